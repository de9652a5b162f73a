"""Unit rows and statistics of rows of logits: one kernel each, forward and backward.

For heads whose logits fit into memory. A step of these waits for launches, not for arithmetic.
"""

# mypy: ignore-errors

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from largemargin.ops.dense import hidden
from largemargin.ops.norms import EPS

LONGEST = 4096
"""Numbers of a row that a program reads at a time."""
PARTS = ("target", "rival", "rest", "spread", "mean")


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which is nearly always the right one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device.index)


def _block(width: int) -> tuple[int, int]:
    """Numbers read at a time, and warps."""
    block = min(LONGEST, max(16, triton.next_power_of_2(width)))
    return block, min(8, max(1, block // 256))


@triton.jit
def _norm(x, width, BLOCK: tl.constexpr, TINY: tl.constexpr, LEAST: tl.constexpr):
    """Of the row at ``x``; no square leaves the range of float32."""
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        value = tl.load(x + at, at < width, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    top = tl.maximum(tl.max(largest, 0), TINY)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        value = tl.load(x + at, at < width, 0.0).to(tl.float32) / top
        squares += value * value
    norm = top * tl.sqrt(tl.sum(squares, 0))
    return tl.where(norm < LEAST, LEAST, norm)  # NaN stays


@triton.jit
def _unit_row(
    x,
    unit,
    inverse,
    width,
    stride,
    factor,
    BLOCK: tl.constexpr,
    TINY: tl.constexpr,
    LEAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    one_over = 1.0 / _norm(x + row * stride, width, BLOCK, TINY, LEAST)
    tl.store(inverse + row, one_over)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + at, at < width, 0.0).to(tl.float32)
        value = value * one_over * factor
        tl.store(unit + row * width + at, value.to(unit.dtype.element_ty), at < width)


@triton.jit
def _unit_row_gradient(
    grad, x, inverse, found, width, stride, factor, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    one_over = tl.load(inverse + row)
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        unit = tl.load(x + row * stride + at, at < width, 0.0).to(tl.float32) * one_over
        along += unit * tl.load(grad + row * width + at, at < width, 0.0)
    total = tl.sum(along, 0)
    scale = tl.where(one_over >= LARGEST, 0.0, one_over * factor)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        unit = tl.load(x + row * stride + at, at < width, 0.0).to(tl.float32) * one_over
        value = tl.load(grad + row * width + at, at < width, 0.0)
        value = scale * (value - total * unit)
        tl.store(found + row * width + at, value.to(found.dtype.element_ty), at < width)


def unit_rows(x: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """``factor`` times the unit rows of ``x`` in a dtype, and the rows' inverse norms (N,)."""
    count, width = x.shape
    unit, inverse = x.new_empty(x.shape, dtype=dtype), x.new_empty(count, dtype=torch.float32)
    block, warps = _block(width)
    x = x if x.stride(1) == 1 else x.contiguous()
    if count:
        with on_device(x):
            _unit_row[(count,)](
                x,
                unit,
                inverse,
                width,
                x.stride(0),
                factor,
                BLOCK=block,
                TINY=torch.finfo(torch.float32).tiny,
                LEAST=EPS,
                num_warps=warps,
            )
    return unit, inverse


def unit_rows_gradient(grad: Tensor, x: Tensor, inverse: Tensor, factor: float = 1.0) -> Tensor:
    """The gradient of ``x`` from that of its unit rows, times ``factor``."""
    count, width = x.shape
    found = x.new_empty(x.shape)
    block, warps = _block(width)
    x = x if x.stride(1) == 1 else x.contiguous()
    if count:
        with on_device(x):
            _unit_row_gradient[(count,)](
                grad.contiguous(),
                x,
                inverse,
                found,
                width,
                x.stride(0),
                factor,
                LARGEST=1 / EPS,
                BLOCK=block,
                num_warps=warps,
            )
    return found


@triton.jit
def _row_stats(
    logits,
    labels,
    found,
    chosen,
    kept,
    count,
    width,
    stride,
    RELATIVE: tl.constexpr,
    LOWEST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The five statistics (5, N), the rival's class, and (3, N) what their gradients need."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    outside = (label < 0) | (label >= width)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        rival = (at < width) & (at != label)
        value = tl.load(logits + row * stride + at, at < width, float("-inf")).to(tl.float32)
        spoilt = spoilt | ((value != value) & rival).to(tl.int32)
        value = tl.where(rival, value, float("-inf"))
        better = value > best
        place = tl.where(better, at.to(tl.int32), place)
        best = tl.where(better, value, best)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, place, width), 0)
    shift = tl.where(top < LOWEST, LOWEST, top)
    mass = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        rival = (at < width) & (at != label)
        value = tl.load(logits + row * stride + at, at < width, 0.0).to(tl.float32) - shift
        weight = tl.where(rival, tl.exp(value), 0.0)
        value = tl.where(rival, value, 0.0)
        mass += weight
        moment += weight * value
        total += value
    whole = tl.sum(mass, 0)
    spread = tl.sum(moment, 0) / whole
    own = tl.load(logits + row * stride + tl.where(outside, 0, label)).to(tl.float32)
    bad = tl.where(outside, float("nan"), 0.0)
    base = bad if RELATIVE else shift + bad
    nothing = tl.where(tl.max(spoilt, 0) > 0, float("nan"), 0.0)
    tl.store(found + row, own - shift + base)
    tl.store(found + count + row, top - shift + base + nothing)
    tl.store(found + 2 * count + row, tl.log(tl.maximum(whole, TINY)) + base + nothing)
    tl.store(found + 3 * count + row, spread + base + nothing)
    tl.store(found + 4 * count + row, tl.sum(total, 0) / (width - 1) + base + nothing)
    tl.store(chosen + row, first.to(tl.int64))
    tl.store(kept + row, shift)
    tl.store(kept + count + row, whole)
    tl.store(kept + 2 * count + row, spread)


@triton.jit
def _row_stats_gradient(
    logits,
    labels,
    chosen,
    kept,
    g_target,
    g_rival,
    g_rest,
    g_spread,
    g_mean,
    found,
    count,
    width,
    stride,
    TARGET: tl.constexpr,
    RIVAL: tl.constexpr,
    REST: tl.constexpr,
    SPREAD: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    inside = (label >= 0) & (label < width)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros((BLOCK,), tl.float32)
    if REST or SPREAD:
        value = tl.load(logits + row * stride + at, at < width, 0.0).to(tl.float32)
        value -= tl.load(kept + row)
        chance = tl.exp(value) / tl.load(kept + count + row)
        if REST:
            grad += chance * tl.load(g_rest + row)
        if SPREAD:
            near = 1.0 + value - tl.load(kept + 2 * count + row)
            grad += chance * near * tl.load(g_spread + row)
    if MEAN:
        grad += tl.load(g_mean + row) / (width - 1)
    if RIVAL:
        grad += tl.where(at == tl.load(chosen + row), tl.load(g_rival + row), 0.0)
    own = tl.load(g_target + row) if TARGET else 0.0
    grad = tl.where(at == label, own, grad)
    grad = tl.where(inside, grad, 0.0)
    tl.store(found + row * width + at, grad, at < width)


class RowStats(NamedTuple):
    """What ``row_stats`` finds."""

    found: Tensor
    """(5, N), as ``PARTS`` orders them."""
    rival: Tensor
    """(N,), the first largest of the other classes."""
    kept: Tensor
    """(3, N): the largest rival, the sum of exponentials above it, the spread less it."""


def row_stats(logits: Tensor, labels: Tensor, relative: bool) -> RowStats:
    """All statistics of (N, C) float32 logits and hard labels; NaN where a label is no class."""
    count, width = logits.shape
    numbers = logits.new_empty(8, count)
    chosen = torch.empty(count, dtype=torch.int64, device=logits.device)
    block, warps = _block(width)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if count:
        with on_device(logits):
            _row_stats[(count,)](
                logits,
                labels.contiguous(),
                numbers,
                chosen,
                numbers[5:],
                count,
                width,
                logits.stride(0),
                RELATIVE=relative,
                LOWEST=hidden(torch.float32),
                TINY=torch.finfo(torch.float32).tiny,
                BLOCK=block,
                num_warps=warps,
            )
    return RowStats(numbers[:5], chosen, numbers[5:])


def row_stats_gradient(
    logits: Tensor, labels: Tensor, stats: RowStats, grads: tuple[Tensor | None, ...]
) -> Tensor:
    """The gradient of the logits; ``grads`` are those of ``PARTS``, None where there is none."""
    count, width = logits.shape
    found = torch.empty(count, width, dtype=torch.float32, device=logits.device)
    block, warps = _block(width)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if count:
        given = [stats.kept if grad is None else grad.contiguous() for grad in grads]
        flags = {name.upper(): g is not None for name, g in zip(PARTS, grads, strict=True)}
        with on_device(logits):
            _row_stats_gradient[(count, triton.cdiv(width, block))](
                logits,
                labels.contiguous(),
                stats.rival,
                stats.kept,
                *given,
                found,
                count,
                width,
                logits.stride(0),
                **flags,
                BLOCK=block,
                num_warps=warps,
            )
    return found


@triton.jit
def _mean_of_kept(values, ignored, mean, count, size, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    kept = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counts = (at < size) & (tl.load(ignored + at, at < size, 1) == 0)
        total += tl.where(counts, tl.load(values + at, at < size, 0.0), 0.0)
        kept += counts.to(tl.float32)
    number = tl.maximum(tl.sum(kept, 0), 1.0)
    tl.store(mean, tl.sum(total, 0) / number)
    tl.store(count, number)


@triton.jit
def _share_of_kept(grad, ignored, count, found, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(grad) / tl.load(count)
    ignores = tl.load(ignored + at, at < size, 1) != 0
    tl.store(found + at, tl.where(ignores, 0.0, share), at < size)


def mean_of_kept(values: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of those (N,) float32 values that are not ignored, 0 of none, and their number."""
    mean, count = values.new_empty(()), values.new_empty(())
    with on_device(values):
        block = _block(values.numel())[0]
        _mean_of_kept[(1,)](
            values.contiguous(), ignored, mean, count, values.numel(), BLOCK=block, num_warps=4
        )
    return mean, count


def mean_of_kept_gradient(grad: Tensor, ignored: Tensor, count: Tensor) -> Tensor:
    found = torch.empty(ignored.shape, dtype=torch.float32, device=ignored.device)
    size = ignored.numel()
    with on_device(ignored):
        grid = (triton.cdiv(size, 1024),)
        _share_of_kept[grid](grad, ignored, count, found, size, BLOCK=1024, num_warps=4)
    return found


@triton.jit
def _shifted_target(
    target,
    features,
    prototypes,
    labels,
    found,
    slopes,
    width,
    classes,
    stride,
    scale,
    margin,
    cos_margin,
    sin_margin,
    least,
    NEAR: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TINY: tl.constexpr,
    LEAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cosine = tl.load(target + row) / scale
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine))
    sine = tl.sqrt(1.0 - cosine * cosine)
    bend = -cosine / sine
    if tl.abs(cosine) > NEAR:
        label = tl.load(labels + row)
        label = tl.where((label < 0) | (label >= classes), 0, label)
        x, w = features + row * stride, prototypes + label * width
        x_size = 1.0 / _norm(x, width, BLOCK, TINY, LEAST)
        w_size = 1.0 / _norm(w, width, BLOCK, TINY, LEAST)
        apart = tl.zeros((BLOCK,), tl.float32)
        together = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            u = tl.load(x + at, at < width, 0.0).to(tl.float32) * x_size
            v = tl.load(w + at, at < width, 0.0).to(tl.float32) * w_size
            apart += (u - v) * (u - v)
            together += (u + v) * (u + v)
        square = tl.minimum(tl.sum(apart, 0), tl.sum(together, 0))
        sine = tl.sqrt(square * (1.0 - square / 4.0))
        bend = tl.where(sine <= least, 0.0, -cosine / sine)
    shifted = cosine * cos_margin - sine * sin_margin
    slope = cos_margin - bend * sin_margin
    if EDGE == 1:  # "hard"
        beyond = cosine <= -cos_margin
        shifted = tl.where(beyond, cosine - margin * sin_margin, shifted)
        slope = tl.where(beyond, 1.0, slope)
    if EDGE == 2:  # "easy"
        shifted = tl.where(cosine <= 0, cosine, shifted)
        slope = tl.where(cosine <= 0, 1.0, slope)
    tl.store(found + row, scale * shifted)
    tl.store(slopes + row, slope)


def shifted_target(
    target: Tensor,
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    scale: float,
    margin: float,
    mode: str,
    near: float,
    least: float,
) -> tuple[Tensor, Tensor]:
    """s cos(theta + m) of (N,) s cos(theta), by chords where theta is near 0 or pi; its slope.

    Where theta + m leaves [0, pi]: "hard" goes on along a line, "easy" leaves the cosine as it is.
    """
    found, slopes = torch.empty_like(target), torch.empty_like(target)
    count, width = features.shape
    block, warps = _block(width)
    features = features if features.stride(1) == 1 else features.contiguous()
    if count:
        with on_device(target):
            _shifted_target[(count,)](
                target.contiguous(),
                features,
                prototypes.contiguous(),
                labels.contiguous(),
                found,
                slopes,
                width,
                prototypes.shape[0],
                features.stride(0),
                scale,
                margin,
                math.cos(margin),
                math.sin(margin),
                least,
                NEAR=near,
                EDGE=("none", "hard", "easy").index(mode),
                BLOCK=block,
                TINY=torch.finfo(torch.float32).tiny,
                LEAST=EPS,
                num_warps=warps,
            )
    return found, slopes
