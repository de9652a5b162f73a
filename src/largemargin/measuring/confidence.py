"""Confidence scores of predictions: probability, margin, largest logit, energy."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from largemargin.geometry.pairs import widen
from largemargin.measuring.logit_model import LogitModel
from largemargin.measuring.probe import head_view
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
