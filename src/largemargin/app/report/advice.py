"""What to try next, from what was measured; each piece of advice names the measurement."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from largemargin.app.report.judgements import confidence_gap, judge, near_guessing, ranked_classes
from largemargin.app.report.number_format import degrees, known, number, percent
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.training.objective import parse_objective
from largemargin.losses import LOSSES
from largemargin.losses.base.loss import Loss

LONG_TAIL = 5.0
"""Largest over smallest class of the training images from which the data count as long-tailed."""


@dataclass(frozen=True)
class Advice:
    """An observation, what to try, and the option that does it."""

    seen: str
    attempt: str
    option: str = ""


def advise(model: ReportModel, models: ReportModels) -> tuple[Advice, ...]:
    """Pieces of advice for one model; empty where nothing calls for any."""
    levels = {each.name: each.level for each in judge(model, models.baseline)}
    return (
        *_prototypes(model, levels["Class margin"]),
        *_lengths(model),
        *_features(model),
        *_classes(model, levels["Worst classes"]),
        *_noise(model, levels["Robustness"]),
        *_confidence(model, levels["Calibration"]),
        *_bad_steps(model),
        *_length(model),
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
    cosine = model.geometry is not None and model.geometry.similarity == "cosine"
    if model.geometry and not cosine and model.geometry.prototypes.magnitude_ratio > 2:
        ratio = model.geometry.prototypes.magnitude_ratio
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
            f"Classes are wider than they are apart: dispersion / separation is "
            f"{number(compact.ideal_ratio, 3)}, ideal is below 1. A few outliers are enough for "
            "that: look at the worst samples first.",
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
        "wider margins for small classes" if few else "looking at its worst samples below",
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
    gap = confidence_gap(model)
    fitted = _temperature(model)
    if gap > 0:
        yield Advice(
            f"The model is overconfident by {percent(gap)}.",
            f"{fitted}, softer targets, or a smaller scale if the loss is on cosines",
            "--objective label_smoothing",
        )
    else:
        yield Advice(
            f"The model is underconfident by {percent(-gap)}.",
            f"{fitted}, a larger scale if the loss is on cosines, or longer training",
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
    return (
        "a temperature, which largemargin predict and export fit where the validation images allow "
        "it"
    )


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


def _length(model: ReportModel) -> Iterator[Advice]:
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
