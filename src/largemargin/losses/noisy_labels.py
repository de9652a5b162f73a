"""Cross entropies that wrong labels pull less on (Zhang & Sabuncu 2018; Wang et al. 2019)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import LARGEST, check_number
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range
from largemargin.losses.base.terms import (
    LogitOptions,
    check_setting,
    over_targets,
    require,
    stats_of,
)
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class GeneralizedCrossEntropy(LogitLoss):
    r"""Generalized cross entropy (BAS-GCE; Zhang & Sabuncu 2018, eq. 6), :math:`(1-p_y^q)/q`.

    Between cross entropy (q to 0) and the mean absolute error of the probabilities (q = 1), which
    wrong labels disturb least and which learns slowest: the gradient of cross entropy is
    multiplied by :math:`p_y^q`. It lies in [0, 1/q].

    Args:
        q: in (0, 1], default 0.7 (original).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: the truncated form, which drops samples with :math:`p_y \le k` between epochs, is
    left out: it needs the loss of every training sample from the epoch before.

    Example:
        >>> GeneralizedCrossEntropy(q=1.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(0.7500)
    """

    key: ClassVar[str] = "generalized_cross_entropy"
    reads_head_logits: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"q": {"at_least": 1 / LARGEST, "at_most": 1}}
    search_space: ClassVar[Mapping[str, Dimension]] = {"q": Range(0.1, 1.0, log=False)}

    def __init__(
        self,
        *,
        q: float = 0.7,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("q", q, **self.limits["q"])
        self.q = q

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return generalized_cross_entropy(*inputs, q=current(self, "q"), **logits, **self.how)


def generalized_cross_entropy(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    q: float = 0.7,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """GCE per sample; :class:`GeneralizedCrossEntropy` has equation, arguments and an example."""
    check_setting("q", q, at_least=1 / LARGEST, at_most=1)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest"), options)
    # By log p, because the slope of p^q is infinite at p = 0.
    minus_log_p = F.softplus(require(stats.rest) - require(stats.target))
    return over_targets(-torch.expm1(-q * minus_log_p) / q, labels)


class SymmetricCrossEntropy(LogitLoss):
    r"""Symmetric cross entropy (BAS-SCE; Wang et al. 2019, eq. 7 and 8).

    .. math:: \ell = -\alpha\log p_y - \beta A\,(1-p_y)

    The second term is the cross entropy with labels and probabilities exchanged, where log 0 is
    set to A < 0. It is bounded, so that wrong labels cannot dominate it.

    Args:
        alpha: >= 0 of the cross entropy, default 0.1 (original for CIFAR-10; 6 for CIFAR-100).
        beta: >= 0 of the reverse, default 1 (original for CIFAR-10; 0.1 for CIFAR-100).
        log_zero: A < 0, default -4 (original). Public code clips labels at 1e-4: A = -9.21.
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: of soft targets each class is taken as the target in turn, as by every loss here;
    the original's reverse term would take the logarithm of the targets.

    Example:
        >>> SymmetricCrossEntropy(alpha=0.0)(torch.zeros(1, 4), torch.tensor([0]))
        tensor(3.0000)
    """

    key: ClassVar[str] = "symmetric_cross_entropy"
    reads_head_logits: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"log_zero": {"below": 0}}
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "alpha": Range(0.01, 10.0),
        "beta": Range(0.1, 10.0),
    }
    not_tuned: ClassVar[Mapping[str, str]] = {"log_zero": "beta multiplies it"}

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        beta: float = 1.0,
        log_zero: float = -4.0,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("alpha", alpha, at_least=0)
        check_number("beta", beta, at_least=0)
        check_number("log_zero", log_zero, below=0)
        self.alpha = alpha
        self.beta = beta
        self.log_zero = log_zero

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return symmetric_cross_entropy(
            *inputs,
            alpha=current(self, "alpha"),
            beta=current(self, "beta"),
            log_zero=current(self, "log_zero"),
            **logits,
            **self.how,
        )


def symmetric_cross_entropy(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    alpha: float = 0.1,
    beta: float = 1.0,
    log_zero: float = -4.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """SCE per sample; :class:`SymmetricCrossEntropy` has equation, arguments and an example."""
    check_setting("alpha", alpha, at_least=0)
    check_setting("beta", beta, at_least=0)
    check_setting("log_zero", log_zero, below=0)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest"), options)
    gap = require(stats.rest) - require(stats.target)
    return over_targets(alpha * F.softplus(gap) - beta * log_zero * torch.sigmoid(gap), labels)
