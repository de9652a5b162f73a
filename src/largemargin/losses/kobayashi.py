"""Kobayashi's view of the softmax loss: divergence, regularized and biased losses (LMS)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_choice, check_number
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range
from largemargin.losses.base.terms import (
    LogitOptions,
    at_target,
    check_setting,
    class_count,
    eager_logits,
    over_targets,
    require,
    stats_of,
)
from largemargin.ops.class_stats import Statistic
from largemargin.ops.row_values import RowLoss, row_values
from largemargin.ops.similarity import HeadLogits
from largemargin.shapes import Features, Labels, PerSample, Prototypes

Divergence: TypeAlias = Literal["symmetric", "rivals_to_uniform", "uniform_to_rivals"]
DIVERGENCES: tuple[Divergence, ...] = ("symmetric", "rivals_to_uniform", "uniform_to_rivals")


class RivalDivergence(LogitLoss):
    r"""Divergence of the posterior over the rivals from the uniform one (KOB-8; LMS 8-10).

    With q the softmax over the n = C-1 classes other than y and u uniform:

    .. math::
        D(q\|u) = \log n + \mathrm{spread} - \mathrm{rest},\quad
        D(u\|q) = \mathrm{rest} - \mathrm{mean} - \log n,\quad
        \tilde D = \tfrac12\bigl(D(q\|u) + D(u\|q)\bigr) = \tfrac12(\mathrm{spread} - \mathrm{mean})

    All are >= 0, and 0 exactly when the other logits are equal, where the softmax loss hides its
    widest margin. The target's logit has no gradient. With two classes they are 0.

    Args:
        kind: "symmetric" (default, the paper's choice), "rivals_to_uniform" D(q||u) or
            "uniform_to_rivals" D(u||q).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: erratum K1 (x is read as the logit).

    Example:
        >>> RivalDivergence()(torch.tensor([[5.0, 1.0, 1.0]]), torch.tensor([0]))
        tensor(0.)
    """

    key: ClassVar[str] = "rival_divergence"
    is_penalty: ClassVar[bool] = True

    def __init__(
        self,
        *,
        kind: Divergence = "symmetric",
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_choice("kind", kind, DIVERGENCES)
        self.kind: Divergence = kind

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return rival_divergence(*inputs, kind=self.kind, **logits, **self.how)


def rival_divergence(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    kind: Divergence = "symmetric",
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Rival divergence per sample; :class:`RivalDivergence` has equation, arguments and example."""
    check_choice("kind", kind, DIVERGENCES)
    kinds: dict[Divergence, tuple[Statistic, ...]] = {
        "symmetric": ("spread", "mean"),
        "rivals_to_uniform": ("rest", "spread"),
        "uniform_to_rivals": ("rest", "mean"),
    }
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(features, prototypes, labels, kinds[kind], options)
    if kind == "symmetric":
        values = 0.5 * (require(stats.spread) - require(stats.mean))
    elif kind == "rivals_to_uniform":
        values = math.log(num_classes - 1) + require(stats.spread) - require(stats.rest)
    else:
        values = require(stats.rest) - require(stats.mean) - math.log(num_classes - 1)
    return over_targets(values, labels)


class BiasedSoftmax(LogitLoss):
    r"""Softmax loss with the target's logit lowered by a constant (KOB-15; LMS 15).

    .. math:: \ell = \mathrm{softplus}(\mathrm{rest} - \mathrm{target} + \rho)
                   + \lambda\tilde D

    On scaled cosines with rho = s m it is CosFace.

    Args:
        margin: rho in logit units, a number or one per class (C,); default 1 (LMS section 3).
        strength: lambda of the symmetric divergence, default 0; LMS Table 4 combines the two.
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: none.

    Example:
        >>> BiasedSoftmax()(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "biased_softmax"
    widens_margins: ClassVar[bool] = True
    reads_head_logits: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"margin": {}}
    search_space: ClassVar[Mapping[str, Dimension]] = {"margin": Range(0.1, 10.0)}
    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 1.0,
        strength: float = 0.0,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        self._keep("margin", margin)
        check_setting("margin", self.margin)
        check_number("strength", strength, at_least=0)
        self.strength = strength

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return biased_softmax(
            *inputs, margin=self.margin, strength=self.strength, **logits, **self.how
        )


def biased_softmax(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    margin: float | Tensor = 1.0,
    strength: float = 0.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Biased softmax per sample; :class:`BiasedSoftmax` has equation, arguments and an example."""
    check_setting("margin", margin)
    check_number("strength", strength, at_least=0)
    found = eager_logits(features, prototypes, labels, options)
    if found is not None and not isinstance(margin, Tensor) and (strength or not margin):
        return row_values(*found, RowLoss(required=margin, strength=0.5 * strength))
    num_classes = class_count(features, prototypes, labels)
    want: tuple[Statistic, ...] = ("target", "rest", "spread", "mean")
    stats, labels = stats_of(features, prototypes, labels, want if strength else want[:2], options)
    required = at_target(margin, labels, num_classes, "margin")
    values = F.softplus(require(stats.rest) - require(stats.target) + required)
    if strength:
        values = values + 0.5 * strength * (require(stats.spread) - require(stats.mean))
    return over_targets(values, labels)


class Kobayashi(LogitLoss):
    r"""Softmax loss plus symmetric-KL regularization (KOB-11; LMS 11, 12).

    .. math:: \ell = \mathrm{CE}(f, y) + \lambda\tilde D(f, y),\qquad
        \frac{\partial\ell}{\partial f_c} = p_c + \frac\lambda2\Bigl[q_c\Bigl(f_c -
        \sum_{d\ne y} q_d f_d\Bigr) + q_c - \frac1{C-1}\Bigr],\quad c\ne y

    Equalising the rivals' logits widens the margin hidden in the softmax loss.

    Args:
        strength: lambda >= 0, default 0.3 (LMS Table 1); 0.5 and 1 are used too.
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: erratum K1.

    Example:
        With two classes it is cross entropy:

        >>> Kobayashi()(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "kobayashi"
    reads_head_logits: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True

    def __init__(
        self,
        *,
        strength: float = 0.3,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("strength", strength, at_least=0)
        self.strength = strength

    def row_loss(self, made: HeadLogits, features: Tensor, prototypes: Tensor) -> RowLoss | None:
        if not self.has_form(made):
            return None
        check_number("strength", self.strength, at_least=0)
        return RowLoss(strength=0.5 * self.strength)

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return kobayashi(*inputs, strength=self.strength, **logits, **self.how)


def kobayashi(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    strength: float = 0.3,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Kobayashi's loss per sample; :class:`Kobayashi` has equation, arguments and an example."""
    return biased_softmax(features, prototypes, labels, margin=0.0, strength=strength, **options)
