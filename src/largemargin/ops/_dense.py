"""The definition of the class statistics, on (N, C) logits. Twice differentiable."""

import torch
from torch import Tensor

Stats = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


def dense_stats(logits: Tensor, labels: Tensor, want: tuple[str, ...]) -> Stats:
    """(target, rival, rival_index, rest, spread, mean) around hard labels or every class."""
    if labels.dim() == 2:
        return _every_class_in_turn(logits, want)
    num_classes = logits.shape[1]
    outside = (labels < 0) | (labels >= num_classes)
    index = labels.long().clamp(0, num_classes - 1)[:, None]
    target = rival = rival_index = rest = spread = mean = None
    if "target" in want:
        target = logits.gather(1, index).squeeze(1).masked_fill(outside, torch.nan)
    if {"rival", "rest", "spread"} & set(want):
        others = logits.scatter(1, index, -torch.inf)
        if "rival" in want:
            rival, rival_index = others.max(dim=1)
        if "rest" in want or "spread" in want:
            rest = torch.logsumexp(others, dim=1)
        if "spread" in want and rest is not None:
            posterior = torch.exp(others - rest[:, None])
            spread = (posterior * logits.scatter(1, index, 0.0)).sum(1)
    if "mean" in want:
        mean = logits.scatter(1, index, 0.0).sum(1) / (num_classes - 1)
    return target, rival, rival_index, rest if "rest" in want else None, spread, mean


def _every_class_in_turn(logits: Tensor, want: tuple[str, ...]) -> Stats:
    """Leave-one-out statistics of shape (N, C) in O(NC).

    Taking class c out of the total is a subtraction, harmless unless c holds most of the mass. So
    the largest logit's column is computed from the others; every other column has posterior at
    most 1/2, where log(1 - p) and division by 1 - p are well conditioned.
    """
    num_classes = logits.shape[1]
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
            shifted = logits - top.detach()
            finite = shifted.masked_fill(is_top, 0.0)
            below = posterior * finite
            of_top = (torch.exp(others - rest_of_top) * finite).sum(1, keepdim=True)
            weight_of_top = torch.exp(top - total)
            all_terms = below.sum(1, keepdim=True) + weight_of_top * (top - top.detach())
            without = (all_terms - below) / (1 - posterior)
            spread = top.detach() + torch.where(is_top, of_top, without)
    if "mean" in want:
        mean = (logits.sum(1, keepdim=True) - logits) / (num_classes - 1)
    target = logits if "target" in want else None
    return target, rival, rival_index, rest, spread, mean
