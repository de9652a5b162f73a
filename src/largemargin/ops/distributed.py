"""Sums over the processes of a distributed run, with gradient (O10).

The backward pass of the sum is again a sum: every rank computes the global value, so after the
averaging that DDP does, gradients equal those of one process on the joined batch.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def world_size() -> int:
    """Number of processes, 1 outside a distributed run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum of ``x`` over all processes; differentiable. Alone, ``x`` itself."""
    if world_size() == 1:
        return x
    total: Tensor = _AllReduceSum.apply(x)
    return total


def gather_numbers(x: Tensor) -> Tensor:
    """A 0-dim tensor of every process, in rank order (R,); differentiable."""
    if world_size() == 1:
        return x[None]
    before = dist.get_rank()
    return all_reduce_sum(F.pad(x[None], (before, world_size() - before - 1)))


def gather_ragged(x: Tensor, fill: float) -> Tensor:
    """Vectors of all processes in rank order, padded with ``fill`` to the longest: (R * N_max,)."""
    size = torch.tensor([x.shape[0]], device=x.device)
    sizes = [torch.empty_like(size) for _ in range(world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(each) for each in sizes)
    padded = x.new_full((longest,), fill)
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat(parts)
