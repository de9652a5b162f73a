"""Dispersion, boundary margins, variance and rescaling: definitions, invariances, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largemargin import geometry as g
from largemargin.errors import LargeMarginError
from largemargin.geometry import pairs
from largemargin.ops import signed_boundary_distance


def problem(seed, samples=12, classes=4, dim=3):
    generator = torch.Generator().manual_seed(seed)
    q, W = (torch.randn(n, dim, generator=generator).double() for n in (samples, classes))
    b = torch.randn(classes, generator=generator).double()
    return q, W, torch.randint(classes, (samples,), generator=generator), b


def definition(q, W, y, b):
    """Margins of NGY-D4 from the (N, C, C) array of all distances."""
    rows = -signed_boundary_distance(q, W, b)[torch.arange(len(q)), y]
    rows = rows.masked_fill(torch.nn.functional.one_hot(y, len(W)).bool(), math.inf)
    for kind in (rows.abs(), rows):
        values = [kind[y == c].amin() if (y == c).any() else math.nan for c in range(len(W))]
        yield torch.tensor(values, dtype=q.dtype)


@given(st.integers(0, 10**6))
def test_boundary_margins_are_their_definition(seed):
    q, W, y, b = problem(seed)
    found = g.boundary_margins(q, W, y, bias=b)
    unsigned, signed = definition(q, W, y, b)
    torch.testing.assert_close(found.unsigned, unsigned, equal_nan=True)
    torch.testing.assert_close(found.signed, signed, equal_nan=True)
    assert float(found.smallest) == pytest.approx(float(unsigned[~unsigned.isnan()].min()))
    assert float(found.smallest_signed) == pytest.approx(float(signed[~signed.isnan()].min()))


@given(st.integers(0, 10**6))
def test_dispersion_is_its_definition(seed):
    q, _, y, _ = problem(seed)
    found = g.class_dispersion(q, y, 5)
    for c in range(5):
        rows = q[y == c]
        if len(rows):
            want = torch.linalg.vector_norm(rows[:, None] - rows, dim=2).max()
            torch.testing.assert_close(found[c], want)
        else:
            assert found[c].isnan()
    torch.testing.assert_close(g.largest_dispersion(q, y, 5), found[~found.isnan()].max())


def test_tiles_do_not_change_the_result(monkeypatch):
    q, W, y, b = problem(0, samples=40, classes=9)
    before = (g.class_dispersion(q, y, 9), g.boundary_margins(q, W, y, bias=b))
    monkeypatch.setattr(pairs.blocks, "__defaults__", (4,))
    torch.testing.assert_close(g.class_dispersion(q, y, 9), before[0], equal_nan=True)
    torch.testing.assert_close(tuple(g.boundary_margins(q, W, y, bias=b)), tuple(before[1]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_any_integer_type(dtype):
    q, W, y, b = problem(5)
    other = y.to(dtype)
    torch.testing.assert_close(g.class_dispersion(q, other, 4), g.class_dispersion(q, y, 4))
    torch.testing.assert_close(
        tuple(g.boundary_margins(q, W, other, bias=b)), tuple(g.boundary_margins(q, W, y, bias=b))
    )
    assert g.variance_split(q, other) == g.variance_split(q, y)
    assert g.ideal_feature_ratio(q, other, 4) == g.ideal_feature_ratio(q, y, 4)


def test_coinciding_prototypes_count_as_distance_zero():
    W = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    found = g.boundary_margins(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]), W, torch.tensor([0, 2]))
    assert found.signed[0] == 0
    assert found.signed[2] == 2


def test_one_sample_has_no_dispersion_even_far_from_the_origin():
    q = torch.full((3, 2), 1e6)
    assert g.class_dispersion(q, torch.tensor([0, 0, 1]), 2).tolist() == [0, 0]


def test_a_large_offset_costs_no_digits():
    q = torch.randn(20, 4, dtype=torch.float64)
    y = torch.arange(20) % 2
    shifted = g.class_dispersion(q + 1e6, y, 2)
    torch.testing.assert_close(shifted, g.class_dispersion(q, y, 2), rtol=1e-8, atol=0)


@given(st.floats(0.05, 20.0), st.integers(0, 10**6))
def test_rescaling_scales_features_margins_and_dispersions(factor, seed):
    generator = torch.Generator().manual_seed(seed)
    x, before = (torch.randn(n, 4, generator=generator).double() for n in (10, 5))
    bias, W, b = (torch.randn(*s, generator=generator).double() for s in ((5,), (3, 5), (3,)))
    y = torch.arange(10) % 3
    new = g.rescale_network(before, bias, b, factor=factor)
    q = torch.relu(torch.nn.functional.linear(x, before, bias))
    scaled = torch.relu(torch.nn.functional.linear(x, new.weight, new.bias))
    torch.testing.assert_close(scaled, factor * q)
    old_margins = g.boundary_margins(q, W, y, bias=b)
    new_margins = g.boundary_margins(scaled, W, y, bias=new.head_bias)
    for old, now in zip(old_margins, new_margins, strict=True):
        torch.testing.assert_close(now, factor * old, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        g.class_dispersion(scaled, y, 3), factor * g.class_dispersion(q, y, 3)
    )
    assert torch.equal((scaled @ W.T + new.head_bias).argmax(1), (q @ W.T + b).argmax(1))
    # Corollary 4.1: growing and shrinking move the parameters in opposite directions.
    grown = g.rescale_network(before, bias, b, factor=1 + factor).weight - before
    shrunk = g.rescale_network(before, bias, b, factor=1 / (1 + factor)).weight - before
    cosine = torch.nn.functional.cosine_similarity(grown.flatten(), shrunk.flatten(), dim=0)
    assert float(cosine) == pytest.approx(-1, abs=1e-12)


def test_rescaling_leaves_its_arguments_and_absent_biases_alone():
    weight = torch.ones(2, 2)
    new = g.rescale_network(weight, None, None, factor=3.0)
    assert new.bias is None
    assert new.head_bias is None
    assert torch.equal(weight, torch.ones(2, 2))


@given(st.integers(0, 10**6))
def test_ideal_feature_ratio_is_its_definition(seed):
    q, _, y, _ = problem(seed)
    apart = torch.linalg.vector_norm(q[:, None] - q, dim=2)
    same = y[:, None] == y
    found = g.ideal_feature_ratio(q, y, 4)
    torch.testing.assert_close(found.dispersion, apart[same].max())
    if (~same).any():
        torch.testing.assert_close(found.separation, apart[~same].min())
    torch.testing.assert_close(found.ratio, found.dispersion / found.separation)


def test_zero_losses_make_features_ideal():
    """Proposition 4.2: balls of radius 0.5 around centroids 3 away from every boundary."""
    centroids = 3 * math.sqrt(2) * torch.eye(4, dtype=torch.float64)
    y = torch.arange(40) % 4
    offsets = torch.nn.functional.normalize(torch.randn(40, 4, dtype=torch.float64), dim=1)
    q = centroids[y] + 0.5 * offsets * torch.rand(40, 1, dtype=torch.float64)
    found = g.ideal_feature_ratio(q, y, 4)
    assert float(found.dispersion) <= 2 * 0.5
    assert float(found.separation) >= 2 * 3 - 2 * 0.5
    assert float(found.ratio) <= 0.5 / (3 - 0.5)
    assert float(g.boundary_margins(q, centroids, y).smallest_signed) >= 3 - 0.5


def test_ideal_feature_ratio_at_its_ends():
    one_class = g.ideal_feature_ratio(torch.rand(3, 2), torch.zeros(3).long(), 2)
    assert float(one_class.separation) == math.inf
    assert float(one_class.ratio) == 0
    same_place = g.ideal_feature_ratio(torch.ones(2, 2), torch.tensor([0, 1]), 2)
    assert float(same_place.ratio) == math.inf


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 10**6))
def test_variances_add_up(samples, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    e = 1e3 + torch.randn(samples, 2, generator=generator).double()
    y = 7 * torch.randint(classes, (samples,), generator=generator)
    split = g.variance_split(e, y)
    torch.testing.assert_close(split.within + split.between, split.total, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(split.total, e.var(0, correction=0).sum(), rtol=1e-9, atol=1e-9)
    order = torch.randperm(samples, generator=generator)
    torch.testing.assert_close(tuple(g.variance_split(e[order], y[order] + 1)), tuple(split))


def test_collapsed_classes_have_no_variance_at_all():
    points = torch.rand(3, 5, dtype=torch.float64) * 1e5
    y = torch.randint(3, (70,))
    split = g.variance_split(points[y], y)
    assert float(split.within) == 0
    assert float(split.ratio) == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, W, y: g.class_dispersion(q, y, 2), "labels must lie"),
        (lambda q, W, y: g.class_dispersion(q[:2], y, 3), "one entry per row"),
        (lambda q, W, y: g.class_dispersion(q * math.nan, y, 3), "finite"),
        (lambda q, W, y: g.class_dispersion(q, torch.rand(4, 3), 3), "but soft targets"),
        (lambda q, W, y: g.boundary_margins(q, W[:, :1], y), "second dimension"),
        (lambda q, W, y: g.boundary_margins(q, W[:1], y * 0), "at least 2 classes"),
        (lambda q, W, y: g.boundary_margins(q, W, y, bias=torch.ones(2)), "bias must have shape"),
        (lambda q, W, y: g.ideal_feature_ratio(q[:0], y[:0], 3), "at least one sample"),
        (lambda q, W, y: g.variance_split(q[:0], y[:0]), "at least one sample"),
        (lambda q, W, y: g.variance_split(q, y.float()), "must be integers"),
        (lambda q, W, y: g.rescale_network(W, None, None, factor=0.0), "factor must be"),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call(torch.rand(4, 2), torch.rand(3, 2), torch.tensor([0, 1, 2, 2]))
