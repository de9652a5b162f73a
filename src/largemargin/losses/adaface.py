"""AdaFace: a margin that follows the norm of the feature, a proxy of image quality (Kim 2022)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.base.angles import cosine_and_sine
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.running_statistics import RunningStatistics, mean_of_kept
from largemargin.losses.base.scale import Scale, check_scale_setting
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
from largemargin.ops.norms import safe_norm
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes

STD_FLOOR = 1e-3
"""Added to the deviation of the norms: equal norms are of average quality (authors' code)."""


class AdaFace(Loss):
    r"""AdaFace (BAS-ADAFACE): features of small norm get an angular margin, large ones an additive.

    .. math:: z_y' = s\bigl(\cos(\mathrm{clip}(\theta_y - m\kappa, 0, \pi)) - m(1 + \kappa)\bigr),
              \qquad \kappa = \mathrm{clip}\Bigl(h\,\frac{\|q\|-\mu}{\sigma + 0.001}, -1, 1\Bigr)

    with kappa the quality, and mu and sigma the running mean and standard deviation of the feature
    norms: an image that cannot be recognised has a feature of small norm, and is then pulled less
    where it is far off. At quality -1 it is ArcFace, at 0 CosFace. The norm is a constant for the
    gradient, as in the paper: training does not move it. Needs features that are not normalised.

    Args:
        margin: m in [0, pi), a number or one per class (C,). Default 0.2, for ordinary classifiers
            (benchmarks/loss_defaults.py): the best quality costs 2 m. The paper has 0.4.
        concentration: h > 0, default 0.333: about two thirds of the qualities lie within 1/3.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. Face recognition: 64 (authors' code).
        rate: weight of a batch in mu and sigma, default 0.01 (paper and authors' training command;
            their class alone has 1).
        norm_mean, norm_std: mu and sigma before the first batch, defaults 20 and 100 (authors'
            code). So wide a start means average quality for all until some hundred batches are in.
        options: those of every :class:`Loss`, with ``sync=True``: norms of all ranks.

    State: ``norms.values``, mu and sigma. A batch of one sample does not move sigma.

    Departures: the clip of the angle is that of the authors' code, at 0 and pi instead of 0.001
    inside; norms are not cut off at 100.

    Example:
        A feature of average norm has CosFace's margin:

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> AdaFace(margin=1.0, scale=8.0, norm_mean=1.0).eval()(W[:1], W, torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "adaface"
    widens_margins: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"margin": RADIANS, "concentration": {"above": 0}}
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "margin": Range(0.05, 0.8, log=False),
        "concentration": Range(0.1, 1.0),
    }
    fixed: ClassVar[frozenset[str]] = frozenset({"rate", "norm_mean", "norm_std"})
    defaults: ClassVar[dict[str, Any]] = {"sync": True}
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True
    counts_rows: ClassVar[bool] = True

    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 0.2,
        concentration: float = 0.333,
        scale: Scale = "auto",
        rate: float = 0.01,
        norm_mean: float = 20.0,
        norm_std: float = 100.0,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**{**self.defaults, **options})
        check_number("concentration", concentration, above=0)
        check_number("rate", rate, at_least=0, at_most=1)
        check_number("norm_mean", norm_mean, at_least=0)
        check_number("norm_std", norm_std, at_least=0)
        check_scale_setting(scale)
        self._keep("margin", margin)
        check_margin("margin", self.margin, RADIANS)
        self.concentration = concentration
        self.scale = scale
        self.rate, self.norm_mean, self.norm_std = rate, norm_mean, norm_std
        self.norms = RunningStatistics(norm_mean, norm_std, rate=rate)

    def aligned_cosine(self) -> float | Tensor:
        return _psi0(self.margin)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("margin (radians)", self.margin, angle)]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """:func:`margin_warm_up`."""
        return margin_warm_up(self, term, total_steps, margin=0.0)

    def per_sample(self, *inputs: Tensor, kept: Tensor | None = None, **made: Any) -> Tensor:
        lengths = _lengths(inputs[0])

        def of_batch(before: Tensor) -> Tensor:
            mean, count = mean_of_kept(lengths, kept, self._synced)
            square, _ = mean_of_kept((lengths - mean).square(), kept, self._synced)
            std = torch.where(count > 1, square * count / (count - 1), torch.nan).sqrt()
            return torch.stack([mean, std])

        mean, std = self.norms(inputs[0], of_batch).unbind()
        return adaface(
            *inputs,
            margin=current(self, "margin"),
            concentration=current(self, "concentration"),
            scale=current(self, "scale"),
            norm_mean=mean,
            norm_std=std,
            **made,
            **self.how,
        )


def adaface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: float | Tensor = 0.2,
    concentration: float = 0.333,
    scale: Scale = "auto",
    norm_mean: float | Tensor = 20.0,
    norm_std: float | Tensor = 100.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """AdaFace per sample; :class:`AdaFace` has equation, arguments and an example.

    ``norm_mean`` and ``norm_std`` are mu and sigma, numbers or 0-dim tensors.
    """
    check_margin("margin", margin, RADIANS)
    check_setting("concentration", concentration, above=0)
    check_setting("norm_mean", norm_mean, at_least=0)
    check_setting("norm_std", norm_std, at_least=0)
    rows = features, prototypes, labels
    s, target, rest = scaled_cosines(*rows, scale, how, _psi0, margin)
    quality = concentration * (_lengths(features) - norm_mean) / (norm_std + STD_FLOOR)
    quality = quality.clamp(-1, 1) if labels.dim() == 1 else quality.clamp(-1, 1)[:, None]
    m = at_target(margin, labels, prototypes.shape[0], "margin")
    cosine, sine = cosine_and_sine(target, s, *rows, how.get("precision"))
    angle = (torch.atan2(sine, cosine) - m * quality).clamp(0, math.pi)
    penalised = s * (torch.cos(angle) - m * (1 + quality))
    return over_targets(F.softplus(rest - penalised), labels)


def _lengths(features: Tensor) -> Tensor:
    return safe_norm(features.detach())


def _psi0(margin: float | Tensor) -> float | Tensor:
    return 1 - 2 * margin  # of quality 1, the smallest
