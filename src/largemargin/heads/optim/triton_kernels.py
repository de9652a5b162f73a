"""The steps of ``RowwiseAdam`` and ``HeadSGD`` as Triton kernels that read and write arrays once.

One program holds a few whole rows, so that the mean square of a row needs no second pass. Compiled
by Triton, and run by its interpreter in tests; imported only where a kernel is launched.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """``_rounding.mixed`` of unsigned numbers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, entry, step, ARRAY: tl.constexpr, HOW: tl.constexpr):
    """To bfloat16, still in float32: not at all (0), to the nearest (1), or at random (2)."""
    if HOW > 0:
        bits = x.to(tl.uint32, bitcast=True)
        if HOW == 1:
            noise = 0x7FFF + ((bits >> 16) & 1)
        else:
            # A block of one, because the interpreter warns when a scalar overflows.
            start = tl.full((1, 1), ARRAY, tl.uint32) + step.to(tl.uint32) * 0x9E3779B1
            noise = _mixed(entry.to(tl.uint32) ^ _mixed(start)) & 0xFFFF
        bits = (bits + noise) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def adam_rows(
    param,
    grad,
    first,
    second,
    numbers,
    rest1,
    rest2,
    eps,
    count,
    width,
    first_entry,
    HAS_MOMENT: tl.constexpr,
    LAZY: tl.constexpr,
    ROUND_PARAM: tl.constexpr,
    ROUND_MOMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    at = row[:, None] * width + column[None, :]
    inside = (row < count)[:, None] & (column < width)[None, :]
    scale, keep = tl.load(numbers), tl.load(numbers + 1)
    shrink, size = tl.load(numbers + 2), tl.load(numbers + 3)
    root, step = tl.load(numbers + 4), tl.load(numbers + 5)

    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
    touched = row < tl.where(keep > 0, count, 0)
    if LAZY:
        touched = touched & (tl.max((gradient != 0).to(tl.int32), 1) > 0)
    written = inside & touched[:, None]
    square = tl.sum(gradient * gradient, 1) / width
    moment2 = tl.load(second + row, mask=touched, other=0.0)
    moment2 = moment2 + rest2 * (square - moment2)
    tl.store(second + row, moment2, mask=touched)
    moment = gradient
    if HAS_MOMENT:
        before = tl.load(first + at, mask=written, other=0.0).to(tl.float32)
        moment = before + rest1 * (gradient - before)
        stored = _rounded(moment, at + first_entry, step, 2, ROUND_MOMENT)
        tl.store(first + at, stored.to(first.dtype.element_ty), mask=written)
    factor = size / (tl.sqrt(moment2) * root + eps)
    value = tl.load(param + at, mask=written, other=0.0).to(tl.float32)
    value = value * shrink - factor[:, None] * moment
    value = _rounded(value, at + first_entry, step, 1, ROUND_PARAM)
    tl.store(param + at, value.to(param.dtype.element_ty), mask=written)


@triton.jit
def sgd_rows(
    param,
    grad,
    momentum,
    numbers,
    decay1,
    weight_decay,
    count,
    width,
    first_entry,
    HAS_MOMENT: tl.constexpr,
    LAZY: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROUND_PARAM: tl.constexpr,
    ROUND_MOMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    at = row[:, None] * width + column[None, :]
    inside = (row < count)[:, None] & (column < width)[None, :]
    scale, keep = tl.load(numbers), tl.load(numbers + 1)
    lr, step = tl.load(numbers + 2), tl.load(numbers + 3)

    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
    touched = row < tl.where(keep > 0, count, 0)
    if LAZY:
        touched = touched & (tl.max((gradient != 0).to(tl.int32), 1) > 0)
    written = inside & touched[:, None]
    value = tl.load(param + at, mask=written, other=0.0).to(tl.float32)
    direction = gradient + weight_decay * value
    if HAS_MOMENT:
        before = tl.load(momentum + at, mask=written, other=0.0).to(tl.float32)
        moment = decay1 * before + direction
        stored = _rounded(moment, at + first_entry, step, 2, ROUND_MOMENT)
        tl.store(momentum + at, stored.to(momentum.dtype.element_ty), mask=written)
        if NESTEROV:
            direction = direction + decay1 * moment
        else:
            direction = moment
    value = _rounded(value - lr * direction, at + first_entry, step, 1, ROUND_PARAM)
    tl.store(param + at, value.to(param.dtype.element_ty), mask=written)
