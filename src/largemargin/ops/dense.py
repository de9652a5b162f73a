"""The definition of the class statistics, on (N, C) logits. Twice differentiable."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

DENSE_LIMIT = 2**22
"""``impl="auto"`` keeps the N x C logits (twice differentiable) up to this many of them."""


def dense_limit(device: str, precision: str | None) -> int:
    """``DENSE_LIMIT``; on a GPU more, since it is faster and plain torch takes more memory.

    Measured by ``benchmarks/heads_cuda.py``. What comes next with products in bfloat16, the tile
    kernels, is faster from fewer classes on than what comes next in float32.
    """
    if device != "cuda":
        return DENSE_LIMIT
    return 2**25 if precision == "bf16" else 2**27


ORDER = ("target", "rival", "rest", "spread", "mean")

Stats: TypeAlias = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


def hidden(dtype: torch.dtype) -> float:
    """Stands for minus infinity: finite, so that 0 times it is 0 and its difference to itself too.

    What ``rest`` is at least, of classes whose biases are all minus infinity.
    """
    return torch.finfo(dtype).min / 4


def wanted_stats(
    values: Iterable[Tensor], rival_index: Tensor, row_bias: Tensor | None, want: tuple[str, ...]
) -> Stats:
    """Those of the values, in ``ORDER``, that were asked for; every logit has the row's bias."""
    target, rival, rest, spread, mean = (
        None if name not in want else value if row_bias is None else value + row_bias
        for name, value in zip(ORDER, values, strict=True)
    )
    return target, rival, None if rival is None else rival_index, rest, spread, mean


def dense_stats(
    logits: Tensor, labels: Tensor, want: tuple[str, ...], *, relative: bool = False
) -> Stats:
    """(target, rival, rival_index, rest, spread, mean) around hard labels or every class.

    ``relative`` leaves out a number common to all of them, one per sample and without gradient, so
    that their differences keep the digits that large logits would round away.
    """
    if labels.dim() == 2:
        return _every_class_in_turn(logits, want, relative)
    num_classes = logits.shape[1]
    labels = labels.long()
    outside = (labels < 0) | (labels >= num_classes)
    index = labels.clamp(0, num_classes - 1)[:, None]
    target = rival = rival_index = rest = spread = mean = None
    if "target" in want:
        target = logits.gather(1, index).squeeze(1)
    if set(want) - {"target"}:
        others = logits.scatter(1, index, -torch.inf)
        if "rival" in want:
            rival, rival_index = others.max(dim=1)
        rest, spread, mean, shift = _of_rivals(others, index, want)
        if shift is not None and relative:
            target, rival = _plus((target, rival), -shift)
        elif shift is not None:
            rest, spread, mean = _plus((rest, spread, mean), shift)
    target, rival, rest, spread, mean = (
        None if value is None else value.masked_fill(outside, torch.nan)
        for value in (target, rival, rest, spread, mean)
    )
    return target, rival, rival_index, rest, spread, mean


def _plus(values: tuple[Tensor | None, ...], shift: Tensor) -> Iterable[Any]:
    return (None if value is None else shift + value for value in values)


def _of_rivals(
    others: Tensor, index: Tensor, want: tuple[str, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(rest, spread, mean) of logits whose target, in column ``index``, is minus infinity.

    All less the largest of them, which comes last: equal logits of any size leave exactly 0, and
    posteriors have no rounding error of the largest logit, as those of logsumexp do. In the
    gradient of a divergence the posteriors of rest and spread cancel.
    """
    rest = spread = mean = None
    if not {"rest", "spread", "mean"} & set(want):
        return rest, spread, mean, None
    shift = others.detach().amax(dim=1, keepdim=True).clamp_min(hidden(others.dtype))
    others, shift = others - shift, shift.squeeze(1)
    if "rest" in want or "spread" in want:
        weights = torch.exp(others)
        mass = weights.sum(1)
        if "rest" in want:
            # At least 1, but 0 where all rivals are minus infinity: they get no gradient then.
            rest = torch.log(mass.clamp_min(torch.finfo(mass.dtype).tiny))
    if "spread" in want or "mean" in want:
        finite = others.scatter(1, index, 0.0)
        if "spread" in want:
            spread = (weights * finite).sum(1) / mass
        if "mean" in want:
            mean = finite.sum(1) / (others.shape[1] - 1)
    return rest, spread, mean, shift


def _every_class_in_turn(logits: Tensor, want: tuple[str, ...], relative: bool) -> Stats:
    """Leave-one-out statistics of shape (N, C) in O(NC).

    Taking class c out of the total is a subtraction, harmless unless c holds most of the mass. So
    the largest logit's column is computed from the others; every other column has posterior at
    most 1/2, where log(1 - p) and division by 1 - p are well conditioned.
    """
    num_classes = logits.shape[1]
    given = logits
    shift = logits.detach().amax(dim=1, keepdim=True)
    logits = logits - shift
    target = (logits if relative else given) if "target" in want else None
    top, top_index = logits.max(dim=1, keepdim=True)
    is_top = torch.zeros_like(logits, dtype=torch.bool).scatter(1, top_index, True)
    others = logits.masked_fill(is_top, -torch.inf)
    rival = rival_index = rest = spread = mean = None
    if "rival" in want:
        second, second_index = others.max(dim=1, keepdim=True)
        rival = torch.where(is_top, second, top)
        rival_index = torch.where(is_top, second_index, top_index)
    if "rest" in want or "spread" in want:
        total = torch.logsumexp(logits, dim=1, keepdim=True)
        rest_of_top = torch.logsumexp(others, dim=1, keepdim=True)
        posterior = torch.exp(logits - total).masked_fill(is_top, 0.0)
        if "rest" in want:
            rest = torch.where(is_top, rest_of_top, total + torch.log1p(-posterior))
        if "spread" in want:
            below = posterior * logits.masked_fill(is_top, 0.0)
            # The top's own term is 0 in value, because the shift made it so, but not in gradient.
            all_terms = below.sum(1, keepdim=True) + torch.exp(top - total) * top
            without = (all_terms - below) / (1 - posterior)
            runner_up = others.detach().amax(dim=1, keepdim=True)
            apart = (others - runner_up).masked_fill(is_top, 0.0)
            of_top = runner_up + (torch.exp(others - rest_of_top) * apart).sum(1, keepdim=True)
            spread = torch.where(is_top, of_top, without)
    if "mean" in want:
        mean = (logits.sum(1, keepdim=True) - logits) / (num_classes - 1)
    if not relative:
        rival, rest, spread, mean = _plus((rival, rest, spread, mean), shift)
    return target, rival, rival_index, rest, spread, mean
