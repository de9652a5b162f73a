"""Target and rest of scaled cosines in plain eager mode, for the losses that need nothing else.

The mathematics of ``dense_logits`` and ``dense_stats`` with a backward pass written by hand: half
as many operators, which is what a small head costs, and one (N, C) buffer is kept and the others
are worked on in place. On the CPU the prototypes are not normalised but the columns of their
product, which are as long as the batch. Second derivatives are those of the dense definition.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from largemargin.ops.dense import dense_stats
from largemargin.ops.matmul import multiply, without_autocast
from largemargin.ops.norms import (
    EPS,
    SQUARABLE,
    all_between,
    gradient_factor,
    inverse_norms,
    row_products,
)
from largemargin.ops.similarity import affine_form, dense_logits
from largemargin.tracing import plain_eager

WANT = ("target", "rest")


def fusable(labels: Tensor, bias: Tensor | None, similarity: str, want: tuple[str, ...]) -> bool:
    """Whether ``fused_stats`` computes what is asked for."""
    return (
        similarity == "cosine"
        and set(want) == set(WANT)
        and labels.dim() == 1
        and bias is None
        and plain_eager()
    )


class _TargetAndRest(torch.autograd.Function):
    """The target and rest that ``dense_stats`` finds, where :func:`fusable` and s is a number.

    Features and prototypes have one dtype, labels are int64; ``known`` ones are known to be
    classes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        prototypes: Tensor,
        labels: Tensor,
        scale: float,
        precision: str | None,
        known: bool,
    ) -> tuple[Tensor, Tensor]:
        inverse = inverse_norms(features)
        rows = features * (inverse * scale)
        # columns * column_scale are the unit prototypes. Extreme ones are normalised first, so
        # that neither the product nor the gradients leave the range of the dtype; elsewhere than
        # on the CPU all are, since looking would wait for the device.
        columns, column_inverse = prototypes, inverse_norms(prototypes)
        column_scale: Tensor | None = column_inverse
        if not (_may_look(prototypes) and all_between(column_inverse, 1 / SQUARABLE[1], 0.5 / EPS)):
            columns, column_scale = prototypes * column_inverse, None
        logits = multiply(rows, columns.T, precision)
        if column_scale is not None:
            logits.mul_(column_scale.T)
        index = labels[:, None]
        outside = None
        if not known:
            index = index.clamp(0, prototypes.shape[0] - 1)
            outside = (index != labels[:, None]).squeeze(1)
        target = logits.gather(1, index).squeeze(1)
        highest = logits.scatter_(1, index, -torch.inf).amax(dim=1, keepdim=True)
        weights = logits.sub_(highest).exp_()
        mass = weights.sum(1)
        rest = mass.log().add_(highest.squeeze(1))
        ctx.save_for_backward(
            features,
            prototypes,
            labels,
            rows,
            inverse,
            columns,
            column_scale,
            column_inverse,
            weights,
            mass,
            index,
            outside,
        )
        ctx.scale, ctx.precision = scale, precision
        if outside is not None:
            target.masked_fill_(outside, torch.nan)
            rest.masked_fill_(outside, torch.nan)
        return target, rest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The caller's autocast would reach the products here: the engine runs in its thread.
        with without_autocast(grads[0]):
            found = _differentiable if torch.is_grad_enabled() else _in_place
            return (*found(ctx, *grads), None, None, None, None)


fused_stats: Callable[..., tuple[Tensor, Tensor]] = _TargetAndRest.apply


def _may_look(tensor: Tensor) -> bool:
    """Whether reading values is free."""
    return tensor.device.type == "cpu"


def _in_place(ctx: Any, grad_target: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing allows no more
    rows, inverse, columns, column_scale, column_inverse = saved[3:8]
    weights, mass, index, outside = saved[8:]
    grad_features = grad_prototypes = None
    grad_rest = grad_rest / mass
    if outside is not None:
        grad_rest = grad_rest.masked_fill(outside, 0.0)
        grad_target = grad_target.masked_fill(outside, 0.0)
    grad = weights * grad_rest[:, None]
    grad.scatter_(1, index, grad_target[:, None])
    if column_scale is not None:
        grad.mul_(column_scale.T)
    if ctx.needs_input_grad[0]:
        grad_features = multiply(grad, columns, ctx.precision)
        along = row_products(grad_features, rows)
        grad_features.addcmul_(rows, along, value=-1 / ctx.scale**2)
        grad_features.mul_(gradient_factor(inverse) * ctx.scale)
    if ctx.needs_input_grad[1]:
        grad_prototypes = multiply(grad.T, rows, ctx.precision)
        along = row_products(grad_prototypes, columns)
        if column_scale is not None:
            along.mul_(column_scale.square())
        grad_prototypes.addcmul_(columns, along, value=-1)
        if column_scale is None:
            grad_prototypes.mul_(gradient_factor(column_inverse))
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
