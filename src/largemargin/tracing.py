"""Who runs the code: plain Python, or something that records it.

A traced graph cannot branch on values, and reading one back from an accelerator waits for it.
So code asks here before it looks at what a tensor holds.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def plain_eager() -> bool:
    """Not compiled, traced, differentiated forwards or under a ``torch.func`` transform: code may
    branch on values."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def transformed() -> bool:
    """Under a ``torch.func`` transform (grad, vmap, hessian, ...)."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._are_functorch_transforms_active())


def made_for_inference(*tensors: Tensor) -> bool:
    """Whether one was made in inference mode, from which no gradient can be computed."""
    return plain_eager() and any(map(Tensor.is_inference, tensors))


def jit_traces() -> bool:
    """Whether ``torch.jit.trace`` is recording."""
    return not torch.compiler.is_compiling() and bool(torch._C._is_tracing())


def exporting() -> bool:
    """Whether ``torch.export`` is recording."""
    return torch.compiler.is_exporting() and (
        _SAYS_WHO_TRACES or not torch.compiler.is_dynamo_compiling()
    )


_SAYS_WHO_TRACES = torch.__version__ >= "2.15"
"""torch 2.11 answers is_exporting() with True wherever dynamo traces."""


def values_are_checked(tensor: Tensor, validate: bool | None) -> bool:
    """Whether the values of an argument are checked: on a CPU, unless the caller decided."""
    if validate is not None:
        return validate and plain_eager()
    return tensor.is_cpu and plain_eager()


def value_range(tensor: Tensor) -> tuple[float, float]:
    """The smallest and largest number in a tensor, NaN where it holds one; (0, 0) of none.

    The cheapest look at values there is: one operator, where a mask takes five.
    """
    if tensor.numel() == 0:
        return 0, 0
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = tensor.long()  # torch finds no extremes of these
    low, high = tensor.aminmax()
    return low.item(), high.item()
