"""``deterministic: true``: repetitions that are equal to the last bit."""

import os
from contextlib import ExitStack

import torch

from largemargin.training.config import RunConfig

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
