"""Random numbers of a run: seeds made from a run's seed and a place in it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from largemargin.data.randomness import seed_for


def seed_all(*parts: int | str) -> None:
    """Seed torch's generators (all devices) and Python's."""
    seed = seed_for(*parts)
    torch.manual_seed(seed)
    random.seed(seed)


class Stream:
    """The CUDA random numbers of one run, apart from those of other runs in the process.

    A captured graph goes on drawing from the generator state that was current at its capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._generator = torch.cuda.default_generators[index]
            self._state = self._generator.clone_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._generator is None:
            yield
            return
        outer = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._state)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(outer)
