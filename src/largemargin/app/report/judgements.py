"""Green, amber or red for what matters about a model, by rules shown on the page, and advice.

Each piece of advice names the measurement that it follows from.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from largemargin.app.report.charts import NOTHING, degrees, known, number, percent
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.training.objective import parse_objective
from largemargin.losses import LOSSES
from largemargin.losses.base.loss import Loss
from largemargin.measuring.accuracy import paired_counts, paired_interval, wilson
from largemargin.measuring.feature_geometry import PrototypeGeometry
from largemargin.measuring.geometry_result import Geometry

Level = Literal["green", "amber", "red", "unknown"]

WORDS = {"green": "good", "amber": "look closer", "red": "weak", "unknown": "not measured"}

VALIDATION = "validation images"
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
    images = {model.tested_on, baseline.tested_on} - {None}
    return model is not baseline and len(images) < 2


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
    if not samples or not known(share):
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
    if not known(value):
        command = model.evaluate_command
        return Judgement(name, "unknown", NOTHING, "Needs test images.", command=command)
    low, high = interval(model)
    detail = f"{100 * low:.2f} to {percent(high)}" if known(low) else ""
    if model.judged_on == VALIDATION:
        detail = "; ".join(filter(None, (detail, f"on the {VALIDATION}, which chose the epoch")))
    if baseline is not None and baseline.accuracy is not None:
        level: Level = "green"
        if near_guessing(value, model):
            level = "red"
        elif value < baseline.accuracy:
            # An interval that is not known is NaN, of which no comparison holds.
            level = "red" if high < interval(baseline)[0] else "amber"
        return Judgement(name, level, percent(value), AGAINST_BASELINE, detail)
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
    mean, worst = statistics.fmean(share for share, _ in ranked), ranked[0][0]
    level: Level = "red" if near_guessing(worst, model) else graded(worst - mean, -0.10, -0.25)
    shown = ", ".join(model.class_name(label) for _, label in ranked[:3])
    return Judgement(name, level, percent(worst), rule, f"lowest: {shown}")


def ranked_classes(model: ReportModel) -> list[tuple[float, int]]:
    """(accuracy, class), lowest first; classes without samples are left out."""
    return sorted((share, at) for at, share in enumerate(model.class_accuracy) if known(share))


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
    detail = f"hardest of {len(shares)}: {worst}"
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
        details.append(f"{direction} by {percent(abs(gap))}")
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


LONG_TAIL = 5.0
"""Largest over smallest class of the training images from which the data count as long-tailed."""


@dataclass(frozen=True)
class Advice:
    """An observation, what to try, and the option that does it."""

    seen: str
    attempt: str
    option: str = ""


def advise(model: ReportModel, models: ReportModels) -> tuple[Advice, ...]:
    """What to try next with one model; empty where nothing calls for any."""
    levels = {each.name: each.level for each in judge(model, models.baseline)}
    return (
        *_prototypes(model, levels["Class margin"]),
        *_lengths(model),
        *_features(model),
        *_classes(model, levels["Worst classes"]),
        *_noise(model, levels["Robustness"]),
        *_confidence(model, levels["Calibration"]),
        *_bad_steps(model),
        *_duration(model),
    )


def collapsed_tail(model: ReportModel) -> tuple[float, float] | None:
    """Mean nearest angle of tail and head classes, where the tail's is under 70 % of the head's."""
    counts = model.train_counts
    angles = () if model.rivals is None else model.rivals.angle
    if len(counts) != len(angles) or len(counts) < 3:
        return None
    if max(counts) < LONG_TAIL * max(1, min(counts)):
        return None
    order = sorted(range(len(counts)), key=lambda at: counts[at])
    third = max(1, len(order) // 3)
    tail = statistics.fmean(angles[at] for at in order[:third])
    head = statistics.fmean(angles[at] for at in order[-third:])
    return (tail, head) if tail < 0.7 * head else None


def _prototypes(model: ReportModel, level: str) -> Iterator[Advice]:
    collapsed = collapsed_tail(model)
    if collapsed is not None:
        tail, head = collapsed
        yield Advice(
            f"Prototypes of the tail classes have collapsed: {degrees(tail)} to their nearest "
            f"rival, {degrees(head)} for the head classes.",
            "adding zero_centroid, which keeps class vectors around the origin",
            f"--objective '{_objective(model)} + zero_centroid'",
        )
    elif level in ("red", "amber") and model.geometry is not None:
        p = model.geometry.prototypes
        widens = any(loss.widens_margins for loss in _losses(model))
        yield Advice(
            f"The closest class vectors are {degrees(p.class_margin)} apart; the largest "
            f"possible angle is {degrees(p.ceiling)}.",
            "a larger margin, or longer training"
            if widens
            else "a loss with a margin between classes, such as cosface, arcface or lm_softmax",
            "" if widens else "--objective lm_softmax",
        )


def _lengths(model: ReportModel) -> Iterator[Advice]:
    """Of class vectors, where they count: not on cosines."""
    if model.geometry is None or model.geometry.similarity == "cosine":
        return
    ratio = model.geometry.prototypes.magnitude_ratio
    if ratio > 2:
        yield Advice(
            f"The longest class vector is {number(ratio, 3)} times the shortest: classes with long "
            "vectors get more of the space.",
            "a loss on cosines, such as normface or cosface, which ignores lengths",
            "--objective normface",
        )


def _features(model: ReportModel) -> Iterator[Advice]:
    compact = None if model.geometry is None else model.geometry.compactness
    if compact is not None and known(compact.ideal_ratio) and compact.ideal_ratio >= 1:
        gathers = any(loss.gathers_classes for loss in _losses(model))
        yield Advice(
            "Classes are wider than they are apart. A few outliers are enough for that: look at "
            "the hardest samples first.",
            "more weight on the term that pulls samples to their class mean"
            if gathers
            else "a term that pulls samples to their class mean",
            "" if gathers else f"--objective '{_objective(model)} + discriminative'",
        )


def _classes(model: ReportModel, level: str) -> Iterator[Advice]:
    if level not in ("red", "amber"):
        return
    share, label = ranked_classes(model)[0]
    counts = model.train_counts
    few = bool(counts) and max(counts) >= LONG_TAIL * max(1, min(counts))
    yield Advice(
        f"Class {model.class_name(label)} has an accuracy of only {percent(share)}"
        + (", and the training classes differ widely in size." if few else "."),
        "wider margins for small classes" if few else "looking at its hardest samples below",
        "--objective ldam" if few else "",
    )


def _noise(model: ReportModel, level: str) -> Iterator[Advice]:
    noisy = model.config is not None and model.config.noise.use != "none"
    found = model.evaluation
    falls = found is not None and not near_guessing(found.clean.accuracy, model)
    if level in ("red", "amber") and falls and not noisy:
        yield Advice(
            "Accuracy falls under perturbations, and training saw clean images only.",
            "noise on training images, with a term that keeps features close to the clean ones",
            "--noise.use pair --objective robust_discriminative",
        )


def _confidence(model: ReportModel, level: str) -> Iterator[Advice]:
    if level not in ("red", "amber"):
        return
    gap, fitted = confidence_gap(model), _temperature(model)
    over = gap > 0
    others = (
        "softer targets, or a smaller scale if the loss is on cosines"
        if over
        else "a larger scale if the loss is on cosines, or longer training"
    )
    yield Advice(
        f"The model is {'over' if over else 'under'}confident by {percent(abs(gap))}.",
        f"{fitted}, {others}",
        "--objective label_smoothing" if over else "",
    )


def _temperature(model: ReportModel) -> str:
    """Temperature scaling, as far as the run has it or can have it."""
    if model.evaluation is not None and model.evaluation.temperature is not None:
        return "a temperature, which largemargin predict and exported probabilities already use"
    images = model.data.get("record", {}).get("images")
    if images is not None and not images.get("validation"):
        return (
            "a temperature, which is fitted on validation images (this model was trained without: "
            "--data.validation 0.1)"
        )
    words = "a temperature, which largemargin predict and export fit"
    return f"{words} where the validation images allow it"


def _bad_steps(model: ReportModel) -> Iterator[Advice]:
    skipped, steps = model.skipped_steps
    if skipped:
        lr = None if model.config is None else model.config.optimizer.lr
        yield Advice(
            f"{skipped:,} of {steps:,} training steps were skipped: their loss or their gradient "
            "was not finite.",
            "a smaller learning rate, and looking at the samples that metrics.jsonl names",
            "" if lr is None else f"--optimizer.lr {lr / 10:g}",
        )


def _duration(model: ReportModel) -> Iterator[Advice]:
    """Whether training was too long or too short, by the validation images."""
    rows = [row for row in model.epochs() if row.get("validation")]
    losses = [row["validation"].get("loss") for row in rows]
    if len(losses) >= 6 and None not in losses:
        best = min(range(len(losses)), key=lambda epoch: losses[epoch])
        if losses[-1] > 1.25 * losses[best] and rows[-1]["loss"] < rows[best]["loss"]:
            yield Advice(
                f"Validation loss was lowest in epoch {rows[best]['epoch'] + 1} and rose after it "
                "while the training loss fell.",
                "more augmentation, weight decay, or early stopping",
                "--patience 5",
            )
    if len(rows) >= 3:
        before, last = (row["validation"]["accuracy"] for row in rows[-2:])
        if last - before > 0.01:
            yield Advice(
                f"Accuracy still rose by {100 * (last - before):.1f} points in the last epoch.",
                "training longer",
                f"--epochs {2 * len(rows)}",
            )


def _losses(model: ReportModel) -> list[type[Loss]]:
    """The losses it was trained with."""
    if model.config is None:
        return []
    return [LOSSES[term.name] for term in parse_objective(model.config.objective)]


def _objective(model: ReportModel) -> str:
    return "cross_entropy" if model.config is None else model.config.objective.name
