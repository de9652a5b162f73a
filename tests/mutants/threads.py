"""Processes of a group as threads of one: collectives of torch.distributed on shared memory."""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = 15.0
"""Seconds after which a rank that waits for the others gives up; a mutant is given 20."""


class Ranks:
    """So many threads, each of which takes itself for a process."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = count
        self.here = threading.local()
        self.barrier = threading.Barrier(count, timeout=PATIENCE)
        self.slots: list[Any] = [None] * count
        for name in (
            *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather"),
            *("get_rank", "get_world_size", "is_initialized"),
        ):
            monkeypatch.setattr(dist, name, getattr(self, name))

    def run(self, task: Callable[[int], Any]) -> list[Any]:
        """What each of the ranks makes of its number; the first of their errors."""
        found: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        watched = sys.gettrace()

        def thread(rank: int) -> None:
            sys.settrace(watched)  # lines that the ranks run count as lines of the test
            self.here.rank = rank
            try:
                found[rank] = task(rank)
            except BaseException as error:
                if not isinstance(error, threading.BrokenBarrierError) or not errors:
                    errors.insert(0, error)
                self.barrier.abort()

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]
        return found

    def _everyone(self, mine: Tensor) -> list[Tensor]:
        self.slots[self.here.rank] = mine.detach().clone()
        self.barrier.wait()
        every = list(self.slots)
        self.barrier.wait()
        return every

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        # The largest of numbers among which one is NaN is another of them, as with some backends.
        how = {"SUM": torch.add, "MAX": torch.fmax, "MIN": torch.fmin}[op.name]
        x.copy_(functools.reduce(how, self._everyone(x)))

    def all_gather_into_tensor(self, out: Tensor, mine: Tensor, group: Any = None) -> None:
        out.copy_(torch.cat(self._everyone(mine)))

    def all_gather(self, out: list[Tensor], mine: Tensor, group: Any = None) -> None:
        for place, each in zip(out, self._everyone(mine), strict=True):
            place.copy_(each)

    def reduce_scatter_tensor(self, out: Tensor, given: Tensor, group: Any = None) -> None:
        whole = torch.stack(self._everyone(given)).sum(0)
        out.copy_(whole.chunk(self.count)[self.here.rank])

    def get_rank(self, group: Any = None) -> int:
        rank: int = self.here.rank
        return rank

    def get_world_size(self, group: Any = None) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return True
