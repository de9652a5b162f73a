"""``Evaluation``: what an evaluation found, as data, as JSON and as a table."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from largemargin.evaluating.attacked import AttackedAccuracy
from largemargin.evaluating.counting import Accuracy
from largemargin.evaluating.cross_camera import CrossCamera
from largemargin.evaluating.ood import Strangers
from largemargin.evaluating.origin import Origin
from largemargin.evaluating.perturbed import PerturbedAccuracy
from largemargin.evaluating.retrieval import Retrieval
from largemargin.measuring.records import Record
from largemargin.measuring.reliability import Calibration

FORMAT = 1
SHOWN_CLASSES = 30
"""Up to this many classes the table shows each."""


@dataclass(frozen=True)
class Evaluation(Record):
    """Everything :func:`evaluate` found; parts that were not asked for are None or empty."""

    classes: tuple[str, ...]
    clean: Accuracy
    interval: tuple[float, float]
    """Wilson's interval of the clean accuracy: where it may lie on unlimited data of this kind."""
    confidence: float
    perturbed: dict[str, PerturbedAccuracy]
    attacked: tuple[AttackedAccuracy, ...]
    strangers: Strangers | None
    """Other data told by scores of the predicted class."""
    retrieval: Retrieval | None
    cross_camera: CrossCamera | None
    settings: dict[str, Any]
    """The :class:`EvaluationConfig` it was made with."""
    seconds: float
    notes: tuple[str, ...]
    """What was left out, and why."""
    temperature: float | None = None
    """What logits were divided by for ``calibrated``; fitted to other data."""
    calibrated: Calibration | None = None
    """Calibration of the probabilities with that temperature."""
    origin: Origin | None = None
    """Which images and which model of a run, where the command evaluated one."""
    format: int = FORMAT

    def __str__(self) -> str:
        return table(self)


def table(e: Evaluation) -> str:
    """An evaluation as text: one quantity a line, notes at the end."""
    lines = [
        *_clean(e),
        *_classes(e),
        *_perturbed(e),
        *_attacked(e),
        *_strangers(e),
        *_retrieval(e),
    ]
    width = max(len(name) for name, value in lines if value)
    text = [f"{name:<{width}}  {value}".rstrip() for name, value in lines]
    title = f"{e.clean.samples:,} samples, {len(e.classes):,} classes"
    return "\n".join([title, *text, *(f"note: {note}" for note in e.notes)])


Lines = Iterator[tuple[str, str]]


def _clean(e: Evaluation) -> Lines:
    c, (low, high) = e.clean, e.interval
    said = f"{100 * e.confidence:g} % interval: {_number(low)} to {_percent(high)}"
    yield "accuracy", f"{_percent(c.accuracy)}   ({said})"
    yield "balanced accuracy", _percent(c.balanced)
    yield "worst class", f"{_percent(c.worst)}   {e.classes[c.worst_class]}"
    yield "cross entropy", f"{c.loss:.4g}"
    yield "calibration error", _percent(c.ece)
    if e.calibrated is not None and e.temperature is not None:
        with_it = f"with temperature {e.temperature:.4g}"
        yield f"  {with_it}", _percent(e.calibrated.expected_error)
    confused = _most_confused(e)
    if confused:
        yield "most confused", confused


def _most_confused(e: Evaluation) -> str:
    if e.clean.confusion is None:
        return ""
    pairs = [
        (count, true, said)
        for true, row in enumerate(e.clean.confusion)
        for said, count in enumerate(row)
        if true != said and count
    ]
    top = sorted(pairs, key=lambda each: (-each[0], each[1], each[2]))[:3]
    return ", ".join(f"{e.classes[t]} as {e.classes[s]} ({n}x)" for n, t, s in top)


def _classes(e: Evaluation) -> Lines:
    if len(e.classes) > SHOWN_CLASSES:
        return
    yield "accuracy by class", ""
    for name, share, count in zip(e.classes, e.clean.per_class, e.clean.counts, strict=True):
        yield f"  {name}", f"{_percent(share)}   of {count:,}" if count else "no samples"


def _perturbed(e: Evaluation) -> Lines:
    if not e.perturbed:
        return
    runs = max(len(each.runs) for each in e.perturbed.values())
    yield f"accuracy under perturbations, mean ± std of {runs} draws", ""
    for name, each in e.perturbed.items():
        spread = "" if math.isnan(each.std) else f" ± {_number(each.std)}"
        yield f"  {name.replace('_', ' ')}", f"{_number(each.accuracy)}{spread} %"


def _attacked(e: Evaluation) -> Lines:
    if not e.attacked:
        return
    yield f"accuracy under attacks, of {e.attacked[0].samples:,} samples", ""
    for each in e.attacked:
        interval = f"({_number(each.low)} to {_percent(each.high)})"
        yield f"  {each.attack}", f"{_percent(each.accuracy)}   {interval}"


def _strangers(e: Evaluation) -> Lines:
    if e.strangers is None:
        return
    yield f"{e.strangers.strangers:,} strangers told apart, AUROC (false positives at 95 %)", ""
    for name, area in e.strangers.auroc.items():
        what = f"margin ({e.strangers.margin})" if name == "margin" else name.replace("_", " ")
        yield f"  by {what}", f"{area:.4f}   ({_percent(e.strangers.fpr95[name])})"


def _retrieval(e: Evaluation) -> Lines:
    if e.retrieval is not None:
        r = e.retrieval
        yield f"retrieval ({r.similarity}, {r.queries:,} queries)", ""
        for k, share in r.recall.items():
            yield f"  recall at {k}", _percent(share)
        yield "  mean average precision", _percent(r.mean_average_precision)
    if e.cross_camera is not None:
        x = e.cross_camera
        yield f"across cameras ({x.queries:,} queries, {x.gallery:,} images)", ""
        yield "  mean average precision", _percent(x.mean_average_precision)
        yield "  rank 1, rank 5", f"{_percent(x.rank1)}, {_percent(x.rank5)}"


def _number(share: float) -> str:
    return f"{100 * share:.2f}"


def _percent(share: float) -> str:
    return f"{_number(share)} %"
