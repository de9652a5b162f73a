"""Target and rest of scaled cosines on the CPU, for the margin losses that need nothing else.

The mathematics of ``dense_logits`` and ``dense_stats`` with a backward pass written by hand. The
prototypes are not normalised but the columns of their product, which are as long as the batch;
one (N, C) buffer is kept and the others are worked on in place. Second derivatives are those of
the dense definition.
"""

from typing import Any

import torch
from torch import Tensor

from largemargin.ops._dense import Stats, dense_stats
from largemargin.ops.product import multiply
from largemargin.ops.rows import (
    EPS,
    SQUARABLE,
    gradient_factor,
    inverse_norms,
    plain_eager,
    unit_rows,
)
from largemargin.ops.similarity import affine_form, dense_logits, in_one_dtype

WANT = ("target", "rest")


def fusable(labels: Tensor, bias: Tensor | None, similarity: str, want: tuple[str, ...]) -> bool:
    """Whether :func:`fused_stats` computes what is asked for; it branches on values."""
    return (
        similarity == "cosine"
        and set(want) == set(WANT)
        and labels.dim() == 1
        and bias is None
        and labels.device.type == "cpu"
        and plain_eager()
    )


def fused_stats(
    features: Tensor, prototypes: Tensor, labels: Tensor, *, scale: float, precision: str | None
) -> Stats:
    """The target and rest that ``dense_stats`` finds, where :func:`fusable` and s is a number."""
    features, prototypes = in_one_dtype(features, prototypes)
    target, rest = _TargetAndRest.apply(features, prototypes, labels.long(), scale, precision)
    return target, None, None, rest, None, None


class _TargetAndRest(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        labels: Tensor,
        scale: float,
        precision: str | None,
    ) -> tuple[Tensor, Tensor]:
        inverse = inverse_norms(features)
        rows, row_factor = features * (inverse * scale), gradient_factor(inverse) * scale
        # columns * column_scale are the unit prototypes. Extreme ones are normalised first, so
        # that neither the product nor the gradients leave the range of the dtype.
        columns, column_scale, column_factor = prototypes, inverse_norms(prototypes), None
        if not bool(((column_scale > 1 / SQUARABLE[1]) & (column_scale < 1 / EPS)).all()):
            columns, column_factor = unit_rows(prototypes)
            column_scale = torch.ones_like(column_scale)
        logits = multiply(rows, columns.T, precision).mul_(column_scale.T)
        index = labels.clamp(0, prototypes.shape[0] - 1)[:, None]
        target = logits.gather(1, index).squeeze(1)
        highest = logits.scatter_(1, index, -torch.inf).amax(dim=1, keepdim=True)
        weights = logits.sub_(highest).exp_()
        mass = weights.sum(1)
        rest = mass.log().add_(highest.squeeze(1))
        outside = (index != labels[:, None]).squeeze(1)
        ctx.save_for_backward(
            features,
            prototypes,
            labels,
            rows,
            row_factor,
            columns,
            column_scale,
            column_factor,
            weights,
            mass,
            index,
            outside,
        )
        ctx.scale, ctx.precision = scale, precision
        return target.masked_fill_(outside, torch.nan), rest.masked_fill_(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The caller's autocast would reach the products here: the engine runs in its thread.
        with torch.autocast("cpu", enabled=False):
            found = _differentiable if torch.is_grad_enabled() else _in_place
            return (*found(ctx, *grads), None, None, None)


def _in_place(ctx: Any, grad_target: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
    rows, row_factor, columns, column_scale, column_factor = saved[3:8]
    weights, mass, index, outside = saved[8:]
    grad_features = grad_prototypes = None
    grad = weights * (grad_rest / mass).masked_fill_(outside, 0.0)[:, None]
    grad.scatter_(1, index, grad_target.masked_fill(outside, 0.0)[:, None]).mul_(column_scale.T)
    if ctx.needs_input_grad[0]:
        grad_features = multiply(grad, columns, ctx.precision)
        along = (grad_features * rows).sum(1, keepdim=True).div_(ctx.scale)
        grad_features.addcmul_(rows, along, value=-1 / ctx.scale).mul_(row_factor)
    if ctx.needs_input_grad[1]:
        grad_prototypes = multiply(grad.T, rows, ctx.precision)
        along = (grad_prototypes * columns).sum(1, keepdim=True).mul_(column_scale.square())
        grad_prototypes.addcmul_(columns, along, value=-1)
        if column_factor is not None:
            grad_prototypes.mul_(column_factor)
    return grad_features, grad_prototypes


def _differentiable(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients from the dense definition, to be differentiated again."""
    features, prototypes, labels = ctx.saved_tensors[:3]
    form = affine_form(
        features,
        prototypes,
        bias=None,
        similarity="cosine",
        scale=ctx.scale,
        precision=ctx.precision,
    )
    target, _, _, rest, _, _ = dense_stats(dense_logits(form), labels, WANT)
    assert target is not None
    assert rest is not None
    needs = ctx.needs_input_grad[:2]
    inputs = [x for x, need in zip((features, prototypes), needs, strict=True) if need]
    found = iter(torch.autograd.grad((target, rest), inputs, grads, create_graph=True))
    return tuple(next(found) if need else None for need in needs)
