"""Cosine logits and statistics of logits in plain eager mode, with backward passes by hand.

The mathematics of ``dense_logits`` and ``dense_stats`` in half as many operators, which is what a
small head costs: one autograd function each, closed-form gradients, work in place. Only what a
loss needs in every step is here; everything else, compiled code, transforms and second derivatives
are those of the dense definition.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.ops.dense import ORDER, Stats, dense_stats
from largemargin.ops.matmul import multiply, without_autocast
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
    """Rows to multiply, and what their gradients need."""

    rows: Tensor
    """Unit rows, or the rows themselves where ``factor`` is left to their products."""
    size: Tensor
    """(N, 1): norms where torch's own kernel divides by them, inverse norms otherwise."""
    ones: Tensor | None = None
    """(N, 1), where torch's kernel made the rows: it would multiply them by these."""
    factor: Tensor | None = None
    """Inverse norms that the products with the rows still have to be multiplied by."""


def units(x: Tensor, most: int | None = None) -> Units:
    """Unit rows; of more than ``most`` numbers on a CPU the products are normalised instead."""
    if may_look(x):
        if most is None or x.numel() <= most:
            ones = x.new_ones(x.shape[0], 1)
            rows, norms = torch._weight_norm_interface(x.contiguous(), ones, 0)
            if all_between(norms, 2 * EPS, SQUARABLE[1]):
                return Units(rows, norms, ones)
        inverse = inverse_norms(x)
        if most is not None and all_between(inverse, 1 / SQUARABLE[1], 0.5 / EPS):
            return Units(x, inverse, None, inverse)
    else:
        inverse = inverse_norms(x)
    return Units(x * inverse, inverse)


def may_look(tensor: Tensor) -> bool:
    """Whether reading values is free."""
    return tensor.device.type == "cpu"


def launches(*tensors: Tensor) -> bool:
    """Whether the kernels of ``ops.triton.rows`` serve; on a CPU only their interpreter."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
    return _serve(tensors[0].device)


@cache
def kernels() -> Any:
    """``ops.triton.rows``, imported when it is needed: Triton takes a second."""
    return importlib.import_module("largemargin.ops.triton.rows")


@cache
def _serve(device: torch.device) -> bool:
    if device.type == "cuda":
        return HAS_TRITON and not is_too_old(device)
    return INTERPRETED and device.type == "cpu"


def units_gradient(grad: Tensor, x: Tensor, unit: Units) -> Tensor:
    """The gradient of ``x`` from that of its unit rows, which it overwrites."""
    if unit.ones is not None:
        made = torch.ops.aten._weight_norm_interface_backward(
            grad, x.contiguous(), unit.ones, unit.size, 0
        )
        found: Tensor = made[0]
        return found
    along = row_products(grad, unit.rows)
    if unit.factor is not None:
        # What the product was multiplied by is in the gradient already.
        return grad.addcmul_(unit.rows, along.mul_(unit.factor.square()), value=-1)
    return grad.addcmul_(unit.rows, along, value=-1).mul_(gradient_factor(unit.size))


class _CosineLogits(torch.autograd.Function):
    """``scale`` times the cosines of features and prototypes of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, prototypes: Tensor, scale: float, precision: str | None
    ) -> Tensor:
        ctx.launches = launches(features, prototypes)
        if ctx.launches:
            low = torch.bfloat16 if precision == "bf16" else torch.float32
            rows = Units(*kernels().unit_rows(features, low, scale))
            columns = Units(*kernels().unit_rows(prototypes, low))
            logits = multiply(rows.rows, columns.rows.T, precision)
        else:
            rows, columns = units(features), units(prototypes, NORMALIZED)
            logits = multiply(rows.rows, columns.rows.T, precision, scale)
            if columns.factor is not None:
                logits.mul_(columns.factor.T)
        ctx.save_for_backward(features, prototypes, *rows, *columns)
        ctx.scale, ctx.precision = scale, precision
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, prototypes, *saved = ctx.saved_tensors  # read once: checkpoints allow no more
        # The caller's autocast would reach the products here: the engine runs in its thread.
        with without_autocast(grad):
            if torch.is_grad_enabled() or batched_gradient(grad):
                return *_cosines_again(ctx, features, prototypes, grad), None, None
            rows, columns = Units(*saved[:4]), Units(*saved[4:])
            grads: list[Tensor | None] = [None, None]
            if ctx.launches:
                grad = grad.to(rows.rows.dtype)
                if ctx.needs_input_grad[0]:
                    wanted = multiply(grad, columns.rows, ctx.precision)
                    grads[0] = kernels().unit_rows_gradient(wanted, features, rows.size, ctx.scale)
                if ctx.needs_input_grad[1]:
                    wanted = multiply(grad.T, rows.rows, ctx.precision)
                    grads[1] = kernels().unit_rows_gradient(wanted, prototypes, columns.size)
                return *grads, None, None
            if columns.factor is not None:
                grad = grad * columns.factor.T
            if ctx.needs_input_grad[0]:
                wanted = multiply(grad, columns.rows, ctx.precision, ctx.scale)
                grads[0] = units_gradient(wanted, features, rows)
            if ctx.needs_input_grad[1]:
                wanted = multiply(grad.T, rows.rows, ctx.precision, ctx.scale)
                grads[1] = units_gradient(wanted, prototypes, columns)
            return *grads, None, None


def cosine_logits(
    features: Tensor, prototypes: Tensor, scale: float, precision: str | None
) -> Tensor:
    """(N, C) logits, float32 or float64, in plain eager mode and for a scale that is a number."""
    if prototypes.dim() == 3:
        every = cosine_logits(features, prototypes.flatten(0, 1), scale, precision)
        return pooled(every, prototypes.shape[1])
    if not launches(features, prototypes):
        features, prototypes = in_one_dtype(features, prototypes)
    with without_autocast(features):
        logits: Tensor = _CosineLogits.apply(features, prototypes, scale, precision)
    return logits


@torch.enable_grad()
def _cosines_again(
    ctx: Any, features: Tensor, prototypes: Tensor, grad: Tensor
) -> list[Tensor | None]:
    """The gradients from the dense definition: to be differentiated again, or many at once."""
    how: Any = {"bias": None, "similarity": "cosine", "scale": ctx.scale}
    logits = dense_logits(affine_form(features, prototypes, precision=ctx.precision, **how))
    needs = ctx.needs_input_grad[:2]
    wanted = [x for x, need in zip((features, prototypes), needs, strict=True) if need]
    found = iter(torch.autograd.grad(logits, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


def _index(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
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
    index, outside = (labels[:, None], None) if known else _index(labels, logits.shape[1])
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


class _SoftmaxAndDivergence(torch.autograd.Function):
    """Cross entropy with the target's logit lowered, + strength (spread - mean), none rounded.

    Spread and mean are taken less ``rest``, so that they are those of log-probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, required: float, strength: float, known: bool
    ) -> Tensor:
        count = logits.shape[1] - 1
        index, outside = (labels[:, None], None) if known else _index(labels, count + 1)
        chances = logits.scatter(1, index, -torch.inf).log_softmax(1)
        lowered = logits.scatter(1, index, -required, reduce="add") if required else logits
        own = lowered.log_softmax(1).gather(1, index).squeeze(1)
        chances.scatter_(1, index, 0.0)
        spread = row_products(chances.exp(), chances).squeeze(1)
        apart = torch.add(spread, chances.sum(1), alpha=-1 / count)
        ctx.save_for_backward(logits, labels, index, outside, chances, spread, own)
        ctx.required, ctx.strength = required, strength
        values = torch.sub(own, apart, alpha=strength).neg_()
        return values if outside is None else values.masked_fill_(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, index, outside, chances, spread, own = ctx.saved_tensors
        strength, count = ctx.strength, logits.shape[1] - 1
        if torch.is_grad_enabled() or batched_gradient(grad):
            with torch.enable_grad():
                want = ("target", "rest", "spread", "mean")
                target, _, _, rest, wide, mean = dense_stats(logits, labels, want, relative=True)
                assert target is not None and rest is not None  # noqa: PT018
                assert wide is not None and mean is not None  # noqa: PT018
                values = F.softplus(rest - target + ctx.required) + strength * (wide - mean)
                again = torch.autograd.grad(values, logits, grad, create_graph=True)
            return *again, None, None, None, None
        if outside is not None:
            grad = grad.masked_fill(outside, 0.0)
        lost = own.expm1()  # minus the probability of the rivals together
        level = torch.rsub(torch.add(lost, spread, alpha=strength), strength)
        each = torch.add(level[:, None], chances, alpha=strength).mul_(chances.exp())
        each.sub_(strength / count).scatter_(1, index, lost[:, None])
        return each.mul_(grad[:, None]), None, None, None, None


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


class _MeanOfKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ignored: Tensor) -> Tensor:
        mean, count = kernels().mean_of_kept(values, ignored)
        ctx.save_for_backward(ignored, count)
        found: Tensor = mean
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ignored, count = ctx.saved_tensors
        if torch.is_grad_enabled() or batched_gradient(grad):
            return (grad / count) * ~ignored, None
        return kernels().mean_of_kept_gradient(grad, ignored, count), None


mean_of_kept: Callable[..., Tensor] = _MeanOfKept.apply
"""The mean of the values (N,) that are not ignored, where :func:`launches`."""


class _ShiftedTarget(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, definition: Any, target: Tensor, *given: Any) -> Tensor:
        found, slope = kernels().shifted_target(target, *given)
        ctx.save_for_backward(target, slope)
        ctx.definition = definition
        made: Tensor = found
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        target, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            with torch.enable_grad():
                made = ctx.definition(target)
                (again,) = torch.autograd.grad(made, target, grad, create_graph=True)
            return None, again, *(None,) * 8
        return None, grad * slope, *(None,) * 8


shifted_target: Callable[..., Tensor] = _ShiftedTarget.apply
"""``ops.triton.rows.shifted_target``; ``definition`` of the target comes first."""


def softmax_values(
    logits: Tensor, labels: Tensor, known: bool, required: float = 0.0, strength: float = 0.0
) -> Tensor:
    """Cross entropy per sample, with the target's logit lowered and the rivals' divergence."""
    if launches(logits):
        want = ("target", "rest", "spread", "mean") if strength else ("target", "rest")
        target, _, _, rest, spread, mean = logit_stats(logits, labels, want, relative=True)
        values = F.softplus(rest - target + required)  # type: ignore[operator]
        return values + strength * (spread - mean) if strength else values  # type: ignore[operator]
    if strength or required:
        found: Tensor = _SoftmaxAndDivergence.apply(logits, labels, required, strength, known)
        return found
    index, outside = (labels[:, None], None) if known else _index(labels, logits.shape[1])
    values = F.cross_entropy(logits, index.squeeze(1), reduction="none")
    return values if outside is None else values.masked_fill(outside, torch.nan)


class _RestOverTarget(torch.autograd.Function):
    """softplus(rest - target + required): a cross entropy with all its digits, however small."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, required: float, known: bool) -> Tensor:
        index, outside = (labels[:, None], None) if known else _index(labels, logits.shape[1])
        others = logits.scatter(1, index, -torch.inf)
        rest = others.logsumexp(1)
        gap = torch.sub(rest, logits.gather(1, index).squeeze(1)).add_(required)
        ctx.save_for_backward(logits, labels, index, outside, others, rest, gap)
        ctx.required, ctx.known = required, known
        values = F.softplus(gap)
        return values if outside is None else values.masked_fill_(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, index, outside, others, rest, gap = ctx.saved_tensors
        if torch.is_grad_enabled() or batched_gradient(grad):
            with torch.enable_grad():
                target, rest, _ = target_and_rival(logits, labels, True, ctx.known)
                values = F.softplus(rest - target + ctx.required)
                again = torch.autograd.grad(values, logits, grad, create_graph=True)
            return *again, None, None, None
        grad = grad if outside is None else grad.masked_fill(outside, 0.0)
        lost = torch.ops.aten.softplus_backward(grad, gap, 1.0, 20.0)  # as torch rounds it
        each = torch.sub(others, rest[:, None]).exp_().mul_(lost[:, None])
        return each.scatter_(1, index, lost.neg()[:, None]), None, None, None


def cosine_softmax_values(
    logits: Tensor, labels: Tensor, known: bool, required: float | Tensor
) -> Tensor:
    """Cross entropy of cosine logits, which are bounded, with the target's lowered."""
    if not isinstance(required, Tensor) and not launches(logits):
        found: Tensor = _RestOverTarget.apply(logits, labels, required, known)
        return found
    if launches(logits):
        target, _, _, rest, *_ = logit_stats(logits, labels, ("target", "rest"), relative=True)
    else:
        target, rest, _ = target_and_rival(logits, labels, True, known)
    return F.softplus(rest - target + required)  # type: ignore[operator]
