"""Triton kernels of the backward pass of the class statistics; see ``forward``."""

# mypy: ignore-errors

import triton
import triton.language as tl

from largemargin.ops.triton.forward import HIDDEN, LOG2_E, SHORT, power


@triton.jit
def _write_gradient(
    product,
    inverse,
    bias,
    place,
    sample,
    known,
    label,
    largest,
    share,
    grads,
    rivals,
    asked,
    along,
    along_bias,
    num_samples,
    count,
    first,
    stride,
    NORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RIVAL: tl.constexpr,
    MASS: tl.constexpr,
    MOMENT: tl.constexpr,
    TOTAL: tl.constexpr,
    PRECISE: tl.constexpr,
    SPECIAL: tl.constexpr,
):
    """Gradients of one tile of logits; ``SPECIAL`` if it may hold a target or a rival."""
    unit: tl.constexpr = 1.0 if PRECISE else LOG2_E
    there = place < count
    if FACTOR:
        factor = tl.load(inverse + place, there, 0.0)
        product *= (factor * unit)[:, None]
    else:
        product *= unit
    if MASS:
        # In the order of the forward pass, so that both round alike.
        if HAS_BIAS:
            offset = tl.load(bias + place, there, 0.0).to(tl.float32) * unit
            below = (product + offset[:, None]) - largest[None, :]
        else:
            below = product - largest[None, :]
        grad = power(below, PRECISE)
        if MOMENT:
            slope = tl.load(asked + 2 * num_samples + sample, known, 0.0) / unit
            grad *= share[None, :] + slope[None, :] * below
        else:
            grad *= share[None, :]
    else:
        grad = tl.zeros_like(product)
    if TOTAL:
        grad += tl.load(asked + 3 * num_samples + sample, known, 0.0)[None, :]
    if SPECIAL:
        # Overwritten, not added to: whatever the exponential gave there is dropped.
        target = tl.load(asked + 4 * num_samples + sample, known, 0.0)
        grad = tl.where(place[:, None] == label[None, :], target[None, :], grad)
        if RIVAL:
            rival = tl.load(rivals + sample, known, -1).to(tl.int32) - first
            more = tl.load(asked + 5 * num_samples + sample, known, 0.0)
            grad += tl.where(place[:, None] == rival[None, :], more[None, :], 0.0)
    if HAS_BIAS:
        tl.store(along_bias + place, tl.sum(grad, 1))
    if FACTOR:
        grad *= factor[:, None]
    rounded = grad.to(grads.dtype.element_ty)
    if NORMALIZE:
        # Of the numbers that the column gradient multiplies: what cancels there cancels exactly.
        tl.store(along + place, tl.sum(rounded.to(tl.float32) * product, 1) / unit)
    # Straight from the registers: a copy in shared memory would cost a resident program.
    at = grads + place.to(tl.int64)[:, None] * stride + sample[None, :]
    tl.store(at, rounded, there[:, None] & known[None, :])


@triton.jit
def gradient(
    rows,
    low,
    grads,
    inverse,
    bias,
    labels,
    rivals,
    asked,
    along,
    num_samples,
    count,
    first,
    dim,
    stride,
    NORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
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
    """Gradients of the logits of a chunk of classes, times ``FACTOR``: (classes, samples).

    ``asked`` is (6, N): largest logit, the factors of exp(l - largest) and of
    exp(l - largest)(l - largest), and the gradients of mean (over C - 1), target and rival.
    ``along`` is (2, sample blocks, chunk): sums over a block's samples of what is written times
    logit without bias, and of the gradient alone.
    """
    block = tl.program_id(0)
    group = tl.program_id(1)
    width = tl.cdiv(count, CLASSES) * CLASSES
    along += block * width
    along_bias = along + tl.num_programs(0) * width
    sample = block * SAMPLES + tl.arange(0, SAMPLES)
    known = sample < num_samples
    label = tl.load(labels + sample, known, -1).to(tl.int32) - first
    unit: tl.constexpr = 1.0 if PRECISE else LOG2_E
    # Samples that only fill the tile up: far below anything, so that no bias overflows there.
    largest = tl.load(asked + sample, known, -HIDDEN) * unit
    share = tl.load(asked + num_samples + sample, known, 0.0)
    for tile in tl.range(group, tl.cdiv(count, CLASSES), tl.num_programs(1), flatten=FLATTEN):
        start_class = tile * CLASSES
        place = start_class + tl.arange(0, CLASSES)
        product = tl.zeros((CLASSES, SAMPLES), tl.float32)
        for start in range(0, dim, DEPTH):
            w = low.load([start_class, start])
            x = rows.load([block * SAMPLES, start])
            product = tl.dot(w, x.T, product, input_precision=INPUT)
        special = (label >= start_class) & (label < start_class + CLASSES)
        if RIVAL:
            rival = tl.load(rivals + sample, known, -1).to(tl.int32) - first
            special |= (rival >= start_class) & (rival < start_class + CLASSES)
        # Two copies of the code: with one, and a branch around what few tiles need, products and
        # gradients would stand in registers at once, twice what there are.
        if tl.max(special.to(tl.int32), 0) > 0:
            _write_gradient(
                product, inverse, bias, place, sample, known, label, largest, share, grads,
                rivals, asked, along, along_bias, num_samples, count, first, stride, NORMALIZE,
                FACTOR, HAS_BIAS, RIVAL, MASS, MOMENT, TOTAL, PRECISE, True,
            )  # fmt: skip
        else:
            _write_gradient(
                product, inverse, bias, place, sample, known, label, largest, share, grads,
                rivals, asked, along, along_bias, num_samples, count, first, stride, NORMALIZE,
                FACTOR, HAS_BIAS, RIVAL, MASS, MOMENT, TOTAL, PRECISE, False,
            )  # fmt: skip


@triton.jit
def column_gradient(
    grads,
    rows,
    low,
    inverse,
    along,
    result,
    num_samples,
    count,
    width,
    blocks,
    dim,
    stride,
    NORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    INPUT: tl.constexpr,
    SAMPLES: tl.constexpr,
    CLASSES: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Gradients of a chunk of class vectors, through their normalisation.

    ``rows`` are transposed, (D, N): both factors lie along the dimension that is summed over.
    From the last class on: what ``gradient`` wrote last is still in the cache.
    The part along a vector is taken off with the vector as rounded for the products: that error
    is one more of the size of theirs, and half the bytes.
    """
    parts = tl.cdiv(dim, DIMS)
    tiles = parts * tl.cdiv(count, CLASSES)
    for turn in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile = tiles - 1 - turn
        start_dim = (tile % parts) * DIMS
        start_class = (tile // parts) * CLASSES
        place = start_class + tl.arange(0, CLASSES)
        there = place < count
        # Before the product, which hides how long these take to arrive.
        sums = tl.zeros((BLOCKS, CLASSES), tl.float32)
        factor = tl.zeros((CLASSES,), tl.float32)
        if NORMALIZE:
            block = tl.arange(0, BLOCKS)[:, None]
            sums = tl.load(along + block * width + place[None, :], block < blocks, 0.0)
            factor = tl.load(inverse + place, there, 0.0)
        at = start_dim + tl.arange(0, DIMS)
        both = there[:, None] & (at < dim)[None, :]
        value = tl.zeros((CLASSES, DIMS), result.dtype.element_ty)
        if NORMALIZE:
            value = tl.load(low + place.to(tl.int64)[:, None] * stride + at[None, :], both, 0.0)
        product = tl.zeros((CLASSES, DIMS), tl.float32)
        for start in range(0, num_samples, SAMPLES):
            g = grads.load([start_class, start])
            x = rows.load([start_dim, start])
            product = tl.dot(g, x.T, product, input_precision=INPUT)
        if NORMALIZE:
            if not FACTOR:
                product *= factor[:, None]
            value = value.to(tl.float32)
            if FACTOR:
                # Not the square of the factor to the slope: it would leave the range of float32.
                value *= factor[:, None]
            slope = tl.sum(sums, 0)
            if not FACTOR:
                slope *= factor
            product -= slope[:, None] * value
            product = tl.where((factor < SHORT)[:, None], product, 0.0)
        target = result + place.to(tl.int64)[:, None] * dim + at[None, :]
        tl.store(target, product.to(result.dtype.element_ty), both, cache_modifier=".cs")
