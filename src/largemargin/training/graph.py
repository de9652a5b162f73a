"""Whole steps as CUDA graphs: augmentation, noise, forward, loss, backward, optimizer."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from largemargin.data import Batches
from largemargin.data.augment import Draws
from largemargin.data.samples import as_float
from largemargin.training.step import Step

WARM_UP = 3
"""Steps of a size that run before it is captured, as they would have run anyway."""


class GraphStep:
    """Runs the steps of an epoch by replaying captured ones, one graph for every batch size.

    The images lie on the device; a step finds its rows by a counter that lies there too, so
    that nothing is sent from the host. The first steps of a size run plainly (libraries
    initialise, the compiler compiles), then one is captured. All of it happens on one stream that
    is not the default one: gradients belong to the stream they were first made on.
    """

    def __init__(self, step: Step, batches: Batches) -> None:
        assert batches.pixels is not None
        self.step = step
        self.batches = batches
        self.device = batches.device
        count = len(batches.samples)
        self.order = torch.zeros(count, dtype=torch.long, device=self.device)
        self.draws = batches.augment.draw(count).to(self.device)
        self.start = torch.zeros((), dtype=torch.long, device=self.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.plain_steps: dict[int, int] = {}
        self._within: dict[int, Tensor] = {}
        compiled = step.losses is not None
        self._compiled = torch.compile(self._taken, dynamic=False) if compiled else self._taken

    def begin(self, epoch: int) -> None:
        """Make this epoch's order and draws the ones that steps read."""
        plan = self.batches.plan(epoch)
        self.order.copy_(plan.order)
        for mine, new in zip(self.draws, plan.draws, strict=True):
            mine.copy_(new)

    def _taken(self, within: Tensor) -> tuple[Tensor, Tensor]:
        pixels = self.batches.pixels
        assert pixels is not None
        rows = self.start + within
        index = self.order[rows]
        draws = Draws(*(each[rows] for each in self.draws))
        images = as_float(self.batches.augment.take(pixels, index, draws))
        return images.contiguous(memory_format=torch.channels_last), self.batches.labels[index]

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._within:
            self._within[size] = torch.arange(size, device=self.device)
        taken = self._compiled if size == self.step.usual_size else self._taken
        return taken(self._within[size])

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a step of the epoch, for one that is not replayed."""
        first, last = self.batches.rows(number)
        self.start.fill_(first)
        return self._batch(last - first)

    def __call__(self, number: int) -> int:
        """Step ``number`` of the epoch; returns its number of images."""
        first, last = self.batches.rows(number)
        size = last - first
        self.start.fill_(first)
        if size in self.graphs:
            self.graphs[size].replay()
        elif self.plain_steps.setdefault(size, 0) < WARM_UP:
            self.plain_steps[size] += 1
            self.step(*self._batch(size))
        else:
            self._capture(size)
            self.graphs[size].replay()
        return size

    def _capture(self, size: int) -> None:
        # Gradients made while capturing live in the graph's own memory.
        self.step.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        with _nothing_collected(), torch.cuda.graph(graph, stream=stream):
            self.step(*self._batch(size))
        self.graphs[size] = graph


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage goes before, none goes inside: freeing another run's graph ends a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
