"""``nearest_two`` on a GPU: products of split numbers, and all the rest in one Triton kernel."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
EXACT = (2, 0, 1, 1, 0, 0), (0, 2, 1, 0, 1, 0)
"""Which part of each side the products of parts take, the smallest first."""
SHORT = (1, 0, 0), (0, 1, 0)
"""The same where torch may multiply in TF32: 16 bits instead of 11."""


def orders() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the left and of the right side, by torch's own setting for float32 products."""
    return SHORT if torch.backends.cuda.matmul.fp32_precision == "tf32" else EXACT


@triton.jit
def _split_row(
    x,
    middle,
    parts,
    sizes,
    dim,
    width,
    share,
    CENTRED: tl.constexpr,
    ORDER: tl.constexpr,
    DIMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = tl.zeros((DIMS,), tl.float32)
    stride: tl.constexpr = len(ORDER)
    for start in range(0, width, DIMS):
        at = start + tl.arange(0, DIMS)
        value = tl.load(x + row * dim + at, at < dim, 0.0)
        if CENTRED:
            value -= tl.load(middle + at, at < dim, 0.0)
        size += value * value
        # The upper half of a float32 is a bfloat16: 8 bits each, 24 in all, nothing is lost.
        upper = -65536
        first = (value.to(tl.int32, bitcast=True) & upper).to(tl.float32, bitcast=True)
        rest = value - first
        second = (rest.to(tl.int32, bitcast=True) & upper).to(tl.float32, bitcast=True)
        third = rest - second
        for place in tl.static_range(stride):
            part = first if ORDER[place] == 0 else (second if ORDER[place] == 1 else third)
            to = parts + (row * stride + place) * width + at
            tl.store(to, part.to(parts.dtype.element_ty), at < width)
    tl.store(sizes + row, share * tl.sum(size, 0))


def split(
    x: Tensor, middle: Tensor | None, order: tuple[int, ...], share: float
) -> tuple[Tensor, Tensor]:
    r"""Rows, less ``middle``, as bfloat16 parts in this order, (B, 6 D) or (B, 3 D); and their
    squared norms times ``share``.

    The product of rows split in both EXACT orders is
    :math:`a_2 b_0 + a_0 b_2 + a_1 b_1 + a_1 b_0 + a_0 b_1 + a_0 b_0`: all but the parts below
    :math:`2^{-24}`, so as exact as in float32, on the units for bfloat16.
    """
    x = x.contiguous()
    width = -(-x.shape[1] // 8) * 8
    # The interpreter has no products of bfloat16: there the parts are float32.
    low = torch.bfloat16 if x.is_cuda else torch.float32
    parts = torch.empty(x.shape[0], len(order) * width, dtype=low, device=x.device)
    sizes = x.new_empty(x.shape[0])
    if x.shape[0]:
        with torch.cuda.device(x.device.index if x.is_cuda else -1):
            _split_row[(x.shape[0],)](
                x,
                x if middle is None else middle,
                parts,
                sizes,
                x.shape[1],
                width,
                share,
                CENTRED=middle is not None,
                ORDER=order,
                DIMS=min(1024, max(16, 1 << (width - 1).bit_length())),
            )
    return parts, sizes


def product(rows: Tensor, columns: Tensor) -> Tensor:
    """Of rows split by a left and rows split by a right order, in float32."""
    if rows.is_cuda:
        return torch.mm(rows, columns.T, out_dtype=torch.float32)
    return rows @ columns.T


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
