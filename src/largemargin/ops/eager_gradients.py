"""Cosine logits and statistics of logits in plain eager mode, with backward passes by hand.

The mathematics of ``dense_logits`` and ``dense_stats`` in half as many operators, which is what a
small head costs: one autograd function each, closed-form gradients, work in place. Only what a
loss needs in every step is here; everything else, compiled code, transforms and second derivatives
are those of the dense definition.
"""

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.ops.dense import ORDER, Stats, dense_stats
from largemargin.ops.matmul import matmul, multiply, without_autocast
from largemargin.ops.norms import (
    EPS,
    SQUARABLE,
    all_between,
    batched_gradient,
    gradient_factor,
    inverse_norms,
    row_products,
)
from largemargin.ops.similarity import affine_form, dense_logits, in_one_dtype, pooled
from largemargin.ops.triton.availability import HAS_TRITON, INTERPRETED, is_too_old
from largemargin.tracing import plain_eager

NORMALIZED = 2**20
"""Up to so many numbers class vectors are normalised on a CPU; of more, their products are."""


class Units(NamedTuple):
    """Unit rows times a number, to be multiplied, and what their gradients need."""

    rows: Tensor
    """Those, or the rows themselves where ``factor`` is left to their products."""
    size: Tensor
    """(N, 1): norms where torch's own kernel divides by them, inverse norms otherwise."""
    length: Tensor | None = None
    """(N, 1), the number, where torch's kernel made the rows."""
    factor: Tensor | None = None
    """Inverse norms that the products with the rows still have to be multiplied by."""


def units(x: Tensor, length: float = 1.0, most: int | None = None) -> Units:
    """Rows of a length; of more than ``most`` numbers on a CPU the products are normalised."""
    if may_look(x):
        if most is None or x.numel() <= most:
            lengths = x.new_full((x.shape[0], 1), length)
            rows, norms = torch._weight_norm_interface(x.contiguous(), lengths, 0)
            if all_between(norms, 2 * EPS, SQUARABLE[1]):
                return Units(rows, norms, lengths)
        inverse = inverse_norms(x)
        if most is not None and all_between(inverse, 1 / SQUARABLE[1], 0.5 / EPS):
            return Units(x, inverse, None, inverse)
    else:
        inverse = inverse_norms(x)
    return Units(x * (inverse if length == 1 else inverse * length), inverse)


def may_look(tensor: Tensor) -> bool:
    """Whether reading values is free."""
    return tensor.device.type == "cpu"


def launches(*tensors: Tensor) -> bool:
    """Whether the kernels of ``ops.triton.rows`` serve; on a CPU only their interpreter."""
    if not _serve(tensors[0].device):
        return False
    return all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors)


@cache
def kernels() -> Any:
    """``ops.triton.rows``, imported when it is needed: Triton takes a second."""
    return importlib.import_module("largemargin.ops.triton.rows")


@cache
def _serve(device: torch.device) -> bool:
    if device.type == "cuda":
        return HAS_TRITON and not is_too_old(device)
    return INTERPRETED and device.type == "cpu"


def units_gradient(grad: Tensor, x: Tensor, unit: Units, length: float, launched: bool) -> Tensor:
    """The gradient of ``x`` from that of its rows of a length, which it overwrites."""
    if launched:
        return kernels().unit_rows_gradient(grad, x, unit.size, length)  # type: ignore[no-any-return]
    if unit.length is not None:
        size = unit.length, unit.size
        found: Tensor = _WEIGHT_NORM_GRADIENT(grad, x.contiguous(), *size, 0)[0]
        return found
    along = row_products(grad, unit.rows)
    if unit.factor is not None:
        # What the product was multiplied by is in the gradient already.
        return grad.addcmul_(unit.rows, along.mul_(unit.factor.square()), value=-1)
    grad.addcmul_(unit.rows, along, value=-(length**-2))
    return grad.mul_(gradient_factor(unit.size) * length)


_WEIGHT_NORM_GRADIENT = torch.ops.aten._weight_norm_interface_backward.default


class _CosineLogits(torch.autograd.Function):
    """``scale`` times the cosines of features and prototypes of one dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        scale: float,
        precision: str | None,
        launched: bool,
    ) -> Tensor:
        if launched:
            low = torch.bfloat16 if precision == "bf16" else torch.float32
            rows = Units(*kernels().unit_rows(features, low, scale))
            columns = Units(*kernels().unit_rows(prototypes, low))
        else:
            rows, columns = units(features, scale), units(prototypes, most=NORMALIZED)
        logits = multiply(rows.rows, columns.rows.T, precision)
        if columns.factor is not None:
            logits.mul_(columns.factor.T)
        ctx.save_for_backward(features, prototypes, *rows, *columns)
        ctx.scale, ctx.precision, ctx.launched = scale, precision, launched
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, prototypes, *saved = ctx.saved_tensors  # read once: checkpoints allow no more
        # The caller's autocast would reach the products here: the engine runs in its thread.
        with without_autocast(grad):
            if torch.is_grad_enabled() or batched_gradient(grad):
                return *_cosines_again(ctx, features, prototypes, grad), None, None, None
            rows, columns = Units(*saved[:4]), Units(*saved[4:])
            grad = grad.to(rows.rows.dtype)
            if columns.factor is not None:
                grad = grad * columns.factor.T
            found: list[Tensor | None] = [None, None]
            if ctx.needs_input_grad[0]:
                wanted = multiply(grad, columns.rows, ctx.precision)
                found[0] = units_gradient(wanted, features, rows, ctx.scale, ctx.launched)
            if ctx.needs_input_grad[1]:
                wanted = multiply(grad.T, rows.rows, ctx.precision)
                found[1] = units_gradient(wanted, prototypes, columns, 1.0, ctx.launched)
            return *found, None, None, None


def cosine_logits(
    features: Tensor, prototypes: Tensor, scale: float, precision: str | None
) -> Tensor:
    """(N, C) logits, float32 or float64, in plain eager mode and for a scale that is a number."""
    if prototypes.dim() == 3:
        every = cosine_logits(features, prototypes.flatten(0, 1), scale, precision)
        return pooled(every, prototypes.shape[1])
    launched = launches(features, prototypes)
    if not launched:
        features, prototypes = in_one_dtype(features, prototypes)
    with without_autocast(features):
        how = scale, precision, launched
        logits: Tensor = _CosineLogits.apply(features, prototypes, *how)
    return logits


class _LowProduct(torch.autograd.Function):
    """Dot products of rows rounded to bfloat16, in float32."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, prototypes: Tensor) -> Tensor:
        rows, columns = features.to(torch.bfloat16), prototypes.to(torch.bfloat16)
        ctx.save_for_backward(features, prototypes, rows, columns)
        return multiply(rows, columns.T, "bf16")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, prototypes, rows, columns = ctx.saved_tensors
        with without_autocast(grad):
            if torch.is_grad_enabled() or batched_gradient(grad):
                with torch.enable_grad():
                    logits = matmul(*in_one_dtype(features, prototypes.T), "bf16")
                return tuple(_again(ctx, logits, features, prototypes, grad))
            low = grad.to(torch.bfloat16)
            found: list[Tensor | None] = [None, None]
            if ctx.needs_input_grad[0]:
                found[0] = multiply(low, columns, "bf16").to(features.dtype)
            if ctx.needs_input_grad[1]:
                found[1] = multiply(low.T, rows, "bf16").to(prototypes.dtype)
        return (*found,)


def dot_logits(
    features: Tensor, prototypes: Tensor, bias: Tensor | None, precision: str | None
) -> Tensor:
    """(N, C) dot products in float32, plus the bias, in plain eager mode."""
    with without_autocast(features):
        if precision == "bf16":
            logits: Tensor = _LowProduct.apply(features, prototypes)
            return logits if bias is None else logits + bias
        return F.linear(*in_one_dtype(features, prototypes), bias)


@torch.enable_grad()
def _cosines_again(
    ctx: Any, features: Tensor, prototypes: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """The gradients from the dense definition: to be differentiated again, or many at once."""
    how: Any = {"bias": None, "similarity": "cosine", "scale": ctx.scale}
    logits = dense_logits(affine_form(features, prototypes, precision=ctx.precision, **how))
    return _again(ctx, logits, features, prototypes, grad)


@torch.enable_grad()
def _again(
    ctx: Any, logits: Tensor, features: Tensor, prototypes: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """Gradients of the two that want one, which can be differentiated again."""
    needs = ctx.needs_input_grad[:2]
    wanted = [x for x, need in zip((features, prototypes), needs, strict=True) if need]
    found = iter(torch.autograd.grad(logits, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


def class_index(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The column (N, 1) of each label, and which labels are no classes (N,)."""
    index = labels[:, None]
    inside = index.clamp(0, num_classes - 1)
    return inside, (inside != index).squeeze(1)


def target_and_rival(
    logits: Tensor, labels: Tensor, rest: bool, known: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The target's logit, and the largest of the others or (``rest``) their log-sum-exp.

    Of bounded logits; ``known`` labels are known to be classes, others get NaN.
    """
    index, outside = (labels[:, None], None) if known else class_index(labels, logits.shape[1])
    rival: Tensor | None = None
    if rest:
        target = logits.gather(1, index).squeeze(1)
        second = logits.scatter(1, index, -torch.inf).logsumexp(1)
    else:
        rival = logits.detach().scatter(1, index, -torch.inf).argmax(1)
        target, second = logits.gather(1, torch.cat((index, rival[:, None]), 1)).unbind(1)
    if outside is not None:
        target, second = (each.masked_fill(outside, torch.nan) for each in (target, second))
    return target, second, rival


class _KernelStats(torch.autograd.Function):
    """All statistics of float32 logits by one kernel each way; those not wanted are left out."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, want: tuple[str, ...], relative: bool
    ) -> tuple[Tensor, ...]:
        stats = kernels().row_stats(logits, labels, relative)
        ctx.save_for_backward(logits, labels, *stats)
        ctx.want, ctx.relative = want, relative
        ctx.mark_non_differentiable(stats.rival)
        ctx.set_materialize_grads(False)
        parts = dict(zip(ORDER, stats.found.unbind(), strict=True))
        return *(parts[name] for name in want), stats.rival

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, *stats = ctx.saved_tensors
        given = {name: g for name, g in zip(ctx.want, grads, strict=False) if g is not None}
        if not given:
            return None, None, None, None
        if torch.is_grad_enabled() or any(map(batched_gradient, given.values())):
            with torch.enable_grad():
                stats = dense_stats(logits, labels, ctx.want, relative=ctx.relative)
                parts = dict(zip(ORDER, (*stats[:2], *stats[3:]), strict=True))
                made = [part for name in given if (part := parts[name]) is not None]
                again = torch.autograd.grad(made, logits, [*given.values()], create_graph=True)
            return *again, None, None, None
        wanted = tuple(map(given.get, ORDER))
        RowStats = kernels().RowStats
        grad = kernels().row_stats_gradient(logits, labels, RowStats(*stats), wanted)
        return grad, None, None, None


def logit_stats(
    logits: Tensor, labels: Tensor, want: tuple[str, ...], *, relative: bool = False
) -> Stats:
    """``dense_stats``, by kernels where they serve."""
    if labels.dim() != 1 or not plain_eager() or not launches(logits):
        return dense_stats(logits, labels, want, relative=relative)
    *found, index = _KernelStats.apply(logits, labels.long(), want, relative)
    parts = dict(zip(want, found, strict=True))
    target, rival, rest, spread, mean = map(parts.get, ORDER)
    return target, rival, None if rival is None else index, rest, spread, mean
