"""Focal loss: cross entropy that looks away from easy samples (Lin et al. 2017)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number, check_weights
from largemargin.losses.base.class_counts import numbers_per_class
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.base.terms import (
    LogitOptions,
    at_target,
    class_count,
    over_targets,
    require,
    stats_of,
)
from largemargin.shapes import Features, Labels, PerSample, Prototypes


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
        self._keep("alpha", None if alpha is None else numbers_per_class("alpha", alpha, ""))
        if self.alpha is not None:
            check_weights("alpha", self.alpha.reshape(-1))

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
        check_weights("alpha", alpha.reshape(-1), options.get("validate"))
        values = values * at_target(alpha.to(values.dtype), labels, num_classes, "alpha")
    return over_targets(values, labels)
