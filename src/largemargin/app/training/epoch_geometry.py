"""How the geometry of a model changes from epoch to epoch, on a few samples that stay the same."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from largemargin.app.config import RunConfig
from largemargin.app.data.load import Data
from largemargin.app.data.samples import EVALUATION_BATCH, Batches, Samples
from largemargin.app.training.processes import Processes, autocast
from largemargin.geometry.evaluation_mode import evaluating
from largemargin.geometry.margins import (
    class_margin,
    implicit_bias,
    magnitude_ratio,
    sample_margins,
)
from largemargin.geometry.pairs import blocks
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.probe import head_view
from largemargin.measuring.sample_draws import generator_for
from largemargin.measuring.scores import rows_at_once

PER_CLASS = 4
"""Of more classes than samples / 4 only some are looked at: one sample alone has no dispersion."""

PAIRED = 2**32
"""Class vectors are compared with each other while C * C * D is not larger: 1,000 classes in 4,000
dimensions, a fraction of a second."""


class EpochGeometry:
    """``measured(model)`` after every epoch: a handful of numbers for its row of metrics.jsonl.

    On validation images, or without them on training images as they are, without augmentation; the
    same ones in every epoch and in every run on the same data. One forward pass, then a few small
    products on the CPU: the cost does not grow with the data. Nothing random is drawn and the model
    is left as it was, so training goes on as if nobody had looked.
    """

    def __init__(self, config: RunConfig, data: Data, processes: Processes) -> None:
        self.config = config
        self.data = data
        self.processes = processes
        self.split = "validation" if data.validation else "train"
        self._batches: Batches | None = None

    def measured(self, model: Any) -> dict[str, Any] | None:
        """On the first process; None on others, and where no samples are asked for."""
        if self.config.geometry_samples == 0 or self.processes.rank > 0:
            return None
        features, labels = self._features(model)
        view = head_view(model.head)
        view = replace(
            view,
            weight=view.weight.cpu().float(),
            bias=None if view.bias is None else view.bias.cpu().float(),
        )
        return {"split": self.split, "samples": len(labels), **summary(features, labels, view)}

    def _features(self, model: Any) -> tuple[Tensor, Tensor]:
        if self._batches is None:
            samples: Samples = self.data.validation or self.data.train
            chosen = spread(samples.labels, self.config.geometry_samples)
            self._batches = Batches(
                samples.subset(chosen),
                EVALUATION_BATCH,
                device=self.processes.device,
                shuffle=False,
                workers=self.config.data.workers,
            )
        rows, labels = [], []
        with evaluating(model), autocast(self.config.precision, self.processes.device):
            for images, label in self._batches:
                rows.append(model.features(images).flatten(1).float())
                labels.append(label)
        return torch.cat(rows).cpu(), torch.cat(labels).cpu()


def spread(labels: Tensor, count: int) -> Tensor:
    """Sorted positions of at most ``count`` samples, as many of each class as there are.

    Example:
        >>> spread(torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]), 6).tolist()[-3:]
        [5, 6, 7]
    """
    generator = generator_for("epoch geometry")
    drawn = torch.randperm(len(labels), generator=generator)
    present, number, sizes = torch.unique(labels[drawn], return_inverse=True, return_counts=True)
    most = max(2, count // PER_CLASS)
    if len(present) > most:
        chosen = torch.zeros(len(present), dtype=torch.bool)
        chosen[torch.randperm(len(present), generator=generator)[:most]] = True
        drawn = drawn[chosen[number]]
        _, number, sizes = torch.unique(labels[drawn], return_inverse=True, return_counts=True)
    # In turn one of each class: ordered by the place a sample has within its class.
    order = number.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[number[order]]
    return drawn[place.argsort(stable=True)[:count]].sort().values


def summary(features: Tensor, labels: Tensor, head: HeadView) -> dict[str, float | None]:
    """The numbers of a row; None where there is none, as in a model that has diverged."""
    names = (
        *("class_margin_degrees", "mean_cosine_margin", "min_cosine_margin"),
        *("largest_dispersion", "magnitude_ratio", "softmax_bias"),
    )
    weight = head.weight
    if not (bool(weight.isfinite().all()) and bool(features.isfinite().all())):
        return dict.fromkeys(names)
    classes, dim = weight.shape
    margins, biases = [], []
    for part in blocks(len(features), rows_at_once(classes)):
        rows, own = features[part], labels[part]
        margins.append(sample_margins(rows, weight, own, similarity="cosine"))
        biases.append(implicit_bias(head(rows), own))
    cosine = torch.cat(margins)
    paired = classes * classes * dim <= PAIRED
    values = (
        float(class_margin(weight, degrees=True)) if paired else None,
        float(cosine.mean()),
        float(cosine.min()),
        _dispersion(features, labels),
        float(magnitude_ratio(weight)),
        float(torch.cat(biases).mean()),
    )
    return dict(zip(names, values, strict=True))


def _dispersion(features: Tensor, labels: Tensor) -> float | None:
    """Largest diameter of a class; None where every sample stands alone."""
    same = labels[:, None] == labels
    if int(same.sum()) == len(labels):
        return None
    # All pairs at once: so few rows need no search class by class.
    apart = torch.cdist(features.double(), features.double())
    return float(apart[same].max())
