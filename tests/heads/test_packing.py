"""Best packings against the known optima, and the bounds against independent evaluations."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import Operations
from torch.testing import assert_close

from largemargin.errors import LargeMarginError
from largemargin.heads import packing as module
from largemargin.heads.packing import Packing, best_packing, packing_bound
from largemargin.heads.simplex import simplex

# Solutions of the Tammes problem, in degrees. 5..14 and 24 are proved; those attained by a known
# polyhedron can be derived by hand (6 octahedron, 12 icosahedron).
TAMMES = {
    5: 90.0,
    6: 90.0,
    7: 77.8695,
    8: 74.8585,
    9: 70.5288,
    10: 66.1468,
    11: 63.4349,
    12: 63.4349,
    14: 55.6706,
    24: 43.6908,
}


def measured_angle(points):
    """All pairs at once by arccos: an independent form, good to 1e-7 away from 0 and pi."""
    cosines = (points @ points.T).fill_diagonal_(-1)
    return math.acos(float(cosines.max()))


def check(packing, C, D):
    assert packing.prototypes.shape == (C, D)
    assert_close(packing.prototypes.norm(dim=1), torch.ones(C, dtype=torch.float64))
    assert measured_angle(packing.prototypes) == pytest.approx(packing.angle, abs=1e-7)
    assert packing.angle <= packing.upper_bound


@pytest.mark.parametrize(
    ("C", "degrees"),
    [
        pytest.param(C, angle, marks=() if C in (6, 8) else pytest.mark.slow)
        for C, angle in TAMMES.items()
    ],
)
def test_known_optima_in_three_dimensions(C, degrees):
    packing = best_packing(C, 3)
    check(packing, C, 3)
    assert math.degrees(packing.angle) == pytest.approx(degrees, abs=1e-3)


@pytest.mark.parametrize(
    ("C", "D", "cosine"),
    [
        pytest.param(16, 5, 1 / 5, marks=pytest.mark.slow),
        pytest.param(27, 6, 1 / 4, marks=pytest.mark.slow),
        (10, 4, 1 / 6),
    ],
)
def test_known_optima_in_more_dimensions(C, D, cosine):
    packing = best_packing(C, D)
    check(packing, C, D)
    assert math.cos(packing.angle) == pytest.approx(cosine, abs=1e-6)


def test_eight_points_take_a_bounded_search():
    """Work is counted, since seconds depend on the machine."""
    with Operations() as operations:
        best_packing(8, 3)
    assert 1_000 < operations.count < 200_000


@given(C=st.integers(2, 40), extra=st.integers(0, 4))
def test_simplex_where_it_fits(C, extra):
    packing = best_packing(C, C - 1 + extra)
    assert torch.equal(packing.prototypes, simplex(C, C - 1 + extra, dtype=torch.float64))
    assert packing.angle == packing.upper_bound == math.acos(-1 / (C - 1))


@given(D=st.integers(2, 30), data=st.data())
def test_right_angles_up_to_twice_the_dimension(D, data):
    C = data.draw(st.integers(D + 2, 2 * D)) if D > 2 else 4
    packing = best_packing(C, D)
    check(packing, C, D)
    assert packing.angle == packing.upper_bound == math.pi / 2
    gram = packing.prototypes @ packing.prototypes.T
    assert (gram.fill_diagonal_(-1) <= 1e-15).all()
    zero = torch.zeros(D, dtype=torch.float64)
    assert_close(packing.prototypes.sum(0), zero, rtol=0, atol=1e-13)
    assert torch.linalg.matrix_rank(packing.prototypes) == D


@given(C=st.integers(3, 200))
def test_regular_polygon_in_the_plane(C):
    packing = best_packing(C, 2)
    assert packing.angle == packing.upper_bound == pytest.approx(2 * math.pi / C, rel=1e-15)
    assert measured_angle(packing.prototypes) == pytest.approx(packing.angle, rel=1e-8)


@settings(max_examples=15)
@given(D=st.integers(3, 8), extra=st.integers(1, 12), seed=st.integers(0, 3))
def test_a_short_search_stays_below_the_bound(D, extra, seed):
    C = 2 * D + extra
    packing = best_packing(C, D, steps=60, restarts=2, seed=seed)
    check(packing, C, D)
    assert packing.angle > 0.6 * packing.upper_bound


@given(C=st.integers(2, 30), D=st.integers(2, 12), seed=st.integers(0, 99))
def test_no_random_configuration_beats_the_bound(C, D, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(C, D, dtype=torch.float64, generator=generator)
    points = points / points.norm(dim=1, keepdim=True)
    assert measured_angle(points) <= packing_bound(C, D)


def test_same_seed_same_packing_and_the_global_generators_rest():
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate()
    first = best_packing(9, 3, steps=50, restarts=2, seed=7)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    torch.manual_seed(4)
    again = best_packing(9, 3, steps=50, restarts=2, seed=7)
    other = best_packing(9, 3, steps=50, restarts=2, seed=8)
    assert torch.equal(first.prototypes, again.prototypes)
    assert first.angle == again.angle
    assert not torch.equal(first.prototypes, other.prototypes)


def test_blocks_change_nothing(monkeypatch):
    whole = best_packing(17, 4, steps=20, restarts=3)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5 * 3 * 17)
    blocked = best_packing(17, 4, steps=20, restarts=3)
    assert_close(whole.prototypes, blocked.prototypes, rtol=0, atol=1e-6)
    assert whole.angle == pytest.approx(blocked.angle, abs=1e-6)


def test_repulsion_is_the_gradient_of_the_log_energy():
    points = torch.randn(2, 6, 3, dtype=torch.float64)
    points = (points / points.norm(dim=-1, keepdim=True)).requires_grad_()
    t = torch.tensor([3.0, 7.0], dtype=torch.float64).reshape(-1, 1, 1)
    itself = 1e40 * torch.eye(6, dtype=torch.float64)  # as good as infinitely far away
    apart = (points[:, :, None] - points[:, None]).square().sum(-1) + itself
    energy = (apart ** (-t / 2)).sum((1, 2))
    (gradient,) = torch.autograd.grad(energy.log().sum(), points)
    points = points.detach()
    gradient = gradient - (gradient * points).sum(-1, keepdim=True) * points
    force = module._repulsion(points, t)
    # Equal up to one positive constant per configuration.
    ratio = (gradient * force).sum((1, 2)) / force.square().sum((1, 2))
    assert (ratio > 0).all()
    assert_close(gradient, ratio[:, None, None] * force)


def test_dtype_of_the_result():
    packing = best_packing(7, 3, steps=200, restarts=4, dtype=torch.float32)
    assert packing.prototypes.dtype == torch.float32
    assert measured_angle(packing.prototypes.double()) == pytest.approx(packing.angle, abs=1e-6)


def test_packing_cannot_be_changed():
    packing = best_packing(3, 2)
    assert isinstance(packing, Packing)
    with pytest.raises(AttributeError):
        packing.angle = 0.0


@pytest.mark.parametrize(
    ("C", "D", "degrees"),
    [
        (2, 1, 180.0),
        (3, 1, 0.0),
        (4, 3, 109.471221),
        (7, 2, 360 / 7),
        (10, 9, 96.379370),
        (100, 99, 90.578755),
        (5, 3, 90.0),
        (100, 64, 90.0),
        (12, 3, 63.434949),
        (16, 5, 78.463041),
        (27, 6, 75.522488),
    ],
)
def test_bound_is_attained_at_known_configurations(C, D, degrees):
    assert math.degrees(packing_bound(C, D)) == pytest.approx(degrees, abs=1e-6)


@given(C=st.integers(2, 300), D=st.integers(1, 40))
def test_bound_falls_with_classes_and_rises_with_dimension(C, D):
    assert packing_bound(C + 1, D) <= packing_bound(C, D) + 1e-12
    assert packing_bound(C, D + 1) >= packing_bound(C, D) - 1e-12


@given(D=st.integers(3, 600), share=st.floats(0, 1))
def test_degree_three_polynomial_satisfies_the_conditions_of_the_proof(D, share):
    s = share * (math.sqrt(D + 3) - 1) / (D + 2)
    a = (1 + s) / (1 + D * s)
    f0 = (2 * a - s) / D - a * a * s
    f1 = 3 / (D + 2) + a * a - 2 * a * s
    f2 = 2 * a - s
    assert f0 > 0
    assert f1 >= -1e-15
    assert f2 >= 0
    size = D * (1 - s) * (2 + (D + 1) * s) / (1 - D * s * s)
    assert (1 + a) ** 2 * (1 - s) / f0 == pytest.approx(size, rel=1e-9)
    # The bound is inverted correctly: at s it admits exactly that many vectors.
    if math.floor(size) > 2 * D:
        cosine = math.cos(module._degree_three_bound(math.floor(size), D))
        assert cosine <= s + 1e-9


@given(radius=st.floats(0.05, math.pi / 2), D=st.integers(2, 800))
def test_cap_share_is_the_incomplete_beta_function(radius, D):
    special = pytest.importorskip("scipy.special")
    exact = 0.5 * special.betainc((D - 1) / 2, 0.5, math.sin(radius) ** 2)
    assert module._cap_share(radius, D) == pytest.approx(exact, rel=1e-9, abs=1e-300)


def test_cap_bound_of_two_half_spheres():
    assert module._cap_bound(2, 5) == pytest.approx(math.pi, abs=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: best_packing(1, 3), "at least 2 classes are needed, but 1 was given"),
        (lambda: best_packing(3, 1), "a line has only two directions. Use dim=2"),
        (lambda: best_packing(3, 0), "dim must be a finite number >= 1, but 0 was given"),
        (lambda: best_packing(8, 3, steps=1), "steps must be a finite number >= 2, but 1"),
        (lambda: best_packing(8, 3, restarts=0), "restarts must be a finite number >= 1, but 0"),
        (lambda: best_packing(8, 3, dtype=torch.int64), "dtype must be floating point"),
        (lambda: packing_bound(1, 3), "at least 2 classes"),
    ],
)
def test_errors_name_the_argument_and_the_fix(build, message):
    with pytest.raises(LargeMarginError, match=message):
        build()
