"""The result of a comparison: its numbers, and as text the table and what may be concluded."""

import math
from dataclasses import dataclass

from largemargin.app.training.significance import (
    NOISE,
    WILCOXON_FROM,
    PairedTest,
    only_uncorrected,
)
from largemargin.measuring.records import Record

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
        return table(self)


def table(found: Comparison) -> str:
    """One line a method, then the reading."""
    rows = [HEADS, *(_cells(each) for each in found.methods)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = [
        "  ".join(
            f"{cell:<{width}}" if at in (0, len(row) - 1) else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:], "", *reading(found)])


def _cells(each: MethodResult) -> tuple[str, ...]:
    test = each.test
    return (
        each.method,
        f"{100 * each.mean:.2f} %",
        _or_dash(100 * each.std, "{:.2f}"),
        "" if test is None else f"{round(100 * test.difference, 2) + 0.0:+.2f}",
        "" if test is None else _interval(100 * test.low, 100 * test.high),
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
    """Too large for noise alone, and yet no verdict: the record says noise of both."""
    if each.test is None or each.corrected is None or each.verdict != NOISE:
        return False
    return only_uncorrected(each.test, each.corrected)


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else form.format(value)


def _interval(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"{low:+.2f} .. {high:+.2f}"


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
