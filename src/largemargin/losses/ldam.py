"""LDAM: CosFace with margins from the class counts, re-weighted late in training (Cao 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.base.class_counts import balanced_weights, check_counts
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_cosine_margin
from largemargin.losses.base.schedules import DeferredReweighting, Schedule, share_of
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range, cosine_margin_limits
from largemargin.losses.cosface import cosface
from largemargin.ops.scheduled_values import current


class LDAM(Loss):
    r"""Label-distribution-aware margin loss with deferred re-weighting (BAS-LDAM).

    .. math:: \ell = \mathrm{CosFace}\ \text{with}\ m_j = \Delta_j \propto n_j^{-1/4},\
              \max_j\Delta_j = 0.5

    Call :meth:`reweight` once at the switch (epoch 160 of 200 in the original): from then on the
    class weights are those of :func:`balanced_weights`. Equal counts give CosFace with m = 0.5.

    Args:
        class_counts: training samples per class, all positive.
        max_margin: of the rarest class, default 0.5 (original).
        scale: s on the whole cosine logit, or "auto" (default): :func:`auto_scale`. The original
            has 30.
        beta: of the deferred weights, default 0.9999 (original).
        options: those of every :class:`Loss`.

    Example:
        >>> loss = LDAM([100, 10, 1])
        >>> loss.margins
        tensor([0.1581, 0.2812, 0.5000])
    """

    key: ClassVar[str] = "ldam"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {"max_margin": Range(0.1, 0.8, log=False)}
    fixed: ClassVar[frozenset[str]] = frozenset({"beta"})  # read once, by reweight()
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True

    class_counts: list[int]

    @property
    def margins(self) -> Tensor:
        """(C,), the margin of each class."""
        assert self.class_margins is not None
        return self.class_margins

    def __init__(
        self,
        class_counts: Sequence[int] | Tensor,
        *,
        max_margin: float = 0.5,
        scale: Scale = "auto",
        beta: float = 0.9999,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_number("beta", beta, at_least=0, below=1)
        check_scale_setting(scale)
        check_counts(class_counts)  # None is none here
        self._count_margins(class_counts, max_margin)
        self.max_margin = max_margin
        self.scale = scale
        self.beta = beta

    def reweight(self, on: bool = True) -> None:
        """Replace the class weights by the balanced ones, or (``on=False``) by none."""
        weights = balanced_weights(self.class_counts, beta=self.beta, dtype=self.margins.dtype)
        self.weight = weights.to(self.margins.device) if on else None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # A checkpoint from after the switch holds weights, one from before it does not.
        self.reweight(f"{prefix}weight" in state_dict)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def setting_limits(self, name: str, num_classes: int | None = None) -> Limits:
        if name != "max_margin":
            return super().setting_limits(name, num_classes)
        return cosine_margin_limits(len(self.class_counts))

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("cosine margin", self.margins, 1 - math.cos(angle))]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """Class weights from 80 % of the training on: the authors' code, epoch 160 of 200."""
        return [DeferredReweighting(share_of(total_steps, 0.8), term=term)]

    def aligned_cosine(self) -> float | Tensor:
        return psi0_of_cosine_margin(self.margins)

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        scale = current(self, "scale")
        return cosface(*inputs, margin=self.margins, scale=scale, **made, **self.how)
