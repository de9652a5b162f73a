"""Triton kernels of the class statistics: a matrix product whose tiles never leave the chip.

Imported only where Triton is there and wanted; ``launch.py`` launches them. Logits are
:math:`l_{ij} = \\langle x_i, w_j\\rangle v_j + b_j` with :math:`v_j` the inverse norm of
:math:`w_j` (``FACTOR``), or 1: a copy of the class vectors is normalised when it is made. Where
the products are bfloat16 (``PRECISE`` is off) logits are counted in units of ln 2: exponentials are
powers of two on a GPU.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)
"""Stands for minus infinity: finite, so that 0 times it is 0."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SHORT = tl.constexpr(1e12)
"""Inverse norms from here on belong to rows that count as zero; they carry no gradient."""


@triton.jit
def power(exponent, PRECISE: tl.constexpr):
    if PRECISE:
        return tl.exp(exponent)
    else:
        return tl.exp2(exponent)


@triton.jit
def prepare(
    columns,
    low,
    inverse,
    count,
    dim,
    width,
    stride,
    COPY: tl.constexpr,
    NORMS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Inverse norms of rows (``NORMS``), and a copy in the dtype of the product, normalised
    (``SCALE``) or not.

    Norms go by way of the largest entry, so that no square overflows.
    """
    for block in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        row64 = row.to(tl.int64)[:, None]
        there = (row < count)[:, None]
        at = tl.arange(0, DIMS)[None, :]
        # The one load there is where a row fits; a longer one is read again piece by piece.
        value = tl.load(columns + row64 * stride + at, there & (at < dim), 0.0)
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if NORMS:
            largest = tl.max(tl.abs(value.to(tl.float32)), 1)
            for start in range(DIMS, dim, DIMS):
                part = tl.load(
                    columns + row64 * stride + start + at, there & (start + at < dim), 0.0
                )
                largest = tl.maximum(largest, tl.max(tl.abs(part.to(tl.float32)), 1))
            largest = tl.maximum(largest, 1.1754943508222875e-38)
            scaled = value.to(tl.float32) / largest[:, None]
            square = tl.sum(scaled * scaled, 1)
            for start in range(DIMS, dim, DIMS):
                part = tl.load(
                    columns + row64 * stride + start + at, there & (start + at < dim), 0.0
                )
                scaled = part.to(tl.float32) / largest[:, None]
                square += tl.sum(scaled * scaled, 1)
            # NaN and infinity come through: a maximum that drops NaN would hide them.
            norm = tl.sqrt(square) * largest
            factor = 1.0 / tl.where(norm < 1 / SHORT, 1 / SHORT, norm)
            tl.store(inverse + row, factor, row < count)
        elif SCALE:
            factor = tl.load(inverse + row, row < count, 0.0)
        if COPY:
            if SCALE:
                value = value.to(tl.float32) * factor[:, None]
            tl.store(low + row64 * width + at, value.to(low.dtype.element_ty), there & (at < width))
            for start in range(DIMS, width, DIMS):
                part = tl.load(
                    columns + row64 * stride + start + at, there & (start + at < dim), 0.0
                )
                if SCALE:
                    part = part.to(tl.float32) * factor[:, None]
                rounded = part.to(low.dtype.element_ty)
                tl.store(low + row64 * width + start + at, rounded, there & (start + at < width))


@triton.jit
def forward(
    rows,
    low,
    inverse,
    bias,
    labels,
    state,
    num_samples,
    count,
    first,
    resume,
    dim,
    FACTOR: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RIVAL: tl.constexpr,
    MASS: tl.constexpr,
    MOMENT: tl.constexpr,
    TOTAL: tl.constexpr,
    PRECISE: tl.constexpr,
    INPUT: tl.constexpr,
    SAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    DEPTH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Running statistics of a block of samples over every so-manieth tile of classes.

    ``state`` is (6, groups, N): target, largest, its class, mass, moment, total. ``first`` is the
    class of row 0 of ``low``; ``resume`` says whether earlier chunks have written the state.
    """
    block = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    sample = block * SAMPLES + tl.arange(0, SAMPLES)
    known = sample < num_samples
    label = tl.load(labels + sample, known, -1).to(tl.int32) - first
    layer = groups * num_samples
    at = state + group * num_samples + sample
    before = known & (tl.zeros_like(sample) < resume)
    target = tl.load(at, before, 0.0)
    largest = tl.load(at + layer, before, HIDDEN)
    chosen = tl.load(at + 2 * layer, before, 0.0).to(tl.int32, bitcast=True)
    mass = tl.load(at + 3 * layer, before, 0.0)
    moment = tl.load(at + 4 * layer, before, 0.0)
    total = tl.load(at + 5 * layer, before, 0.0)
    unit: tl.constexpr = 1.0 if PRECISE else LOG2_E
    for tile in tl.range(group, tl.cdiv(count, CLASSES), groups, flatten=FLATTEN):
        product = tl.zeros((SAMPLES, CLASSES), tl.float32)
        for start in range(0, dim, DEPTH):
            x = rows.load([block * SAMPLES, start])
            w = low.load([tile * CLASSES, start])
            product = tl.dot(x, w.T, product, input_precision=INPUT)
        place = tile * CLASSES + tl.arange(0, CLASSES)
        there = place < count
        # Always a new tensor: the next product can begin while this one is looked at.
        if FACTOR:
            logits = product * (tl.load(inverse + place, there, 0.0) * unit)[None, :]
        else:
            logits = product * unit
        if TOTAL:
            total += tl.sum(logits, 1)
        if HAS_BIAS:
            logits += tl.load(bias + place, there, HIDDEN).to(tl.float32)[None, :] * unit
        elif MASKED:
            logits = tl.where(there[None, :], logits, HIDDEN)
        inside = (label >= tile * CLASSES) & (label < tile * CLASSES + CLASSES)
        if tl.max(inside.to(tl.int32), 0) > 0:
            own = place[None, :] == label[:, None]
            target = tl.where(inside, tl.sum(tl.where(own, logits, 0.0), 1), target)
            logits = tl.where(own, HIDDEN, logits)
        if RIVAL:
            best, best_at = tl.max(logits, 1, return_indices=True)
            chosen = tl.where(best > largest, best_at + tile * CLASSES + first, chosen)
        else:
            best = tl.max(logits, 1)
        highest = tl.maximum(largest, best)
        if MASS:
            below = logits - highest[:, None]
            weight = power(below, PRECISE)
            decay = power(largest - highest, PRECISE)
            if MOMENT:
                # Moments are about the running maximum, so they move when it does.
                moved = tl.where(mass > 0, largest - highest, 0.0)
                moment = decay * (moment + mass * moved) + tl.sum(weight * below, 1)
            mass = mass * decay + tl.sum(weight, 1)
        largest = highest
    tl.store(at, target, known)
    tl.store(at + layer, largest, known)
    tl.store(at + 2 * layer, chosen.to(tl.float32, bitcast=True), known)
    tl.store(at + 3 * layer, mass, known)
    tl.store(at + 4 * layer, moment, known)
    tl.store(at + 5 * layer, total, known)


@triton.jit
def combine(
    state,
    labels,
    bias_sum,
    found,
    chosen_class,
    num_samples,
    num_classes,
    groups,
    HAS_BIAS: tl.constexpr,
    PRECISE: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Statistics of each sample from those of the groups.

    ``found`` is (8, N): target, rival, rest, spread, mean, then what the backward pass needs:
    largest logit, mass and moment about it.
    """
    sample = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    known = sample < num_samples
    layer = groups * num_samples
    target = tl.zeros((SAMPLES,), tl.float32)
    mass = tl.zeros((SAMPLES,), tl.float32)
    moment = tl.zeros((SAMPLES,), tl.float32)
    total = tl.zeros((SAMPLES,), tl.float32)
    largest = tl.full((SAMPLES,), HIDDEN, tl.float32)
    chosen = tl.full((SAMPLES,), 2147483647, tl.int32)
    for group in range(groups):
        at = state + group * num_samples + sample
        target += tl.load(at, known, 0.0)
        best = tl.load(at + layer, known, HIDDEN)
        best_at = tl.load(at + 2 * layer, known, 0.0).to(tl.int32, bitcast=True)
        part = tl.load(at + 3 * layer, known, 0.0)
        part_moment = tl.load(at + 4 * layer, known, 0.0)
        total += tl.load(at + 5 * layer, known, 0.0)
        # The first class wins among equals; groups hold interleaved classes.
        first = (best > largest) | ((best == largest) & (best_at < chosen))
        chosen = tl.where(first, best_at, chosen)
        highest = tl.maximum(largest, best)
        decay = power(largest - highest, PRECISE)
        share = power(best - highest, PRECISE)
        moment = decay * (moment + mass * tl.where(mass > 0, largest - highest, 0.0))
        moment += share * (part_moment + part * tl.where(part > 0, best - highest, 0.0))
        mass = mass * decay + part * share
        largest = highest
    unit: tl.constexpr = 1.0 if PRECISE else LN_2
    target *= unit
    largest *= unit
    moment = moment * unit / mass
    total = total * unit - target
    if HAS_BIAS:
        total += tl.load(bias_sum)
    label = tl.load(labels + sample, known, -1)
    nan = float("nan")
    outside = (label < 0) | (label >= num_classes)
    # A target's own bias is in the sum of the biases and in its logit: it cancels above.
    at = found + sample
    tl.store(at, tl.where(outside, nan, target), known)
    broken = outside | (mass != mass)
    tl.store(at + num_samples, tl.where(broken, nan, largest), known)
    tl.store(at + 2 * num_samples, tl.where(outside, nan, largest + tl.log(mass)), known)
    tl.store(at + 3 * num_samples, tl.where(outside, nan, largest + moment), known)
    mean = total / (num_classes - 1)
    tl.store(at + 4 * num_samples, tl.where(outside, nan, mean), known)
    tl.store(at + 5 * num_samples, largest, known)
    tl.store(at + 6 * num_samples, mass, known)
    tl.store(at + 7 * num_samples, moment, known)
    tl.store(chosen_class + sample, chosen.to(tl.int64), known)


@triton.jit
def maxima(
    rows,
    low,
    inverse,
    bias,
    best,
    num_samples,
    count,
    first,
    dim,
    stride,
    FACTOR: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INPUT: tl.constexpr,
    SAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    DEPTH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """The largest logit of each sample in each tile of classes: ``best`` is (tiles, N)."""
    block = tl.program_id(0)
    sample = block * SAMPLES + tl.arange(0, SAMPLES)
    known = sample < num_samples
    for tile in tl.range(
        tl.program_id(1), tl.cdiv(count, CLASSES), tl.num_programs(1), flatten=FLATTEN
    ):
        product = tl.zeros((SAMPLES, CLASSES), tl.float32)
        for start in range(0, dim, DEPTH):
            x = rows.load([block * SAMPLES, start])
            w = low.load([tile * CLASSES, start])
            product = tl.dot(x, w.T, product, input_precision=INPUT)
        place = tile * CLASSES + tl.arange(0, CLASSES)
        there = place < count
        logits = product * 1.0
        if FACTOR:
            logits *= tl.load(inverse + place, there, 0.0)[None, :]
        if HAS_BIAS:
            logits += tl.load(bias + place, there, HIDDEN).to(tl.float32)[None, :]
        elif MASKED:
            logits = tl.where(there[None, :], logits, HIDDEN)
        at = best + (first // CLASSES + tile).to(tl.int64) * stride + sample
        tl.store(at, tl.max(logits, 1), known)


@triton.jit
def rescore(
    rows,
    columns,
    inverse,
    bias,
    tiles,
    scores,
    num_classes,
    dim,
    row_stride,
    stride,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLASSES: tl.constexpr,
    PART: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Logits of one sample for the classes of one tile in float32: ``scores`` is (N, k, tile)."""
    sample = tl.program_id(0)
    slot = tl.program_id(1)
    slots = tl.num_programs(1)
    tile = tl.load(tiles + sample * slots + slot)
    for part in range(0, CLASSES, PART):
        place = tile * CLASSES + part + tl.arange(0, PART)
        there = place < num_classes
        row = place.to(tl.int64)[:, None] * stride
        product = tl.zeros((PART,), tl.float32)
        for start in range(0, dim, DIMS):
            at = start + tl.arange(0, DIMS)
            x = tl.load(rows + sample.to(tl.int64) * row_stride + at, at < dim, 0.0)
            both = there[:, None] & (at < dim)[None, :]
            w = tl.load(columns + row + at[None, :], both, 0.0).to(tl.float32)
            product += tl.sum(w * x[None, :], 1)
        if NORMALIZE:
            product *= tl.load(inverse + place, there, 0.0)
        if HAS_BIAS:
            product += tl.load(bias + place, there, 0.0).to(tl.float32)
        product = tl.where(there, product, float("-inf"))
        at = (sample.to(tl.int64) * slots + slot) * CLASSES + part + tl.arange(0, PART)
        tl.store(scores + at, product)
