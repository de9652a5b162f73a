"""Focal loss and label smoothing: two reweightings of cross entropy (Lin et al. 2017; LMS 13)."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.base.loss import LossOptions
from largemargin.losses.base.terms import at_target, class_count, over_targets, require, stats_of
from largemargin.losses.cross_entropy import LogitLoss
from largemargin.ops.class_stats import ComputeOptions
from largemargin.shapes import Features, Labels, PerSample, Prototypes


def focal(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    gamma: float = 2.0,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    r"""Focal loss (BAS-FOCAL), :math:`-\alpha_y(1-p_y)^\gamma\log p_y`.

    1 - p_y is formed as exp(-softplus(target - rest)), never by subtraction. gamma = 0 is cross
    entropy.

    Args:
        features: (N, D), or (N, C) logits in the two-argument form.
        prototypes: (C, D), or the labels in the two-argument form.
        labels: (N,) or soft targets (N, C).
        gamma: >= 0, default 2 (original); long-tail code often uses 1.
        alpha: (C,) factor per class, default 1. Unlike a class weight it does not enter the
            denominator of the mean.

    Departures: none.

    Example:
        >>> focal(torch.zeros(1, 2), torch.tensor([0]), gamma=1.0)
        tensor([0.3466])
    """
    check_number("gamma", gamma, at_least=0)
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(
        features,
        prototypes,
        labels,
        ("target", "rest"),
        bias=bias,
        similarity=similarity,
        scale=scale,
        how=how,
    )
    gap = require(stats.rest) - require(stats.target)
    # The factor is 1 long before the clamp. Without it the gradient at infinity would be NaN: that
    # of an ignored row too, which stands for class 0, where its bias is minus infinity.
    values = F.softplus(gap) * torch.exp(-gamma * F.softplus(-gap.clamp_max(1000)))
    if alpha is not None:
        values = values * at_target(alpha.to(values.dtype), labels, num_classes, "alpha")
    return over_targets(values, labels)


def label_smoothing(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    smoothing: float = 0.1,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    r"""Label smoothing (KOB-13; LMS 13).

    .. math:: -(1-\lambda)\log p_y - \frac\lambda C\sum_c \log p_c

    The mass lambda/C falls on the target too, as in torch. Unlike the option of the same name it
    needs no (N, C) targets, so it runs with ``impl="chunked"``.

    Args:
        features: (N, D), or (N, C) logits in the two-argument form.
        prototypes: (C, D), or the labels in the two-argument form.
        labels: (N,) or soft targets (N, C).
        smoothing: lambda in [0, 1], default 0.1 (LMS).

    Departures: none.

    Example:
        >>> label_smoothing(torch.zeros(1, 4), torch.tensor([0]))
        tensor([1.3863])
    """
    check_number("smoothing", smoothing, at_least=0, at_most=1)
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(
        features,
        prototypes,
        labels,
        ("target", "rest", "mean"),
        bias=bias,
        similarity=similarity,
        scale=scale,
        how=how,
    )
    target = require(stats.target)
    cross_entropy = F.softplus(require(stats.rest) - target)
    to_rivals = smoothing * (num_classes - 1) / num_classes
    return over_targets(cross_entropy + to_rivals * (target - require(stats.mean)), labels)


class Focal(LogitLoss):
    """Module form of :func:`focal`, with the options of :class:`Loss`."""

    alpha: Tensor | None

    def __init__(
        self,
        *,
        gamma: float = 2.0,
        alpha: Tensor | Sequence[float] | None = None,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("gamma", gamma, at_least=0)
        self.gamma = gamma
        self._keep("alpha", None if alpha is None else torch.as_tensor(alpha))

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return focal(*inputs, gamma=self.gamma, alpha=self.alpha, **logits, **self.how)


class LabelSmoothing(LogitLoss):
    """Module form of :func:`label_smoothing`, with the options of :class:`Loss`."""

    def __init__(
        self,
        *,
        smoothing: float = 0.1,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("smoothing", smoothing, at_least=0, at_most=1)
        self.smoothing = smoothing

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return label_smoothing(*inputs, smoothing=self.smoothing, **logits, **self.how)
