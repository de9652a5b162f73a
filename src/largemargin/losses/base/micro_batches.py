"""State that moves once per optimisation step, from all the micro-batches of the step."""

from typing import TypeAlias

from torch import nn

from largemargin.heads.centroid_bank import CentroidBank
from largemargin.losses.center import CenterLoss

Collector: TypeAlias = CentroidBank | CenterLoss
"""Has ``accumulate``, the micro-batches of a step, and ``commit()``, which ends one early."""


def collectors(module: nn.Module) -> list[Collector]:
    """The banks and centers inside a module."""
    return [each for each in module.modules() if isinstance(each, Collector)]


def set_accumulation(module: nn.Module, accumulate: int) -> None:
    """Let those that move at every forward pass collect so many."""
    for each in collectors(module):
        if each.accumulate == 1 and accumulate != 1:
            each.accumulate = accumulate
            each._make_pending()
