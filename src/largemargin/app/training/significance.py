"""Whether a difference between paired results is more than noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.measuring.records import Record

LEVEL = 0.05
"""Below this corrected probability a difference is called one."""

NOISE = "noise"
"""The verdict of a difference that is not shown, as it is stored; people read other words."""

WILCOXON_FROM = 6
"""With fewer pairs the signed-rank test cannot reach 0.05, whatever they are."""


@dataclass(frozen=True)
class PairedTest(Record):
    """Results of two methods with the same seeds; differences are method minus baseline."""

    pairs: int
    difference: float
    low: float
    high: float
    """The difference's 95 % confidence interval (t); NaN with one pair, and where all differences
    are equal, which says nothing of how far others would be off."""
    t_test: float
    """Two-sided p of the paired t-test; of the exact sign test where all differences are equal."""
    wilcoxon: float | None
    """Two-sided p of the signed-rank test, from six pairs on."""


def paired_test(method: Sequence[float], baseline: Sequence[float]) -> PairedTest:
    """Compare results of equal seeds.

    Accuracies come in steps of one image, so a few differences may all be the same number. The
    t-test would call that certain; the sign test knows that it may be luck, and is used then.

    Example:
        >>> paired_test([0.91, 0.93, 0.92], [0.90, 0.90, 0.91]).t_test < 0.2
        True
    """
    if len(method) != len(baseline) or not method:
        raise LargeMarginError(
            f"a paired test needs as many results of both methods, but got {len(method)} and "
            f"{len(baseline)}."
        )
    differences = [a - b for a, b in zip(method, baseline, strict=True)]
    count, mean = len(differences), sum(differences) / len(differences)
    if count == 1:
        return PairedTest(count, mean, math.nan, math.nan, math.nan, None)
    # Accuracies of equal images differ in the last bit, which is no difference.
    if max(differences) - min(differences) < 1e-12:
        p = 1.0 if abs(mean) < 1e-12 else min(1.0, 2 * 0.5**count)
        return PairedTest(count, mean, math.nan, math.nan, p, None)
    try:
        from scipy import stats
    except ImportError:
        raise MissingPackage(
            "tests of significance need scipy. Install it: pip install 'largemargin[train]'"
        ) from None

    found = stats.ttest_1samp(differences, 0.0)
    interval = found.confidence_interval(0.95)
    ranks = None
    if sum(abs(each) > 1e-12 for each in differences) >= WILCOXON_FROM:
        ranks = float(stats.wilcoxon([round(each, 12) for each in differences]).pvalue)
    low, high = float(interval.low), float(interval.high)
    return PairedTest(count, mean, low, high, float(found.pvalue), ranks)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Holm's correction for several comparisons with one baseline; NaN stays NaN.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    known = sorted((p, at) for at, p in enumerate(probabilities) if not math.isnan(p))
    corrected, largest = [math.nan] * len(probabilities), 0.0
    for rank, (p, at) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[at] = largest
    return corrected


def only_uncorrected(test: PairedTest, corrected: float) -> bool:
    """Whether the interval excludes 0 but the correction for several methods takes that back."""
    return not corrected < LEVEL and (test.low > 0 or test.high < 0)


def verdict(test: PairedTest, corrected: float) -> str:
    """What the numbers allow to say."""
    if test.pairs < 2:
        return "one seed: no verdict"
    if not corrected < LEVEL:
        return NOISE
    return "better" if test.difference > 0 else "worse"
