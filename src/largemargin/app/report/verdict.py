"""Green, amber or red for what matters about a model, each by a rule that is told."""

import math
import shlex
import statistics
from dataclasses import dataclass
from typing import Literal

from largemargin.app.report.number_format import degrees, known, percent
from largemargin.app.report.report_models import Subject
from largemargin.measuring.accuracy import crossed
from largemargin.measuring.accuracy_interval import paired_interval, wilson
from largemargin.measuring.calibration import Calibration

Level = Literal["green", "amber", "red", "unknown"]

WORDS = {"green": "good", "amber": "look closer", "red": "weak", "unknown": "not measured"}

NEAR = 0.1
"""Of the way from guessing to perfect: below it nothing can be called good."""


@dataclass(frozen=True)
class Judgement:
    """One quantity of one model. ``level`` is decided by ``rule`` and nothing else."""

    name: str
    level: Level
    value: str
    rule: str
    detail: str = ""
    command: str = ""

    @property
    def word(self) -> str:
        return WORDS[self.level]


def judge(subject: Subject, baseline: Subject | None) -> tuple[Judgement, ...]:
    """What the report says about a model, in the order of the page."""
    other = baseline if baseline is not None and comparable(subject, baseline) else None
    return (
        accuracy(subject, other),
        class_margin(subject),
        worst_classes(subject),
        robustness(subject),
        calibration(subject),
    )


def comparable(subject: Subject, baseline: Subject) -> bool:
    """Whether a model may be held against the baseline: another one, tested on the same images."""
    if subject is baseline:
        return False
    images = {each.tested_on for each in (subject, baseline)} - {None}
    return len(images) < 2


def graded(value: float, green: float, amber: float) -> Level:
    """Green from ``green`` on, amber from ``amber`` on, red below."""
    return "green" if value >= green else "amber" if value >= amber else "red"


def near_guessing(share: float, subject: Subject) -> bool:
    """Whether an accuracy is less than a tenth of the way from guessing to perfect."""
    chance = 1 / max(2, len(subject.classes))
    return known(share) and share < chance + NEAR * (1 - chance)


def interval(subject: Subject) -> tuple[float, float]:
    """Wilson's 95 % interval of the accuracy; (NaN, NaN) where it is not known."""
    share, samples = subject.accuracy, subject.samples
    if share is None or not samples or not known(share):
        return math.nan, math.nan
    return wilson(round(share * samples), samples)


def paired(subject: Subject, baseline: Subject) -> tuple[int, int, int, int] | None:
    """Images that both models are right about, each alone and neither; None where not known."""
    own, base = subject.correct, baseline.correct
    return None if own is None or base is None else crossed(own, base)


def difference(subject: Subject, baseline: Subject) -> tuple[float, float]:
    """95 % interval of the difference of two accuracies (Newcombe 1998).

    Image by image where it is known which ones both are right about. Otherwise from the intervals
    of both, which takes the images of each as drawn by themselves; they are the same, so it is
    rather too wide.
    """
    own, base = subject.accuracy, baseline.accuracy
    if own is None or base is None:
        return math.nan, math.nan
    counts = paired(subject, baseline)
    if counts is not None:
        return paired_interval(*counts)
    low, high = interval(subject)
    base_low, base_high = interval(baseline)
    return (
        own - base - math.hypot(own - low, base_high - base),
        own - base + math.hypot(high - own, base - base_low),
    )


def accuracy(subject: Subject, baseline: Subject | None) -> Judgement:
    name, value = "Accuracy", subject.accuracy
    if value is None or not known(value):
        return Judgement(name, "unknown", "–", "Needs test images.", command=_evaluate(subject))
    low, high = interval(subject)
    detail = f"95 % interval {percent(low)} to {percent(high)}" if known(low) else ""
    if baseline is not None and baseline.accuracy is not None:
        rule = (
            "Against the softmax baseline: green when at least as accurate, amber when lower but "
            "the 95 % intervals overlap, red when they do not, and red for both when less than "
            "10 % of the way from guessing to perfect."
        )
        base_low, _ = interval(baseline)
        below = value < baseline.accuracy
        guessing = near_guessing(value, subject)
        apart = below and known(high) and known(base_low) and high < base_low
        change = 100 * (value - baseline.accuracy)
        detail += f"; {change:+.2f} points against the baseline"
        least, most = difference(subject, baseline)
        if known(least) and least <= 0 <= most:
            detail += ", no clear difference"
        level: Level = "red" if apart or guessing else "amber" if below else "green"
        return Judgement(name, level, percent(value), rule, detail.removeprefix("; "))
    chance = 1 / max(2, len(subject.classes))
    rule = (
        "Of the way from guessing to perfect: green from 90 %, amber from 50 %, red below. "
        "With a softmax run beside it the rule is the comparison with that run."
    )
    level = graded((value - chance) / (1 - chance), 0.9, 0.5)
    return Judgement(name, level, percent(value), rule, detail)


def class_margin(subject: Subject) -> Judgement:
    name = "Class margin"
    rule = (
        "Smallest angle between class vectors, as a share of the widest that is known to be "
        "possible for so many classes in so many dimensions: green from 90 %, amber from 70 %."
    )
    if subject.geometry is None:
        return Judgement(name, "unknown", "–", rule, command=measure_command(subject))
    p = subject.geometry.prototypes
    best = p.reachable if known(p.reachable) else p.ceiling
    share = p.class_margin / best if best > 0 else math.nan
    between = " and ".join(subject.class_name(label) for label in p.closest_classes)
    detail = f"{percent(share, 0)} of {degrees(best)}; closest: {between}"
    level = graded(share, 0.9, 0.7) if known(share) else "unknown"
    return Judgement(name, level, degrees(p.class_margin), rule, detail)


def worst_classes(subject: Subject) -> Judgement:
    name = "Worst classes"
    rule = (
        "Points by which the worst class lies below the mean of the classes: green up to 10, amber "
        "up to 25, red beyond, and red when it is less than 10 % of the way from guessing to "
        "perfect."
    )
    ranked = ranked_classes(subject)
    if not ranked:
        return Judgement(name, "unknown", "–", rule, command=_evaluate(subject))
    mean = statistics.fmean(share for share, _ in ranked)
    worst, _label = ranked[0]
    level = graded(-(mean - worst), -0.10, -0.25)
    if near_guessing(worst, subject):
        level = "red"
    shown = ", ".join(f"{subject.class_name(c)} {percent(s)}" for s, c in ranked[:3])
    return Judgement(name, level, percent(worst), rule, f"lowest: {shown}")


def ranked_classes(subject: Subject) -> list[tuple[float, int]]:
    """(accuracy, class), lowest first; classes without samples are left out."""
    found = [(share, at) for at, share in enumerate(subject.class_accuracy) if known(share)]
    return sorted(found)


def robustness(subject: Subject) -> Judgement:
    name = "Robustness"
    rule = (
        "Mean accuracy under all perturbations, as a share of the clean accuracy: green from 90 %, "
        "amber from 70 %, and red when the clean accuracy is less than 10 % of the way from "
        "guessing to perfect."
    )
    found = subject.evaluation
    if found is None or not found.perturbed:
        return Judgement(name, "unknown", "–", rule, command=_evaluate(subject))
    each = {key: value.accuracy for key, value in found.perturbed.items()}
    mean = statistics.fmean(each.values())
    hardest = min(each, key=lambda key: each[key])
    detail = f"mean of {len(each)}; hardest: {hardest.replace('_', ' ')} {percent(each[hardest])}"
    level: Level = "red"
    if found.clean.accuracy and not near_guessing(found.clean.accuracy, subject):
        level = graded(mean / found.clean.accuracy, 0.9, 0.7)
    return Judgement(name, level, percent(mean), rule, detail)


def calibration(subject: Subject) -> Judgement:
    name = "Calibration"
    rule = (
        "Expected calibration error, the mean gap between confidence and accuracy: green up to "
        "3 %, amber up to 10 %, red beyond."
    )
    found = calibration_of(subject)
    if found is None:
        return Judgement(name, "unknown", "–", rule, command=measure_command(subject))
    error = found.expected_error
    gap = confidence_gap(subject)
    told = "overconfident" if gap > 0 else "underconfident"
    detail = f"{told} by {percent(abs(gap))} on average" if known(gap) and gap else ""
    evaluated = subject.evaluation
    if evaluated is not None and evaluated.calibrated is not None:
        with_it = percent(evaluated.calibrated.expected_error)
        detail += f"{'; ' if detail else ''}{with_it} with temperature {evaluated.temperature:.3g}"
    level = graded(-error, -0.03, -0.10) if known(error) else "unknown"
    return Judgement(name, level, percent(error), rule, detail)


def calibration_of(subject: Subject) -> Calibration | None:
    """The calibration that was evaluated, or else measured."""
    if subject.evaluation is not None:
        return subject.evaluation.clean.calibration
    return None if subject.geometry is None else subject.geometry.calibration


def confidence_gap(subject: Subject) -> float:
    """Mean confidence minus accuracy."""
    found = calibration_of(subject)
    if found is None or not sum(found.counts):
        return math.nan
    bins = zip(found.counts, found.confidence, found.accuracy, strict=True)
    return float(sum(n * (c - a) for n, c, a in bins if n)) / sum(found.counts)


def _evaluate(subject: Subject) -> str:
    return f"largemargin evaluate {subject.where}"


def measure_command(subject: Subject, *options: str) -> str:
    """Measures what is asked for, and again what was measured before: the file is written anew."""
    g = subject.geometry
    had = {
        "--curvature true": g is not None and g.curvature is not None,
        "--bounds true": g is not None and g.bounds is not None,
        "--input_margins true": g is not None and g.input_margins is not None,
        "--sphere true": g is not None and g.sphere is not None,
    }
    again = [option for option, there in had.items() if there and option not in options]
    layers = () if g is None else (each.name for each in g.layers or ())
    margins = () if g is None else g.layer_margins or ()
    for option, names in (("--layers", ",".join(layers)), ("--layer_margins", ",".join(margins))):
        again += [f"{option} {shlex.quote(names)}"] if names else []
    words = ["largemargin measure", subject.where, *again, *options]
    return " ".join([*words, f"--out {subject.where}/geometry.json"])
