"""What to try next, from what was measured. Every piece of advice says what it is based on."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from largemargin.app.report.number_format import degrees, known, number, percent
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.verdict import confidence_gap, judge, near_guessing, ranked_classes
from largemargin.app.training.objective import parse_objective

MARGIN_LOSSES = {
    *("arcface", "biased_softmax", "cosface", "gm_softmax", "kobayashi", "ldam", "lm_softmax"),
    *("lsoftmax", "sample_margin", "sphereface", "unified_margin"),
}
PULLING = {
    *("center", "compactness", "discriminative", "robust_discriminative", "stable_discriminative"),
}
"""Losses that pull samples to their class."""

LONG_TAIL = 5.0
"""Largest over smallest class of the training images, from which on there is a tail."""


@dataclass(frozen=True)
class Advice:
    """What was seen, what to try, and the option that does it."""

    seen: str
    attempt: str
    option: str = ""


def advise(subject: Subject, subjects: Subjects) -> tuple[Advice, ...]:
    """Pieces of advice for one model; none where nothing asks for it."""
    levels = {each.name: each.level for each in judge(subject, subjects.baseline)}
    return (
        *_prototypes(subject, levels["Class margin"]),
        *_features(subject),
        *_classes(subject, levels["Worst classes"]),
        *_noise(subject, levels["Robustness"]),
        *_confidence(subject, levels["Calibration"]),
        *_training(subject),
    )


def train_counts(subject: Subject) -> list[int]:
    """Training images of each class, by class; empty where they are not known."""
    counts = subject.data.get("record", {}).get("counts", {}).get("train", {})
    found = [counts.get(name) for name in subject.classes]
    return [int(each) for each in found] if found and None not in found else []


def nearest_angles(subject: Subject) -> list[float]:
    """Angle of every class vector to its nearest other one; empty where it is not known."""
    rivals = subject.rivals
    return [] if rivals is None else list(rivals.angle)


def collapsed_tail(subject: Subject) -> tuple[float, float] | None:
    """Mean nearest angle of tail and head classes, where the tail's is under 70 % of the head's."""
    counts, angles = train_counts(subject), nearest_angles(subject)
    if len(counts) != len(angles) or len(counts) < 3:
        return None
    if max(counts) < LONG_TAIL * max(1, min(counts)):
        return None
    order = sorted(range(len(counts)), key=lambda at: counts[at])
    third = max(1, len(order) // 3)
    tail = statistics.fmean(angles[at] for at in order[:third])
    head = statistics.fmean(angles[at] for at in order[-third:])
    return (tail, head) if tail < 0.7 * head else None


def _prototypes(subject: Subject, level: str) -> Iterator[Advice]:
    collapsed = collapsed_tail(subject)
    if collapsed is not None:
        tail, head = collapsed
        yield Advice(
            f"Prototypes of the tail classes have collapsed: {degrees(tail)} to their nearest "
            f"rival, {degrees(head)} for the head classes.",
            "add zero_centroid, which keeps class vectors around the origin",
            f"--objective '{_objective(subject)} + zero_centroid'",
        )
    elif level in ("red", "amber") and subject.geometry is not None:
        p = subject.geometry.prototypes
        asks = bool(_terms(subject) & MARGIN_LOSSES)
        yield Advice(
            f"The closest class vectors are {degrees(p.class_margin)} apart; {degrees(p.ceiling)} "
            "is the ceiling.",
            "a larger margin, or longer training"
            if asks
            else "a loss that asks for a margin between classes, as cosface, arcface or lm_softmax",
            "" if asks else "--objective lm_softmax",
        )
    cosine = subject.geometry is not None and subject.geometry.similarity == "cosine"
    if subject.geometry and not cosine and subject.geometry.prototypes.magnitude_ratio > 2:
        ratio = subject.geometry.prototypes.magnitude_ratio
        yield Advice(
            f"The longest class vector is {number(ratio, 3)} times the shortest: long ones win "
            "more of the space.",
            "a loss on cosines, as normface or cosface, which takes lengths out",
            "--objective normface",
        )


def _features(subject: Subject) -> Iterator[Advice]:
    compact = None if subject.geometry is None else subject.geometry.compactness
    if compact is not None and known(compact.ideal_ratio) and compact.ideal_ratio >= 1:
        pulls = bool(_terms(subject) & PULLING)
        yield Advice(
            f"Classes are wider than they are apart: dispersion / separation is "
            f"{number(compact.ideal_ratio, 3)}, ideal is below 1. A few outliers are enough for "
            "that: look at the worst samples first.",
            "more weight on the term that pulls samples to their class mean"
            if pulls
            else "a term that pulls samples to their class mean",
            "" if pulls else f"--objective '{_objective(subject)} + discriminative'",
        )


def _classes(subject: Subject, level: str) -> Iterator[Advice]:
    if level not in ("red", "amber"):
        return
    share, label = ranked_classes(subject)[0]
    counts = train_counts(subject)
    few = bool(counts) and max(counts) >= LONG_TAIL * max(1, min(counts))
    yield Advice(
        f"Class {subject.class_name(label)} is right in {percent(share)} only"
        + (", and training classes are of very different sizes." if few else "."),
        "margins that are wider for small classes" if few else "a look at its worst samples below",
        "--objective ldam" if few else "",
    )


def _noise(subject: Subject, level: str) -> Iterator[Advice]:
    noisy = subject.config is not None and subject.config.noise.use != "none"
    found = subject.evaluation
    falls = found is not None and not near_guessing(found.clean.accuracy, subject)
    if level in ("red", "amber") and falls and not noisy:
        yield Advice(
            "Accuracy falls under perturbations, and training saw clean images only.",
            "noise on training images, together with a term that keeps features still",
            "--noise.use pair --objective robust_discriminative",
        )


def _confidence(subject: Subject, level: str) -> Iterator[Advice]:
    if level not in ("red", "amber"):
        return
    gap = confidence_gap(subject)
    fitted = _temperature(subject)
    if gap > 0:
        yield Advice(
            f"The model is overconfident by {percent(gap)}.",
            f"{fitted}, softer targets, or a smaller scale of a loss on cosines",
            "--objective label_smoothing",
        )
    else:
        yield Advice(
            f"The model is underconfident by {percent(-gap)}.",
            f"{fitted}, a larger scale of a loss on cosines, or longer training",
        )


def _temperature(subject: Subject) -> str:
    """Whether predictions have one is not known before it was fitted."""
    if subject.evaluation is not None and subject.evaluation.temperature is not None:
        return "a temperature, which largemargin predict and exported probabilities have already"
    images = subject.data.get("record", {}).get("images")
    if images is not None and not images.get("validation"):
        return (
            "a temperature, which is fitted to validation images (this model was trained without: "
            "--data.validation 0.1)"
        )
    return (
        "a temperature, which largemargin predict and export fit where the validation images allow "
        "it"
    )


def _training(subject: Subject) -> Iterator[Advice]:
    skipped, steps = subject.skipped_steps
    if skipped:
        lr = None if subject.config is None else subject.config.optimizer.lr
        yield Advice(
            f"{skipped:,} of {steps:,} steps of training were left out: their loss or their "
            "gradient was not finite.",
            "a smaller learning rate, and a look at the samples that metrics.jsonl names",
            "" if lr is None else f"--optimizer.lr {lr / 10:g}",
        )
    rows = [row for row in subject.epochs() if row.get("validation")]
    losses = [row["validation"].get("loss") for row in rows]
    if len(losses) >= 6 and None not in losses:
        best = min(range(len(losses)), key=lambda at: losses[at])
        if losses[-1] > 1.25 * losses[best] and rows[-1]["loss"] < rows[best]["loss"]:
            yield Advice(
                f"Validation loss was lowest in epoch {rows[best]['epoch'] + 1} and rose after it "
                "while the training loss fell.",
                "more augmentation or weight decay, or to stop early",
                "--patience 5",
            )
    if len(rows) >= 3:
        first, last = rows[-2]["validation"]["accuracy"], rows[-1]["validation"]["accuracy"]
        if last - first > 0.01:
            yield Advice(
                f"Accuracy still rose by {100 * (last - first):.1f} points in the last epoch.",
                "to train longer",
                f"--epochs {2 * len(rows)}",
            )


def _terms(subject: Subject) -> set[str]:
    """Names of the losses it was trained with."""
    if subject.config is None:
        return set()
    return {term.name for term in parse_objective(subject.config.objective)}


def _objective(subject: Subject) -> str:
    return "cross_entropy" if subject.config is None else subject.config.objective.name
