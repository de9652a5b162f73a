"""What a test could have seen, and risk-coverage curves: by hand, by scipy, by simulation."""

import math
import random

import pytest
import torch

pytest.importorskip("scipy", reason="the distributions are scipy's")

from largemargin_papers.benchmark.assess import risk_coverage
from largemargin_papers.benchmark.statistics import detectable_effect, power_of
from scipy import stats

from largemargin import LargeMarginError


def test_power_agrees_with_a_simulation() -> None:
    draw = random.Random(3)
    limit = stats.t.ppf(0.975, 5)
    found = 0
    for _ in range(4000):
        values = [draw.gauss(1.2, 1.0) for _ in range(6)]
        mean = sum(values) / 6
        std = math.sqrt(sum((each - mean) ** 2 for each in values) / 5)
        found += abs(mean) / (std / math.sqrt(6)) > limit
    # Three standard errors of 4000 draws.
    assert found / 4000 == pytest.approx(power_of(1.2, 6, 0.05), abs=0.022)


def test_published_sample_sizes() -> None:
    # Cohen's d = 0.5 of pairs needs 34 of them for a power of 0.8, d = 0.8 needs 15.
    assert power_of(0.5, 34, 0.05) >= 0.8 > power_of(0.5, 33, 0.05)
    assert power_of(0.8, 15, 0.05) >= 0.8 > power_of(0.8, 14, 0.05)


def test_the_detectable_effect_has_the_power_asked_for() -> None:
    effect = detectable_effect(0.013, 6, level=0.05, power=0.8)
    assert power_of(effect / 0.013, 6, 0.05) == pytest.approx(0.8, abs=1e-6)
    assert detectable_effect(0.026, 6, level=0.05, power=0.8) == pytest.approx(2 * effect)
    assert detectable_effect(0.013, 6, level=0.05 / 8, power=0.8) > effect
    assert detectable_effect(0.013, 12, level=0.05, power=0.8) < effect
    assert detectable_effect(0.0, 6, level=0.05, power=0.8) == 0.0


def test_with_many_pairs_it_is_that_of_the_normal_distribution() -> None:
    by_hand = (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) / math.sqrt(400)
    assert detectable_effect(1.0, 400, level=0.05, power=0.8) == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"pairs": 1},
        {"std": -0.1},
        {"level": 0.0},
        {"level": 1.0},
        {"power": 0.04},  # what a test of nothing has
        {"power": 1.0},  # no effect is so large
    ],
)
def test_what_no_test_can_be_asked(change: dict[str, float]) -> None:
    given = {"std": 1.0, "pairs": 6, "level": 0.05, "power": 0.8, **change}
    (name,) = change
    with pytest.raises(LargeMarginError, match=name):
        detectable_effect(
            given["std"], int(given["pairs"]), level=given["level"], power=given["power"]
        )


def test_risk_coverage_by_hand() -> None:
    # Errors among the 1, 2, 3, 4 surest: 0, 0, 1/3, 1/4.
    found = risk_coverage(torch.tensor([0.0, 2.0, 3.0, 1.0]), torch.tensor([1, 1, 1, 0]))
    assert found["area"] == pytest.approx((1 / 3 + 1 / 4) / 4)
    assert found["accuracy at 0.5"] == 1.0


def test_equal_sureness_says_nothing() -> None:
    right = torch.tensor([1, 0, 1, 0, 1, 1, 0, 1])
    found = risk_coverage(torch.ones(8), right)
    assert found["area"] == pytest.approx(3 / 8)
    assert found["accuracy at 0.5"] == pytest.approx(5 / 8)


def test_the_order_of_samples_does_not_matter_and_nan_is_least_sure() -> None:
    sure = torch.tensor([0.3, 0.9, math.nan, 0.5, 0.5])
    right = torch.tensor([0, 1, 0, 1, 0])
    order = torch.tensor([4, 2, 0, 1, 3])
    assert risk_coverage(sure, right) == pytest.approx(risk_coverage(sure[order], right[order]))
    # With the NaN last: 0, 1/4, 1/3, 1/2, 3/5.
    assert risk_coverage(sure, right)["area"] == pytest.approx(
        (0 + 1 / 4 + 1 / 3 + 1 / 2 + 3 / 5) / 5
    )
