"""Confidence scores of predictions (probability, margin, largest logit, energy), and how well they
detect out-of-distribution (OOD) data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_number
from largemargin.geometry.pairs import widen
from largemargin.measuring.batches import DataBatch, Source
from largemargin.measuring.calibration import auroc, keep_threshold
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, columns_of
from largemargin.measuring.probe import head_view
from largemargin.measuring.records import Record
from largemargin.measuring.scores import HeadScores


class Scored(NamedTuple):
    """(N,) each; a larger score is a surer prediction."""

    predicted: Tensor
    probability: Tensor
    """Softmax probability of the predicted class."""
    margin: Tensor
    """See :attr:`Scorer.margin`."""
    logit_margin: Tensor
    """Largest logit minus the second largest."""
    max_logit: Tensor
    energy: Tensor
    """Logarithm of the sum of exponentials of the logits: the negative free energy (Liu et al.
    2020)."""


SCORES = Scored._fields[1:]


class Scorer:
    """A model with its head: scores of its predictions, batch by batch.

    Use it inside ``with reader.evaluating():``.
    """

    def __init__(self, reader: LogitModel, *, temperature: float = 1.0) -> None:
        self.reader = reader
        self.temperature = temperature
        """Of the probabilities; no other score knows it."""
        self.view = head_view(reader.head)
        self.scores = HeadScores(self.view)
        self.margin = "cosine" if self.view.similarity == "cosine" else "distance"
        """Which margin is reported.

        "distance": Euclidean distance of the features to the nearest decision boundary. "cosine",
        for heads that decide by angles alone: cosine to the predicted class minus the largest other
        one, since the distance would grow with a feature length that decides nothing.
        """

    def __call__(self, inputs: Any) -> Scored:
        logits, features = self.reader.read(inputs)
        return self.of(logits, features)

    def of(self, logits: Tensor, features: Tensor) -> Scored:
        """The scores of logits (N, C) and features (N, D), in float64."""
        wide = widen(logits)
        top, predicted = wide.max(1)
        below = wide - top[:, None]
        total = below.exp().sum(1)
        divided = total if self.temperature == 1 else (below / self.temperature).exp().sum(1)
        second = wide.scatter(1, predicted[:, None], -torch.inf).amax(1)
        parts = torch.split(features, self.scores.rows_at_once)
        name = f"lead_{self.margin}"
        margin = torch.cat([self.scores.unlabelled(part)[name] for part in parts])
        return Scored(predicted, divided.reciprocal(), margin, top - second, top, top + total.log())


@dataclass(frozen=True)
class OODScores(Record):
    """How well scores tell known data from out-of-distribution data: see :func:`detect_ood`."""

    known: int
    """Samples of the known data."""
    ood: int
    """Out-of-distribution samples."""
    auroc: dict[str, float]
    """Probability that a known sample scores above an OOD sample, ties counting half."""
    fpr95: dict[str, float]
    """Share of OOD samples taken for known where 95 % of the known samples are kept."""
    margin: str
    """What "margin" is: distance to the boundary, or cosine for cosine heads."""
    chosen: str | None = None
    """The score that tells the validation data apart best; None without validation data."""
    validation: dict[str, float] | None = None
    """AUROC of every score there."""

    RENAMED: ClassVar[dict[str, str]] = {"strangers": "ood"}


def false_positive_rate(known: Tensor, ood: Tensor, *, keep: float = 0.95) -> float:
    """Share of OOD samples that score at least as high as the threshold that keeps ``keep``.

    The threshold is the largest at which at least that share of the known samples is kept, a
    sample being kept when its score is not below it.

    Example:
        >>> known, ood = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([0.0, 2.0])
        >>> false_positive_rate(known, ood, keep=0.75)
        0.5
    """
    check_number("keep", keep, above=0, at_most=1)
    known, ood = known.double().cpu(), ood.double().cpu()
    if len(known) == 0 or len(ood) == 0:
        return math.nan
    if bool(known.isnan().any()) or bool(ood.isnan().any()):
        return math.nan
    return float((ood >= keep_threshold(known, keep)).double().mean())


def compare_scores(known: dict[str, Tensor], ood: dict[str, Tensor], margin: str) -> OODScores:
    """AUROC and false positive rate of every score."""
    return OODScores(
        len(known["margin"]),
        len(ood["margin"]),
        {name: auroc(known[name], ood[name]) for name in SCORES},
        {name: false_positive_rate(known[name], ood[name]) for name in SCORES},
        margin,
    )


def detect_ood(
    model: nn.Module,
    data: Source,
    ood: Source,
    *,
    validation: tuple[Source, Source] | None = None,
    **options: Unpack[ReadingOptions],
) -> OODScores:
    """How well five scores of predictions tell known data from out-of-distribution data.

    ``margin``, ``logit_margin``, ``probability`` (Hendrycks and Gimpel 2017), ``max_logit``
    (Hendrycks et al. 2022) and ``energy`` (Liu et al. 2020), the larger the more known. None is
    best everywhere, and the best of five on ``ood`` itself flatters: ``validation`` chooses one.

    Args:
        model: any model :func:`largemargin.attach` can read.
        data: of the classes it was trained on; labels are not used.
        ood: data of no known class: a split, or a loader of inputs or (inputs, labels).
        validation: known and OOD data like ``data`` and ``ood``, but other samples and, for an
            honest number, other kinds of OOD data. ``chosen`` is the score of largest AUROC there.
        options: batch_size, device, workers, sync and progress as in :func:`accuracy_of`.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> known, ood = [torch.tensor([[3.0, 0.0], [0.0, 2.0]])], [torch.tensor([[1.0, 1.0]])]
        >>> detect_ood(model, known, ood).auroc["margin"]
        1.0
    """
    reader = LogitModel(model)
    if validation is not None and (
        isinstance(validation, str) or not isinstance(validation, Sequence) or len(validation) != 2
    ):
        raise LargeMarginError(
            "validation must be two sources of data, (known, out of distribution), but "
            f"{type(validation).__name__} was given."
        )

    def compared(known: Source, other: Source, of: str = "") -> OODScores:
        found = scores_of(reader, known, f"{of}data", **options)
        others = scores_of(reader, other, f"{of}ood", **options)
        return compare_scores(found, others, Scorer(reader).margin)

    result = compared(data, ood)
    if validation is None:
        return result
    by = compared(*validation, of="validation ").auroc
    told = [name for name in SCORES if not math.isnan(by[name])]
    best = max(told, key=by.__getitem__, default=None)
    return replace(result, chosen=best, validation=by)


def scores_of(
    reader: LogitModel, data: Source, what: str, **options: Unpack[ReadingOptions]
) -> dict[str, Tensor]:
    """Every score of every sample, (N,) float64 on the CPU; see :func:`columns_of`."""
    scorer = Scorer(reader)

    def columns(batch: DataBatch) -> tuple[Tensor, ...]:
        return tuple(column.double() for column in scorer(batch.inputs)[1:])

    empty = f"the data given as {what} is empty."
    found = columns_of(reader, data, columns, what, empty, **options)
    return dict(zip(SCORES, found, strict=True))
