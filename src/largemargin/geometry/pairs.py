"""Pairs of rows, exactly and without an N x N buffer.

Squared distances from a Gram matrix are fast but lose the small ones to cancellation, so they only
select: what is returned is measured on the rows themselves, in float64.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

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


class _Screen:
    """Squared distances in float32, good enough to say which pairs have to be measured.

    Rows are centred and scaled, so that the error of a squared distance is at most ``slack``
    whatever the input's size. ``order`` is the order in which they stand in tiles.
    """

    def __init__(self, points: Tensor, order: Tensor | None = None) -> None:
        self.points = points.detach()
        self.order = order
        self.count, self.dim = points.shape
        dtype = torch.float32 if points.device.type == "mps" else torch.float64
        self.center = self.points.mean(0, dtype=dtype) if self.count else points.new_zeros(self.dim)
        parts = list(blocks(self.count))
        spans = [float((self._rows(part) - self.center).abs().max()) for part in parts]
        largest = max(spans, default=0.0)
        self.scale = largest if largest > 0 else 1.0
        self.flat = largest == 0
        """All rows are equal."""
        # Reduced products (TensorFloat-32, bfloat16) keep too few bits for the slack below. torch
        # refuses to say by one function which are set where only one backend was.
        backends: Any = torch.backends
        backend = backends.cuda if points.device.type == "cuda" else backends.mkldnn
        low = torch.float32 if backend.matmul.fp32_precision in ("none", "ieee") else dtype
        self.single = torch.empty(self.count, self.dim, dtype=low, device=points.device)
        self.norms = torch.empty(self.count, dtype=dtype, device=points.device)
        for part in parts:
            rows = self.wide(part)
            self.single[part] = rows.to(low)
            self.norms[part] = rows.square().sum(1)
        self.single_norms = self.norms.to(low)
        longest = float(self.norms.max()) if self.count else 0.0
        steps = 4 * (self.dim + 8) * longest
        self.slack = {False: steps * torch.finfo(low).eps, True: steps * torch.finfo(dtype).eps}

    def _rows(self, part: slice) -> Tensor:
        return widen(self.points[part] if self.order is None else self.points[self.order[part]])

    def wide(self, part: slice) -> Tensor:
        return (self._rows(part) - self.center) / self.scale

    def tile(self, rows: slice, columns: slice, sign: int, wide: bool) -> tuple[Tensor, Tensor]:
        """``sign`` times squared distances, as a table and what to add to each of its rows."""
        if wide:
            left, right, norms = self.wide(rows), self.wide(columns), self.norms
        else:
            left, right, norms = self.single[rows], self.single[columns], self.single_norms
        table = torch.addmm(sign * norms[columns], left, right.T, alpha=-2 * sign)
        return table, sign * norms[rows]

    def measured(self, i: Tensor, j: Tensor) -> Tensor:
        """Squared distances of pairs of rows, from their differences, in units of the screen."""
        if self.order is not None:
            i, j = self.order[i], self.order[j]
        return ((widen(self.points[i]) - widen(self.points[j])) / self.scale).square().sum(1)

    def indices(self, i: int, j: int) -> tuple[int, int]:
        if self.order is not None:
            i, j = int(self.order[i]), int(self.order[j])
        return min(i, j), max(i, j)


_Tile = tuple[slice, slice, Tensor | None, float]
"""Rows, columns, pairs to leave out, and a squared distance no pair of the tile is below."""


def _search(
    screen: _Screen, tiles: Iterable[_Tile], sign: int, best: float = math.inf
) -> tuple[int, int] | None:
    """The pair of smallest ``sign * distance``, if one is below ``best``."""
    pair = None
    for tile in tiles:
        rows, columns, _, bound = tile
        if bound > best:
            continue
        found = _candidates(screen, tile, sign, best)
        for candidates in torch.split(found, TILE * 8) if len(found) else ():
            i, j = candidates[:, 0] + rows.start, candidates[:, 1] + columns.start
            value, position = (sign * screen.measured(i, j)).min(0)
            if float(value) < best:
                best = float(value)
                pair = int(i[position]), int(j[position])
        if best == 0 and sign > 0:
            break
    return None if pair is None else screen.indices(*pair)


def _candidates(screen: _Screen, tile: _Tile, sign: int, best: float) -> Tensor:
    """(n, 2) pairs of a tile that may be below ``best``: row and column in it.

    It is looked at in float32 first. Where that leaves too many pairs open, it is computed in
    float64, and for the farthest pair, whose distance is as large as anything in the tile, that
    decides.
    """
    rows, columns, hidden, _ = tile
    for wide in (False, True):
        table, offset = screen.tile(rows, columns, sign, wide)
        if hidden is not None:
            table.masked_fill_(hidden, math.inf)
        lowest = table.amin(1) + offset
        smallest, slack = float(lowest.min()), screen.slack[wide]
        if smallest == math.inf or smallest - slack > best:
            return torch.empty(0, 2, dtype=torch.long, device=table.device)
        if wide and sign < 0:
            first = (table + offset[:, None]).argmin()[None]
            return torch.stack((first // table.shape[1], first % table.shape[1]), 1)
        limit = min(best, smallest + slack) + slack
        near = (lowest <= limit).nonzero()[:, 0]
        found = (table[near] + offset[near, None] <= limit).nonzero()
        found[:, 0] = near[found[:, 0]]
        if len(found) <= TILE:
            break
    return found


def _triangle(screen: _Screen, *, diagonal: bool) -> Iterator[_Tile]:
    """Tiles of the upper triangle of all pairs, without pairs (i, i) unless ``diagonal``."""
    for rows in blocks(screen.count):
        for columns in blocks(screen.count):
            hidden = None
            if columns.start == rows.start and not diagonal:
                size = rows.stop - rows.start
                every = torch.ones(size, size, dtype=torch.bool, device=screen.points.device)
                hidden = every.tril_()
            if columns.start >= rows.start:
                yield rows, columns, hidden, -math.inf


def _runs(groups: Tensor) -> list[slice]:
    """Tiles of sorted groups: a large group has tiles of its own, small ones share them."""
    sizes = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    limit = next(blocks(len(groups))).stop
    found, start, end = [], 0, 0
    for size in sizes:
        if end > start and end - start + size > limit:
            found.append(slice(start, end))
            start = end
        end += size
        count = math.ceil(size / limit)
        if start + size == end and count > 1:
            cuts = [start + round(size * part / count) for part in range(count + 1)]
            found.extend(slice(*each) for each in pairwise(cuts))
            start = end
    return [*found, slice(start, end)] if end > start else found


def _bounds(screen: _Screen, parts: list[slice]) -> Tensor:
    r"""Squared distances that no pair of rows of two parts is below.

    Rows x and y of parts with centers a and b are at least as far apart as their projections on
    the line through a and b: :math:`\langle y - x, b - a\rangle / \|b - a\|`.
    """
    centers = torch.stack([screen.wide(part).mean(0) for part in parts])
    reach = []  # entry [a, b]: the largest <x, b - a> of part a
    for index, part in enumerate(parts):
        along = screen.wide(part) @ centers.T
        reach.append((along - along[:, index, None]).amax(0))
    table = torch.stack(reach)
    apart = distances(centers, centers)
    gaps = -(table + table.T) / apart.clamp_min(torch.finfo(apart.dtype).tiny)
    # A little less, for the rounding in it: entries are at most 1.
    rounding = 16 * screen.dim * torch.finfo(apart.dtype).eps
    return (gaps * (1 - rounding) - rounding).clamp_min(0).square()


def _between(screen: _Screen, groups: Tensor) -> Iterator[_Tile]:
    """Tiles with pairs of different groups, likely close ones first."""
    parts = _runs(groups)
    bounds = _bounds(screen, parts)
    first = groups[[part.start for part in parts]].tolist()
    last = groups[[part.stop - 1 for part in parts]].tolist()
    for position in bounds.flatten().argsort(stable=True).tolist():
        a, b = divmod(position, len(parts))
        if a > b or first[a] == last[b]:
            continue
        hidden = None
        if last[a] >= first[b]:
            hidden = groups[parts[a], None] == groups[parts[b]]
        yield parts[a], parts[b], hidden, float(bounds[a, b])


def closest_pair(points: Tensor, groups: Tensor | None = None) -> tuple[int, int] | None:
    """Indices of the two closest rows, or of the two closest rows of different ``groups``.

    Every pair whose Gram distance is within rounding of the smallest is measured again, so the
    pair is right even where many rows nearly coincide. Rows of one group stand together, so that
    groups far from each other are left out without looking at their pairs. ``None`` when there is
    no such pair.
    """
    if groups is None:
        screen = _Screen(points)
        return _search(screen, _triangle(screen, diagonal=False), 1)
    # Numbered, so that groups compare as integers whatever they are.
    numbers = torch.unique(groups, return_inverse=True)[1]
    ordered, order = numbers.sort(stable=True)
    if len(order) == 0 or bool(ordered[0] == ordered[-1]):
        return None
    screen = _Screen(points, order)
    return _search(screen, _between(screen, ordered), 1)


def farthest_pair(points: Tensor) -> tuple[int, int]:
    """Indices of the two rows farthest apart; (0, 0) where there is no distance."""
    screen = _Screen(points)
    if screen.flat:
        return 0, 0
    # The row farthest from the center and the one farthest from it are a good pair to begin with:
    # few tiles hold a better one.
    first = int(screen.norms.argmax())
    start = screen.wide(slice(first, first + 1))
    parts = blocks(screen.count)
    away = torch.cat([(screen.wide(part) - start).square().sum(1) for part in parts])
    second = int(away.argmax())
    known = torch.tensor([first]), torch.tensor([second])
    best = -float(screen.measured(*known))
    return _search(screen, _triangle(screen, diagonal=True), -1, best) or screen.indices(
        first, second
    )


def diameters(points: Tensor, groups: Tensor, count: int) -> Tensor:
    """(count,) largest distance within each group, float64 on the CPU; NaN for an empty group."""
    found = torch.full((count,), math.nan, dtype=torch.float64)
    order = groups.argsort(stable=True)
    sizes = torch.bincount(groups, minlength=count).tolist()
    for group, members in enumerate(torch.split(order, sizes)):
        if len(members) > 0:
            rows = points[members]
            found[group] = float(row_distance(rows, farthest_pair(rows)))
    return found


def row_distance(points: Tensor, pair: tuple[int, int]) -> Tensor:
    """Distance of two rows as a 0-dim float64 tensor."""
    i, j = pair
    return (widen(points[i]) - widen(points[j])).square().sum().sqrt()
