"""ArcFace: a margin on the angle of the target (LTLM)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_choice
from largemargin.losses.base.angles import NEAR, cosine_and_sine, noise_of_angles
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_angular_margin
from largemargin.losses.base.schedules import Schedule, margin_warm_up
from largemargin.losses.base.setting_ranges import RADIANS, Dimension, Limits, Range
from largemargin.losses.base.terms import (
    at_target,
    check_margin,
    eager_logits,
    over_targets,
    scale_of_cosines,
    target_and_rest,
)
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.matmul import Precision, resolve_precision
from largemargin.ops.row_values import Angle, RowLoss, row_values
from largemargin.ops.scheduled_values import current
from largemargin.ops.shards import is_shared
from largemargin.ops.similarity import HeadLogits
from largemargin.shapes import Features, Labels, PerSample, Prototypes
from largemargin.tracing import value_range, values_are_checked

Mode: TypeAlias = Literal["hard", "easy", "none"]
Gradient: TypeAlias = Literal["exact", "detached"]
MODES: tuple[Mode, ...] = ("hard", "easy", "none")
GRADIENTS: tuple[Gradient, ...] = ("exact", "detached")


class ArcFace(Loss):
    r"""ArcFace (ZHO-ARCFACE): the angle of the target must be smaller by ``margin`` **radians**.

    .. math:: \ell = -\log\frac{e^{s T(\theta_y)}}
                              {e^{s T(\theta_y)} + \sum_{j\ne y} e^{s\cos\theta_j}}

    where :math:`\theta + m` leaves [0, pi], the three modes differ:

    * ``"hard"`` (default): cos(theta+m) while cos theta > -cos m, else cos theta - m sin m.
      Decreasing everywhere, with a downward jump of cos m + m sin m - 1.
    * ``"easy"``: cos(theta+m) while cos theta > 0, else cos theta. Not monotone at pi/2.
    * ``"none"``: cos(theta+m) everywhere; its gradient has the wrong sign past pi - m.

    :class:`UnifiedMargin` with m2 = m is continuous and monotone.

    Args:
        margin: m in radians in [0, pi), a number or one per class (C,). Default 0.3, for ordinary
            classifiers (benchmarks/loss_defaults.py). The original, for tens of thousands of faces,
            has 0.5, which is 28.6 degrees; LTLM's tables use 0.1 by the public script.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. Face recognition: 64 (original).
        mode: "hard" (default), "easy" or "none".
        gradient: "exact" is the derivative of the value, sin(theta+m)/sin theta in the first
            branch. "detached" passes the gradient to cos theta unchanged, as some production code
            does: the same value, another gradient.
        class_counts: training samples per class; the margin of class j is then
            ``margin`` times the fourth root of n_min / n_j.
        options: those of every :class:`Loss`.

    Departures: the value and gradient at theta = 0 and pi are those of the limit with the sine
    held at 0, so that they stay finite.

    Example:
        At angle 0 the target logit is s cos m:

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> ArcFace(margin=math.pi / 3, scale=2.0)(W[:1], W, torch.tensor([0]))
        tensor(0.3133)
    """

    key: ClassVar[str] = "arcface"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"margin": RADIANS}
    search_space: ClassVar[Mapping[str, Dimension]] = {"margin": Range(0.05, 0.8, log=False)}
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True

    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 0.3,
        scale: Scale = "auto",
        mode: Mode = "hard",
        gradient: Gradient = "exact",
        class_counts: Sequence[int] | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_choice("mode", mode, MODES)
        check_choice("gradient", gradient, GRADIENTS)
        check_scale_setting(scale)
        self.scale = scale
        self.mode: Mode = mode
        self.gradient: Gradient = gradient
        self._keep("margin", margin)
        check_margin("margin", self.margin, RADIANS)
        self._count_margins(class_counts, self.margin)

    def aligned_cosine(self) -> float | Tensor:
        return psi0_of_angular_margin(self._margins)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("margin (radians)", self._margins, angle)]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """:func:`margin_warm_up`."""
        return margin_warm_up(self, term, total_steps, margin=0.0)

    @property
    def _margins(self) -> float | Tensor:
        return self.margin if self.class_margins is None else self.class_margins

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        margin, scale = self._margins, self.scale_of(made)
        if scale is None or isinstance(margin, Tensor) or self.gradient != "exact":
            return None
        check_margin("margin", margin, RADIANS)
        return _row_loss(scale, margin, self.mode, features, prototypes, None)

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        return arcface(
            *inputs,
            margin=current(self, "margin") if self.class_margins is None else self.class_margins,
            scale=current(self, "scale"),
            mode=self.mode,
            gradient=self.gradient,
            **made,
            **self.how,
        )


def arcface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: float | Tensor = 0.3,
    scale: Scale = "auto",
    mode: Mode = "hard",
    gradient: Gradient = "exact",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """ArcFace per sample; :class:`ArcFace` has equation, arguments and an example."""
    if mode not in MODES or gradient not in GRADIENTS:
        check_choice("mode", mode, MODES)
        check_choice("gradient", gradient, GRADIENTS)
    check_margin("margin", margin, RADIANS)
    s = scale_of_cosines(scale, features, prototypes, how, psi0_of_angular_margin, margin)
    cosines: Any = {"similarity": "cosine", "scale": s, **how}
    precision = how.get("precision")
    if gradient == "exact" and how.get("log_prior") is None:
        loss = _row_loss(s, margin, mode, features, prototypes, precision)
        found = None if loss is None else eager_logits(features, prototypes, labels, cosines)
        if loss is not None and found is not None:
            return row_values(*found, loss, (features, prototypes))
    target, rest = target_and_rest(features, prototypes, labels, **cosines)
    penalised = _penalised(target, s, features, prototypes, labels, margin, mode, precision)
    if gradient == "detached":
        penalised = target + (penalised - target).detach()
    return over_targets(F.softplus(rest - penalised), labels)


def _row_loss(
    scale: float | Tensor,
    margin: float | Tensor,
    mode: Mode,
    features: Tensor,
    prototypes: Tensor,
    precision: Precision | None,
) -> RowLoss | None:
    """It, of one margin and one vector per class."""
    if isinstance(margin, Tensor) or isinstance(scale, Tensor) or prototypes.dim() != 2:
        return None
    resolved: Any = resolve_precision(precision, features, prototypes)
    kind = torch.float64 if torch.float64 in (features.dtype, prototypes.dtype) else torch.float32
    least = noise_of_angles(kind, features, prototypes, resolved)

    def definition(target: Tensor, x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return _penalised(target, scale, x, w, labels, margin, mode, resolved)

    angle = Angle(scale, float(margin), mode, NEAR, least, definition)
    return RowLoss(angle=angle, reach=4 * scale)


def _penalised(
    target: Tensor,
    scale: float | Tensor,
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    margin: float | Tensor,
    mode: Mode,
    precision: Precision | None,
) -> Tensor:
    """s T(theta) of s cos(theta): the definition, and shorter ways to the same for one margin."""

    def definition(target: Tensor) -> Tensor:
        m = at_target(margin, labels, prototypes.shape[0], "margin")
        rows = features, prototypes, labels
        cosine, sine = cosine_and_sine(target, scale, *rows, precision)
        return scale * penalised_cosine(cosine, sine, m, mode)

    if labels.dim() == 2 or isinstance(margin, Tensor) or isinstance(scale, Tensor):
        return definition(target)
    several = is_shared(prototypes) or prototypes.dim() == 3
    if several or target.numel() == 0 or not values_are_checked(target, None):
        return definition(target)
    low, high = value_range(target)
    if not -NEAR * scale < low <= high < NEAR * scale:
        return definition(target)
    inside = mode == "hard" and low > -math.cos(margin) * scale
    found: Tensor = _Penalised.apply(target, scale, float(margin), mode, inside)
    return found


class _Penalised(torch.autograd.Function):
    """s T(theta) of s cos(theta) for angles away from 0 and pi; ``all_inside``: no second branch.

    The backward pass is made of the input alone, so that it can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any, target: Tensor, scale: float, margin: float, mode: Mode, all_inside: bool
    ) -> Tensor:
        ctx.save_for_backward(target)
        ctx.settings = scale, margin, mode, all_inside
        cosine = target / scale
        sine = (1 - cosine * cosine).sqrt_()
        shifted = torch.sub(target * math.cos(margin), sine, alpha=scale * math.sin(margin))
        if mode == "none" or all_inside:
            return shifted
        if mode == "easy":
            return torch.where(cosine > 0, shifted, target)
        beyond = target - scale * margin * math.sin(margin)
        return torch.where(cosine > -math.cos(margin), shifted, beyond)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (target,) = ctx.saved_tensors
        scale, margin, mode, all_inside = ctx.settings
        cosine = target / scale
        slope = cosine / torch.sqrt(1 - cosine * cosine) * math.sin(margin) + math.cos(margin)
        if not (mode == "none" or all_inside):
            edge = 0 if mode == "easy" else -math.cos(margin)
            slope = slope.masked_fill(cosine <= edge, 1)
        return grad * slope, None, None, None, None


def penalised_cosine(cosine: Tensor, sine: Tensor, margin: float | Tensor, mode: Mode) -> Tensor:
    """T(theta) from the cosine and sine of theta; the margin a number or one per cosine."""
    if isinstance(margin, Tensor):
        cos_m, sin_m = torch.cos(margin), torch.sin(margin)
    else:
        cos_m, sin_m = math.cos(margin), math.sin(margin)  # type: ignore[assignment]
    shifted = cosine * cos_m - sine * sin_m
    if mode == "hard":
        return torch.where(cosine > -cos_m, shifted, cosine - margin * sin_m)
    if mode == "easy":
        return torch.where(cosine > 0, shifted, cosine)
    return shifted
