"""LM-Softmax: the target leaves the denominator (LTLM)."""

from typing import Any, ClassVar, Unpack

from torch import Tensor

from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.scale import Scale, check_scale_setting
from largemargin.losses.base.terms import (
    eager_logits,
    over_targets,
    scale_of_cosines,
    target_and_rest,
)
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.row_values import ANYWHERE, RowLoss, row_values
from largemargin.ops.scheduled_values import current
from largemargin.ops.similarity import HeadLogits
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class LMSoftmax(Loss):
    r"""Largest-margin softmax (ZHO-LM).

    .. math:: \ell_i = \frac1s \log\sum_{j\ne y} e^{s(\cos\theta_j - \cos\theta_y)}
                    = \frac{\mathrm{rest} - \mathrm{target}}{s}

    It lies in [-gamma_i, -gamma_i + log(C-1)/s] with gamma_i the cosine sample margin, so negative
    values are normal and minimising it maximises the smallest margin as s grows. It never stops
    pushing; on imbalanced data it collapses unless combined with :class:`ZeroCentroid` (LTLM
    Table 2).

    Args:
        scale: s > 0, or "auto" (default): :func:`auto_scale`. LTLM uses 10, 20 and 64.
        options: those of every :class:`Loss`.

    Departures: erratum Z8 concerns an inequality about it, not the loss.

    Example:
        With two classes it is cos_other - cos_target for every s:

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> LMSoftmax()(torch.tensor([[3.0, 4.0]]), W, torch.tensor([1]))
        tensor(-0.2000)
    """

    key: ClassVar[str] = "lm_softmax"
    widens_margins: ClassVar[bool] = True
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True

    def __init__(self, *, scale: Scale = "auto", **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        check_scale_setting(scale)
        self.scale = scale

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        scale = self.scale_of(made)
        return None if scale is None else RowLoss("rest", factor=1 / scale, reach=2 * scale)

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        return lm_softmax(*inputs, scale=current(self, "scale"), **made, **self.how)


def lm_softmax(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    scale: Scale = "auto",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """LM-Softmax per sample; :class:`LMSoftmax` has equation, arguments and an example."""
    s = scale_of_cosines(scale, features, prototypes, how)
    cosines: Any = {"similarity": "cosine", "scale": s, **how}
    if not isinstance(s, Tensor):
        found = eager_logits(features, prototypes, labels, cosines)
        if found is not None:
            reach = ANYWHERE if how.get("log_prior") is not None else 2 * s
            return row_values(*found, RowLoss("rest", factor=1 / s, reach=reach))
    target, rest = target_and_rest(features, prototypes, labels, **cosines)
    return over_targets((rest - target) / s, labels)
