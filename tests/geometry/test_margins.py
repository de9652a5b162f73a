"""Class margins, sample margins and packings: properties, precision, large sizes, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largemargin import geometry as g
from largemargin.errors import LargeMarginError
from largemargin.geometry import pairs
from largemargin.ops.norms import EPS


def simplex(num_classes, dim, dtype=torch.float64):
    """Regular simplex by QR of a centred basis."""
    centred = torch.eye(num_classes, dtype=dtype) - 1 / num_classes
    basis = torch.linalg.svd(centred).U[:, : num_classes - 1]
    rows = math.sqrt(num_classes / (num_classes - 1)) * centred @ basis
    return torch.nn.functional.pad(rows, (0, dim - num_classes + 1))


@pytest.mark.parametrize("num_classes", [2, 3, 5, 10])
def test_simplex_reaches_every_ceiling(num_classes):
    W = simplex(num_classes, 12)
    labels = torch.arange(num_classes)
    best = g.simplex_optimum(num_classes, scale=7.0)
    assert float(g.class_margin(W)) == pytest.approx(best.class_margin, abs=1e-12)
    margins = g.sample_margins(W, W, labels, similarity="cosine")
    torch.testing.assert_close(margins, torch.full_like(margins, best.sample_margin))
    sides = g.lm_softmax_inequality(W, W, labels, scale=7.0)
    value = float(sides.right) - math.log(num_classes) / 7.0
    assert value == pytest.approx(best.lm_softmax, abs=1e-12)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(0, 10**6))
def test_random_prototypes_stay_below_the_simplex(num_classes, dim, seed):
    W = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(seed)).double()
    margin = float(g.class_margin(W))
    assert 0 <= margin <= g.simplex_optimum(num_classes).class_margin + 1e-9
    scaled = W * torch.linspace(0.1, 9, num_classes).double()[:, None]
    assert float(g.class_margin(scaled)) == pytest.approx(margin, abs=1e-9)
    assert float(g.class_margin(W.flip(0))) == pytest.approx(margin, abs=1e-12)
    off_diagonal = g.angle_matrix(W) + 9 * torch.eye(num_classes)
    assert float(off_diagonal.min()) == pytest.approx(margin, abs=1e-12)


@pytest.mark.parametrize("angle", [1e-9, 1e-7, 1e-4, 1.0, math.pi - 1e-7])
def test_small_and_large_angles_keep_their_digits(angle):
    W = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    assert float(g.class_margin(W)) == pytest.approx(angle, rel=1e-6, abs=1e-15)
    assert float(g.angle_matrix(W)[0, 1]) == pytest.approx(angle, rel=1e-6, abs=1e-15)


def test_the_smallest_of_many_tiny_angles_is_found():
    # All cosines round to 1: only differences can tell these directions apart.
    angles = torch.cumsum(1e-10 * (1 + torch.rand(40, dtype=torch.float64)), 0)
    W = torch.stack([angles.cos(), angles.sin()], 1)
    smallest = float(angles.diff().min())
    assert float(g.class_margin(W)) == pytest.approx(smallest, rel=1e-4)


def test_zero_rows_are_at_right_angles():
    W = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert float(g.class_margin(W)) == pytest.approx(math.pi / 2)
    assert float(g.class_margin(torch.zeros(3, 2))) == pytest.approx(math.pi / 2)
    assert float(g.angle_matrix(W)[0, 1]) == pytest.approx(math.pi / 2)
    close = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.5]])
    assert float(g.class_margin(close)) == pytest.approx(math.atan(0.5))
    assert float(g.magnitude_ratio(close)) == math.inf
    short = torch.tensor([[EPS, 0.0], [1.0, 1.0]], dtype=torch.float64)  # the shortest that is none
    assert float(g.angle_matrix(short)[0, 1]) == pytest.approx(math.pi / 4)
    short[0] /= 2
    assert float(g.angle_matrix(short)[0, 1]) == pytest.approx(math.pi / 2)


def test_class_margin_gradient_opens_the_closest_pair():
    W = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.2]], dtype=torch.float64)
    W.requires_grad_()
    torch.autograd.gradcheck(g.class_margin, (W,))
    (gradient,) = torch.autograd.grad(g.class_margin(W), W)
    assert torch.equal(gradient[2], torch.zeros(2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(g.class_margin(torch.ones(2, 2).double() * W[0, 0]), W)
    assert torch.isfinite(gradient).all()


def test_tiles_do_not_change_the_result(monkeypatch):
    W = torch.randn(23, 5, dtype=torch.float64)
    labels = torch.arange(23) % 4
    whole = (pairs.closest_pair(W), pairs.closest_pair(W, labels), pairs.farthest_pair(W))
    energy = g.riesz_energy(W, 3.0)
    monkeypatch.setattr(pairs.blocks, "__defaults__", (4,))
    assert (
        pairs.closest_pair(W),
        pairs.closest_pair(W, labels),
        pairs.farthest_pair(W),
    ) == whole
    torch.testing.assert_close(g.riesz_energy(W, 3.0), energy)


def test_distances_survive_a_common_offset():
    a = 1e3 + torch.randn(6, 3, dtype=torch.float64)
    b = torch.cat([1e3 + torch.randn(4, 3, dtype=torch.float64), a[:2] + 1e-9])
    want = torch.linalg.vector_norm(a[:, None] - b, dim=2)
    torch.testing.assert_close(pairs.distances(a, b), want, rtol=1e-10, atol=0)


def test_closest_pair_without_a_pair():
    assert pairs.closest_pair(torch.rand(1, 2)) is None
    assert pairs.closest_pair(torch.rand(3, 2), torch.zeros(3)) is None


@given(st.integers(2, 7), st.floats(0.5, 60.0), st.integers(0, 10**6))
def test_riesz_root_is_below_the_smallest_distance(num_classes, t, seed):
    W = torch.randn(num_classes, 3, generator=torch.Generator().manual_seed(seed)).double()
    smallest = float(g.min_distance(W))
    root, later = float(g.riesz_root(W, t)), float(g.riesz_root(W, 50 * t))
    assert root <= later + 1e-9
    assert later <= smallest * (1 + 1e-9)
    assert smallest == pytest.approx(float(torch.nn.functional.pdist(W).min()))
    pairs_sum = 2 * float((torch.nn.functional.pdist(W) ** -t).sum())
    assert float(g.riesz_energy(W, t)) == pytest.approx(pairs_sum)


def test_riesz_energy_gradient_and_coincidence():
    W = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda w: g.riesz_energy(w, 2.0), (W,))
    torch.autograd.gradcheck(g.min_distance, (W,))
    same = torch.ones(2, 3)
    assert float(g.riesz_energy(same, 1.0)) == math.inf
    assert float(g.riesz_root(same, 1.0)) == 0
    assert float(g.riesz_root(torch.randn(5, 3), 1e4)) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_promoted(dtype):
    q, W, y = torch.randn(5, 4).to(dtype), torch.randn(3, 4).to(dtype), torch.arange(5) % 3
    results = [
        g.class_margin(W),
        g.angle_matrix(W),
        g.magnitude_ratio(W),
        g.sample_margins(q, W, y),
        g.min_distance(W),
        g.riesz_energy(W, 1.0),
        g.class_dispersion(q, y, 3),
        g.boundary_margins(q, W, y).signed,
        g.variance_split(q, y).total,
        g.ideal_feature_ratio(q, y, 3).ratio,
    ]
    assert {result.dtype for result in results} == {torch.float32}
    reference = g.boundary_margins(q.double(), W.double(), y).signed
    torch.testing.assert_close(results[7].double(), reference, rtol=1e-5, atol=1e-6)


@given(st.integers(2, 9), st.floats(-1e4, 1e4), st.integers(0, 10**6))
def test_implicit_bias_is_the_margin_of_cross_entropy(num_classes, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    f = 5 * torch.randn(6, num_classes, generator=generator).double()
    y = torch.randint(num_classes, (6,), generator=generator)
    bias = g.implicit_bias(f, y)
    assert (bias >= 0).all()
    assert (bias <= math.log(max(num_classes - 1, 1)) + 1e-12).all()
    rival = f.scatter(1, y[:, None], -math.inf).max(1).values
    margin = rival - f.gather(1, y[:, None])[:, 0]
    loss = torch.nn.functional.cross_entropy(f, y, reduction="none")
    torch.testing.assert_close(torch.nn.functional.softplus(margin + bias), loss)
    torch.testing.assert_close(g.implicit_bias(f + shift, y), bias, rtol=1e-7, atol=1e-9)
    soft = g.implicit_bias(f, torch.full((6, num_classes), 1 / num_classes).double())
    torch.testing.assert_close(soft.gather(1, y[:, None])[:, 0], bias)


def test_implicit_bias_of_large_float32_logits():
    f = torch.tensor([[3e4, 1e4, 1e4 - 1.0, 1e4 - 2.0]])
    want = math.log(1 + math.exp(-1) + math.exp(-2))
    assert float(g.implicit_bias(f, torch.tensor([0]))) == pytest.approx(want, abs=1e-6)


def test_summaries_have_the_gradient_of_their_margins():
    margins = torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0])
    for part in ("minimum", "mean", "class_minimum"):
        assert torch.autograd.gradcheck(
            lambda x, part=part: getattr(g.summarize_margins(x, labels, 2), part), margins
        )


def test_summary_of_no_samples():
    summary = g.summarize_margins(torch.zeros(0), torch.zeros(0, dtype=torch.long), 2)
    assert summary.class_minimum.tolist() == [math.inf, math.inf]
    assert float(summary.minimum) == math.inf
    assert math.isnan(float(summary.mean))


@given(st.floats(0.5, 200.0), st.integers(0, 10**6))
def test_lm_softmax_inequality_holds(scale, seed):
    generator = torch.Generator().manual_seed(seed)
    q, W = (torch.randn(n, 3, generator=generator).double() for n in (7, 4))
    y = torch.randint(4, (7,), generator=generator)
    sides = g.lm_softmax_inequality(q, W, y, scale=scale)
    assert sides.left >= sides.right - 1e-12
    excess = float(sides.left + sides.gamma_min)
    assert -1e-12 <= excess <= math.log(7 * 3) / scale + 1e-12


@pytest.mark.parametrize("part", ["left", "right", "gamma_min"])
def test_lm_softmax_inequality_has_the_gradient_of_its_formula(part):
    q, W = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 4))
    y = torch.tensor([0, 1, 2, 3, 0])
    assert torch.autograd.gradcheck(
        lambda *given: getattr(g.lm_softmax_inequality(*given, y, scale=3.0), part), (q, W)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: g.class_margin(torch.rand(1, 3)), "at least 2 classes"),
        (lambda: g.class_margin(torch.rand(3)), "prototypes must have shape"),
        (lambda: g.class_margin(torch.ones(2, 2).long()), "floating point"),
        (lambda: g.class_margin(torch.tensor([[1.0], [math.nan]])), "row 1 holds NaN"),
        (lambda: g.angle_matrix(torch.rand(1, 3)), "at least 2 classes"),
        (lambda: g.magnitude_ratio(torch.rand(1, 3)), "at least 2 classes"),
        (lambda: g.min_distance(torch.rand(1, 3)), "at least 2 classes"),
        (lambda: g.riesz_energy(torch.rand(2, 3), 0.0), "t must be"),
        (lambda: g.riesz_root(torch.rand(2, 3), -1.0), "t must be"),
        (
            lambda: g.sample_margins(torch.rand(1, 2), torch.rand(2, 2), torch.tensor([2])),
            "labels must lie",
        ),
        (
            lambda: g.sample_margins(torch.rand(1, 2), torch.rand(2, 2), torch.rand(1, 2)),
            "soft targets",
        ),
        (lambda: g.class_minimum(torch.rand(2, 2), torch.tensor([0, 1]), 2), "values must be"),
        (lambda: g.implicit_bias(torch.rand(1, 1), torch.tensor([0])), "at least 2 classes"),
        (
            lambda: g.lm_softmax_inequality(
                torch.rand(0, 2), torch.rand(2, 2), torch.zeros(0).long()
            ),
            "N >= 1",
        ),
        (
            lambda: g.lm_softmax_inequality(
                torch.rand(1, 2), torch.rand(2, 2), torch.tensor([0]), scale=0.0
            ),
            "scale",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call()


def test_what_screening_may_be_off_by_is_that_of_the_longest_point():
    """Points are centred and scaled first; a short one has less to round away."""
    points = torch.tensor([[9.0, 0.0], [-9.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    screen = pairs._Screen(points)
    assert screen.norms.tolist() == pytest.approx([1.0, 1.0, 1 / 81, 1 / 81])
    assert screen.slack[True] / torch.finfo(torch.float64).eps == pytest.approx(4 * (2 + 8))
