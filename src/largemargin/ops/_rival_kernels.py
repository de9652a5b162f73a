"""The element-wise part of ``nearest_two`` as one Triton kernel: both products are read once."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024


@triton.jit
def _best_two_rows(
    square,
    gap,
    sizes,
    bias,
    own_size,
    own_logit,
    own,
    values,
    indices,
    start,
    count,
    degenerate,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size, logit = tl.load(own_size + row), tl.load(own_logit + row)
    own_column = tl.load(own + row) - start
    first, second = float("-inf"), float("-inf")
    first_at, second_at = 0, 0
    for begin in range(0, count, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < count
        length = tl.load(square + row * count + column, mask=inside, other=1.0)
        length += size + tl.load(sizes + column, mask=inside, other=0.0)
        distance = tl.load(gap + row * count + column, mask=inside, other=0.0) - logit
        if HAS_BIAS:
            distance += tl.load(bias + column, mask=inside, other=0.0)
        flat = length <= degenerate
        distance = tl.where(flat, 0.0, distance / tl.sqrt(tl.where(flat, 1.0, length)))
        # Comparisons pass NaN over; it has to win.
        distance = tl.where(distance == distance, distance, float("inf"))
        distance = tl.where(inside & (column != own_column), distance, float("-inf"))
        best, at = tl.max(distance, 0), tl.argmax(distance, 0)
        distance = tl.where(column == begin + at, float("-inf"), distance)
        next_best, next_at = tl.max(distance, 0), tl.argmax(distance, 0)
        # The better of this tile's second and the loser among the two firsts comes second.
        wins = best > first
        loser, loser_at = tl.where(wins, first, best), tl.where(wins, first_at, begin + at)
        first_at = tl.where(wins, begin + at, first_at)
        first = tl.where(wins, best, first)
        rest, rest_at = (
            tl.where(wins, next_best, second),
            tl.where(wins, begin + next_at, second_at),
        )
        second = tl.maximum(loser, rest)
        second_at = tl.where(loser >= rest, loser_at, rest_at)
    tl.store(values + 2 * row, first)
    tl.store(values + 2 * row + 1, second)
    tl.store(indices + 2 * row, (first_at + start).to(tl.int64))
    tl.store(indices + 2 * row + 1, (second_at + start).to(tl.int64))


def launch(
    square: Tensor,
    gap: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    own_size: Tensor,
    own_logit: Tensor,
    own: Tensor,
    start: int,
) -> tuple[Tensor, Tensor]:
    """Values (K, 2) and classes (K, 2) of the two largest of each row."""
    rows, count = gap.shape
    values, indices = gap.new_empty(rows, 2), own.new_empty(rows, 2)
    device = gap.device.index if gap.device.type == "cuda" else -1
    if rows:
        with torch.cuda.device(device):
            _best_two_rows[(rows,)](
                square,
                gap,
                sizes,
                sizes if bias is None else bias.contiguous(),
                own_size.contiguous(),
                own_logit.contiguous(),
                own,
                values,
                indices,
                start,
                count,
                1e-24,
                HAS_BIAS=bias is not None,
                COLUMNS=COLUMNS,
            )
    return values, indices
