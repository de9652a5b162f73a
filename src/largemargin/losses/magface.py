"""MagFace: a margin that grows with the feature's norm, and a pull on the norm (Meng 2021)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice
from largemargin.losses.arcface import MODES, Mode, penalised_cosine
from largemargin.losses.base.angles import cosine_and_sine
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_angular_margin
from largemargin.losses.base.setting_ranges import RADIANS, Dimension, Limits, Range
from largemargin.losses.base.terms import check_setting, over_targets, scaled_cosines
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.norms import safe_norm
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes

PULL = 35 / 64
"""Strength of the regularizer over the scale: the paper's numbers."""


class MagFace(Loss):
    r"""MagFace (BAS-MAGFACE): ArcFace with a margin m(a) by the norm a of the feature.

    .. math:: \ell = \mathrm{ArcFace}_{m(a)} + \lambda\Bigl(\frac1a + \frac{a}{u_a^2}\Bigr),\qquad
              m(a) = l_m + (u_m - l_m)\frac{a - l_a}{u_a - l_a},\quad
              a = \mathrm{clip}(\|q\|, l_a, u_a)

    The margin costs a sample the more the longer its feature is, the regularizer rewards length:
    samples that are easily recognised end with long features, and the norm measures quality. The
    gradient goes through the norm, in the margin too. Needs features that are not normalised.

    Args:
        min_norm, max_norm: l_a and u_a, defaults 10 and 110 (paper). Made for 512 features after
            batch norm; norms outside get no gradient from margin and regularizer.
        min_margin, max_margin: l_m and u_m in radians in [0, pi), defaults 0.45 and 0.8 (authors'
            trainer).
        strength: lambda_g; default 35/64 of the scale, so 35 at s = 64 (paper; the authors' trainer
            has 20, their run.sh 35): the angular part grows with s, and beside a small one 35
            would only make features long. Below
            :math:`s\,\frac{u_m-l_m}{u_a-l_a}\,\frac{u_a^2l_a^2}{u_a^2-l_a^2}` (their check; 0.35 s
            at the defaults) the best norm may be the smallest for all.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. Face recognition: 64 (paper).
        mode: as in :class:`ArcFace`; default "easy" (authors' code).
        options: those of every :class:`Loss`.

    Departures: none.

    Example:
        The shortest feature, on its prototype, with m = 0: softplus(-s) + lambda(1/l_a + l_a/u_a²)

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> loss = MagFace(min_norm=1.0, max_norm=2.0, min_margin=0.0, strength=4.0, scale=1.0)
        >>> loss(W[:1], W, torch.tensor([0]))
        tensor(5.3133)
    """

    key: ClassVar[str] = "magface"
    widens_margins: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {
        "class_margin": "the margin follows the norm of the feature."
    }
    limits: ClassVar[Mapping[str, Limits]] = {
        "min_margin": RADIANS,
        "max_margin": RADIANS,
        "min_norm": {"above": 0},
        "max_norm": {"above": 0},
    }
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "min_margin": Range(0.05, 0.5, log=False),
        "max_margin": Range(0.5, 0.9, log=False),
        "strength": Range(5.0, 100.0),
    }
    not_tuned: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("min_norm", "max_norm"), "they say where the norms of the network lie"
    )
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True

    def __init__(
        self,
        *,
        min_norm: float = 10.0,
        max_norm: float = 110.0,
        min_margin: float = 0.45,
        max_margin: float = 0.8,
        strength: float | None = None,
        scale: Scale = "auto",
        mode: Mode = "easy",
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        _check(min_norm, max_norm, min_margin, max_margin, strength, mode)
        check_scale_setting(scale)
        self.min_norm, self.max_norm = min_norm, max_norm
        self.min_margin, self.max_margin = min_margin, max_margin
        self.strength = strength
        self.scale = scale
        self.mode: Mode = mode

    def aligned_cosine(self) -> float | Tensor:
        return _psi0(self.min_margin, self.max_margin)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("min_margin (radians)", self.min_margin, angle)]

    def per_sample(self, *inputs: Tensor, **made: Any) -> Tensor:
        return magface(
            *inputs,
            min_norm=current(self, "min_norm"),
            max_norm=current(self, "max_norm"),
            min_margin=current(self, "min_margin"),
            max_margin=current(self, "max_margin"),
            strength=current(self, "strength"),
            scale=current(self, "scale"),
            mode=self.mode,
            **made,
            **self.how,
        )


def magface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    min_norm: float = 10.0,
    max_norm: float = 110.0,
    min_margin: float = 0.45,
    max_margin: float = 0.8,
    strength: float | None = None,
    scale: Scale = "auto",
    mode: Mode = "easy",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """MagFace per sample; :class:`MagFace` has equation, arguments and an example."""
    _check(min_norm, max_norm, min_margin, max_margin, strength, mode)
    rows = features, prototypes, labels
    s, target, rest = scaled_cosines(*rows, scale, how, _psi0, min_margin, max_margin)
    norm = safe_norm(features).clamp(min_norm, max_norm)
    norm = norm if labels.dim() == 1 else norm[:, None]
    slope = (max_margin - min_margin) / (max_norm - min_norm)
    margin = min_margin + slope * (norm - min_norm)
    cosine, sine = cosine_and_sine(target, s, *rows, how.get("precision"))
    penalised = s * penalised_cosine(cosine, sine, margin, mode)
    factor = PULL * s if strength is None else strength
    pull = factor * (1 / norm + norm / max_norm**2)
    return over_targets(F.softplus(rest - penalised) + pull, labels)


def _check(
    min_norm: float | Tensor,
    max_norm: float | Tensor,
    min_margin: float | Tensor,
    max_margin: float | Tensor,
    strength: float | Tensor | None,
    mode: str,
) -> None:
    check_choice("mode", mode, MODES)
    check_setting("strength", 0.0 if strength is None else strength, at_least=0)
    check_setting("min_norm", min_norm, above=0)
    check_setting("max_norm", max_norm, above=0)
    check_setting("min_margin", min_margin, **RADIANS)
    check_setting("max_margin", max_margin, **RADIANS)
    ordered = not isinstance(max_norm, Tensor) and not isinstance(max_margin, Tensor)
    if ordered and not (max_norm > min_norm and max_margin >= min_margin):
        raise LargeMarginError(
            f"max_norm must be above min_norm and max_margin at least min_margin, but norms from "
            f"{min_norm} to {max_norm} and margins from {min_margin} to {max_margin} were given."
        )


def _psi0(min_margin: float | Tensor, max_margin: float | Tensor) -> float | Tensor:
    return psi0_of_angular_margin(max_margin)
