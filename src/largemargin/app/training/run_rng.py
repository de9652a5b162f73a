"""Random numbers of a run: generators, their seeds and states, and ``deterministic: true``."""

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from largemargin.app.config import RunConfig
from largemargin.measuring.sample_draws import seed_for

DETERMINISTIC = (
    "deterministic: repetitions are equal to the last bit on the same machine, with the same torch "
    "and number of threads. It costs 0 to 4 % on a CPU; on a GPU some operations get slower, and "
    "those without a deterministic form are refused."
)


def make_deterministic(config: RunConfig, stack: ExitStack) -> None:
    """Deterministic algorithms where the run asks for them; put back when it ends."""
    if not config.deterministic:
        return
    # cuBLAS reads it when it starts, and is not deterministic without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    searches = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it picks whatever is fastest this time
    stack.callback(torch.use_deterministic_algorithms, before)
    stack.callback(setattr, torch.backends.cudnn, "benchmark", searches)


def seed_all(*parts: int | str) -> None:
    """Seed torch's generators (all devices) and Python's."""
    seed = seed_for(*parts)
    torch.manual_seed(seed)
    random.seed(seed)


class RunRng:
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

    def states(self) -> dict[str, Tensor]:
        """Where all generators of the run are, for the middle of an epoch."""
        python = torch.tensor(random.getstate()[1], dtype=torch.int64)
        found = {"torch": torch.get_rng_state(), "python": python}
        if self._generator is not None:
            with self():
                found["device"] = self._generator.get_state()
        return found

    def restore(self, states: dict[str, Tensor]) -> None:
        """Put the generators where :meth:`states` found them."""
        torch.set_rng_state(states["torch"])
        random.setstate((3, tuple(states["python"].tolist()), None))
        if self._generator is not None and "device" in states:
            with self():
                self._generator.set_state(states["device"])

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
