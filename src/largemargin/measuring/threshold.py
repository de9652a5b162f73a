"""A margin below which predictions are flagged, calibrated on validation data."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.batches import Source
from largemargin.measuring.calibration import keep_threshold
from largemargin.measuring.confidence import Scorer, validation_columns
from largemargin.measuring.logit_model import LogitModel
from largemargin.measuring.records import Record

RULES = ("keep", "accuracy")


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
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
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
        batch_size, device, workers, sync, progress: as in :func:`accuracy_of`.

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

    margins, right = validation_columns(
        reader,
        validation,
        read,
        "threshold",
        batch_size=batch_size,
        device=device,
        workers=workers,
        sync=sync,
        progress=progress,
    )
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
