"""Numbers that a loss takes from the batches it sees: buffers that only training moves."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from largemargin.errors import refuse_transform
from largemargin.heads.centroid_bank import Replay, exact_buffers, recomputing
from largemargin.ops.distributed import all_reduce_sum
from largemargin.ops.norms import read_rows


class RunningStatistics(nn.Module):
    """An exponential mean of what each training batch shows.

    It moves once per training forward, before the loss of that batch reads it; never in
    evaluation, and the recomputation of activation checkpointing reads what the first run read.

    Args:
        start: the numbers before the first batch.
        rate: weight of a new batch, in [0, 1].

    State: ``values``, float32 (float64 in a float64 model).
    """

    values: Tensor

    def __init__(self, *start: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("values", torch.tensor(start))
        self._replay = Replay()

    def forward(self, batch: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """The numbers for this batch; ``find`` makes its own of those before it.

        What is not finite leaves the number as it was: one bad batch must not spoil it for good.
        """
        before = read_rows(self.values, None)
        if not self.training:
            return before
        refuse_transform(self)
        known = self._replay.recall(batch, before.shape)
        if known is not None:
            return known[0]
        with torch.no_grad():
            found = find(before).to(before.dtype)
            moved = torch.lerp(before, torch.where(found.isfinite(), found, before), self.rate)
            if not recomputing():
                self._replay.remember(batch, (moved,))
                self.values.copy_(moved)
        return moved

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningStatistics":
        with exact_buffers(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def mean_of_kept(values: Tensor, kept: Tensor | None, sync: bool) -> tuple[Tensor, Tensor]:
    """The mean of those (N,) values that count, over all ranks with ``sync``, and their number."""
    if kept is None:
        kept = torch.ones_like(values, dtype=torch.bool)
    sums = torch.stack([torch.where(kept, values, 0).sum(), kept.sum().to(values.dtype)])
    total, count = (all_reduce_sum(sums) if sync else sums).unbind()
    return torch.where(count > 0, total / count.clamp_min(1), torch.nan), count
