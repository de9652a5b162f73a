"""The discriminative terms of class centroids, in plain eager mode, with one backward pass by hand.

Compactness, margin and norm as their losses define them, a third of the operators that autograd
would hand to the device. Second derivatives are those of the definition, which the caller gives.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from largemargin.ops.boundary import DEGENERATE, EXACT_LIMIT, nearest_rival
from largemargin.ops.eager_gradients import launches
from largemargin.ops.norms import EPS, SQUARABLE, all_between, batched_gradient, row_norms


class CentroidTerms(NamedTuple):
    """What the terms are made of beside features, prototypes and bias; none has a gradient."""

    of_sample: Tensor
    """(N,) the row of each sample's class, which is that of its centroid."""
    classes: Tensor
    """(K,)."""
    means: Tensor
    """(K, D), the features' class means."""
    compact: Tensor
    """(K, D), what samples are drawn to."""
    points: Tensor
    """(K, D), what is kept away from boundaries."""
    counts: Tensor
    """(K,) samples, 0 where a row holds no class."""
    valid: Tensor | None
    """(N,) which samples count; None for all."""
    by_class: bool
    """Row c is class c, and all are there."""
    through_compact: float
    """The derivative of ``compact`` by ``means``."""
    through_points: float
    radius: float
    power: int
    """Of compactness; 0 for a square with a linear tail."""
    tail: float
    margin: float
    margin_power: int
    with_norm: bool


def _rivals(t: CentroidTerms, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The nearest rival of every centroid; how far its row is, where that is an ordinary number."""
    if not t.by_class or t.points.is_cuda or t.counts.shape[0] * weight.numel() > EXACT_LIMIT:
        return nearest_rival(t.points, weight, t.classes, bias), None
    apart = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    ordinary = apart.is_cpu and all_between(apart.fill_diagonal_(1.0), *SQUARABLE)
    logits = t.points @ weight.T if bias is None else torch.addmm(bias, t.points, weight.T)
    ratio = (logits - logits.diagonal()[:, None]).div_(apart)
    if not ordinary:
        ratio.masked_fill_(apart <= DEGENERATE, 0.0)
    rival = ratio.fill_diagonal_(-torch.inf).argmax(1)
    return rival, apart.gather(1, rival[:, None]).squeeze(1) if ordinary else None


class _CentroidTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        definition: Callable[..., Any],
        t: CentroidTerms,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q = features if t.valid is None else torch.where(t.valid[:, None], features, 0)
        # What each class, and each of its samples, counts in a mean over classes.
        if t.by_class:
            share, counts = torch.full_like(t.counts, 1 / t.counts.shape[0]), t.counts
        else:
            share, counts = t.counts.sign(), t.counts.clamp_min(1)
            share = share / share.sum().clamp_min(1)
        each = (share / counts).index_select(0, t.of_sample)
        if t.valid is not None:
            each = each.masked_fill(~t.valid, 0.0)
        away = t.compact.index_select(0, t.of_sample) - q
        distance = row_norms(away)
        hinge = (distance - t.radius).relu_()
        if t.power == 0:
            capped = hinge.clamp_max(t.tail)
            values = (2 * hinge - capped).mul_(capped)
        else:
            values = hinge if t.power == 1 else hinge.square()
        compact = values.dot(each)

        rival, length = _rivals(t, weight, bias)
        rows = weight.index_select(0, rival)
        normal = rows - (weight if t.by_class else weight.index_select(0, t.classes))
        gap = (normal * t.points).sum(1)
        if bias is not None:
            mine = bias if t.by_class else bias.index_select(0, t.classes)
            gap += bias.index_select(0, rival) - mine
        if length is None:
            length = row_norms(normal)
            inverse = length.reciprocal().masked_fill_(length <= DEGENERATE, 0.0)
        else:
            inverse = length.reciprocal()
        signed = gap.mul_(inverse)
        kept = (signed + t.margin).relu_()
        margin = (kept if t.margin_power == 1 else kept.square()).dot(share)
        size = row_norms(t.points) if t.with_norm else None
        ctx.save_for_backward(
            *(features, weight, bias, share, counts, each, away, distance, hinge),
            *(rival, normal, inverse, signed, kept, size),
        )
        ctx.terms, ctx.definition = t, definition
        return compact, margin, None if size is None else size.dot(share)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, share, counts, each, away, distance, hinge, *more = (
            ctx.saved_tensors
        )
        rival, normal, inverse, signed, kept, size = more
        t, (g_compact, g_margin, g_norm) = ctx.terms, grads
        if torch.is_grad_enabled() or batched_gradient(g_compact):
            inputs = features, weight, bias
            needs = ctx.needs_input_grad[2:]
            return None, None, *gradients_again(ctx.definition, grads, inputs, needs)

        # Compactness: along the way from each sample to its centroid.
        if t.power == 0:
            slope = hinge.clamp_max(t.tail).mul_(2)
        else:
            slope = 2 * hinge if t.power == 2 else hinge.sign()
        pull = slope.mul_(each).mul_(g_compact)
        pull = pull.div_(distance.clamp_min(EPS))  # at 0 the slope is 0
        to_center = away * pull[:, None]
        # Margin: of every centroid, along the normal of its nearest boundary.
        push = kept.sign() if t.margin_power == 1 else 2 * kept
        push = push.mul_(share).mul_(g_margin).mul_(inverse)[:, None]
        points = normal * push
        if size is not None:
            long = (share * g_norm).div_(size.clamp_min(EPS))
            points.addcmul_(t.points, long[:, None])
        g_features = g_weight = g_bias = None
        if ctx.needs_input_grad[2]:
            sums = torch.zeros_like(t.means).index_add_(0, t.of_sample, to_center)
            sums.mul_(t.through_compact).add_(points, alpha=t.through_points)
            sums.div_(counts[:, None])
            g_features = sums.index_select(0, t.of_sample).sub_(to_center)
            if t.valid is not None:
                g_features.masked_fill_(~t.valid[:, None], 0.0)
        if ctx.needs_input_grad[3]:
            tilt = torch.addcmul(t.points, normal, (signed * inverse)[:, None], value=-1)
            g_weight = _differences(t, tilt.mul_(push), rival, weight)
        if bias is not None and ctx.needs_input_grad[4]:
            g_bias = _differences(t, push[:, 0], rival, bias)
        return None, None, g_features, g_weight, g_bias


def _differences(t: CentroidTerms, grad: Tensor, rival: Tensor, like: Tensor) -> Tensor:
    """The gradient of rows from that of rival rows less own ones."""
    if t.by_class:
        return (-grad).index_add_(0, rival, grad)
    empty = torch.zeros_like(like, dtype=grad.dtype)
    return empty.index_add_(0, rival, grad).index_add_(0, t.classes, grad, alpha=-1)


centroid_terms: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = _CentroidTerms.apply
"""Compactness, margin and norm, means over the classes present.

``definition`` makes the same of features, prototypes and bias by autograd.
"""


LONGEST = 4096
"""Samples of a batch, and numbers of a row, up to which the kernels serve."""
SEARCHED = 2**28
"""Numbers that the kernels read in their search for rivals, of all centroids together."""


@cache
def kernels() -> Any:
    """``ops.triton.centroids``, imported when it is needed: Triton takes a second."""
    return importlib.import_module("largemargin.ops.triton.centroids")


def kernels_serve(features: Tensor, weight: Tensor, labels: Tensor) -> bool:
    """Whether the terms of a batch are computed by kernels."""
    return (
        launches(features, weight)
        and labels.dtype is torch.int64
        and 0 < features.shape[0] <= LONGEST
        and weight.shape[1] <= LONGEST
        and min(features.shape[0], weight.shape[0]) * weight.numel() <= SEARCHED
    )


class _KernelTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        definition: Callable[..., Any],
        t: CentroidTerms,
        labels: Tensor,
        ignore: int | None,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        parts, saved = kernels().centroid_terms(features, labels, weight, bias, t, ignore)
        ctx.save_for_backward(labels, features, weight, bias, *saved)
        ctx.definition, ctx.terms, ctx.ignore = definition, t, ignore
        found: tuple[Tensor, ...] = parts[: 3 if t.with_norm else 2].sum(1).unbind()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        labels, features, weight, bias, *saved = ctx.saved_tensors
        if torch.is_grad_enabled() or batched_gradient(grads[0]):
            inputs = features, weight, bias
            needs = ctx.needs_input_grad[4:]
            return *(None,) * 4, *gradients_again(ctx.definition, grads, inputs, needs)
        t, needs, kept = ctx.terms, ctx.needs_input_grad[4:], kernels().Saved(*saved)
        g_features = g_weight = g_bias = None
        if needs[0]:
            g_features = kernels().features_gradient(
                grads, features, labels, weight, t, ctx.ignore, kept
            )
        if needs[1] or needs[2]:
            found = kernels().prototypes_gradient(grads[1], labels, weight, bias, t, kept)
            g_weight, g_bias = found
        return None, None, None, None, g_features, g_weight, g_bias


def gradients_again(
    definition: Callable[..., Any],
    grads: Sequence[Tensor | None],
    inputs: tuple[Tensor | None, ...],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients by autograd from the definition: to be differentiated again."""
    with torch.enable_grad():
        made = definition(*inputs)
        given = [
            (m, g)
            for m, g in zip(made, grads, strict=False)
            if m is not None and g is not None and m.requires_grad
        ]
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need and x is not None]
        values, by = zip(*given, strict=True)
        found = iter(
            torch.autograd.grad(values, wanted, by, create_graph=True, materialize_grads=True)
        )
    return [next(found) if need else None for need in needs]


kernel_terms: Callable[..., tuple[Tensor, ...]] = _KernelTerms.apply
"""Compactness, margin and, where it is wanted, norm by kernels; NaN where a label is no class.

Of (definition, terms, labels, ignored label or None, features, weight, bias). ``counts`` are those
of slots, ``classes`` and ``valid`` are not read.
"""
