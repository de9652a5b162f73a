"""Class statistics block by block: no (N, C) buffer is kept, the backward pass recomputes it."""

from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.ops.dense import ORDER, Stats, hidden, wanted_stats
from largemargin.ops.matmul import multiply, without_autocast
from largemargin.ops.norms import batched_gradient, unit_rows
from largemargin.ops.shards import once
from largemargin.ops.similarity import AffineForm, by_class

BLOCK_ELEMENTS = 2**20
"""Logits held at a time: 4 MiB in float32, about what the caches of a core hold."""
GPU_BLOCK_ELEMENTS = 2**25
"""The same on a GPU, which needs more at a time to be busy: 128 MiB."""
ONCE = (
    'impl="chunked" can be differentiated once only: it recomputes the logits in its backward '
    'pass instead of keeping them. Pass impl="dense" for second derivatives.'
)
MIN_BLOCK = 256
"""Classes per block at least: narrower products would waste the matrix units."""


def block_size(num_samples: int, num_classes: int, device: str) -> int:
    """Classes of a block."""
    logits = BLOCK_ELEMENTS if device == "cpu" else GPU_BLOCK_ELEMENTS
    return min(num_classes, max(MIN_BLOCK, logits // max(num_samples, 1)))


def chunked_stats(form: AffineForm, labels: Tensor, want: tuple[str, ...]) -> Stats:
    """The statistics of ``dense_stats(dense_logits(form), labels, want)`` for hard labels."""
    num_samples, num_columns = form.rows.shape[0], form.columns.shape[0]
    block = max(1, block_size(num_samples, num_columns, form.rows.device.type) // form.centers)
    flags = tuple(name in want for name in ORDER)
    *values, rival_index = _ChunkedStats.apply(
        form.rows,
        form.columns,
        form.column_bias,
        labels.long(),
        form.normalize_columns,
        form.precision,
        flags,
        block,
        form.centers,
    )
    return wanted_stats(values, rival_index, form.row_bias, want)


def _block_logits(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    normalize_columns: bool,
    precision: str | None,
    centers: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Logits of one block of classes, its (normalised) columns and their backward factor.

    Last, where classes have sub-centers, the nearest one (N, B, 1) of each.
    """
    factor = nearest = None
    if normalize_columns:
        columns, factor = unit_rows(columns)
    logits = multiply(rows, columns.T, precision)
    if bias is not None:
        logits += bias
    if centers > 1:
        logits, nearest = by_class(logits, centers).max(2)
        nearest = nearest[..., None]
    return logits, columns, factor, nearest


def _position(index: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Column of each sample's class inside the block (clamped), and whether it is in there."""
    inside = (index >= start) & (index < stop)
    return (index - start).clamp(0, stop - start - 1)[:, None], inside[:, None]


class _ChunkedStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        normalize_columns: bool,
        precision: str | None,
        flags: tuple[bool, ...],
        block: int,
        centers: int,
    ) -> tuple[Tensor, ...]:
        _, want_rival, want_rest, want_spread, want_mean = flags
        num_samples, num_classes = rows.shape[0], columns.shape[0] // centers
        # A label outside [0, C) is in no block: its target stays NaN, and so do the others below.
        target = rows.new_full((num_samples,), torch.nan)
        # In the target's column too; a block of classes of bias minus infinity adds nothing.
        nothing = hidden(rows.dtype)
        rival = rows.new_full((num_samples,), nothing)
        rival_index = torch.zeros_like(labels)
        mass, moment, total = (rows.new_zeros(num_samples) for _ in range(3))
        for start in range(0, num_classes, block):
            stop = min(start + block, num_classes)
            here = slice(start * centers, stop * centers)
            logits, _, _, _ = _block_logits(
                rows,
                columns[here],
                None if bias is None else bias[here],
                normalize_columns,
                precision,
                centers,
            )
            position, inside = _position(labels, start, stop)
            own = logits.gather(1, position)
            target = torch.where(inside.squeeze(1), own.squeeze(1), target)
            if want_mean:
                total += logits.sum(1) - torch.where(inside, own, 0).squeeze(1)
            if want_rival or want_rest or want_spread:
                logits.scatter_(1, position, own.masked_fill(inside, nothing))
                if want_rival:
                    best, best_index = logits.max(dim=1)
                    rival_index = torch.where(best > rival, best_index + start, rival_index)
                else:
                    best = logits.amax(dim=1)
                highest = torch.maximum(rival, best)
                if want_rest or want_spread:
                    decay = torch.exp(rival - highest)
                    below = logits.sub_(highest[:, None])
                    if want_spread:
                        weights = torch.exp(below)
                        # Moments are about the running maximum, so they move when it does.
                        moved = torch.where(mass > 0, rival - highest, 0)
                        moment = decay * (moment + mass * moved) + (weights * below).sum(1)
                    else:
                        weights = below.exp_()
                    mass = mass * decay + weights.sum(1)
                rival = highest
        outside = (labels < 0) | (labels >= num_classes)
        moment = moment / mass
        ctx.save_for_backward(rows, columns, bias, labels, rival_index, rival, mass, moment)
        rest = (rival + torch.log(mass)).masked_fill(outside, torch.nan)
        spread = (rival + moment).masked_fill(outside, torch.nan)
        mean = (total / (num_classes - 1)).masked_fill(outside, torch.nan)
        rival = rival.masked_fill(outside, torch.nan)
        ctx.settings = (normalize_columns, precision, flags, block, centers)
        ctx.mark_non_differentiable(rival_index)
        # Last, because not every release of the compiler keeps a place for its missing gradient.
        return target, rival, rest, spread, mean, rival_index

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling() and any(map(batched_gradient, grads)):
            raise LargeMarginError(
                'impl="chunked" takes one gradient at a time, but many were given at once '
                '(is_grads_batched=True, or a vectorized jacobian). Pass impl="dense".'
            )
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
        # The caller's autocast would reach the products here: the engine runs in its thread.
        with torch.no_grad(), without_autocast(saved[0]):
            results = _backward(ctx, saved, grads)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            anchors = [each for each in (*saved[:3], *grads) if each is not None]
            results = tuple(
                None if result is None else once(result, *anchors, message=ONCE)
                for result in results
            )
        return (*results, *[None] * 6)


def _backward(
    ctx: Any, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    rows, columns, bias = saved[:3]
    normalize_columns, precision, flags, block, centers = ctx.settings
    needs_rows, needs_columns, needs_bias = ctx.needs_input_grad[:3]
    num_classes = columns.shape[0] // centers
    grad_rows = torch.zeros_like(rows) if needs_rows else None
    # Compiled, the parts are put together at the end, each written to its place; a matrix that is
    # filled part by part would be copied as a whole for every part.
    compiling = torch.compiler.is_compiling()
    if compiling:
        rows = _after(rows, torch.stack(grads[:5]))
    grad_columns = torch.empty_like(columns) if needs_columns and not compiling else None
    parts: list[Tensor] = []
    grad_bias = torch.empty_like(bias) if needs_bias else None
    for start in range(0, num_classes, block):
        stop = min(start + block, num_classes)
        here = slice(start * centers, stop * centers)
        logits, block_columns, factor, nearest = _block_logits(
            rows,
            columns[here],
            None if bias is None else bias[here],
            normalize_columns,
            precision,
            centers,
        )
        grad = _block_gradient(logits, start, num_classes, flags, saved[3:], grads)
        if nearest is not None:
            every = grad.new_zeros(*grad.shape, centers)
            grad = every.scatter_(2, nearest, grad[..., None]).flatten(1)
        if grad_bias is not None:
            grad_bias[here] = grad.sum(0)
        if precision == "bf16":
            grad = grad.to(torch.bfloat16)  # once, for both products
        if grad_rows is not None:
            grad_rows += multiply(grad, block_columns, precision)
        if needs_columns:
            part = _columns_gradient(grad, rows, block_columns, factor, columns.dtype, precision)
            if grad_columns is None:
                parts.append(part)
            else:
                grad_columns[here] = part
    return grad_rows, torch.cat(parts) if parts else grad_columns, grad_bias


def _columns_gradient(
    grad: Tensor,
    rows: Tensor,
    block: Tensor,
    factor: Tensor | None,
    dtype: torch.dtype,
    precision: str | None,
) -> Tensor:
    """The gradient on a block of columns, which were normalised where there is a ``factor``."""
    part = multiply(grad.T, rows, precision).to(dtype)
    if factor is None:
        return part
    along = (part * block).sum(1, keepdim=True)
    return part.addcmul_(block, along, value=-1).mul_(factor)


def _block_gradient(
    logits: Tensor,
    start: int,
    num_classes: int,
    flags: tuple[bool, ...],
    statistics: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
) -> Tensor:
    """The gradient on the logits of the block that begins at ``start``; overwrites them."""
    labels, rival_index, rival, mass, moment = statistics
    want_target, want_rival, want_rest, want_spread, want_mean = flags
    grad_target, grad_rival, grad_rest, grad_spread, grad_mean = grads[:5]
    stop = start + logits.shape[1]
    if want_rest or want_spread:
        # exp(logit - rest), in an order that keeps its precision for large logits.
        below = logits.sub_(rival[:, None])
        if want_spread:
            deviation = below - moment[:, None]
            deviation.mul_((grad_spread / mass)[:, None])
            deviation.add_(((grad_spread + grad_rest) / mass)[:, None])
            grad = below.exp_().mul_(deviation)
        else:
            grad = below.exp_().mul_((grad_rest / mass)[:, None])
    else:
        grad = logits.zero_()
    if want_mean:
        grad += (grad_mean / (num_classes - 1))[:, None]
    # The target's column is overwritten, not added to: whatever exp gave there is dropped.
    position, inside = _position(labels, start, stop)
    own = grad_target[:, None] if want_target else torch.zeros_like(grad[:, :1])
    grad.scatter_(1, position, torch.where(inside, own, grad.gather(1, position)))
    if want_rival:
        position, inside = _position(rival_index, start, stop)
        grad.scatter_add_(1, position, torch.where(inside, grad_rival[:, None], 0))
    return grad


@torch.library.custom_op("largemargin::after", mutates_args=())
def _after(x: Tensor, gradients: Tensor) -> Tensor:
    """A copy that is there when gradients are.

    A compiler finds the products of the forward pass in the backward pass again and would keep
    them all, (N, C) numbers, instead of making them anew. These are of something else.
    """
    return x.clone()


@_after.register_fake
def _(x: Tensor, gradients: Tensor) -> Tensor:
    return torch.empty_like(x)
