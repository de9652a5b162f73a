"""Softmax of cosines: NormFace without margin, CosFace (AM-Softmax) and LDAM (LTLM; Cao 2019)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.base.class_counts import balanced_weights
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_cosine_margin
from largemargin.losses.base.schedules import (
    DeferredReweighting,
    Schedule,
    margin_warm_up,
    share_of,
)
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range, cosine_margin_limits
from largemargin.losses.base.terms import at_target, check_margin, over_targets, scaled_cosines
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class NormFace(Loss):
    r"""NormFace (ZHO-NORMFACE): softmax loss with normalised features and prototypes, no bias.

    .. math:: \ell = -\log\frac{e^{s\cos\theta_y}}{\sum_j e^{s\cos\theta_j}}

    Args:
        scale: s > 0. LTLM uses 10, 20 and 64; default 64. Small problems want 8 to 20; "auto":
            :func:`auto_scale`.
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

    def __init__(self, *, scale: Scale = 64.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        check_scale_setting(scale)
        self.scale = scale

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return normface(*inputs, scale=current(self, "scale"), **self.how)


def normface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    scale: Scale = 64.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """NormFace per sample; :class:`NormFace` has equation, arguments and an example."""
    _, target, rest = scaled_cosines(features, prototypes, labels, scale, how)
    return over_targets(F.softplus(rest - target), labels)


class CosFace(Loss):
    r"""CosFace / AM-Softmax (ZHO-COSFACE).

    .. math:: \ell = -\log\frac{e^{s(\cos\theta_y - m)}}
                              {e^{s(\cos\theta_y - m)} + \sum_{j\ne y} e^{s\cos\theta_j}}

    Args:
        margin: m in cosine units, a number or one per class (C,). Below C/(C-1), the widest margin
            any arrangement of C classes has. Default 0.35 (face recognition original; LTLM's
            tables use 0.1 by the public script, the slides do not print it).
        scale: s > 0, default 64 (original; AM-Softmax uses 30, LTLM 10, 20 and 64). "auto":
            :func:`auto_scale`.
        class_counts: training samples per class; the margin of class j is then
            ``margin`` times the fourth root of n_min / n_j: rare classes get the widest, as in
            LDAM.
        options: those of every :class:`Loss`.

    Departures: none.

    Example:
        Right on the margin the two logits tie:

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> CosFace(margin=1.0, scale=8.0)(W[:1], W, torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "cosface"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {"margin": Range(0.05, 0.6, log=False)}
    head_similarity: ClassVar[str | None] = "cosine"

    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 0.35,
        scale: Scale = 64.0,
        class_counts: Sequence[int] | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_scale_setting(scale)
        self.scale = scale
        self._keep("margin", margin)
        self._count_margins(class_counts, self.margin)

    def aligned_cosine(self) -> float | Tensor:
        return psi0_of_cosine_margin(self._margins)

    def setting_limits(self, name: str, num_classes: int | None = None) -> Limits:
        if name != "margin":
            return super().setting_limits(name, num_classes)
        return cosine_margin_limits(len(self.class_counts or ()) or num_classes or 2)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("cosine margin", self._margins, 1 - math.cos(angle))]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """:func:`margin_warm_up`."""
        return margin_warm_up(self, term, total_steps, margin=0.0)

    @property
    def _margins(self) -> float | Tensor:
        return self.margin if self.class_margins is None else self.class_margins

    def per_sample(self, *inputs: Tensor) -> Tensor:
        margin = current(self, "margin") if self.class_margins is None else self.class_margins
        return cosface(*inputs, margin=margin, scale=current(self, "scale"), **self.how)


def cosface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: float | Tensor = 0.35,
    scale: Scale = 64.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """CosFace per sample; :class:`CosFace` has equation, arguments and an example."""
    s, target, rest = scaled_cosines(
        features, prototypes, labels, scale, how, psi0_of_cosine_margin, margin
    )
    num_classes = prototypes.shape[0]
    check_margin("margin", margin, cosine_margin_limits(num_classes))
    required = s * at_target(margin, labels, num_classes, "margin")
    return over_targets(F.softplus(rest - target + required), labels)


class LDAM(Loss):
    r"""Label-distribution-aware margin loss with deferred re-weighting (BAS-LDAM).

    .. math:: \ell = \mathrm{CosFace}\ \text{with}\ m_j = \Delta_j \propto n_j^{-1/4},\
              \max_j\Delta_j = 0.5,\ s = 30

    Call :meth:`reweight` once at the switch (epoch 160 of 200 in the original): from then on the
    class weights are those of :func:`balanced_weights`. Equal counts give CosFace with m = 0.5.

    Args:
        class_counts: training samples per class, all positive.
        max_margin: of the rarest class, default 0.5 (original).
        scale: s on the whole cosine logit, default 30 (original). "auto": :func:`auto_scale`.
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
        scale: Scale = 30.0,
        beta: float = 0.9999,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_number("beta", beta, at_least=0, below=1)
        check_scale_setting(scale)
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

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return cosface(*inputs, margin=self.margins, scale=current(self, "scale"), **self.how)
