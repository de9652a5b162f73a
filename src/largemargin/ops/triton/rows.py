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
from largemargin.ops.row_values import KINDS, Angle, RowLoss
from largemargin.ops.triton.compiled_launch import Kernel

LONGEST = 4096
"""Numbers of a row that a program reads at a time."""
TINIEST = torch.finfo(torch.float32).tiny
LOWEST = hidden(torch.float32)
NO_ANGLE = Angle(1.0, 0.0, "none", 1.0, 0.0, torch.add)
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
            _UNIT_ROW(
                (count, 1, 1),
                *(x, unit, inverse, width, x.stride(0), float(factor), block, TINIEST, EPS),
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
            _UNIT_ROW_GRADIENT(
                (count, 1, 1),
                *(grad.contiguous(), x, inverse, found, width, x.stride(0)),
                *(float(factor), 1 / EPS, block),
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
            _ROW_STATS(
                (count, 1, 1),
                *(logits, labels.contiguous(), numbers, chosen, numbers[5:], count, width),
                *(logits.stride(0), relative, LOWEST, TINIEST, block),
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
        with on_device(logits):
            _ROW_STATS_GRADIENT(
                (count, triton.cdiv(width, block), 1),
                *(logits, labels.contiguous(), stats.rival, stats.kept, *given, found),
                *(count, width, logits.stride(0), *(grad is not None for grad in grads), block),
                num_warps=warps,
            )
    return found


@triton.jit
def _shifted(
    cosine,
    label,
    x,
    prototypes,
    width,
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
    """cos(theta + m) of cos(theta), by chords where theta is near 0 or pi, and its slope."""
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine))
    sine = tl.sqrt(1.0 - cosine * cosine)
    bend = -cosine / sine
    if tl.abs(cosine) > NEAR:
        w = prototypes + label * width
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
    return shifted, slope


@triton.jit
def _row_values(
    logits,
    labels,
    values,
    kept,
    chosen,
    features,
    prototypes,
    count,
    width,
    stride,
    ignore,
    required,
    strength,
    factor,
    scale,
    margin,
    cos_margin,
    sin_margin,
    least,
    dim,
    feature_stride,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
    ANGLE: tl.constexpr,
    IGNORES: tl.constexpr,
    MEAN: tl.constexpr,
    NEAR: tl.constexpr,
    EDGE: tl.constexpr,
    LOWEST: tl.constexpr,
    TINY: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """A loss (N,), or its parts of the mean, and (6, N) what the gradient needs."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    outside = (label < 0) | (label >= width)
    own_column = tl.where(outside, 0, label)
    share = 1.0
    if MEAN:
        others = tl.zeros((SAMPLES,), tl.float32)
        for start in range(0, count, SAMPLES):
            at = start + tl.arange(0, SAMPLES)
            if IGNORES:
                counts = (at < count) & (tl.load(labels + at, at < count, ignore) != ignore)
            else:
                counts = at < count
            others += counts.to(tl.float32)
        share = 1.0 / tl.maximum(tl.sum(others, 0), 1.0)
    ignored = label != label
    if IGNORES:
        ignored = label == ignore
    share = tl.where(ignored, 0.0, share)
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
    shift = tl.where(top < LOWEST, LOWEST, top)
    own = tl.load(logits + row * stride + own_column).to(tl.float32)
    bad = tl.where(outside | (tl.max(spoilt, 0) > 0), float("nan"), 0.0)
    slope = 1.0
    if ANGLE:
        shifted, slope = _shifted(
            own / scale,
            own_column,
            features + row * feature_stride,
            prototypes,
            dim,
            margin,
            cos_margin,
            sin_margin,
            least,
            NEAR,
            EDGE,
            DIMS,
            TINY,
            LEAST,
        )
        own = scale * shifted
    whole = 1.0
    spread = 0.0
    if KIND == 2:
        result = (top - own) * factor
        lost = factor
        tl.store(chosen + row, tl.min(tl.where(best == top, place, width), 0))
    else:
        mass = tl.zeros((BLOCK,), tl.float32)
        moment = tl.zeros((BLOCK,), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + lanes
            rival = (at < width) & (at != label)
            value = tl.load(logits + row * stride + at, at < width, 0.0).to(tl.float32) - shift
            weight = tl.where(rival, tl.exp(value), 0.0)
            mass += weight
            if SPREAD:
                value = tl.where(rival, value, 0.0)
                moment += weight * value
                total += value
        whole = tl.sum(mass, 0)
        gap = tl.log(tl.maximum(whole, TINY)) - (own - shift)
        if KIND == 1:
            result = gap * factor
            lost = factor
        else:
            gap += required
            # log(1 + e) with the digits of a small e; above 20 torch takes the gap itself.
            e = tl.exp(tl.where(gap > 20.0, 20.0, gap))
            one = 1.0 + e
            near = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
            result = tl.where(gap > 20.0, gap, near)
            lost = tl.where(gap > 20.0, 1.0, e / one)
        if SPREAD:
            spread = tl.sum(moment, 0) / whole
            result += strength * (spread - tl.sum(total, 0) / (width - 1))
    tl.store(values + row, tl.where(ignored, 0.0, (result + bad) * share))
    tl.store(kept + row, shift)
    tl.store(kept + count + row, whole)
    tl.store(kept + 2 * count + row, spread)
    tl.store(kept + 3 * count + row, lost)
    tl.store(kept + 4 * count + row, lost * slope)
    tl.store(kept + 5 * count + row, share)


@triton.jit
def _row_values_gradient(
    grad,
    grad_stride,
    logits,
    labels,
    kept,
    chosen,
    found,
    count,
    width,
    stride,
    strength,
    KIND: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    share = tl.load(kept + 5 * count + row)
    inside = (label >= 0) & (label < width) & (share != 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lost = tl.load(kept + 3 * count + row)
    if KIND == 2:
        each = tl.where(at == tl.load(chosen + row), lost, 0.0)
    else:
        value = tl.load(logits + row * stride + at, at < width, 0.0).to(tl.float32)
        value -= tl.load(kept + row)
        chance = tl.exp(value) / tl.load(kept + count + row)
        each = chance * lost
        if SPREAD:
            near = 1.0 + value - tl.load(kept + 2 * count + row)
            each += strength * (chance * near - 1.0 / (width - 1))
    each = tl.where(at == label, -tl.load(kept + 4 * count + row), each)
    each = tl.where(inside, each * (tl.load(grad + row * grad_stride) * share), 0.0)
    tl.store(found + row * width + at, each.to(found.dtype.element_ty), at < width)


def row_values(
    logits: Tensor,
    labels: Tensor,
    loss: RowLoss,
    ignore: int | None,
    mean: bool,
    features: Tensor | None,
    prototypes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A loss of each row, or its part of the mean, and what ``row_values_gradient`` takes."""
    count, width = logits.shape
    numbers = torch.empty(7, count, dtype=torch.float32, device=logits.device)
    chosen = None
    if loss.kind == "rival":
        chosen = torch.empty(count, dtype=torch.int32, device=logits.device)
    block, warps = _block(width)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    angle, dim, stride = loss.angle or NO_ANGLE, 1, 1
    if features is None or prototypes is None:
        features = prototypes = logits
    else:
        features = features if features.stride(1) == 1 else features.contiguous()
        prototypes = prototypes.contiguous()
        dim, stride = features.shape[1], features.stride(0)
    if count:
        with on_device(logits):
            _ROW_VALUES(
                (count, 1, 1),
                *(logits, labels, numbers, numbers[1:], numbers if chosen is None else chosen),
                *(features, prototypes, count, width, logits.stride(0)),
                *(0 if ignore is None else ignore, float(loss.required), float(loss.strength)),
                *(float(loss.factor), float(angle.scale), float(angle.margin)),
                *(math.cos(angle.margin), math.sin(angle.margin), float(angle.least)),
                *(dim, stride, KINDS.index(loss.kind), loss.strength != 0),
                *(loss.angle is not None, ignore is not None, mean, float(angle.near)),
                *(("none", "hard", "easy").index(angle.mode), LOWEST, TINIEST, EPS),
                *(block, _block(dim)[0], min(1024, max(16, triton.next_power_of_2(count)))),
                num_warps=warps,
            )
    return numbers[0], numbers[1:], chosen


def row_values_gradient(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    loss: RowLoss,
    kept: Tensor,
    chosen: Tensor | None,
) -> Tensor:
    """The gradient of the logits, in their dtype."""
    count, width = logits.shape
    found = torch.empty(count, width, dtype=logits.dtype, device=logits.device)
    block, warps = _block(width)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if count:
        with on_device(logits):
            _ROW_VALUES_GRADIENT(
                (count, triton.cdiv(width, block), 1),
                *(grad, grad.stride(0), logits, labels, kept, kept if chosen is None else chosen),
                *(found, count, width, logits.stride(0), float(loss.strength)),
                *(KINDS.index(loss.kind), loss.strength != 0, block),
                num_warps=warps,
            )
    return found


_UNIT_ROW, _UNIT_ROW_GRADIENT = Kernel(_unit_row), Kernel(_unit_row_gradient)
_ROW_STATS, _ROW_STATS_GRADIENT = Kernel(_row_stats), Kernel(_row_stats_gradient)
_ROW_VALUES, _ROW_VALUES_GRADIENT = Kernel(_row_values), Kernel(_row_values_gradient)
