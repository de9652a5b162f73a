"""Predictions with what speaks for them: probability, margin, largest logit, energy.

One pass over validation data, for numbers that are calibrated on it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.geometry.pairs import widen
from largemargin.measuring.batches import (
    IGNORED,
    Source,
    count_pieces,
    known_rows,
    need_labels,
    pieces,
)
from largemargin.measuring.probe import LogitModel, head_view
from largemargin.measuring.progress_bar import with_bar
from largemargin.measuring.ranks import fail_together
from largemargin.measuring.scores import Scores
from largemargin.ops.distributed import world_size


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
    """A model with its head, ready to be asked about batches of inputs.

    Use it inside ``with reader.evaluating():``.
    """

    def __init__(self, reader: LogitModel, *, temperature: float = 1.0) -> None:
        self.reader = reader
        self.temperature = temperature
        """Of the probabilities; no other score knows it."""
        self.view = head_view(reader.head)
        self.scores = Scores(self.view)
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


def columns_of(
    reader: LogitModel,
    validation: Source,
    read: Callable[[Any, Tensor], tuple[Tensor, ...]],
    *,
    what: str,
    batch_size: int,
    device: torch.device | str | None,
    workers: int,
    sync: bool,
    progress: bool,
) -> tuple[Tensor, ...]:
    """What ``read(inputs, labels)`` gives for all samples, on the CPU, of all processes.

    Args:
        reader: the model, put in evaluation mode for the pass.
        validation: labelled data; rows whose label is -100 are dropped.
        read: columns of a batch, one row per sample.
        what: is calibrated, for the progress bar and the message where there is no data.
        batch_size, device, workers, sync, progress: as in :func:`accuracy_of`.
    """
    where = reader.device if device is None else torch.device(device)
    shared = sync and world_size() > 1

    def rows() -> list[tuple[Tensor, ...]]:
        found = pieces(
            validation, batch_size=batch_size, device=where, workers=workers, shared=shared
        )
        total = count_pieces(validation, batch_size, shared=shared)
        parts = []
        with reader.evaluating():
            for piece in with_bar(found, what, total, progress):
                labels = need_labels(piece)
                known = known_rows(labels, reader.num_classes)
                columns = read(piece.inputs, labels)
                parts.append(tuple(column[known].cpu() for column in columns))
        return parts

    every = [part for parts in fail_together(shared, rows) for part in parts]
    columns = tuple(torch.cat(column) for column in zip(*every, strict=True))
    if not columns or len(columns[0]) == 0:
        raise LargeMarginError(
            f"a {what} is calibrated on validation data, but it is empty, or all of it is labelled "
            f"{IGNORED}."
        )
    return columns
