"""A-Softmax (SphereFace) and L-Softmax: the target's angle multiplied by an integer (LTLM)."""

from collections.abc import Mapping
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import LargeMarginError, check_classifier
from largemargin.heads.head_spec import HeadSpec
from largemargin.losses.base.angles import multiplied_angle
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.scale import Scale, check_scale_setting
from largemargin.losses.base.schedules import Annealing, Schedule
from largemargin.losses.base.setting_ranges import Choice, Dimension, Range
from largemargin.losses.base.settings import size_as_built
from largemargin.losses.base.terms import (
    at_target,
    check_setting,
    over_targets,
    scaled_cosines,
    target_and_rest,
)
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.norms import safe_norm
from largemargin.ops.scheduled_values import current
from largemargin.ops.shards import refuse_sharded
from largemargin.shapes import Features, Labels, PerSample, Prototypes

LARGEST_FACTOR = 100
"""Of an angle: the polynomial has as many terms, and no arrangement has room for wider margins."""


class SphereFace(Loss):
    r"""A-Softmax / SphereFace (ZHO-ASOFTMAX).

    .. math:: \ell = -\log\frac{e^{r\psi(\theta_y)}}
                              {e^{r\psi(\theta_y)} + \sum_{j\ne y} e^{r\cos\theta_j}}

    with :math:`\psi` of :func:`sphereface_psi`, annealed to
    :math:`(\lambda\cos\theta + \psi)/(1+\lambda)`, and r the feature norm (``scale=None``, the
    original: rows of W normalised, features not) or a constant scale (LTLM's variant).

    Args:
        margin: m, an integer; default 4 (original). A real factor: :class:`UnifiedMargin`.
        scale: None keeps the feature norm; a number s > 0, or "auto" (:func:`auto_scale`),
            normalises features.
        annealing: lambda >= 0; the original starts near 1000 and decays to 5. Default 0, the bare
            loss, which trains only from a good start.
        options: those of every :class:`Loss`.

    Departures: cos(m theta) is evaluated as a polynomial in cos theta, which has no singular
    gradient at 0 and pi.

    Example:
        m = 1 is NormFace:

        >>> W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> SphereFace(margin=1, scale=1.0)(W[:1], W, torch.tensor([0]))
        tensor(0.1269)
    """

    key: ClassVar[str] = "sphereface"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "margin": Choice((2, 3, 4)),
        "annealing": Range(0.1, 100.0),
    }
    refuses: ClassVar[dict[str, str]] = {
        "class_margin": "the margin is an integer factor of the angle."
    }

    def __init__(
        self,
        *,
        margin: int = 4,
        scale: Scale | None = None,
        annealing: float = 0.0,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        self.margin = check_integer_margin(margin, "SphereFace")
        if scale is not None:
            check_scale_setting(scale)
        self.scale = scale
        self.annealing = annealing

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """lambda from 1000 to 5 with rate 0.12 for 28,000 steps, at 5 after 6 % of them.

        The authors' model and solver files. ``annealing`` > 0 of the loss is the floor instead.
        """
        floor, rate = size_as_built(self, "annealing") or 5.0, 0.12 * 28_000 / total_steps
        return [Annealing(f"{term}.annealing", floor=floor, rate=rate)]

    def head_form(self, num_classes: int) -> HeadSpec:
        if self.scale is None:
            return HeadSpec("cosine_prototypes")
        return HeadSpec("cosine", self.scale_for(num_classes))

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return sphereface(
            *inputs,
            margin=self.margin,
            scale=current(self, "scale"),
            annealing=current(self, "annealing"),
            **self.how,
        )


def sphereface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: int = 4,
    scale: Scale | None = None,
    annealing: float = 0.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """A-Softmax per sample; :class:`SphereFace` has equation, arguments and an example."""
    margin = check_integer_margin(margin, "sphereface")
    check_setting("annealing", annealing, at_least=0)
    if scale is None:
        target, rest = target_and_rest(
            features, prototypes, labels, similarity="cosine_prototypes", **how
        )
        length = safe_norm(features)
        length = length if labels.dim() == 1 else length[:, None]
    else:
        s, target, rest = scaled_cosines(features, prototypes, labels, scale, how)
        length = torch.ones_like(target) * s
    cosine = target / length.clamp_min(torch.finfo(length.dtype).tiny)
    penalised = length * _annealed(cosine, margin, annealing)
    return over_targets(F.softplus(rest - penalised), labels)


def sphereface_psi(theta: Tensor, margin: int = 4) -> Tensor:
    r"""A-Softmax's target curve :math:`\psi(\theta) = (-1)^k\cos(m\theta) - 2k`.

    :math:`k = \min(\lfloor m\theta/\pi\rfloor, m-1)`: continuous and decreasing on [0, pi] from
    1 to 1 - 2m.

    Example:
        >>> sphereface_psi(torch.tensor([0.0]), 4)
        tensor([1.])
    """
    margin = check_integer_margin(margin, "sphereface_psi")
    k = torch.floor(margin * theta.detach() / torch.pi).clamp(0, margin - 1)
    return (1 - 2 * torch.remainder(k, 2)) * torch.cos(margin * theta) - 2 * k


class LSoftmax(Loss):
    r"""L-Softmax (BAS-LSOFTMAX; Liu et al. 2016): nothing normalised, no bias.

    .. math:: z_y' = \|W_y\|\|q\|\,\frac{\lambda\cos\theta + \psi(\theta)}{1+\lambda},
              \qquad z_j = \langle W_j, q\rangle

    Args:
        margin: m, an integer in {2, 3, 4}; default 4. m = 1 is the plain softmax loss.
        annealing: lambda >= 0, decayed from a large value in the original.
        options: those of every :class:`Loss`.

    Departures: as in :class:`SphereFace`.

    Example:
        >>> W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> LSoftmax(margin=1)(W[:1], W, torch.tensor([0]))
        tensor(0.1269)
    """

    key: ClassVar[str] = "lsoftmax"
    has_target_curve: ClassVar[bool] = True
    widens_margins: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = SphereFace.search_space
    refuses: ClassVar[dict[str, str]] = SphereFace.refuses

    def __init__(
        self, *, margin: int = 4, annealing: float = 0.0, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        self.margin = check_integer_margin(margin, "LSoftmax")
        self.annealing = annealing

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """lambda from 1000 to 0 with rate 2.5e-5 and power 35 for 30,000 steps.

        The authors' MNIST example. ``annealing`` > 0 of the loss is the floor instead.
        """
        floor, rate = size_as_built(self, "annealing"), 2.5e-5 * 30_000 / total_steps
        return [Annealing(f"{term}.annealing", floor=floor, rate=rate, power=35.0)]

    def head_form(self, num_classes: int) -> HeadSpec:
        return HeadSpec("dot")

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return lsoftmax(
            *inputs, margin=self.margin, annealing=current(self, "annealing"), **self.how
        )


def lsoftmax(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: int = 4,
    annealing: float = 0.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """L-Softmax per sample; :class:`LSoftmax` has equation, arguments and an example."""
    margin = check_integer_margin(margin, "lsoftmax")
    refuse_sharded(prototypes, "lsoftmax", "it needs the length of each sample's class vector.")
    check_classifier(features, prototypes, None)  # sub-centers differ in length
    check_setting("annealing", annealing, at_least=0)
    target, rest = target_and_rest(features, prototypes, labels, similarity="dot", **how)
    length = safe_norm(features)
    if labels.dim() == 1:
        own = prototypes[labels.long().clamp(0, prototypes.shape[0] - 1)]
        length = length * safe_norm(own)
    else:
        length = length[:, None] * at_target(safe_norm(prototypes), labels, len(prototypes), "W")
    cosine = target / length.clamp_min(torch.finfo(length.dtype).tiny)
    penalised = length * _annealed(cosine, margin, annealing)
    return over_targets(F.softplus(rest - penalised), labels)


def _annealed(cosine: Tensor, margin: int, annealing: float | Tensor) -> Tensor:
    cosine = torch.where(cosine.abs() > 1, cosine.sign(), cosine)
    return (annealing * cosine + multiplied_angle(cosine, margin)) / (1 + annealing)


def check_integer_margin(margin: float, name: str) -> int:
    whole = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not whole or not 1 <= margin <= LARGEST_FACTOR or margin != int(margin):
        raise LargeMarginError(
            f"margin of {name} multiplies the angle and must be an integer >= 1 and "
            f"<= {LARGEST_FACTOR}, but {margin!r} was given. For a real factor use unified_margin "
            "(UnifiedMargin) with m1 = margin."
        )
    return int(margin)
