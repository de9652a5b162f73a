"""Paired tests: against scipy, by hand, and where differences are luck."""

import math

import pytest

pytest.importorskip("scipy", reason="the paired tests are scipy's")

from scipy import stats

from largemargin import LargeMarginError
from largemargin.app.training.comparison_result import PairedTest, holm, paired_test, verdict

METHOD = [0.91, 0.93, 0.92, 0.95, 0.90, 0.94, 0.93]
BASELINE = [0.90, 0.90, 0.91, 0.91, 0.91, 0.90, 0.92]


def test_agrees_with_scipy() -> None:
    found = paired_test(METHOD, BASELINE)
    assert found.t_test == pytest.approx(stats.ttest_rel(METHOD, BASELINE).pvalue)
    assert found.difference == pytest.approx(sum(METHOD) / 7 - sum(BASELINE) / 7)
    assert found.low < found.difference < found.high
    assert found.wilcoxon is not None
    assert 0 < found.wilcoxon < 0.2


def test_the_interval_excludes_zero_exactly_when_p_is_below_5_percent() -> None:
    for shift in (0.0, 0.005, 0.01, 0.02, 0.04):
        found = paired_test([each + shift for each in METHOD], BASELINE)
        assert (found.low > 0) == (found.t_test < 0.05)


def test_swapping_the_methods_changes_the_sign_only() -> None:
    one, other = paired_test(METHOD, BASELINE), paired_test(BASELINE, METHOD)
    assert one.difference == pytest.approx(-other.difference)
    assert one.t_test == pytest.approx(other.t_test)


def test_equal_results_are_no_difference() -> None:
    found = paired_test(BASELINE, BASELINE)
    assert (found.difference, found.t_test) == (0.0, 1.0)
    assert verdict(found, 1.0) == "noise"


def test_the_same_difference_with_few_seeds_is_not_certain() -> None:
    better = [each + 0.002 for each in BASELINE[:3]]
    found = paired_test(better, BASELINE[:3])
    assert found.t_test == 0.25  # two-sided sign test of three
    assert verdict(found, found.t_test) == "noise"
    assert math.isnan(found.low)  # equal differences say nothing of their spread
    assert math.isnan(found.high)


def test_one_seed_has_no_verdict() -> None:
    found = paired_test([0.99], [0.5])
    assert math.isnan(found.t_test)
    assert verdict(found, math.nan) == "one seed: no verdict"


def test_verdicts_have_a_direction() -> None:
    up = PairedTest(5, 0.1, 0.05, 0.15, 0.001, None)
    assert verdict(up, 0.001) == "better"
    assert verdict(PairedTest(5, -0.1, -0.15, -0.05, 0.001, None), 0.001) == "worse"
    assert verdict(up, 0.06) == "noise"


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5]) == [0.5]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert math.isnan(holm([math.nan, 0.01])[0])


def test_unpaired_results_are_refused() -> None:
    with pytest.raises(LargeMarginError, match="3 and 2"):
        paired_test([1, 2, 3], [1, 2])


def test_rejects_a_true_null_about_as_often_as_it_says() -> None:
    import random

    noise = random.Random(0)
    trials = 400
    rejected = 0
    for _ in range(trials):
        pairs = [(noise.gauss(0, 1), noise.gauss(0, 1)) for _ in range(5)]
        rejected += paired_test([a for a, _ in pairs], [b for _, b in pairs]).t_test < 0.05
    assert rejected / trials < 0.08
