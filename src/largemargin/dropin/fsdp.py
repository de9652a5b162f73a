"""Reading a model that FSDP2, DDP or tensor parallelism spreads over processes."""

from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError
from largemargin.ops.shards import is_sharded


def is_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module. (By name: the import is slow.)"""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def refuse_tensor_parallel(*tensors: object) -> None:
    """Refuse a head that several processes compute together, each a part of the logits.

    What FSDP has sharded is whole while the layer runs; features and logits are plain tensors then.
    """
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) and is_sharded(tensor):
            raise LargeMarginError(
                "the head is tensor-parallel: parallelize_module has cut its weight over "
                "processes, and no process has the whole features and logits that attach reads. "
                "Leave the head out of the plan (the rest of the model may be in it). For more "
                "classes than one device holds use lm.ShardedClassHead and call the loss on the "
                "features: loss(backbone(x), head, labels)."
            )


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


def reach(total: Tensor, outputs: list[Tensor], *, fsdp: bool) -> Tensor:
    """Let the backward pass enter through the model's outputs, where FSDP or DDP waits for it.

    FSDP gathers parameters when a gradient arrives at a module's output. A loss that reads the
    features would bypass the output of the outermost module. DDP begins there with the sums over
    processes: with a static graph, in the first pass, and where it looks for unused parameters.
    """
    waiting = fsdp
    if not torch.compiler.is_compiling():
        for output in outputs:
            waiting = waiting or type(output.grad_fn).__name__.startswith("_DDPSink")
    for output in outputs if waiting else ():
        if output.requires_grad:
            total = _Reach.apply(total, output)
    return total
