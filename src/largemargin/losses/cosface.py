"""CosFace, also known as AM-Softmax: a margin on the cosine of the target (LTLM)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_cosine_margin
from largemargin.losses.base.schedules import Schedule, margin_warm_up
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range, cosine_margin_limits
from largemargin.losses.base.terms import (
    at_target,
    check_margin,
    class_count,
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


class CosFace(Loss):
    r"""CosFace / AM-Softmax (ZHO-COSFACE).

    .. math:: \ell = -\log\frac{e^{s(\cos\theta_y - m)}}
                              {e^{s(\cos\theta_y - m)} + \sum_{j\ne y} e^{s\cos\theta_j}}

    Args:
        margin: m in cosine units, a number or one per class (C,). Below C/(C-1), the widest margin
            any arrangement of C classes has. Default 0.2, for ordinary classifiers
            (benchmarks/loss_defaults.py). The original, for tens of thousands of faces, has 0.35;
            LTLM's tables use 0.1 by the public script, the slides do not print it.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. Face recognition: 64 (original), 30
            (AM-Softmax); LTLM: 10, 20 and 64.
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
    reads_head_logits: ClassVar[bool] = True

    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 0.2,
        scale: Scale = "auto",
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

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        margin, scale = self._margins, self.scale_of(made)
        if scale is None or isinstance(margin, Tensor):
            return None
        check_margin("margin", margin, cosine_margin_limits(prototypes.shape[0]))
        return RowLoss(required=scale * margin, reach=scale * (2 + margin))

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        margin = current(self, "margin") if self.class_margins is None else self.class_margins
        return cosface(*inputs, margin=margin, scale=current(self, "scale"), **made, **self.how)


def cosface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: float | Tensor = 0.2,
    scale: Scale = "auto",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """CosFace per sample; :class:`CosFace` has equation, arguments and an example."""
    num_classes = class_count(features, prototypes, labels)
    check_margin("margin", margin, cosine_margin_limits(num_classes))
    s = scale_of_cosines(scale, features, prototypes, how, psi0_of_cosine_margin, margin)
    required = s * at_target(margin, labels, num_classes, "margin")
    cosines: Any = {"similarity": "cosine", "scale": s, **how}
    if not isinstance(required, Tensor):
        found = eager_logits(features, prototypes, labels, cosines)
        if found is not None:
            reach = ANYWHERE if how.get("log_prior") is not None else float(2 * s + required)
            return row_values(*found, RowLoss(required=float(required), reach=reach))
    target, rest = target_and_rest(features, prototypes, labels, **cosines)
    return over_targets(F.softplus(rest - target + required), labels)
