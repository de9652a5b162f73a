"""ElasticFace: a margin of its own for every sample, drawn from a Gaussian (Boutros 2022)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_choice, check_length, check_number
from largemargin.losses.arcface import penalised_cosine
from largemargin.losses.base.angles import cosine_and_sine
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.scale import (
    Scale,
    check_scale_setting,
    psi0_of_angular_margin,
    psi0_of_cosine_margin,
)
from largemargin.losses.base.schedules import Schedule, margin_warm_up
from largemargin.losses.base.setting_ranges import (
    RADIANS,
    Dimension,
    Limits,
    Range,
    cosine_margin_limits,
)
from largemargin.losses.base.terms import (
    at_target,
    check_margin,
    check_setting,
    class_count,
    mean_over_targets,
    over_targets,
    scaled_cosines,
)
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.norms import promote
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes

Form: TypeAlias = Literal["arc", "cos"]
FORMS: tuple[Form, ...] = ("arc", "cos")
PSI0 = {"arc": psi0_of_angular_margin, "cos": psi0_of_cosine_margin}


class ElasticFace(Loss):
    r"""ElasticFace (BAS-ELASTIC): ArcFace or CosFace with a random margin per sample.

    .. math:: z_y' = s\cos(\theta_y + m_i)\ \ (\text{arc}),\qquad z_y' = s(\cos\theta_y - m_i)\ \
              (\text{cos}),\qquad m_i = m + \sigma\,\varepsilon_i,\ \varepsilon_i \sim N(0, 1)

    One margin for all assumes that all classes vary alike. ``plus`` hands the drawn margins out by
    size: the sample furthest from its prototype gets the widest, the nearest the narrowest.

    Margins are drawn anew in every training forward, from torch's generator of the features'
    device: ``torch.manual_seed`` repeats a run, and activation checkpointing, which restores the
    generator, repeats the draw. Evaluation draws nothing and has m for all.

    Args:
        margin: m, radians in [0, pi) or in cosine units, a number or one per class (C,). Default
            0.5, the paper's for "arc"; for "cos" it has 0.35.
        std: sigma >= 0, default 0.05 (paper and authors' configuration). With ``plus`` both have
            0.0175 for "arc"; for "cos" 0.025 (paper) or 0.02 (configuration).
        form: "arc" (default) or "cos".
        plus: the variant above, default False.
        scale: s > 0, or "auto" (default): :func:`auto_scale`. Face recognition: 64 (paper).
        options: those of every :class:`Loss`.

    Departures: in the authors' code of ``plus`` the sorted margins reach the samples in another
    order than the sorted cosines'; here it is as the paper says. Margins are sorted within a rank.

    Example:
        Evaluation is ArcFace (``mode="none"``):

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> ElasticFace(margin=math.pi / 3, scale=2.0).eval()(W[:1], W, torch.tensor([0]))
        tensor(0.3133)
    """

    key: ClassVar[str] = "elasticface"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    counts_rows: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "margin": Range(0.05, 0.8, log=False),
        "std": Range(0.005, 0.2),
    }
    head_similarity: ClassVar[str | None] = "cosine"
    reads_head_logits: ClassVar[bool] = True

    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 0.5,
        std: float = 0.05,
        form: Form = "arc",
        plus: bool = False,
        scale: Scale = "auto",
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_choice("form", form, FORMS)
        check_number("std", std, at_least=0)
        check_scale_setting(scale)
        self.form: Form = form
        self._keep("margin", margin)
        if form == "arc":
            check_margin("margin", self.margin, RADIANS)
        self.std = std
        self.plus = plus
        self.scale = scale

    def aligned_cosine(self) -> float | Tensor:
        return PSI0[self.form](self.margin)

    def setting_limits(self, name: str, num_classes: int | None = None) -> Limits:
        if name != "margin":
            return super().setting_limits(name, num_classes)
        return _limits(self.form, num_classes or 2)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        if self.form == "arc":
            return [MarginCeiling("margin (radians)", self.margin, angle)]
        return [MarginCeiling("cosine margin", self.margin, 1 - math.cos(angle))]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """:func:`margin_warm_up`."""
        return margin_warm_up(self, term, total_steps, margin=0.0)

    def per_sample(self, *inputs: Tensor, kept: Tensor | None = None, **made: Any) -> Tensor:
        noise = torch.randn_like(promote(inputs[0].detach()[:, 0])) if self.training else None
        margin, std, scale = current(self, "margin"), current(self, "std"), current(self, "scale")
        how: Any = {**made, **self.how}
        return _values(inputs, margin, std, noise, kept, self.form, self.plus, scale, how)


def elasticface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: float | Tensor = 0.5,
    std: float = 0.05,
    noise: Tensor | None = None,
    form: Form = "arc",
    plus: bool = False,
    scale: Scale = "auto",
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """ElasticFace per sample; :class:`ElasticFace` has equation, arguments and an example.

    ``noise`` (N,) are the draws epsilon; None for none, the margin m for all.
    """
    rows = features, prototypes, labels
    return _values(rows, margin, std, noise, None, form, plus, scale, how)


def _values(
    rows: tuple[Tensor, ...],
    margin: float | Tensor,
    std: float,
    noise: Tensor | None,
    kept: Tensor | None,
    form: Form,
    plus: bool,
    scale: Scale,
    how: ComputeOptions,
) -> Tensor:
    """The loss; ``kept`` (N,) says which rows count, None for all."""
    check_choice("form", form, FORMS)
    features, prototypes, labels = rows
    num_classes = class_count(features, prototypes, labels)
    check_margin("margin", margin, _limits(form, num_classes))
    check_setting("std", std, at_least=0)
    s, target, rest = scaled_cosines(features, prototypes, labels, scale, how, PSI0[form], margin)
    precision = how.get("precision")
    cosine, sine = cosine_and_sine(target, s, features, prototypes, labels, precision)
    m = at_target(margin, labels, num_classes, "margin")
    if noise is not None:
        noise = torch.as_tensor(noise).to(cosine)
        check_length("noise", noise, len(labels), "one number per sample")
        if plus:
            noise = _by_distance(noise, mean_over_targets(cosine.detach(), labels), kept)
        m = m + std * (noise if labels.dim() == 1 else noise[:, None])
    penalised = penalised_cosine(cosine, sine, m, "none") if form == "arc" else cosine - m
    return over_targets(F.softplus(rest - s * penalised), labels)


def _by_distance(noise: Tensor, cosines: Tensor, kept: Tensor | None) -> Tensor:
    """The draws by size, the largest to the sample furthest from its prototype.

    Rows that do not count come first in both orders: none gets the draw of one that does.
    """
    if kept is not None:
        cosines = cosines.masked_fill(~kept, torch.inf)
        noise = noise.masked_fill(~kept, -torch.inf)
    far_last = cosines.argsort(descending=True)
    handed = torch.empty_like(noise).index_copy(0, far_last, noise.sort().values)
    return handed if kept is None else handed.masked_fill(~kept, 0)


def _limits(form: Form, num_classes: int) -> Limits:
    return RADIANS if form == "arc" else cosine_margin_limits(num_classes)
