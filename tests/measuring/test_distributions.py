"""Summaries of numbers against NumPy and SciPy."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from largemargin.measuring import distributions
from largemargin.measuring.distributions import describe, describe_classes


@pytest.mark.parametrize("count", [2, 3, 50, 1001])
def test_density_is_that_of_scipy(count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    values = torch.randn(count, dtype=torch.float64).exp()
    found = describe(values)
    x = values.numpy()
    spread = (np.quantile(x, 0.75) - np.quantile(x, 0.25)) / 1.34
    bandwidth = 0.9 * min(x.std(), spread) * count**-0.2
    kernel = stats.gaussian_kde(x, bw_method=bandwidth / x.std(ddof=1))
    want = kernel(np.array(found.density_at))
    np.testing.assert_allclose(found.density, want, rtol=1e-9, atol=1e-16 * want.max())
    ends = x.min() - 3 * bandwidth, x.max() + 3 * bandwidth
    assert (found.density_at[0], found.density_at[-1]) == pytest.approx(ends)


def test_density_of_many_samples_is_nearly_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(30_000, dtype=torch.float64)
    thinned = describe(values)
    monkeypatch.setattr(distributions, "DENSITY_SAMPLES", 10**6)
    whole = describe(values)
    gap = np.abs(np.array(thinned.density) - np.array(whole.density)).max()
    assert 0 < gap < 1e-3 * max(whole.density)
    step = whole.density_at[1] - whole.density_at[0]
    assert sum(whole.density) * step == pytest.approx(1, abs=1e-2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(1, 12))
def test_moments_quantiles_and_histogram(numbers: list[float], bins: int) -> None:
    found = describe(torch.tensor(numbers, dtype=torch.float64), bins=bins)
    x = np.array(numbers)
    scale = np.abs(x).max() + 1
    assert found.mean == pytest.approx(x.mean(), abs=1e-12 * scale)
    assert found.std == pytest.approx(x.std(), abs=1e-9 * scale)
    for q, value in found.quantiles.items():
        assert value == pytest.approx(np.quantile(x, q), abs=1e-12 * scale)
    assert sum(found.counts) == len(x)
    assert len(found.counts) == len(found.edges) - 1 == bins
    assert found.edges[0] <= x.min() <= x.max() <= found.edges[-1]


@pytest.mark.parametrize("number", [0.0, 1e-9, -0.1, 7.0, -1e9])
def test_equal_numbers_have_a_histogram_around_them(number: float) -> None:
    found = describe(torch.full((7,), number, dtype=torch.float64), bins=4)
    assert all(low < high for low, high in itertools.pairwise(found.edges))
    assert found.edges[0] < number < found.edges[-1]
    assert sum(found.counts) == 7


def test_equal_numbers() -> None:
    assert len(describe(torch.arange(9.0)).counts) == 50
    found = describe(torch.full((7,), 0.1))
    assert (found.std, found.ratio, found.density) == (0.0, math.inf, ())
    assert describe(torch.full((7,), -0.1)).ratio == -math.inf
    assert math.isnan(describe(torch.zeros(3)).ratio)
    assert sum(found.counts) == 7
    assert found.minimum == found.maximum == pytest.approx(0.1)
    by_class = describe_classes(torch.full((5,), 0.1), torch.tensor([0, 0, 0, 2, 2]), 3)
    assert by_class.std[0] == by_class.std[2] == 0
    assert by_class.ratio[0] == math.inf


def test_no_numbers_and_bad_numbers() -> None:
    empty = describe(torch.zeros(0))
    assert empty.count == 0
    assert math.isnan(empty.mean)
    assert math.isnan(empty.minimum)
    bad = describe(torch.tensor([1.0, math.nan]))
    assert math.isnan(bad.minimum)
    assert bad.counts == ()
    far = describe(torch.tensor([1.0, math.inf]))
    assert far.maximum == math.inf
    assert far.minimum == 1
    by_class = describe_classes(torch.ones(2), torch.tensor([0, 2]), 4)
    assert [math.isnan(each) for each in by_class.mean] == [False, True, False, True]
    assert by_class.counts == (1, 0, 1, 0)


def test_order_does_not_matter() -> None:
    values = torch.randn(1000)
    assert describe(values) == describe(values[torch.randperm(1000)])


def test_the_share_below_0_is_counted() -> None:
    values = torch.tensor([-3.0, -1e-9, 0.0, -0.0, 2.0])
    assert describe(values).negative == 0.4
    assert describe(values + 4).negative == 0
    assert math.isnan(describe(torch.tensor([])).negative)
