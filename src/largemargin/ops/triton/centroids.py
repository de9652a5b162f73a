"""Class means, a centroid bank's step and the discriminative terms: one kernel each.

For batches and heads whose cost is that of launching operators. A slot is a class where there are
no more classes than samples; otherwise the first sample of a class holds it. No atomics: two runs
are bit-equal.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from largemargin.ops.boundary import DEGENERATE
from largemargin.ops.centroid_terms import CentroidTerms
from largemargin.ops.norms import EPS
from largemargin.ops.triton.compiled_launch import Kernel
from largemargin.ops.triton.rows import on_device

TILE = 4096
"""Numbers of features or prototypes that a program reads at a time."""
LABELS = 256
"""Labels or counts that a program reads at a time."""


@triton.jit
def _counts(label, classes, ignore, HAS_IGNORE: tl.constexpr):
    """Whether a sample of this label counts."""
    inside = (label >= 0) & (label < classes)
    if HAS_IGNORE:
        inside = inside & (label != ignore)
    return inside


@triton.jit
def _length(row):
    """The norm of a row; no square leaves the range of float64."""
    wide = row.to(tl.float64)
    return tl.sqrt(tl.sum(wide * wide, 0)).to(tl.float32)


@triton.jit
def _positive(x):
    """The larger of x and 0; NaN stays."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def _class_rows(
    features,
    labels,
    table,
    seen,
    totals,
    of_sample,
    held,
    means,
    blended,
    previous,
    known,
    count,
    classes,
    width,
    stride,
    ignore,
    weight,
    HAS_IGNORE: tl.constexpr,
    BY_CLASS: tl.constexpr,
    WRITE: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot: its mean, blended with its row of the ``table``, which is written."""
    slot = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    wide = lanes < width
    label = slot
    if not BY_CLASS:
        label = tl.load(labels + slot)
    valid = _counts(label, classes, ignore, HAS_IGNORE)
    number = tl.zeros((MANY,), tl.int32)
    first = tl.zeros((MANY,), tl.int32) + count
    for start in range(0, count, MANY):
        at = start + tl.arange(0, MANY)
        same = (tl.load(labels + at, at < count, -1) == label) & (at < count) & valid
        number += same.to(tl.int32)
        first = tl.minimum(first, tl.where(same, at, count))
    amount = tl.sum(number, 0)
    leader = tl.min(first, 0)
    here = amount > 0
    if not BY_CLASS:
        tl.store(of_sample + slot, tl.where(valid, leader, 0).to(tl.int64))
        here = here & (leader == slot)
    total = tl.zeros((BLOCK,), tl.float32)
    if here:
        for start in range(0, count, ROWS):
            at = start + tl.arange(0, ROWS)
            same = (tl.load(labels + at, at < count, -1) == label) & (at < count)
            where = features + at[:, None].to(tl.int64) * stride + lanes[None, :]
            tile = tl.load(where, same[:, None] & wide[None, :], 0.0).to(tl.float32)
            total += tl.sum(tile, 0)
    number_here = tl.where(here, amount, 0)
    tl.store(held + slot, number_here.to(tl.float32))
    mean = total / tl.where(here, amount, 1).to(tl.float32)
    source = tl.where(here, label, 0)
    was = (tl.load(seen + source) != 0) & here
    before = tl.load(table + source * width + lanes, lanes < tl.where(here, width, 0), 0.0)
    tl.store(previous + slot * width + lanes, before, wide)
    tl.store(known + slot, was.to(tl.uint8))
    before = tl.where(was, before, mean)
    step = mean - before
    # As torch.lerp: exact where both agree, so that a new class is at distance 0 from itself.
    mixed = before + weight * step
    if weight >= 0.5:
        mixed = mean - step * (1.0 - weight)
    tl.store(means + slot * width + lanes, mean, wide)
    tl.store(blended + slot * width + lanes, mixed, wide)
    if WRITE:
        # One overflowing batch must not spoil a class for good: its centroid is not stored.
        spoilt = tl.sum((wide & ~(tl.abs(mean) < float("inf"))).to(tl.int32), 0)
        if here & (spoilt == 0):
            tl.store(table + label * width + lanes, mixed, wide)
            tl.store(seen + label, tl.full((), 1, tl.uint8))
            tl.store(totals + label, tl.load(totals + label) + number_here.to(tl.int64))


@triton.jit
def _terms(
    features,
    labels,
    prototypes,
    bias,
    of_sample,
    held,
    compact,
    points,
    parts,
    distances,
    rivals,
    inverses,
    signs,
    sizes,
    present,
    count,
    slots,
    classes,
    width,
    stride,
    ignore,
    radius,
    tail,
    margin,
    HAS_IGNORE: tl.constexpr,
    BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POWER: tl.constexpr,
    MARGIN_POWER: tl.constexpr,
    DEGENERATE: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What one sample adds to compactness, and one slot to margin and norm; (3, programs)."""
    place = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    wide = lanes < width
    number = tl.zeros((MANY,), tl.int32)
    for start in range(0, slots, MANY):
        at = start + tl.arange(0, MANY)
        number += (tl.load(held + at, at < slots, 0.0) > 0).to(tl.int32)
    kinds = tl.maximum(tl.sum(number, 0), 1).to(tl.float32)
    if place == 0:
        tl.store(present, kinds)
    drawn = tl.full((), 0.0, tl.float32)
    apart = tl.full((), 0.0, tl.float32)
    size = tl.full((), 0.0, tl.float32)
    bad = tl.full((), 0.0, tl.float32)
    if place < count:
        label = tl.load(labels + place)
        if _counts(label, classes, ignore, HAS_IGNORE):
            row = label
            if not BY_CLASS:
                row = tl.load(of_sample + place)
            center = tl.load(compact + row * width + lanes, wide, 0.0)
            value = tl.load(features + place * stride + lanes, wide, 0.0).to(tl.float32)
            distance = _length(center - value)
            tl.store(distances + place, distance)
            hinge = _positive(distance - radius)
            if POWER == 0:
                capped = tl.where(hinge > tail, tail, hinge)
                drawn = (2.0 * hinge - capped) * capped
            elif POWER == 1:
                drawn = hinge
            else:
                drawn = hinge * hinge
            drawn = drawn * (1.0 / kinds / tl.load(held + row))
        else:
            ignored = label != label
            if HAS_IGNORE:
                ignored = label == ignore
            bad = tl.where(ignored, 0.0, float("nan"))
    if tl.load(held + place, place < slots, 0.0) > 0:
        own = place
        if not BY_CLASS:
            own = tl.load(labels + place)
        point = tl.load(points + place * width + lanes, wide, 0.0)
        mine = tl.load(prototypes + own * width + lanes, wide, 0.0).to(tl.float32)
        my_bias = tl.full((), 0.0, tl.float32)
        if HAS_BIAS:
            my_bias = tl.load(bias + own).to(tl.float32)
        best = tl.full((), float("-inf"), tl.float32)
        rival = tl.where(own == 0, 1, 0)
        for start in range(0, classes, ROWS):
            at = start + tl.arange(0, ROWS)
            real = at < classes
            where = prototypes + at[:, None].to(tl.int64) * width + lanes[None, :]
            tile = tl.load(where, real[:, None] & wide[None, :], 0.0).to(tl.float32)
            normal = tl.where(wide[None, :], tile - mine[None, :], 0.0)
            gap = tl.sum(normal * point[None, :], 1)
            if HAS_BIAS:
                gap += tl.load(bias + at, real, 0.0).to(tl.float32) - my_bias
            # By way of the largest entry: no square leaves the range of float32.
            largest = tl.maximum(tl.max(tl.abs(normal), 1), 1e-30)
            scaled = normal / largest[:, None]
            length = largest * tl.sqrt(tl.sum(scaled * scaled, 1))
            degenerate = length <= DEGENERATE
            ratio = tl.where(degenerate, 0.0, gap / tl.where(degenerate, 1.0, length))
            ratio = tl.where(ratio != ratio, float("inf"), ratio)  # not hidden
            ratio = tl.where(real & (at != own), ratio, float("-inf"))
            top = tl.max(ratio, 0)
            if top > best:
                best = top
                rival = tl.min(tl.where(ratio == top, at, classes), 0)
        other = prototypes + rival.to(tl.int64) * width + lanes
        normal = tl.load(other, wide, 0.0).to(tl.float32) - mine
        length = _length(normal)
        gap = tl.sum(normal * point, 0)
        if HAS_BIAS:
            gap += tl.load(bias + rival).to(tl.float32) - my_bias
        degenerate = length <= DEGENERATE
        inverse = tl.where(degenerate, 0.0, 1.0 / tl.where(degenerate, 1.0, length))
        signed = gap * inverse
        apart = _positive(signed + margin)
        if MARGIN_POWER == 2:
            apart = apart * apart
        apart = apart / kinds
        length = _length(point)
        size = length / kinds
        tl.store(rivals + place, rival.to(tl.int64))
        tl.store(inverses + place, inverse)
        tl.store(signs + place, signed)
        tl.store(sizes + place, length)
    tl.store(parts + place, drawn + bad)
    tl.store(parts + programs + place, apart + bad)
    tl.store(parts + 2 * programs + place, size + bad)


@triton.jit
def _pull(distance, share, by, radius, tail, POWER: tl.constexpr, EPS: tl.constexpr):
    """What the way from a sample to its centroid is multiplied by: the derivative of its term."""
    hinge = _positive(distance - radius)
    if POWER == 0:
        slope = 2.0 * tl.where(hinge > tail, tail, hinge)
    elif POWER == 1:
        slope = tl.where(hinge > 0.0, 1.0, 0.0)
    else:
        slope = 2.0 * hinge
    return slope * share * by / tl.where(distance < EPS, EPS, distance)


@triton.jit
def _push(signed, inverse, share, by, margin, MARGIN_POWER: tl.constexpr):
    """The derivative of a centroid's term by its distance, over the normal's length."""
    kept = _positive(signed + margin)
    slope = tl.where(kept > 0.0, 1.0, 0.0) if MARGIN_POWER == 1 else 2.0 * kept
    return slope * share * by * inverse


@triton.jit
def _features_gradient(
    g_compact,
    g_margin,
    g_norm,
    features,
    labels,
    prototypes,
    held,
    compact,
    points,
    distances,
    rivals,
    inverses,
    signs,
    sizes,
    present,
    found,
    count,
    slots,
    classes,
    width,
    stride,
    ignore,
    radius,
    tail,
    margin,
    through_compact,
    through_points,
    HAS_IGNORE: tl.constexpr,
    BY_CLASS: tl.constexpr,
    WITH_NORM: tl.constexpr,
    POWER: tl.constexpr,
    MARGIN_POWER: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of all samples of one slot; zeros for samples that do not count."""
    place = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    wide = lanes < width
    label = tl.load(labels + place, place < count, 0)
    if (place < count) & (_counts(label, classes, ignore, HAS_IGNORE) == 0):
        nothing = tl.zeros((BLOCK,), found.dtype.element_ty)
        tl.store(found + place * width + lanes, nothing, wide)
    amount = tl.load(held + place, place < slots, 0.0)
    if amount > 0:
        own = place
        if not BY_CLASS:
            own = tl.load(labels + place)
        share = 1.0 / tl.load(present)
        push = _push(
            tl.load(signs + place),
            tl.load(inverses + place),
            share,
            tl.load(g_margin),
            margin,
            MARGIN_POWER,
        )
        point = tl.load(points + place * width + lanes, wide, 0.0)
        mine = tl.load(prototypes + own * width + lanes, wide, 0.0).to(tl.float32)
        other = prototypes + tl.load(rivals + place) * width + lanes
        moved = (tl.load(other, wide, 0.0).to(tl.float32) - mine) * push
        if WITH_NORM:
            size = tl.load(sizes + place)
            moved += point * (share * tl.load(g_norm) / tl.where(size < EPS, EPS, size))
        center = tl.load(compact + place * width + lanes, wide, 0.0)
        each = share / amount
        by = tl.load(g_compact)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, count, ROWS):
            at = start + tl.arange(0, ROWS)
            same = (tl.load(labels + at, at < count, -1) == own) & (at < count)
            where = features + at[:, None].to(tl.int64) * stride + lanes[None, :]
            keep = same[:, None] & wide[None, :]
            away = center[None, :] - tl.load(where, keep, 0.0).to(tl.float32)
            pull = _pull(tl.load(distances + at, same, 1.0), each, by, radius, tail, POWER, EPS)
            total += tl.sum(tl.where(keep, away * pull[:, None], 0.0), 0)
        shared = (through_compact * total + through_points * moved) / amount
        for start in range(0, count, ROWS):
            at = start + tl.arange(0, ROWS)
            same = (tl.load(labels + at, at < count, -1) == own) & (at < count)
            row = at[:, None].to(tl.int64)
            keep = same[:, None] & wide[None, :]
            value = tl.load(features + row * stride + lanes[None, :], keep, 0.0)
            away = center[None, :] - value.to(tl.float32)
            pull = _pull(tl.load(distances + at, same, 1.0), each, by, radius, tail, POWER, EPS)
            grad = shared[None, :] - away * pull[:, None]
            tl.store(found + row * width + lanes[None, :], grad.to(found.dtype.element_ty), keep)


@triton.jit
def _prototypes_gradient(
    g_margin,
    labels,
    prototypes,
    held,
    points,
    rivals,
    inverses,
    signs,
    present,
    found,
    bias_found,
    slots,
    width,
    margin,
    BY_CLASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MARGIN_POWER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one class vector and its bias, from all slots whose own class or rival it is."""
    place = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    wide = lanes < width
    share = 1.0 / tl.load(present)
    by = tl.load(g_margin)
    total = tl.zeros((BLOCK,), tl.float32)
    offset = tl.zeros((ROWS,), tl.float32)
    for start in range(0, slots, ROWS):
        at = start + tl.arange(0, ROWS)
        real = tl.load(held + at, at < slots, 0.0) > 0
        own = at.to(tl.int64)
        if not BY_CLASS:
            own = tl.load(labels + at, real, 0)
        rival = tl.load(rivals + at, real, 0)
        mine = real & (own == place)
        theirs = real & (rival == place)
        touched = mine | theirs
        if tl.sum(touched.to(tl.int32), 0) > 0:
            inverse = tl.load(inverses + at, touched, 0.0)
            signed = tl.load(signs + at, touched, 0.0)
            push = _push(signed, inverse, share, by, margin, MARGIN_POWER)
            push = tl.where(theirs, push, -push)
            keep = touched[:, None] & wide[None, :]
            a = tl.load(prototypes + own[:, None] * width + lanes[None, :], keep, 0.0)
            b = tl.load(prototypes + rival[:, None] * width + lanes[None, :], keep, 0.0)
            point = tl.load(points + at[:, None].to(tl.int64) * width + lanes[None, :], keep, 0.0)
            normal = b.to(tl.float32) - a.to(tl.float32)
            tilt = point - normal * (signed * inverse)[:, None]
            total += tl.sum(tl.where(keep, tilt * push[:, None], 0.0), 0)
            offset += tl.where(touched, push, 0.0)
    tl.store(found + place * width + lanes, total.to(found.dtype.element_ty), wide)
    if HAS_BIAS:
        tl.store(bias_found + place, tl.sum(offset, 0).to(bias_found.dtype.element_ty))


_CLASS_ROWS = Kernel(_class_rows)
_TERMS = Kernel(_terms)
_FEATURES_GRADIENT = Kernel(_features_gradient)
_PROTOTYPES_GRADIENT = Kernel(_prototypes_gradient)


class ClassRows(NamedTuple):
    """What ``class_rows`` finds for K slots."""

    of_sample: Tensor
    """(N,), the slot of each sample; 0 of those that do not count."""
    held: Tensor
    """(K,) samples, 0 where a slot holds no class."""
    means: Tensor
    blended: Tensor
    previous: Tensor
    """(K, D) rows of the table before the step, 0 where a slot holds no class."""
    known: Tensor
    """(K,) whether the class had been seen before."""


class Saved(NamedTuple):
    """What the gradients of the terms need."""

    distances: Tensor
    rivals: Tensor
    inverses: Tensor
    signs: Tensor
    sizes: Tensor
    present: Tensor


def _blocks(width: int) -> tuple[int, int]:
    """Rows read at a time, and numbers of each."""
    block = max(16, triton.next_power_of_2(width))
    return max(1, min(32, TILE // block)), block


def _warps(block: int) -> int:
    return 8 if block >= 1024 else 4


def _ignored(ignore: int | None) -> tuple[int, bool]:
    return (-1, False) if ignore is None else (ignore, True)


def class_rows(
    features: Tensor,
    labels: Tensor,
    table: Tensor,
    seen: Tensor,
    totals: Tensor,
    *,
    num_classes: int,
    ignore: int | None,
    weight: float,
    write: bool,
) -> ClassRows:
    """Class means of a batch, blended by ``weight`` with the rows of the ``table`` (C, D).

    To ``write`` changes the table, which classes were ``seen`` and how often (``totals``).
    """
    count, width = features.shape
    by_class = num_classes <= count
    slots = num_classes if by_class else count
    features = features if features.stride(1) == 1 else features.contiguous()
    matrices = torch.empty(3, slots, width, dtype=torch.float32, device=features.device)
    means, blended, previous = matrices.unbind()
    held = torch.empty(slots, dtype=torch.float32, device=features.device)
    known = torch.empty(slots, dtype=torch.bool, device=features.device)
    of_sample = labels if by_class else torch.empty_like(labels)
    number, has = _ignored(ignore)
    rows, block = _blocks(width)
    with on_device(features):
        _CLASS_ROWS(
            (slots, 1, 1),
            *(features, labels, table, seen.view(torch.uint8), totals, of_sample, held, means),
            *(blended, previous, known.view(torch.uint8), count, num_classes, width),
            *(features.stride(0), number, float(weight), has, by_class, write),
            *(LABELS, rows, block),
            num_warps=_warps(block),
        )
    return ClassRows(of_sample, held, means, blended, previous, known)


def centroid_terms(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    t: CentroidTerms,
    ignore: int | None,
) -> tuple[Tensor, Saved]:
    """What samples and slots add to compactness, margin and norm: (3, L), whose sums they are."""
    (count, width), slots = features.shape, t.counts.shape[0]
    features = features if features.stride(1) == 1 else features.contiguous()
    programs = max(count, slots)
    parts, numbers = t.counts.new_empty(3, programs), t.counts.new_empty(4 * programs + 1)
    distances, inverses, signs, sizes = numbers[:-1].view(4, programs).unbind()
    rivals = torch.empty(slots, dtype=torch.int64, device=features.device)
    saved = Saved(distances, rivals, inverses, signs, sizes, numbers[-1:])
    number, has = _ignored(ignore)
    tile, block = _blocks(width)
    with on_device(features):
        _TERMS(
            (programs, 1, 1),
            *(features, labels, prototypes.contiguous(), prototypes if bias is None else bias),
            *(t.of_sample, t.counts, t.compact, t.points, parts, *saved, count, slots),
            *(prototypes.shape[0], width, features.stride(0), number, float(t.radius)),
            *(float(t.tail), float(t.margin), has, t.by_class, bias is not None, t.power),
            *(t.margin_power, DEGENERATE, LABELS, tile, block),
            num_warps=_warps(block),
        )
    return parts, saved


def features_gradient(
    grads: tuple[Tensor, ...],
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    t: CentroidTerms,
    ignore: int | None,
    saved: Saved,
) -> Tensor:
    """``grads`` are those of the terms."""
    (count, width), slots = features.shape, t.counts.shape[0]
    features = features if features.stride(1) == 1 else features.contiguous()
    found = torch.empty(count, width, dtype=features.dtype, device=features.device)
    number, has = _ignored(ignore)
    tile, block = _blocks(width)
    with on_device(features):
        _FEATURES_GRADIENT(
            (max(count, slots), 1, 1),
            *(grads[0], grads[1], grads[-1], features, labels, prototypes.contiguous()),
            *(t.counts, t.compact, t.points, *saved, found, count, slots),
            *(prototypes.shape[0], width, features.stride(0), number, float(t.radius)),
            *(float(t.tail), float(t.margin), float(t.through_compact)),
            *(float(t.through_points), has, t.by_class, t.with_norm, t.power),
            *(t.margin_power, EPS, tile, block),
            num_warps=_warps(block),
        )
    return found


def prototypes_gradient(
    g_margin: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    t: CentroidTerms,
    saved: Saved,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of class vectors and bias."""
    classes, width = prototypes.shape
    found = torch.empty(classes, width, dtype=prototypes.dtype, device=prototypes.device)
    bias_found = None if bias is None else torch.empty_like(bias)
    tile, block = _blocks(width)
    with on_device(prototypes):
        _PROTOTYPES_GRADIENT(
            (classes, 1, 1),
            *(g_margin, labels, prototypes.contiguous(), t.counts, t.points, saved.rivals),
            *(saved.inverses, saved.signs, saved.present, found),
            *(found if bias_found is None else bias_found, t.counts.shape[0], width),
            *(float(t.margin), t.by_class, bias is not None, t.margin_power, tile, block),
            num_warps=_warps(block),
        )
    return found, bias_found
