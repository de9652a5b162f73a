"""Whether Triton kernels run here: asked without importing Triton."""

import importlib.util
import os
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Triton's interpreter runs the kernels on a CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


INTERPRETED = interpreted()
"""From the start, as Triton itself sees it."""


def settled(function: Any) -> Any:
    """The compiler calls it once and keeps the answer, instead of looking into it.

    What ``torch.compiler.assume_constant_result`` does, which imports the compiler for it.
    """
    function._dynamo_marked_constant = True
    return function


@settled
def is_too_old(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8
