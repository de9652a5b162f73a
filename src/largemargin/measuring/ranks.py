"""Results of the processes of a distributed run, gathered; an error of one is an error of all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from largemargin.errors import LargeMarginError

T = TypeVar("T")


def fail_together(shared: bool, work: Callable[[], T]) -> list[T]:
    """What ``work`` returns on every process, in rank order; on this one alone unless ``shared``.

    Where it fails on one process it raises on all: they would wait for each other forever.
    """
    if not shared:
        return [work()]
    try:
        mine = work()
    except Exception as error:
        gather(None, error)
        raise
    return gather(mine)


def gather(mine: Any, failure: Exception | None = None) -> list[Any]:
    """What every process holds, in rank order; raises where another one has failed."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (None if failure is None else str(failure), mine))
    if failure is not None:
        return []
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            raise LargeMarginError(f"process {rank} could not measure its part: {problem}")
    return [each for _, each in everyone]
