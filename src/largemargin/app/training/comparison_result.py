"""The result of a comparison: its numbers, and as text the table and what may be concluded.

First the tests of significance: whether a difference of paired results is more than noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from largemargin.errors import LargeMarginError, optional_module
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
    stats = optional_module("scipy.stats", "tests of significance need scipy")
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


def verdict(test: PairedTest, corrected: float) -> str:
    """What the numbers allow to say."""
    if test.pairs < 2:
        return "one seed: no verdict"
    if not corrected < LEVEL:
        return NOISE
    return "better" if test.difference > 0 else "worse"


RESULT, RUNS = "compare.json", "runs"
"""Where the result and its runs lie in the folder of a comparison."""

UNCLEAR = "no clear difference"
FEW = 3
"""With fewer seeds the spread is hardly known."""

HEADS = (
    *("method", "accuracy", "std", "difference", "95 % interval", "p (Holm)", "class margin"),
    *("trials", "tuning", "training", "verdict"),
)


@dataclass(frozen=True)
class MethodResult(Record):
    """One method: its runs, what tuning it cost, how it differs from softmax."""

    method: str
    folders: tuple[str, ...]
    accuracies: tuple[float, ...]
    """On the test images, by seed; on the validation images where there are no others."""
    mean: float
    std: float
    """Of a sample (n - 1), NaN with one seed."""
    seconds: float
    """Mean of a run's training."""
    trials: int
    tuning_seconds: float
    class_margin: float
    """Mean smallest angle between class vectors, degrees; NaN where it was not measured."""
    test: PairedTest | None
    """Against softmax; None for softmax itself."""
    corrected: float | None
    """p of the paired t-test after Holm's correction over the methods."""
    verdict: str


@dataclass(frozen=True)
class Comparison(Record):
    """What :func:`compare` found; prints as a table."""

    split: str
    images: int
    seeds: tuple[int, ...]
    methods: tuple[MethodResult, ...]
    format: int = 1

    def __str__(self) -> str:
        """One line a method, then the reading."""
        rows = [HEADS, *(_cells(each) for each in self.methods)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                f"{cell:<{width}}" if at in (0, len(row) - 1) else f"{cell:>{width}}"
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], "", *reading(self)])


def _cells(each: MethodResult) -> tuple[str, ...]:
    test, difference, interval = each.test, "", ""
    if test is not None:
        difference = f"{round(100 * test.difference, 2) + 0.0:+.2f}"
        interval = _or_dash(test.low, f"{100 * test.low:+.2f} .. {100 * test.high:+.2f}")
    return (
        each.method,
        f"{100 * each.mean:.2f} %",
        _or_dash(100 * each.std, "{:.2f}"),
        difference,
        interval,
        "" if each.corrected is None else _or_dash(each.corrected, "{:.3f}"),
        _or_dash(each.class_margin, "{:.1f}°"),
        str(each.trials),
        f"{each.tuning_seconds:.0f} s",
        f"{each.seconds:.1f} s",
        verdict_text(each),
    )


def verdict_text(each: MethodResult) -> str:
    """The verdict as people read it, in the words of the report; records say noise."""
    if _only_uncorrected(each):
        return "not shown"
    return UNCLEAR if each.verdict == NOISE else each.verdict


def _only_uncorrected(each: MethodResult) -> bool:
    """Whether the interval excludes 0 but the correction for several methods takes that back."""
    test, corrected = each.test, each.corrected
    if test is None or corrected is None or each.verdict != NOISE:
        return False  # the record says noise of both
    return not corrected < LEVEL and (test.low > 0 or test.high < 0)


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


def reading(found: Comparison) -> list[str]:
    """What the table says, and what it does not say."""
    count, image = len(found.seeds), 100 / max(1, found.images)
    lines = [
        f"accuracy: {found.split}, mean over {count} seed{'s' if count > 1 else ''}; one of the "
        f"{found.images:,} images is {image:.2f} points",
        "difference: method minus softmax in points, seed by seed; p: paired t-test with Holm's "
        "correction",
        "trials, tuning: tuning per method; training: of one run",
    ]
    if found.split == "validation":
        lines.append(
            "There are no test images: these also chose the best epoch, so the accuracies are a "
            "little too high."
        )
    if not any(each.trials for each in found.methods):
        lines.append(
            "Nothing was tuned: another learning rate may change the order (--trials 20 tunes "
            "every method alike)."
        )
    lines.append("")
    if count == 1:
        return [*lines, "One seed cannot tell a difference from luck: give more, --seeds 5."]
    lines += [_sentence(each, count) for each in found.methods if each.test is not None]
    if count < WILCOXON_FROM:
        lines.append(f"The rank test beside the t-test needs {WILCOXON_FROM} seeds.")
    return lines


def _sentence(each: MethodResult, count: int) -> str:
    test = each.test
    assert test is not None
    ranks = "" if test.wilcoxon is None else f"; rank test p {test.wilcoxon:.3f}"
    if each.verdict != NOISE:
        size = f"{100 * abs(test.difference):.2f} points"
        return f"{each.method} is {each.verdict} than softmax by {size}{ranks}."
    if _only_uncorrected(each):
        return (
            f"{each.method}: {100 * test.difference:+.2f} points to softmax are not shown after "
            f"the correction for the number of methods (p {each.corrected:.3f}, without it "
            f"{test.t_test:.3f}); more seeds may show them{ranks}."
        )
    known = f"{each.method}: {UNCLEAR} to softmax (p {each.corrected:.2f})"
    if count < FEW:
        return f"{known}; {count} seeds are too few to show one{ranks}."
    if math.isnan(test.low):
        return f"{known}; all seeds differ by the same{ranks}."
    reach = 100 * max(abs(test.low), abs(test.high))
    return f"{known}; {count} seeds do not exclude one of up to {reach:.2f} points{ranks}."
