"""Softmax loss (LMD 3.3; LMS 2): cross entropy of an affine head."""

from typing import ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_choice
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.terms import over_targets, require, stats_of
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.similarity import SIMILARITIES
from largemargin.shapes import Features, Labels, PerSample, Prototypes


def cross_entropy(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    r"""Softmax loss, the baseline of every comparison (LMD eq. 3.3, LMS eq. 2).

    .. math:: \ell = \log\sum_j e^{z_j} - z_y = \mathrm{softplus}(\mathrm{rest} - \mathrm{target})

    Call it with (features, prototypes, labels) or with (logits, labels). Departure: none.

    Args:
        features: (N, D), or (N, C) logits in the two-argument form.
        prototypes: (C, D), or the labels in the two-argument form.
        labels: (N,) or soft targets (N, C).
        bias: (C,).

    Example:
        Two equal logits cost log 2:

        >>> cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
        tensor([0.6931])
    """
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
    return over_targets(F.softplus(require(stats.rest) - require(stats.target)), labels)


class LogitLoss(Loss):
    """A loss that only sees logits: called with (logits, labels) or (features, prototypes, labels).

    ``similarity`` and ``scale`` say how logits are made from features; None takes them from the
    prototype module if it has them (a ``ClassHead``), otherwise dot products with scale 1.
    """

    takes_logits: ClassVar[bool] = True
    uses_bias: ClassVar[bool] = True

    def __init__(
        self,
        *,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        if similarity is not None:
            check_choice("similarity", similarity, SIMILARITIES)
        self.similarity = similarity
        self.scale = scale


class CrossEntropy(LogitLoss):
    """Module form of :func:`cross_entropy`, with the options of :class:`Loss`."""

    def per_sample(self, *inputs: Tensor, **logits: object) -> Tensor:
        return cross_entropy(*inputs, **logits, **self.how)  # type: ignore[arg-type]
