"""The unified margin s(cos(m1 theta + m2) - m3) with real m1, monotone past pi (LTLM)."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.losses.base.angles import continued_cosine, cosine_and_sine
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_angular_margin
from largemargin.losses.base.schedules import Schedule, margin_warm_up
from largemargin.losses.base.setting_ranges import RADIANS, Dimension, Limits, Range
from largemargin.losses.base.terms import (
    at_target,
    check_margin,
    check_setting,
    over_targets,
    scaled_cosines,
)
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class UnifiedMargin(Loss):
    r"""Unified margin (ZHO-UNI): multiplicative, angular and cosine margin in one formula.

    .. math:: z_y' = s\,\bigl(T(m_1\theta_y + m_2) - m_3\bigr),\qquad
              T(\phi) = (-1)^k\cos\phi - 2k,\ k = \lfloor\phi/\pi\rfloor

    (1, 0, 0) is NormFace, (1, 0, m) CosFace, (1, m, 0) ArcFace with a continuous monotone
    continuation past pi - m, (m, 0, 0) A-Softmax with normalised features, for any real m.

    Args:
        m1: factor > 0 of the angle; default 1. Below 1 it widens the class, for use with a larger
            m2 or m3: (0.9, 0.4, 0.15) is a combined margin of the ArcFace paper.
        m2: angular margin in radians >= 0, a number or one per class; default 0.
        m3: cosine margin >= 0, a number or one per class; default 0.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. LTLM uses 10, 20 and 64.
        options: those of every :class:`Loss`.

    Departures: erratum Z3 (s multiplies m3 too); the monotone continuation replaces the plain
    cosine beyond pi, where the printed inequality fails (Z4).

    Example:
        >>> W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> UnifiedMargin(m3=2.0, scale=4.0)(W[:1], W, torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "unified_margin"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"m1": {"above": 0}, "m2": RADIANS}
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "m1": Range(1.0, 1.5, log=False),
        "m2": Range(0.0, 0.5, log=False),
        "m3": Range(0.0, 0.4, log=False),
    }
    head_similarity: ClassVar[str | None] = "cosine"

    m2: float | Tensor
    m3: float | Tensor

    def __init__(
        self,
        *,
        m1: float = 1.0,
        m2: float | Tensor | Sequence[float] = 0.0,
        m3: float | Tensor | Sequence[float] = 0.0,
        scale: Scale = "auto",
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_setting("m1", m1, above=0)
        check_scale_setting(scale)
        self.m1 = m1
        self._keep("m2", m2)
        self._keep("m3", m3)
        self.scale = scale

    def aligned_cosine(self) -> float | Tensor:
        return _psi0(self.m2, self.m3)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [
            MarginCeiling("margin m2 (radians)", self.m2, angle),
            MarginCeiling("cosine margin m3", self.m3, 1 - math.cos(angle)),
        ]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """:func:`margin_warm_up`; no margin is m1 = 1."""
        return margin_warm_up(self, term, total_steps, m1=1.0, m2=0.0, m3=0.0)

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return unified_margin(
            *inputs,
            m1=current(self, "m1"),
            m2=current(self, "m2"),
            m3=current(self, "m3"),
            scale=current(self, "scale"),
            **self.how,
        )


def unified_margin(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    m1: float = 1.0,
    m2: float | Tensor = 0.0,
    m3: float | Tensor = 0.0,
    scale: Scale = "auto",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """Unified margin per sample; :class:`UnifiedMargin` has equation, arguments and an example."""
    check_setting("m1", m1, above=0)
    check_margin("m2", m2, RADIANS)
    check_setting("m3", m3, at_least=0)
    s, target, rest = scaled_cosines(features, prototypes, labels, scale, how, _psi0, m2, m3)
    num_classes = prototypes.shape[0]
    rows = features, prototypes, labels
    cosine, sine = cosine_and_sine(target, s, *rows, how.get("precision"))
    phi = m1 * torch.atan2(sine, cosine) + at_target(m2, labels, num_classes, "m2")
    penalised = s * (continued_cosine(phi) - at_target(m3, labels, num_classes, "m3"))
    return over_targets(F.softplus(rest - penalised), labels)


def _psi0(m2: float | Tensor, m3: float | Tensor) -> float | Tensor:
    return psi0_of_angular_margin(m2) - m3
