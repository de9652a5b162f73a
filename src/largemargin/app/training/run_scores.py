"""How good the model of a run is on its validation and test images, and whether it diverged."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from largemargin.app.config import RunConfig
from largemargin.app.data.load import Data, samples_text
from largemargin.app.data.samples import EVALUATION_BATCH, Batches, Samples
from largemargin.app.training.processes import Processes, autocast
from largemargin.errors import LargeMarginError
from largemargin.geometry.evaluation_mode import evaluating
from largemargin.measuring.accuracy import Accuracy, accuracy_of
from largemargin.measuring.batches import Source
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.measure import measure

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
