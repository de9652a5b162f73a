"""How good a model is on the validation and test images of a run."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import largemargin as lm
from largemargin.data import Batches, Data, Samples
from largemargin.data.load import in_words
from largemargin.evaluating import Accuracy, accuracy_of
from largemargin.evaluating.pieces import Source
from largemargin.training.config import RunConfig
from largemargin.training.divergence import why_diverged
from largemargin.training.processes import Processes

BATCH = 1000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    dtype = DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


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
        few = samples.subset(range(min(BATCH, len(samples))))
        batches = Batches(few, BATCH, device=self.device, shuffle=False)
        with autocast(self.config.precision, self.device):
            return why_diverged(model, batches, self.config)

    def geometry(self, model: nn.Module) -> lm.Geometry | None:
        """On the test images, or else the validation images; on the first process only."""
        samples = self.data.test or self.data.validation
        if not samples or self.processes.rank > 0:
            return None
        batches = Batches(samples, BATCH, device=self.device, shuffle=False)
        words = in_words(self.data, "test" if self.data.test else "validation", samples)
        with autocast(self.config.precision, self.device):
            return lm.measure(
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
        return Batches(samples, BATCH, device=self.device, shuffle=False, workers=workers)

    def _accuracy(self, model: nn.Module, data: Source) -> Accuracy:
        """Of a split every process takes its share, and it is known which images are right."""
        with autocast(self.config.precision, self.device):
            return accuracy_of(
                model,
                data,
                num_classes=len(self.data.classes),
                device=self.device,
                batch_size=BATCH,
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
