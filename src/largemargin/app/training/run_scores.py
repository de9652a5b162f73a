"""How good the model of a run is, whether it diverged, and how its geometry changes by epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.config import RunConfig
from largemargin.app.data.load import Data, samples_text
from largemargin.app.data.samples import EVALUATION_BATCH, Batches, Samples
from largemargin.app.training.processes import Processes, autocast
from largemargin.errors import LargeMarginError
from largemargin.geometry.evaluation_mode import evaluating
from largemargin.geometry.margins import (
    class_margin,
    implicit_bias,
    magnitude_ratio,
    sample_margins,
)
from largemargin.geometry.pairs import blocks
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.accuracy import Accuracy, accuracy_of
from largemargin.measuring.batches import Source
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.measure import measure
from largemargin.measuring.probe import head_view
from largemargin.measuring.sample_draws import generator_for
from largemargin.measuring.scores import rows_at_once

TOLD = "the run diverged"

PER_CLASS = 4
"""Of more classes than samples / 4 only some are looked at: one sample alone has no dispersion."""

PAIRED = 2**32
"""Class vectors are compared with each other while C * C * D is not larger: 1,000 classes in 4,000
dimensions, a fraction of a second."""


class Diverged(LargeMarginError):
    """Raised where too many steps in a row were not finite; see ``max_bad_steps``."""


class Scores:
    """Accuracies and geometry of a run's model, in the precision it is trained in."""

    def __init__(self, config: RunConfig, data: Data, processes: Processes) -> None:
        self.config = config
        self.data = data
        self.processes = processes
        self.device = processes.device
        self._validation: Batches | None = None
        self._few: Batches | None = None

    def validation(self, model: nn.Module) -> dict[str, float] | None:
        samples, world = self.data.validation, self.processes.world
        if not samples:
            return None
        if self._validation is None:
            if world > 1:  # each process takes its share
                samples = samples.subset(range(self.processes.rank, len(samples), world))
            self._validation = self._batches(samples, self.config.data.workers)
        return in_short(self._accuracy(model, self._validation))

    def test(self, model: nn.Module) -> Accuracy | None:
        return self._accuracy(model, self.data.test) if self.data.test else None

    def failure(self, model: nn.Module) -> str | None:
        """Why the model is no result, where it diverged; the same on every process."""
        samples = self.data.test or self.data.validation or self.data.train
        few = samples.subset(range(min(EVALUATION_BATCH, len(samples))))
        with autocast(self.config.precision, self.device):
            return why_diverged(model, self._batches(few), self.config)

    def geometry(self, model: nn.Module) -> Geometry | None:
        """On the test images, or else the validation images; on the first process only."""
        samples = self.data.test or self.data.validation
        if not samples or self.processes.rank > 0:
            return None
        words = samples_text(self.data, "test" if self.data.test else "validation", samples)
        with autocast(self.config.precision, self.device):
            return measure(
                model,
                self._batches(samples),
                pairwise=True,
                sync=False,
                data_name=words,
                class_names=self.data.classes,
            )

    def epoch_geometry(self, model: Any) -> dict[str, Any] | None:
        """After every epoch a handful of numbers for its row of metrics.jsonl.

        On a few validation images, or without them on training images as they are, without
        augmentation; the same ones in every epoch and in every run on the same data. One forward
        pass, then a few small products on the CPU: the cost does not grow with the data. Nothing
        random is drawn and the model is left as it was, so training goes on as if nobody had
        looked. None on other processes than the first, and where no samples are asked for.
        """
        if self.config.geometry_samples == 0 or self.processes.rank > 0:
            return None
        if self._few is None:
            samples: Samples = self.data.validation or self.data.train
            chosen = spread(samples.labels, self.config.geometry_samples)
            self._few = self._batches(samples.subset(chosen), self.config.data.workers)
        rows, labels = [], []
        with evaluating(model), autocast(self.config.precision, self.device):
            for images, label in self._few:
                rows.append(model.features(images).flatten(1).float())
                labels.append(label)
        features, classes = torch.cat(rows).cpu(), torch.cat(labels).cpu()
        view = head_view(model.head)
        bias = None if view.bias is None else view.bias.cpu().float()
        view = replace(view, weight=view.weight.cpu().float(), bias=bias)
        split = "validation" if self.data.validation else "train"
        return {"split": split, "samples": len(classes), **summary(features, classes, view)}

    def _batches(self, samples: Samples, workers: int = 0) -> Batches:
        """All images in their order."""
        return Batches(
            samples, EVALUATION_BATCH, device=self.device, shuffle=False, workers=workers
        )

    def _accuracy(self, model: nn.Module, data: Source) -> Accuracy:
        """Of a split every process takes its share, and it is known which images are right."""
        with autocast(self.config.precision, self.device):
            return accuracy_of(
                model,
                data,
                num_classes=len(self.data.classes),
                device=self.device,
                batch_size=EVALUATION_BATCH,
                workers=self.config.data.workers,
            )


def in_short(found: Accuracy) -> dict[str, float]:
    """The numbers of it that rows and results of runs have."""
    return {
        "accuracy": found.accuracy,
        "balanced_accuracy": found.balanced,
        "loss": found.loss,
        "ece": found.ece,
    }


def why_diverged(model: nn.Module, batches: Batches, config: RunConfig) -> str | None:
    """What is wrong with a trained model, and what to do; None where nothing is.

    A model has diverged where a weight or a buffer is not finite, or where most of the first batch
    of images have outputs that are not. Images that are not finite themselves say nothing.
    """
    states = model.state_dict()
    broken = [name for name, each in states.items() if not bool(torch.isfinite(each).all())]
    if broken:
        seen = f"{len(broken)} of the {len(states)} tensors of its model are not finite"
        return f"{seen} ({broken[0]}). {advice(config)}"
    with evaluating(model):
        images, _ = next(iter(batches))
        sound = images.flatten(1).isfinite().all(1)
        finite = model(images).flatten(1).isfinite().all(1)[sound]
    wrong = len(finite) - int(finite.sum())
    if 2 * wrong <= len(finite):  # also where no image is finite
        return None
    return f"its outputs are not finite for {wrong:,} of {len(finite):,} images. {advice(config)}"


def advice(config: RunConfig) -> str:
    """What keeps a run from diverging."""
    clip = config.optimizer.clip_norm
    clipping = "set optimizer.clip_norm" if clip is None else f"optimizer.clip_norm ({clip:g})"
    return (
        f"Lower optimizer.lr ({config.optimizer.lr:g}) or {clipping}, and look at the samples that "
        "metrics.jsonl names under bad_steps."
    )


def left_out(rows: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    """A note where the rows of the epochs end with such in which no step was finite."""
    skipped = takewhile(lambda row: row.get("bad_steps") and row["loss"] is None, reversed(rows))
    count = len(list(skipped))
    if count == 0:
        return []
    which = "the last epoch" if count == 1 else f"the last {count} epochs"
    return [f"all steps of {which} were skipped, because none was finite. {advice(config)}"]


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
    # All pairs at once: so few rows need no search class by class.
    same, apart = labels[:, None] == labels, torch.cdist(features.double(), features.double())
    paired = classes * classes * dim <= PAIRED
    values = (
        float(class_margin(weight, degrees=True)) if paired else None,
        float(cosine.mean()),
        float(cosine.min()),
        None if int(same.sum()) == len(labels) else float(apart[same].max()),
        float(magnitude_ratio(weight)),
        float(torch.cat(biases).mean()),
    )
    return dict(zip(names, values, strict=True))
