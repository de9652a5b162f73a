"""Green, amber or red for what matters about a model, each by a rule shown on the page."""

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from largemargin.app.report.number_format import NOTHING, degrees, known, percent
from largemargin.app.report.report_models import ReportModel
from largemargin.measuring.accuracy import paired_counts, paired_interval, wilson
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.prototype_geometry import PrototypeGeometry

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


def judge(model: ReportModel, baseline: ReportModel | None) -> tuple[Judgement, ...]:
    """What the report says about a model, in the order of the page."""
    other = baseline if baseline is not None and comparable(model, baseline) else None
    return (
        accuracy(model, other),
        class_margin(model),
        worst_classes(model),
        robustness(model),
        calibration(model),
    )


def comparable(model: ReportModel, baseline: ReportModel) -> bool:
    """Whether a model may be compared with the baseline: another one, tested on the same images."""
    if model is baseline:
        return False
    images = {each.tested_on for each in (model, baseline)} - {None}
    return len(images) < 2


def graded(value: float, green: float, amber: float) -> Level:
    """Green from ``green`` on, amber from ``amber`` on, red below."""
    return "green" if value >= green else "amber" if value >= amber else "red"


def near_guessing(share: float, model: ReportModel) -> bool:
    """Whether an accuracy is less than a tenth of the way from guessing to perfect."""
    chance = 1 / max(2, len(model.classes))
    return known(share) and share < chance + NEAR * (1 - chance)


def interval(model: ReportModel) -> tuple[float, float]:
    """Wilson's 95 % interval of the accuracy; (NaN, NaN) where it is not known."""
    share, samples = model.accuracy, model.samples
    if share is None or not samples or not known(share):
        return math.nan, math.nan
    return wilson(round(share * samples), samples)


def paired(model: ReportModel, baseline: ReportModel) -> tuple[int, int, int, int] | None:
    """Images that both models are right about, each alone and neither; None where not known."""
    own, base = model.correct, baseline.correct
    return None if own is None or base is None else paired_counts(own, base)


def difference(model: ReportModel, baseline: ReportModel) -> tuple[float, float]:
    """95 % interval of the difference of two accuracies (Newcombe 1998).

    Image by image where it is known which ones both are right about. Otherwise from the intervals
    of both, which takes the images of each as drawn by themselves; they are the same, so it is
    rather too wide.
    """
    own, base = model.accuracy, baseline.accuracy
    if own is None or base is None:
        return math.nan, math.nan
    counts = paired(model, baseline)
    if counts is not None:
        return paired_interval(*counts)
    low, high = interval(model)
    base_low, base_high = interval(baseline)
    return (
        own - base - math.hypot(own - low, base_high - base),
        own - base + math.hypot(high - own, base - base_low),
    )


def accuracy(model: ReportModel, baseline: ReportModel | None) -> Judgement:
    name, value = "Accuracy", model.accuracy
    if value is None or not known(value):
        command = model.evaluate_command
        return Judgement(name, "unknown", NOTHING, "Needs test images.", command=command)
    low, high = interval(model)
    detail = f"95 % interval {percent(low)} to {percent(high)}" if known(low) else ""
    if baseline is not None and baseline.accuracy is not None:
        details = filter(None, (detail, _change(model, baseline)))
        level = _against(model, baseline)
        return Judgement(name, level, percent(value), AGAINST_BASELINE, "; ".join(details))
    chance = 1 / max(2, len(model.classes))
    level = graded((value - chance) / (1 - chance), 0.9, 0.5)
    return Judgement(name, level, percent(value), ALONE, detail)


AGAINST_BASELINE = (
    "Against the softmax baseline: green when at least as accurate, amber when lower but the 95 % "
    "intervals overlap, red when they do not; red for both when less than 10 % of the way from "
    "guessing to perfect accuracy."
)
ALONE = (
    "Share of the way from guessing to perfect accuracy: green from 90 %, amber from 50 %, red "
    "below. With a softmax run in the report the rule is the comparison with that run."
)


def _against(model: ReportModel, baseline: ReportModel) -> Level:
    value, base = model.accuracy or 0.0, baseline.accuracy or 0.0
    if near_guessing(value, model):
        return "red"
    if not value < base:
        return "green"
    (_, high), (base_low, _) = interval(model), interval(baseline)
    return "red" if known(high) and known(base_low) and high < base_low else "amber"


def _change(model: ReportModel, baseline: ReportModel) -> str:
    change = (model.accuracy or 0.0) - (baseline.accuracy or 0.0)
    least, most = difference(model, baseline)
    unclear = known(least) and least <= 0 <= most
    return f"{100 * change:+.2f} points against the baseline" + (
        ", no clear difference" if unclear else ""
    )


def class_margin(model: ReportModel) -> Judgement:
    name = "Class margin"
    rule = (
        "Smallest angle between class vectors, as a share of the largest known to be possible for "
        "this many classes in this many dimensions: green from 90 %, amber from 70 %."
    )
    if model.geometry is None:
        return Judgement(name, "unknown", NOTHING, rule, command=model.measure_command())
    p, share = model.geometry.prototypes, class_margin_share(model.geometry)
    between = " and ".join(model.class_name(label) for label in p.closest_classes)
    detail = f"{percent(share, 0)} of {degrees(_largest(p))}; closest: {between}"
    level = graded(share, 0.9, 0.7) if known(share) else "unknown"
    return Judgement(name, level, degrees(p.class_margin), rule, detail)


def class_margin_share(geometry: Geometry) -> float:
    """Of the largest angle between class vectors that is known to be possible."""
    largest = _largest(geometry.prototypes)
    return geometry.prototypes.class_margin / largest if largest > 0 else math.nan


def _largest(prototypes: PrototypeGeometry) -> float:
    return prototypes.reachable if known(prototypes.reachable) else prototypes.ceiling


def worst_classes(model: ReportModel) -> Judgement:
    name = "Worst classes"
    rule = (
        "Points by which the worst class lies below the mean of the classes: green up to 10, amber "
        "up to 25, red beyond; red too when it is less than 10 % of the way from guessing to "
        "perfect accuracy."
    )
    ranked = ranked_classes(model)
    if not ranked:
        return Judgement(name, "unknown", NOTHING, rule, command=model.evaluate_command)
    mean = statistics.fmean(share for share, _ in ranked)
    worst, _label = ranked[0]
    level = graded(-(mean - worst), -0.10, -0.25)
    if near_guessing(worst, model):
        level = "red"
    shown = ", ".join(f"{model.class_name(c)} ({percent(s)})" for s, c in ranked[:3])
    return Judgement(name, level, percent(worst), rule, f"lowest: {shown}")


def ranked_classes(model: ReportModel) -> list[tuple[float, int]]:
    """(accuracy, class), lowest first; classes without samples are left out."""
    found = [(share, at) for at, share in enumerate(model.class_accuracy) if known(share)]
    return sorted(found)


def robustness(model: ReportModel) -> Judgement:
    name = "Robustness"
    rule = (
        "Mean accuracy under all perturbations, as a share of the clean accuracy: green from 90 %, "
        "amber from 70 %, red below; red too when the clean accuracy is less than 10 % of the way "
        "from guessing to perfect accuracy."
    )
    evaluation = model.evaluation
    if evaluation is None or not evaluation.perturbed:
        return Judgement(name, "unknown", NOTHING, rule, command=model.evaluate_command)
    shares = {noise: result.accuracy for noise, result in evaluation.perturbed.items()}
    mean = statistics.fmean(shares.values())
    hardest = min(shares, key=lambda noise: shares[noise])
    worst = f"{hardest.replace('_', ' ')} ({percent(shares[hardest])})"
    detail = f"mean of {len(shares)} perturbations; hardest: {worst}"
    clean: float = evaluation.clean.accuracy
    level: Level = "red"
    if clean and not near_guessing(clean, model):
        level = graded(mean / clean, 0.9, 0.7)
    return Judgement(name, level, percent(mean), rule, detail)


def calibration(model: ReportModel) -> Judgement:
    name = "Calibration"
    rule = (
        "Expected calibration error, the mean gap between confidence and accuracy: green up to "
        "3 %, amber up to 10 %, red beyond."
    )
    found = model.calibration
    if found is None:
        return Judgement(name, "unknown", NOTHING, rule, command=model.measure_command())
    error, gap = found.expected_error, confidence_gap(model)
    details = []
    if known(gap) and gap:
        direction = "overconfident" if gap > 0 else "underconfident"
        details.append(f"{direction} by {percent(abs(gap))} on average")
    evaluation = model.evaluation
    if evaluation is not None and evaluation.calibrated is not None:
        calibrated = percent(evaluation.calibrated.expected_error)
        details.append(f"{calibrated} with temperature {evaluation.temperature:.3g}")
    level = graded(-error, -0.03, -0.10) if known(error) else "unknown"
    return Judgement(name, level, percent(error), rule, "; ".join(details))


def confidence_gap(model: ReportModel) -> float:
    """Mean confidence minus accuracy."""
    found = model.calibration
    if found is None or not sum(found.counts):
        return math.nan
    bins = zip(found.counts, found.confidence, found.accuracy, strict=True)
    return float(sum(n * (c - a) for n, c, a in bins if n)) / sum(found.counts)
