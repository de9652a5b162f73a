"""How good the model of a run is, whether it diverged, and how its geometry changes by epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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

    def validation(self, model: nn.Module) -> dict[str, float] | None:
        if not self.data.validation:
            return None
        if self._validation is None:
            self._validation = self._batches(self.data.validation)
        return in_short(self._accuracy(model, self._validation))

    def test(self, model: nn.Module) -> Accuracy | None:
        if not self.data.test:
            return None
        return self._accuracy(model, self.data.test)

    def failure(self, model: nn.Module) -> str | None:
        """Why the model is no result, where it diverged; the same on every process."""
        samples = self.data.test or self.data.validation or self.data.train
        few = samples.subset(range(min(EVALUATION_BATCH, len(samples))))
        batches = Batches(few, EVALUATION_BATCH, device=self.device, shuffle=False)
        with autocast(self.config.precision, self.device):
            return why_diverged(model, batches, self.config)

    def geometry(self, model: nn.Module) -> Geometry | None:
        """On the test images, or else the validation images; on the first process only."""
        samples = self.data.test or self.data.validation
        if not samples or self.processes.rank > 0:
            return None
        batches = Batches(samples, EVALUATION_BATCH, device=self.device, shuffle=False)
        words = samples_text(self.data, "test" if self.data.test else "validation", samples)
        with autocast(self.config.precision, self.device):
            return measure(
                model,
                batches,
                pairwise=True,
                sync=False,
                data_name=words,
                class_names=self.data.classes,
            )

    def _batches(self, samples: Samples) -> Batches:
        """All images in their order; of several processes each takes its share."""
        rank, world = self.processes.rank, self.processes.world
        if world > 1:
            samples = samples.subset(range(rank, len(samples), world))
        workers = self.config.data.workers
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
    """A note where the run ended with epochs in which no step was finite.

    Args:
        rows: of the epochs, as ``Run.metrics("epoch")`` gives them.
        config: of the run.
    """
    count = 0
    for row in reversed(rows):
        if not row.get("bad_steps") or row["loss"] is not None:
            break
        count += 1
    if count == 0:
        return []
    which = "the last epoch" if count == 1 else f"the last {count} epochs"
    return [f"all steps of {which} were skipped, because none was finite. {advice(config)}"]


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
