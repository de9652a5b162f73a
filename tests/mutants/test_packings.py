"""Packings step by step: bounds against closed forms, forces against autograd, one descent."""

import math

import pytest
import torch

from largemargin.errors import LargeMarginError
from largemargin.heads import packing


def points(count, dim, seed=0, batch=1):
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(batch, count, dim, generator=draw, dtype=torch.float64)
    return found / found.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("radius", [0.01, 0.3, 1.0, math.pi / 2])
def test_shares_of_caps(radius):
    """In 2 dimensions an arc, in 3 Archimedes' cap, in 4 and 5 the integral of sin^2 and sin^3."""
    cosine = math.cos(radius)
    for dim, want in {
        2: radius / math.pi,
        3: (1 - cosine) / 2,
        4: (radius - math.sin(radius) * cosine) / math.pi,
        5: (2 / 3 - cosine + cosine**3 / 3) * 3 / 4,
    }.items():
        assert packing._cap_share(radius, dim) == pytest.approx(want, rel=1e-7)


def test_shares_of_caps_in_many_dimensions():
    """Half the sphere, and where most of the cap is at its edge."""
    for dim in (50, 500, 5000):
        assert packing._cap_share(math.pi / 2, dim) == pytest.approx(0.5, rel=1e-6)
    # sin^(D-2) falls from the edge as exp(-(D-2) cot(r) u): D large, share ~ that of its tail.
    dim, radius = 2000, 1.0
    u = torch.linspace(0, radius, 2_000_001, dtype=torch.float64)
    log_part = torch.trapezoid(((dim - 2) * (u.sin() / u[-1].sin()).log()).exp(), u).log()
    log_whole = math.lgamma((dim - 1) / 2) + math.lgamma(0.5) - math.lgamma(dim / 2)
    want = float(log_part) + (dim - 2) * math.log(math.sin(radius)) - log_whole
    assert math.log(packing._cap_share(radius, dim)) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("classes", [9, 100, 10_000])
def test_bounds_by_caps(classes):
    """On a sphere: C (1 - cos r) / 2 = 1, and the angle is twice r."""
    want = 2 * math.acos(1 - 2 / classes)
    assert packing._cap_bound(classes, 3) == pytest.approx(want, rel=1e-9)
    assert classes * packing._cap_share(packing._cap_bound(classes, 7) / 2, 7) == pytest.approx(1)


@pytest.mark.parametrize(
    ("classes", "dim", "cosine"),
    [(16, 5, 1 / 5), (27, 6, 1 / 4), (6, 3, 0.0), (8, 4, 0.0)],
)
def test_bounds_by_polynomials_are_attained(classes, dim, cosine):
    found = packing._degree_three_bound(classes, dim)
    assert math.cos(found) == pytest.approx(cosine, abs=1e-9)


def test_bounds_by_polynomials_hold_up_to_a_number_of_classes():
    """20 in 5 dimensions; from there on the last angle of the valid range."""
    last = (math.sqrt(8) - 1) / 7
    assert 5 * (1 - last) * (2 + 6 * last) / (1 - 5 * last**2) == pytest.approx(20)
    for classes in (20, 21, 10**6):
        found = packing._degree_three_bound(classes, 5)
        assert found == pytest.approx(math.acos(last), abs=1e-12)
    s = math.cos(packing._degree_three_bound(19, 5))
    assert 5 * (1 - s) * (2 + 6 * s) / (1 - 5 * s * s) == pytest.approx(19, rel=1e-12)


@pytest.mark.parametrize(
    ("classes", "dim", "angle"),
    [
        (2, 1, math.pi),
        (3, 1, 0.0),
        (3, 2, 2 * math.pi / 3),
        (4, 2, math.pi / 2),
        (5, 2, 2 * math.pi / 5),
        (4, 3, math.acos(-1 / 3)),
        (5, 3, math.pi / 2),
        (6, 3, math.pi / 2),
        (12, 3, math.acos(1 / math.sqrt(5))),
        (8, 4, math.pi / 2),
        (16, 5, math.acos(0.2)),
    ],
)
def test_bounds_of_angles(classes, dim, angle):
    assert packing.packing_bound(classes, dim) == pytest.approx(angle, rel=1e-9, abs=1e-12)


def test_bounds_of_many_points_on_a_sphere_are_those_of_triangles():
    omega = 24 * math.pi / (6 * 22)
    want = math.acos((1 / math.tan(omega) ** 2 - 1) / 2)
    assert packing.packing_bound(24, 3) == pytest.approx(want, rel=1e-12)
    assert want < min(packing._cap_bound(24, 3), packing._degree_three_bound(24, 3))


@pytest.mark.parametrize(("classes", "dim"), [(5, 3), (6, 3), (7, 5), (10, 6), (12, 6)])
def test_simplices_in_orthogonal_subspaces(classes, dim):
    rows = packing._orthogonal_simplices(classes, dim)
    assert rows.shape == (classes, dim)
    gram = rows @ rows.T
    assert torch.allclose(gram.diagonal(), torch.ones(classes, dtype=torch.float64))
    assert (gram - torch.eye(classes)).max() < 1e-12
    assert rows.sum(0).abs().max() < 1e-12
    sizes = sorted(int((row < -1e-9).sum()) + 1 for row in gram)
    widths = [dim // (classes - dim) + (n < dim % (classes - dim)) for n in range(classes - dim)]
    assert sizes == sorted(width + 1 for width in widths for _ in range(width + 1))


@pytest.mark.parametrize("limit", [1, 20, 2**22])
def test_smallest_angles_in_blocks(monkeypatch, limit):
    monkeypatch.setattr(packing, "BLOCK_ELEMENTS", limit)
    for seed in range(3):
        given = points(9, 4, seed)[0]
        gram = (given @ given.T).fill_diagonal_(-1)
        assert packing._smallest_angle(given) == pytest.approx(float(gram.max().acos()), rel=1e-9)
    close = torch.tensor([[1.0, 0.0], [1.0, 1e-9], [-1.0, 0.0]], dtype=torch.float64)
    assert packing._smallest_angle(close) == pytest.approx(1e-9, rel=1e-6)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert packing._smallest_angle(opposite) == pytest.approx(math.pi)


def test_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_ELEMENTS", 10)
    assert list(packing._row_blocks(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(packing._row_blocks(2, 11)) == [slice(0, 1), slice(1, 2)]


def test_blocks_hold_pairs_of_all_starts(monkeypatch):
    asked = []
    blocks = packing._row_blocks
    monkeypatch.setattr(
        packing, "_row_blocks", lambda *given: asked.append(given) or blocks(*given)
    )
    packing._smallest_angle(points(9, 4)[0])
    packing._repulsion(points(6, 3, batch=2), torch.tensor(2.0))
    assert asked == [(9, 9), (6, 12)]


@pytest.mark.parametrize("limit", [1, 30, 2**22])
@pytest.mark.parametrize("exponent", [2.0, 7.5])
def test_forces_are_gradients_of_the_energy(monkeypatch, exponent, limit):
    """Along the sphere; of every start by itself, up to one factor of its own."""
    monkeypatch.setattr(packing, "BLOCK_ELEMENTS", limit)
    given = points(6, 3, batch=2)
    exponents = torch.tensor([exponent, exponent + 1], dtype=torch.float64).reshape(-1, 1, 1)
    force = packing._repulsion(given, exponents)
    for start, power in zip(range(2), exponents.flatten(), strict=True):
        leaf = given[start].clone().requires_grad_()
        difference = leaf[:, None] - leaf[None]
        square = difference.square().sum(-1) + torch.diag(torch.full((6,), torch.inf))
        terms = square.pow(-power / 2)
        (slope,) = torch.autograd.grad(terms.sum(), leaf)
        slope = slope - (slope * leaf).sum(1, keepdim=True) * leaf
        largest = terms.sum(1).max()
        assert torch.allclose(force[start], slope.detach() / (2 * power * largest), atol=1e-12)


def test_points_that_coincide_have_a_finite_force():
    """As at a distance of 1e-6."""
    given = torch.tensor([[[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]]], dtype=torch.float64)
    assert packing._repulsion(given, torch.tensor(100.0)).isfinite().all()
    other = torch.tensor([[[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]]], dtype=torch.float64)
    pair = torch.stack((other[0, 0], other[0, 0] + torch.tensor([0, 1e-7, 0])))[None]
    pair = pair / pair.norm(dim=-1, keepdim=True)
    want = 1e-7 / 1e-12
    assert packing._repulsion(pair, torch.tensor(2.0)).norm(dim=-1)[0, 1].item() == pytest.approx(
        want, rel=1e-3
    )


def test_a_descent_step_by_step():
    """Averages as in Adam, one size a point, steps that shrink as 1/t, and t from 4 to 64."""
    given = points(5, 3, batch=2)
    first = torch.tensor([4.0, 8.0], dtype=torch.float64)
    found = packing._descend(given, 5, first, 64.0)
    at, mean, square = given, 0.0, 0.0
    for step in range(5):
        exponent = torch.stack([t * (64 / t) ** (step / 4) for t in first]).reshape(-1, 1, 1)
        force = packing._repulsion(at, exponent)
        mean = mean * 9 / 10 + force / 10
        square = square * 99 / 100 + force.square().sum(-1, keepdim=True) / 3 / 100
        unbiased = mean / (1 - 0.9 ** (step + 1))
        size = (square / (1 - 0.99 ** (step + 1))).sqrt()
        at = torch.nn.functional.normalize(at - unbiased / size / exponent, dim=-1)
    assert torch.allclose(found, at, atol=1e-12)


def test_a_descent_where_no_force_is_left_stays():
    """0 / 1e-30, not 0 / 0."""
    poles = torch.tensor([[[1.0, 0, 0], [-1.0, 0, 0]]], dtype=torch.float64)
    assert torch.equal(packing._descend(poles, 3, 4.0, 8.0), poles)


def test_a_force_too_small_to_be_seen_is_not_made_large(monkeypatch):
    """Below 1e-30 a force keeps its size relative to that: here a tenth, over t = 4."""
    here = torch.tensor([[[1.0, 0, 0]]], dtype=torch.float64)
    force = torch.tensor([[[0, 0, 1e-31]]], dtype=torch.float64)
    monkeypatch.setattr(packing, "_repulsion", lambda *_: force)
    found = packing._descend(here, 2, 4.0, 4.0)
    assert torch.allclose((found[..., 2] / found[..., 0]), torch.tensor(-0.05).double(), rtol=1e-3)


def test_limits_of_a_search():
    for options, match in (
        ({"steps": 1}, "steps"),
        ({"restarts": 0}, "restarts"),
        ({"dtype": torch.int64}, "floating point"),
    ):
        with pytest.raises(LargeMarginError, match=match):
            packing.best_packing(7, 3, **options)
    with pytest.raises(LargeMarginError, match="a line has only two"):
        packing.best_packing(3, 1)
    assert packing.best_packing(2, 1).prototypes.tolist() == [[1], [-1]]


def test_a_search_starts_from_seeds_and_ends_with_the_best(monkeypatch):
    """Exponents from 2 to 128 over the starts, to 1e4 from each and to 1e9 from the best."""
    calls = []

    def descend(given, steps, first, last):
        calls.append((given, steps, first, last))
        return given

    monkeypatch.setattr(packing, "_descend", descend)
    found = packing.best_packing(9, 3, steps=2, restarts=4, seed=5)
    (starts, steps, first, last), (best, again, second, end) = calls
    assert (steps, again, last, second, end) == (2, 2, 1e4, 1e4, 1e9)
    assert starts.shape == (4, 9, 3)
    assert torch.equal(starts, points(9, 3, seed=5, batch=4))
    assert first.tolist() == pytest.approx([2, 8, 32, 128])
    angles = [packing._smallest_angle(each) for each in starts]
    assert torch.equal(best, starts[angles.index(max(angles))][None])
    assert found.angle == max(angles)
    assert found.upper_bound == packing.packing_bound(9, 3)
    assert torch.equal(found.prototypes, best[0])
    for classes, restarts in ((9, 64), (41, 24), (5000, 1)):
        calls.clear()
        packing.best_packing(classes, 3, steps=2)
        assert len(calls[0][0]) == restarts
    calls.clear()
    packing.best_packing(9, 3, restarts=1)
    assert torch.equal(calls[0][0], points(9, 3, seed=0))
    assert [steps for _, steps, _, _ in calls] == [1000, 1000]
    assert calls[0][2].tolist() == [2]


def test_polygons_and_defaults():
    found = packing.best_packing(5, 2, dtype=torch.float32)
    turn = torch.arange(5) * 2 * math.pi / 5
    assert torch.allclose(found.prototypes, torch.stack((turn.cos(), turn.sin()), 1))
    assert found.angle == found.upper_bound == 2 * math.pi / 5
    assert packing.best_packing(5, 2).prototypes.dtype == torch.float64
    six = packing.best_packing(6, 3)
    assert six.angle == six.upper_bound == math.pi / 2
