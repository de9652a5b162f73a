"""What is fitted to validation data: a temperature of probabilities, and a margin below which
predictions are flagged. Training data will not do: the model is surer of it than of new data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.geometry.pairs import blocks
from largemargin.measuring.accuracy import Counts
from largemargin.measuring.batches import IGNORED, DataBatch, Source, known_rows, need_labels
from largemargin.measuring.calibration import keep_threshold
from largemargin.measuring.confidence import Scorer
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, columns_of
from largemargin.measuring.records import Record

MOST = 2**29
"""Logits that are kept: 2 GiB."""

AT_ONCE = 2**22
"""Logits that are widened to float64 at a time."""

EXACT = 1e-9
"""Relative error of the temperature."""

RULES = ("keep", "accuracy")


@dataclass(frozen=True)
class Temperature(Record):
    """What logits are divided by before the softmax: see :func:`calibrate_temperature`."""

    value: float
    samples: int
    """Validation samples it was fitted on."""
    loss: float
    """Mean cross entropy on them, with this temperature."""
    loss_before: float
    ece: float
    """Expected calibration error on them, with this temperature."""
    ece_before: float
    format: int = 1

    def __str__(self) -> str:
        return (
            f"temperature {self.value:.4g}: on {self.samples:,} validation samples cross entropy "
            f"{self.loss_before:.4g} -> {self.loss:.4g}, calibration error "
            f"{100 * self.ece_before:.2f} -> {100 * self.ece:.2f} %"
        )


class TemperatureScaled(nn.Module):
    """A model whose logits are divided by a temperature; predictions stay what they are.

    Args:
        model: any model :func:`largemargin.attach` can read. The result is its logits alone.
        temperature: of :func:`calibrate_temperature`, or a number.

    Example:
        >>> model = TemperatureScaled(nn.Linear(2, 2, bias=False), 0.5)
        >>> x = torch.ones(1, 2)
        >>> torch.equal(model(x), model.model(x) / 0.5)
        True
    """

    temperature: Tensor

    def __init__(self, model: nn.Module, temperature: Temperature | float) -> None:
        super().__init__()
        self.model = LogitModel(model)
        # Not a parameter, which would be trained; not float64, which not every device has.
        self.register_buffer("temperature", torch.tensor(number_of(temperature)))

    def forward(self, inputs: object) -> Tensor:
        logits: Tensor = self.model(inputs)
        return logits / self.temperature.to(logits.dtype)


def calibrate_temperature(
    model: nn.Module,
    validation: Source | None,
    *,
    bins: int = 15,
    **options: Unpack[ReadingOptions],
) -> Temperature:
    r"""The temperature at which probabilities fit validation data best (Guo et al. 2017).

    .. math:: T = \arg\min_T \frac1N\sum_n -\log \mathrm{softmax}(z_n / T)_{y_n}

    Losses on cosines need it more than others: their probabilities depend on the scale they were
    trained with, so that a classifier which is always right may say 0.5. One number changes no
    prediction and no margin. The optimum is unique and found to nine digits.

    Training data will not do: the model is surer of it than of new data.

    Args:
        model: any model :func:`largemargin.attach` can read.
        validation: labelled data from the same source as what will be predicted.
        bins: of the calibration errors that are reported; the fit knows none.
        options: batch_size, device, workers, sync and progress as in :func:`accuracy_of`.

    Raises:
        LargeMarginError: without validation data, and where there is no best temperature because
            every prediction is right or the logits say nothing about the labels.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(10 * torch.eye(2))
        >>> x, y = torch.eye(2).repeat(4, 1), torch.tensor([0, 1, 0, 1, 0, 1, 0, 0])
        >>> round(calibrate_temperature(model, [(x, y)]).value, 4)  # right 7 times of 8
        5.139
    """
    if validation is None:
        raise LargeMarginError(
            "a temperature is fitted to validation data, but there is none. Hold some out "
            "(data.validation: 0.1), or pass labelled data of your own. Training data will not do: "
            "the model is surer of it than of new data."
        )
    reader = LogitModel(model)
    kept = 0

    def read(inputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal kept
        logits = reader(inputs)
        kept += logits.numel()
        if kept > MOST:
            raise LargeMarginError(
                f"more than {MOST:,} logits would be kept ({reader.num_classes:,} for each "
                "sample). A temperature needs no more than some thousand samples: pass fewer."
            )
        return logits, labels

    logits, labels = validation_columns(reader, validation, read, "temperature", **options)
    return temperature_of(logits, labels, bins=bins)


def temperature_of(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Temperature:
    """The temperature of logits (N, C) with labels (N,): see :func:`calibrate_temperature`.

    Example:
        >>> found = temperature_of(torch.tensor([[4.0, 0.0]] * 3), torch.tensor([0, 0, 1]))
        >>> round(found.value, 4)  # 4 / log 2
        5.7708
    """
    before = Counts(logits.shape[1], bins=bins)
    before.add(logits, labels)
    found = before.result()  # which checks labels
    if found.broken:
        raise LargeMarginError(
            f"logits must be numbers, but {found.broken} rows hold NaN: has the model diverged?"
        )
    endless = int((logits == torch.inf).any(1).sum())
    if endless:
        raise LargeMarginError(
            f"logits must be finite (or -inf, for a class that is ruled out), but {endless} rows "
            "hold infinity. In half precision they overflow: use bfloat16 or float32."
        )
    known = labels != IGNORED
    logits, labels = logits[known], labels[known]
    value = 1 / _sharpness(logits, labels)
    after = Counts(logits.shape[1], bins=bins)
    for part in blocks(len(logits), max(1, AT_ONCE // logits.shape[1])):
        after.add(logits[part].double() / value, labels[part])
    fitted = after.result()
    return Temperature(value, found.samples, fitted.loss, found.loss, fitted.ece, found.ece)


def number_of(temperature: Temperature | float) -> float:
    """The value, checked."""
    value = temperature.value if isinstance(temperature, Temperature) else temperature
    check_number("temperature", value, above=0)
    return float(value)


def _sharpness(logits: Tensor, labels: Tensor) -> float:
    """1 / T: where the mean loss, which is convex in it, is smallest.

    Its derivative, the mean of (expected logit - logit of the label), grows from that of equal
    probabilities to that of the largest logit; Newton's steps, halved where they leave the
    bracket, find where it is 0.
    """
    target = logits.double().gather(1, labels[:, None])[:, 0]
    if bool((logits.amax(1) == logits.gather(1, labels[:, None])[:, 0]).all()):
        raise LargeMarginError(
            f"no temperature is best: all {len(labels)} validation samples are predicted right, so "
            "that a smaller one is always better. Use more validation data."
        )
    if float((logits.double().mean(1) - target).mean()) >= 0:
        raise LargeMarginError(
            "no temperature is best: the logits of the right classes are not above the mean of all "
            "logits. Has the model learned these classes, in this order?"
        )
    low, high, at = 0.0, float("inf"), 1.0
    while True:
        slope, curve = _slope(logits, target, at)
        if slope == 0:
            return at
        low, high = (at, high) if slope < 0 else (low, at)
        step = at - slope / curve if curve > 0 else float("inf")
        if not low < step < high:
            step = 2 * at if high == float("inf") else (low + high) / 2
        if abs(step - at) <= EXACT * at:
            return step
        at = step


def _slope(logits: Tensor, target: Tensor, sharpness: float) -> tuple[float, float]:
    """First and second derivative of the mean loss by 1 / T."""
    slope = curve = 0.0
    for part in blocks(len(logits), max(1, AT_ONCE // logits.shape[1])):
        wide = logits[part].double()
        probability = torch.softmax(sharpness * wide, 1)
        wide = wide.masked_fill(wide == -torch.inf, 0)  # a class that is ruled out
        mean = (probability * wide).sum(1)
        slope += float((mean - target[part]).sum())
        curve += float((probability * (wide - mean[:, None]).square()).sum())
    return slope / len(logits), curve / len(logits)


@dataclass(frozen=True)
class Threshold(Record):
    """A margin below which predictions are flagged: see :func:`calibrate_threshold`."""

    value: float
    margin: str
    """Which margin it is one of: "distance" to the boundary, or "cosine"."""
    rule: str
    target: float
    samples: int
    """Validation samples it was calibrated on."""
    accuracy: float
    """Of the model on all of them."""
    accepted: float
    """Share of them that is not flagged."""
    accepted_accuracy: float
    """Accuracy on those."""
    errors_found: float
    """Share of the wrong predictions that is flagged; NaN where there are none."""
    format: int = 1

    def __str__(self) -> str:
        found = f", {100 * self.errors_found:.1f} % of the wrong predictions among them"
        if math.isnan(self.errors_found):
            found = "; there are no wrong predictions"
        return (
            f"threshold {self.value:.4g} ({self.margin} margin): of {self.samples:,} validation "
            f"samples {100 * (1 - self.accepted):.1f} % are flagged{found}; accuracy "
            f"{100 * self.accuracy:.2f} % of all, {100 * self.accepted_accuracy:.2f} % of the rest"
        )


def calibrate_threshold(
    model: nn.Module,
    validation: Source | None,
    *,
    rule: str = "keep",
    target: float | None = None,
    **options: Unpack[ReadingOptions],
) -> Threshold:
    """The margin below which a prediction is flagged, from data the model was not trained on.

    Training data will not do: its margins are larger than those of new data, so that a threshold
    from it flags far more right predictions than asked for.

    Args:
        model: any model :func:`largemargin.attach` can read.
        validation: labelled data from the same source as what will be predicted.
        rule: "keep" (default) takes the largest threshold that keeps a share ``target`` of the
            right predictions. It exists whatever the accuracy, needs no wrong predictions, and
            says what it costs: 1 - target of the right ones. "accuracy" takes the smallest
            threshold at which the predictions that are kept reach an accuracy of ``target``; with
            few errors it hangs on one or two samples.
        target: default 0.95 for "keep", 0.99 for "accuracy".
        options: batch_size, device, workers, sync and progress as in :func:`accuracy_of`.

    Raises:
        LargeMarginError: without validation data, with too few samples for the target (1 / (1 -
            target) right predictions for "keep"), or where no threshold reaches it.
    """
    check_choice("rule", rule, RULES)
    wanted = {"keep": 0.95, "accuracy": 0.99}[rule] if target is None else target
    check_number("target", wanted, above=0, at_most=1)
    if validation is None:
        raise LargeMarginError(
            "a threshold is calibrated on validation data, but there is none. Hold some out "
            "(data.validation: 0.1), pass labelled data of your own, or predict without a "
            "threshold. Training data will not do: its margins are too large."
        )
    reader = LogitModel(model)
    scorer = Scorer(reader)

    def read(inputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        scored = scorer(inputs)
        return scored.margin, scored.predicted == labels

    margins, right = validation_columns(reader, validation, read, "threshold", **options)
    return threshold_of(margins, right, rule=rule, target=wanted, margin=scorer.margin)


def threshold_of(
    margins: Tensor, right: Tensor, *, rule: str = "keep", target: float, margin: str = "distance"
) -> Threshold:
    """The threshold for margins (N,) of predictions that are right or not: see
    :func:`calibrate_threshold`.

    Example:
        >>> margins = torch.arange(1.0, 41.0)
        >>> right = margins > 3
        >>> threshold_of(margins, right, target=0.95).value
        5.0
        >>> threshold_of(margins, right, rule="accuracy", target=1.0).value
        4.0
    """
    check_choice("rule", rule, RULES)
    check_number("target", target, above=0, at_most=1)
    margins, right = margins.double().cpu(), right.bool().cpu()  # numbers would be indices
    if bool(margins.isnan().any()):
        raise LargeMarginError("margins must be numbers, but some are NaN: has the model diverged?")
    if rule == "keep":
        value = _keeping(margins[right], target)
    else:
        value = _reaching(margins, right, target)
    kept = margins >= value  # never nothing: the value is one of the margins
    wrong = int((~right).sum())
    return Threshold(
        value=value,
        margin=margin,
        rule=rule,
        target=target,
        samples=len(margins),
        accuracy=float(right.double().mean()),
        accepted=float(kept.double().mean()),
        accepted_accuracy=float(right[kept].double().mean()),
        errors_found=int((~kept & ~right).sum()) / wrong if wrong else math.nan,
    )


def _keeping(margins: Tensor, target: float) -> float:
    needed = 1 if target == 1 else math.ceil(1 / (1 - target) - 1e-9)
    if len(margins) < needed:
        raise LargeMarginError(
            f"a threshold that keeps {100 * target:g} % of the right predictions needs at least "
            f"{needed} of them, but the validation data has {len(margins)}. Use more validation "
            "data or a smaller target."
        )
    return keep_threshold(margins, target)


def _reaching(margins: Tensor, right: Tensor, target: float) -> float:
    """The smallest margin at which those not below it are right often enough."""
    order = margins.argsort(descending=True)
    ordered, hits = margins[order], right[order].double()
    share = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    # Equal margins are accepted together: only the last of them is a threshold.
    last = torch.ones(len(ordered), dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    good = (last & (share >= target - 1e-12)).nonzero()[:, 0]
    if len(good) == 0:
        raise LargeMarginError(
            f"no threshold brings the accuracy of accepted validation samples to {100 * target:g} "
            "%. Use a smaller target or a better model."
        )
    return float(ordered[good[-1]])


def validation_columns(
    reader: LogitModel,
    validation: Source,
    columns: Callable[[Any, Tensor], tuple[Tensor, ...]],
    what: str,
    **options: Unpack[ReadingOptions],
) -> tuple[Tensor, ...]:
    """What ``columns(inputs, labels)`` gives for all samples that are not labelled -100.

    ``what`` is calibrated.
    """

    def known(batch: DataBatch) -> tuple[Tensor, ...]:
        labels = need_labels(batch.labels)
        keep = known_rows(labels, reader.num_classes)
        return tuple(column[keep] for column in columns(batch.inputs, labels))

    empty = (
        f"a {what} is calibrated on validation data, but it is empty, or all of it is labelled "
        f"{IGNORED}."
    )
    return columns_of(reader, validation, known, what, empty, **options)
