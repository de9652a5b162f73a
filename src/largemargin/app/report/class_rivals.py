"""The nearest rival of every class, and the angles between the classes that are closest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHOWN = 64
"""Classes of a matrix of angles that can still be looked at."""

ROWS = 1024


@dataclass(frozen=True)
class Rivals:
    """Angles in degrees between class vectors."""

    nearest: tuple[int, ...]
    """By class: the class whose vector is closest."""
    angle: tuple[float, ...]
    """By class: the angle to it."""
    classes: tuple[int, ...]
    """Those with the closest rivals, at most 64, in their order."""
    matrix: tuple[tuple[float, ...], ...]
    """Angles between these."""


def rivals_of(weight: Tensor) -> Rivals:
    """From class vectors (C, D), a part of the rows at a time."""
    unit = torch.nn.functional.normalize(weight.double(), dim=1)
    nearest, cosines = [], []
    for start in range(0, len(unit), ROWS):
        block = unit[start : start + ROWS] @ unit.T
        rows = torch.arange(len(block))
        block[rows, start + rows] = -torch.inf
        best = block.max(1)
        cosines.append(best.values)
        nearest.append(best.indices)
    angle = _degrees(torch.cat(cosines))
    chosen = angle.argsort(stable=True)[:SHOWN].sort().values
    matrix = _degrees(unit[chosen] @ unit[chosen].T)
    return Rivals(
        tuple(torch.cat(nearest).tolist()),
        tuple(angle.tolist()),
        tuple(chosen.tolist()),
        tuple(tuple(row) for row in matrix.tolist()),
    )


def rivals_in(angles: Sequence[Sequence[float]]) -> Rivals:
    """From a whole matrix of angles."""
    pairs = [
        min((a, at) for at, a in enumerate(row) if at != own) for own, row in enumerate(angles)
    ]
    order = sorted(range(len(pairs)), key=lambda at: pairs[at][0])
    chosen = sorted(order[:SHOWN])
    return Rivals(
        tuple(at for _, at in pairs),
        tuple(a for a, _ in pairs),
        tuple(chosen),
        tuple(tuple(angles[i][j] for j in chosen) for i in chosen),
    )


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(torch.arccos(cosines.clamp(-1, 1)))
