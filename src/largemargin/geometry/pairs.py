"""Pairs of rows, exactly and without an N x N buffer.

Squared distances from a Gram matrix are fast but lose the small ones to cancellation, so they only
select: what is returned is measured on the rows themselves, in float64.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 2048
"""Rows and columns of one tile: 32 MiB of float64, a few of them alive at a time."""

CANCELLATION = 1e-4
"""Squared distances below this share of the squared norms are recomputed from differences."""


def widen(x: Tensor) -> Tensor:
    """A detached float64 copy or view (float32 on MPS, which has no float64)."""
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)


def blocks(total: int, size: int = TILE) -> Iterator[slice]:
    """Consecutive slices of at most ``size`` that cover ``range(total)``."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) squared distances by the Gram matrix; center the rows first."""
    product = a @ b.T
    return product.mul_(-2).add_(a.square().sum(1)[:, None]).add_(b.square().sum(1))


def distances(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) Euclidean distances, small ones too: those are measured again as differences."""
    center = b.mean(0)
    near_a, near_b = a - center, b - center
    squares = squared_distances(near_a, near_b)
    scale = near_a.square().sum(1)[:, None] + near_b.square().sum(1)
    small = (squares < CANCELLATION * scale).nonzero()
    for pairs in torch.split(small, TILE * 8):
        rows, columns = pairs.unbind(1)
        squares[rows, columns] = (a[rows] - b[columns]).square().sum(1)
    return squares.clamp_min_(0).sqrt_()


def closest_pair(points: Tensor, groups: Tensor | None = None) -> tuple[int, int] | None:
    """Indices of the two closest rows, or of the two closest rows of different ``groups``.

    Every pair whose Gram distance is within rounding of the smallest is measured again, so the
    pair is right even where many rows nearly coincide. ``None`` when there is no such pair.
    """
    points = widen(points)
    centered = points - points.mean(0)
    norms = centered.square().sum(1)
    rounding = 4 * (points.shape[1] + 4) * torch.finfo(points.dtype).eps
    slack = rounding * float(norms.max()) if points.shape[0] else 0.0
    best, pair = float("inf"), None
    index = torch.arange(points.shape[0], device=points.device)
    for rows in blocks(points.shape[0]):
        for columns in blocks(points.shape[0]):
            if columns.start < rows.start:
                continue
            squares = squared_distances(centered[rows], centered[columns])
            if columns.start == rows.start:
                squares.masked_fill_(index[rows, None] >= index[columns], torch.inf)
            if groups is not None:
                squares.masked_fill_(groups[rows, None] == groups[columns], torch.inf)
            smallest = float(squares.min())
            limit = min(best, smallest + slack) + slack
            if smallest > limit or smallest == float("inf"):
                continue
            for candidates in torch.split((squares <= limit).nonzero(), TILE * 8):
                i, j = candidates[:, 0] + rows.start, candidates[:, 1] + columns.start
                measured = (points[i] - points[j]).square().sum(1)
                value, position = measured.min(0)
                if float(value) < best:
                    best = float(value)
                    pair = int(i[position]), int(j[position])
            if best == 0:
                return pair
    return pair


def farthest_pair(points: Tensor) -> tuple[int, int]:
    """Indices of the two rows farthest apart; (0, 0) for a single row."""
    points = widen(points)
    centered = points - points.mean(0)
    best, pair = 0.0, (0, 0)
    for rows in blocks(points.shape[0]):
        for columns in blocks(points.shape[0]):
            if columns.start < rows.start:
                continue
            squares = squared_distances(centered[rows], centered[columns])
            position = int(squares.argmax())
            value = float(squares.view(-1)[position])
            if value > best:
                best = value
                i, j = divmod(position, squares.shape[1])
                pair = rows.start + i, columns.start + j
    return pair


def row_distance(points: Tensor, pair: tuple[int, int]) -> Tensor:
    """Distance of two rows as a 0-dim float64 tensor."""
    i, j = pair
    return (widen(points[i]) - widen(points[j])).square().sum().sqrt()
