"""NormFace: cross entropy of scaled cosines (LTLM)."""

from typing import Any, ClassVar, Unpack

from torch import Tensor

from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.scale import Scale, check_scale_setting
from largemargin.losses.cosface import cosface
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.row_values import RowLoss
from largemargin.ops.scheduled_values import current
from largemargin.ops.similarity import HeadLogits
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class NormFace(Loss):
    r"""NormFace (ZHO-NORMFACE): softmax loss with normalised features and prototypes, no bias.

    .. math:: \ell = -\log\frac{e^{s\cos\theta_y}}{\sum_j e^{s\cos\theta_j}}

    Args:
        scale: s > 0, or "auto" (default): :func:`auto_scale`. LTLM uses 10, 20 and 64.
        options: those of every :class:`Loss`.

    Departures: none.

    Example:
        A feature on its prototype and opposite to the other one costs softplus(-2s):

        >>> W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> NormFace(scale=1.0)(W[:1], W, torch.tensor([0]))
        tensor(0.1269)
    """

    key: ClassVar[str] = "normface"
    has_target_curve: ClassVar[bool] = True
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True

    def __init__(self, *, scale: Scale = "auto", **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        check_scale_setting(scale)
        self.scale = scale

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        scale = self.scale_of(made)
        return None if scale is None else RowLoss(reach=2 * scale)

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        return normface(*inputs, scale=current(self, "scale"), **made, **self.how)


def normface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    scale: Scale = "auto",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """NormFace per sample; :class:`NormFace` has equation, arguments and an example."""
    return cosface(features, prototypes, labels, margin=0.0, scale=scale, **how)
