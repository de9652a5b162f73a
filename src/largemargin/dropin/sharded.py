"""Reading a head whose weight FSDP2 has sharded over the processes."""

from typing import Any

import torch
from torch import Tensor, nn


def is_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module. (By name: the import is slow.)"""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


class _Gather(torch.autograd.Function):
    """The whole weight on every process; its gradient is averaged, as FSDP averages, and cut."""

    @staticmethod
    def forward(ctx: Any, sharded: Any) -> Tensor:
        ctx.mesh, ctx.placements = sharded.device_mesh, sharded.placements
        whole: Tensor = sharded.full_tensor()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        mine = gradient / ctx.mesh.size()
        partial = DTensor.from_local(mine, ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(placements=ctx.placements)


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "full_tensor")


def gathered(weight: Tensor) -> Tensor:
    """The weight itself, or all of it where this process holds a shard only."""
    if not is_sharded(weight):
        return weight
    whole: Tensor = _Gather.apply(weight)
    return whole


class _Reach(torch.autograd.Function):
    """The loss, with a zero gradient for an output of the model."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, logits: Tensor) -> Tensor:
        ctx.like = logits.shape, logits.dtype, logits.device
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.zeros(shape, dtype=dtype, device=device)


def reach(total: Tensor, outputs: list[Tensor]) -> Tensor:
    """Let the backward pass enter through the model's outputs, where FSDP waits for it.

    FSDP gathers parameters when a gradient arrives at a module's output. A loss that reads the
    features would bypass the output of the outermost module.
    """
    for output in outputs:
        total = _Reach.apply(total, output)
    return total
