"""Processes of a distributed run: what each has found, put together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.geometry.pairs import blocks
from largemargin.measuring.store import FeatureStore

SENT_ROWS = 65_536
"""Features sent at a time."""


T = TypeVar("T")


def together(shared: bool, work: Callable[[], T]) -> list[T]:
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


def gather_store(mine: FeatureStore) -> FeatureStore:
    """The features of all processes in rank order, where this one keeps its own."""
    path = None if mine.path is None else mine.path.with_name(f"everyone.{mine.path.name}")
    joined = FeatureStore(path)
    own = mine.all()
    for rank, rows in enumerate(gather(mine.rows)):
        for part in blocks(rows, SENT_ROWS):
            sent: list[Tensor | None] = [own[part].clone() if dist.get_rank() == rank else None]
            dist.broadcast_object_list(sent, src=rank)
            assert sent[0] is not None
            joined.add(sent[0])
    joined.width = joined.width or mine.width  # a process without samples knows no width
    return joined
