"""Softmax loss (LMD 3.3; LMS 2), focal loss (Lin et al. 2017) and label smoothing (LMS 13)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import SHARE, Dimension, Limits, Range
from largemargin.losses.base.terms import (
    LogitOptions,
    at_target,
    class_count,
    over_targets,
    require,
    stats_of,
)
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class CrossEntropy(LogitLoss):
    r"""Softmax loss, the baseline of every comparison (LMD eq. 3.3, LMS eq. 2).

    .. math:: \ell = \log\sum_j e^{z_j} - z_y = \mathrm{softplus}(\mathrm{rest} - \mathrm{target})

    Call it with (features, prototypes, labels) or with (logits, labels). Departure: none.

    Args:
        similarity, scale, options: those of every :class:`LogitLoss`.

    Example:
        Two equal logits cost log 2:

        >>> CrossEntropy()(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "cross_entropy"
    term: ClassVar[str] = "softmax"

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return cross_entropy(*inputs, **logits, **self.how)


def cross_entropy(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Softmax loss per sample; :class:`CrossEntropy` has equation, arguments and an example."""
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest"), options)
    return over_targets(F.softplus(require(stats.rest) - require(stats.target)), labels)


class Focal(LogitLoss):
    r"""Focal loss (BAS-FOCAL), :math:`-\alpha_y(1-p_y)^\gamma\log p_y`.

    1 - p_y is formed as exp(-softplus(target - rest)), never by subtraction. gamma = 0 is cross
    entropy.

    Args:
        gamma: >= 0, default 2 (original); long-tail code often uses 1.
        alpha: (C,) factor per class, default 1. Unlike a class weight it does not enter the
            denominator of the mean.
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: none.

    Example:
        >>> Focal(gamma=1.0)(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.3466)
    """

    key: ClassVar[str] = "focal"
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "gamma": Range(0.25, 5.0),
        "alpha": Range(0.05, 5.0),
    }
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


def focal(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    gamma: float = 2.0,
    alpha: Tensor | None = None,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Focal loss per sample; :class:`Focal` has equation, arguments and an example."""
    check_number("gamma", gamma, at_least=0)
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest"), options)
    gap = require(stats.rest) - require(stats.target)
    # The factor is 1 long before the clamp. Without it the gradient at infinity would be NaN: that
    # of an ignored row too, which stands for class 0, where its bias is minus infinity.
    values = F.softplus(gap) * torch.exp(-gamma * F.softplus(-gap.clamp_max(1000)))
    if alpha is not None:
        values = values * at_target(alpha.to(values.dtype), labels, num_classes, "alpha")
    return over_targets(values, labels)


class LabelSmoothing(LogitLoss):
    r"""Label smoothing (KOB-13; LMS 13).

    .. math:: -(1-\lambda)\log p_y - \frac\lambda C\sum_c \log p_c

    The mass lambda/C falls on the target too, as in torch. Unlike the option of the same name it
    needs no (N, C) targets, so it runs with ``impl="chunked"``.

    Args:
        smoothing: lambda in [0, 1], default 0.1 (LMS).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: none.

    Example:
        >>> LabelSmoothing()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(1.3863)
    """

    key: ClassVar[str] = "label_smoothing"
    limits: ClassVar[Mapping[str, Limits]] = {"smoothing": SHARE}
    search_space: ClassVar[Mapping[str, Dimension]] = {"smoothing": Range(0.01, 0.3)}

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


def label_smoothing(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    smoothing: float = 0.1,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Label smoothing per sample; :class:`LabelSmoothing` has equation, arguments and example."""
    check_number("smoothing", smoothing, at_least=0, at_most=1)
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest", "mean"), options)
    target = require(stats.target)
    softmax = F.softplus(require(stats.rest) - target)
    to_rivals = smoothing * (num_classes - 1) / num_classes
    return over_targets(softmax + to_rivals * (target - require(stats.mean)), labels)
