"""Calibration of probabilities, and how well margins tell errors and OOD samples apart."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_number
from largemargin.measuring.records import Record


@dataclass(frozen=True)
class Calibration(Record):
    """Confidence against accuracy in equally wide bins of confidence."""

    expected_error: float
    """ECE: mean over samples of |accuracy - confidence| of their bin."""
    largest_error: float
    """Of one bin."""
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    confidence: tuple[float, ...]
    """Mean of each bin; NaN for an empty one."""
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Rejection(Record):
    """How well a score of the predicted class tells two groups apart: area under the ROC curve.

    1: the score of every kept sample is above that of every rejected one; 0.5: it says nothing;
    NaN where one group is empty.
    """

    auroc: dict[str, float]
    kept: int
    rejected: int


def calibration(confidence: Tensor, correct: Tensor, *, bins: int = 15) -> Calibration:
    r"""Expected calibration error :math:`\sum_b \frac{n_b}{N}|acc_b - conf_b|`.

    Args:
        confidence: (N,) probability of the predicted class.
        correct: (N,) bool.
        bins: equally wide bins of (0, 1], as in Guo et al. 2017, who use 15.

    Example:
        >>> calibration(torch.tensor([0.75, 0.5]), torch.tensor([True, False])).expected_error
        0.375
    """
    check_number("bins", bins, at_least=1)
    confidence, correct = confidence.double().cpu(), correct.cpu()
    # A confidence that is a border belongs to the bin below it.
    place = torch.bucketize(confidence, torch.arange(1, bins, dtype=torch.float64) / bins)
    nothing = torch.zeros(bins, dtype=torch.float64)
    return calibration_of_bins(
        torch.bincount(place, minlength=bins),
        nothing.index_add(0, place, confidence),
        nothing.index_add(0, place, correct.double()),
    )


def calibration_of_bins(counts: Tensor, confidence: Tensor, right: Tensor) -> Calibration:
    """From the samples of each bin, the sum of their confidence, and how many of them are right."""
    bins, safe = len(counts), counts.clamp_min(1)
    mean, right = confidence.double() / safe, right.double() / safe
    gaps = torch.where(counts > 0, (right - mean).abs(), 0)
    empty = counts == 0
    return Calibration(
        float((gaps * counts).sum() / counts.sum().clamp_min(1)),
        float(gaps.max()),
        tuple(each / bins for each in range(bins + 1)),
        tuple(counts.tolist()),
        tuple(mean.masked_fill(empty, math.nan).tolist()),
        tuple(right.masked_fill(empty, math.nan).tolist()),
    )


def auroc(positive: Tensor, negative: Tensor) -> float:
    """Probability that a positive scores above a negative, ties counting half: the exact AUROC.

    Example:
        >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
        0.875
    """
    positive, negative = positive.double().cpu(), negative.double().cpu()
    if len(positive) == 0 or len(negative) == 0:
        return math.nan
    if bool(positive.isnan().any()) or bool(negative.isnan().any()):
        return math.nan
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)
    upto = torch.searchsorted(ordered, positive, right=True)
    return float((below + upto).double().sum() / 2) / (len(positive) * len(negative))


def rejection(kept: dict[str, Tensor], rejected: dict[str, Tensor]) -> Rejection:
    """AUROC of every score between samples to keep and samples to reject."""
    if kept.keys() != rejected.keys():
        raise LargeMarginError(
            f"both groups need the same scores, but {sorted(kept)} and {sorted(rejected)} were "
            "given."
        )
    first = next(iter(kept))
    return Rejection(
        {name: auroc(kept[name], rejected[name]) for name in kept},
        len(kept[first]),
        len(rejected[first]),
    )


def keep_threshold(scores: Tensor, keep: float) -> float:
    """The largest threshold that at least the share ``keep`` of the scores is not below."""
    # A share such as 0.95 of 20 is 19.000000000000004 in floating point.
    count = max(math.ceil(keep * len(scores) - 1e-9), 1)
    return float(scores.sort(descending=True).values[count - 1])
