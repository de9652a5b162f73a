"""``LogitLoss``: a loss that only sees logits, whichever way they were made."""

from typing import ClassVar, Unpack

from torch import Tensor

from largemargin.errors import check_choice
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.similarity import SIMILARITIES


class LogitOptions(ComputeOptions, total=False):
    """How logits are made from features, beside the compute options."""

    bias: Tensor | None
    similarity: str
    scale: float | Tensor


class LogitLoss(Loss):
    """A loss that only sees logits: called with (logits, labels) or (features, prototypes, labels).

    Args:
        similarity, scale: how logits are made from features; None takes them from the prototype
            module if it has them (a ``ClassHead``), otherwise dot products with scale 1.
        options: those of every :class:`Loss`.
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
