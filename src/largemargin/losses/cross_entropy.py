"""Softmax loss (LMD 3.3; LMS 2): cross entropy of an affine head."""

from typing import Any, ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.losses.base.loss import LogitLoss
from largemargin.losses.base.terms import (
    LogitOptions,
    eager_logits,
    over_targets,
    require,
    stats_of,
)
from largemargin.ops.row_values import RowLoss, row_values
from largemargin.ops.similarity import HeadLogits
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
    reads_head_logits: ClassVar[bool] = True

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        return RowLoss() if self.has_form(made) else None

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return cross_entropy(*inputs, **logits, **self.how)


def cross_entropy(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Softmax loss per sample; :class:`CrossEntropy` has equation, arguments and an example."""
    found = eager_logits(features, prototypes, labels, options)
    if found is not None:
        return row_values(*found, RowLoss())
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest"), options)
    return over_targets(F.softplus(require(stats.rest) - require(stats.target)), labels)
