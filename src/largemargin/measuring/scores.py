"""Scores of features at a head: margins, distances to boundaries, confidence; in float64."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_matrix,
    check_num_classes,
)
from largemargin.geometry.pairs import distances, widen
from largemargin.heads.head_spec import HeadView, boundary_form
from largemargin.ops.boundary import DEGENERATE
from largemargin.ops.norms import EPS, safe_norm

LENGTH_CLASSES = 1024
"""Up to this many classes the lengths of all boundary normals are kept: 8 MiB."""

TABLE_CELLS = 2**21
"""Samples times classes looked at at a time: 16 MiB a table, a dozen of them alive."""

LEADS = ("lead_raw", "lead_cosine", "lead_distance", "confidence", "max_logit", "energy")
"""Scores of the predicted class that need no label."""


def rows_at_once(num_classes: int) -> int:
    """Samples whose table with all classes is looked at at a time."""
    return min(max(TABLE_CELLS // num_classes, 16), 8192)


class Tables(NamedTuple):
    """(N, C) each."""

    logits: Tensor
    cosines: Tensor
    plane: Tensor
    """Values of the linear classifier with the same decision boundaries."""


class HeadScores:
    """Scores that a head gives (N, D) features."""

    def __init__(self, head: HeadView) -> None:
        check_matrix("weight", head.weight, "(C, D)")
        check_num_classes(head.weight.shape[0])
        check_all_finite(weight=head.weight, bias=head.bias)
        self.head = head
        self.weight = widen(head.weight)
        self.bias = None if head.bias is None else widen(head.bias)
        self.num_classes, self.dim = self.weight.shape
        self.scale = float(head.scale)
        self.norms = safe_norm(self.weight).clamp_min(EPS)
        self.half_squares = 0.5 * self.weight.square().sum(1)
        self.curved = head.similarity == "cosine" and self.bias is not None
        """Boundaries are cones, not planes: distances to them are not measured."""
        self.normals, _ = boundary_form(head, self.weight, self.bias)
        self.lengths: Tensor | None = None
        if self.num_classes <= LENGTH_CLASSES:
            self.lengths = self._lengths(self.normals)

    @property
    def rows_at_once(self) -> int:
        return rows_at_once(self.num_classes)

    def labelled(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """What is known of each sample, labels given: see ``stream.PER_SAMPLE``."""
        rows = widen(features)
        norms = safe_norm(rows)
        tables = self._tables(rows, norms)
        raw, rival, others = _margin(tables.logits, labels)
        best = others.gather(1, rival[:, None])
        softmax_bias = (others - best).exp_().sum(1).log_()
        distance, boundary = self._distances(tables.plane, labels)
        margins = raw, _margin(tables.cosines, labels)[0], distance
        top, predicted = tables.logits.max(1)
        # Where the prediction is right, its lead is the margin.
        wrong = (predicted != labels).nonzero()[:, 0]
        others_lead = self._leads(Tables(*(each[wrong] for each in tables)), predicted[wrong])
        leads = [
            margin.index_copy(0, wrong, lead)
            for margin, lead in zip(margins, others_lead, strict=True)
        ]
        return {
            **dict(zip(("raw", "cosine", "distance"), margins, strict=True)),
            **dict(zip(LEADS, (*leads, *_levels(tables.logits, top)), strict=True)),
            "norm": norms,
            "predicted": predicted,
            "rival": rival,
            "boundary": boundary,
            "loss": torch.logaddexp(softmax_bias - raw, torch.zeros_like(raw)),
            "softmax_bias": softmax_bias,
        }

    def unlabelled(self, features: Tensor) -> dict[str, Tensor]:
        """The predicted class and by how much it leads, in every sense of ``LEADS``."""
        rows = widen(features)
        tables = self._tables(rows, safe_norm(rows))
        top, predicted = tables.logits.max(1)
        leads = (*self._leads(tables, predicted), *_levels(tables.logits, top))
        return {"predicted": predicted, **dict(zip(LEADS, leads, strict=True))}

    def _tables(self, rows: Tensor, norms: Tensor) -> Tables:
        product = rows @ self.weight.T
        unit = product / self.norms
        cosines = unit / norms.clamp_min(EPS)[:, None]
        bias = 0.0 if self.bias is None else self.bias
        similarity = self.head.similarity
        if similarity == "cosine":
            return Tables(self.scale * (cosines + bias), cosines, unit)
        if similarity == "euclidean":
            plane = product - self.half_squares + bias
            logits = plane - 0.5 * norms.square()[:, None]
            return Tables(self.scale * logits, cosines, plane)
        plane = (unit if similarity == "cosine_prototypes" else product) + bias
        return Tables(plane if self.scale == 1 else self.scale * plane, cosines, plane)

    def _leads(self, tables: Tables, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By how much a class leads in logits, cosines and distance."""
        return (
            _margin(tables.logits, classes)[0],
            _margin(tables.cosines, classes)[0],
            self._distances(tables.plane, classes)[0],
        )

    def _distances(self, plane: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Signed and unsigned distance to the nearest boundary of each sample's class."""
        if self.curved:
            unknown = plane.new_full((len(plane),), math.nan)
            return unknown, unknown
        if self.lengths is not None:
            lengths = self.lengths[classes]
        else:
            kinds, place = torch.unique(classes, return_inverse=True)
            lengths = self._lengths(self.normals[kinds])[place]
        gaps = (plane.gather(1, classes[:, None]) - plane).div_(lengths)
        gaps.scatter_(1, classes[:, None], math.inf)
        return gaps.amin(1), gaps.abs_().amin(1)

    def _lengths(self, normals: Tensor) -> Tensor:
        """Lengths of the boundary normals; infinite where there is no boundary (O17)."""
        lengths = distances(normals, self.normals)
        return torch.where(lengths <= DEGENERATE, math.inf, lengths)


def check_logits_finite(logits: Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise LargeMarginError(
            "logits must be finite, but some are NaN or infinite. Look for a diverged model or "
            "broken inputs."
        )


def _margin(scores: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Score of each sample's class minus the best other one, which that is, and the others."""
    others = scores.scatter(1, classes[:, None], -math.inf)
    best, rival = others.max(1)
    return scores.gather(1, classes[:, None])[:, 0] - best, rival, others


def _levels(logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax probability of the largest logit, that logit, and the log sum of exponentials."""
    total = (logits - top[:, None]).exp_().sum(1)
    return 1 / total, top, top + total.log()
