"""Hinge losses on logits: largest rival, all rivals, one against the rest (LMS 1, 14; ODN)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Limits, Range
from largemargin.losses.base.terms import (
    LogitOptions,
    at_target,
    check_setting,
    class_count,
    over_targets,
    require,
    stats_of,
    target_of,
    whole_logits,
    with_prior,
)
from largemargin.shapes import Features, Labels, PerSample, Prototypes

_DENSE = "it looks at every rival's logit by itself, so the (N, C) logits must exist."


class MaxHinge(LogitLoss):
    r"""Multi-class hinge :math:`[f_{c^*} - f_y + \rho]_+` on the largest rival (KOB-1; LMS 1).

    Touches two logits only and is reported not to train deep networks (LMS section 3). The
    derivative at the hinge is 0; among tied rivals one gets the gradient.

    Args:
        margin: rho, a number or one per class (C,); default 1 (LMS).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Example:
        >>> MaxHinge()(torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([0]))
        tensor(0.5000)
    """

    key: ClassVar[str] = "max_hinge"
    limits: ClassVar[Mapping[str, Limits]] = {"margin": {}}
    search_space: ClassVar[Mapping[str, Dimension]] = {"margin": Range(0.1, 10.0)}
    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 1.0,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        self._keep("margin", margin)
        check_setting("margin", self.margin)

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return max_hinge(*inputs, margin=self.margin, **logits, **self.how)


def max_hinge(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    margin: float | Tensor = 1.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Multi-class hinge per sample; :class:`MaxHinge` has equation, arguments and an example."""
    gap, labels = _gap(features, prototypes, labels, margin, options)
    return over_targets(F.relu(gap), labels)


class MaxSoftplus(MaxHinge):
    r"""Smooth version :math:`\mathrm{softplus}(f_{c^*} - f_y + \rho)` of the hinge (KOB-1; LMS 3).

    Args as :class:`MaxHinge`.

    Example:
        >>> MaxSoftplus()(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "max_softplus"

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return max_softplus(*inputs, margin=self.margin, **logits, **self.how)


def max_softplus(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    margin: float | Tensor = 1.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Smooth hinge per sample; :class:`MaxSoftplus` has equation, arguments and an example."""
    gap, labels = _gap(features, prototypes, labels, margin, options)
    return over_targets(F.softplus(gap), labels)


class DenseHinge(MaxHinge):
    r"""Mean hinge over all rivals, :math:`\frac1{C-1}\sum_{c\ne y}[f_c - f_y + \rho]_+` (KOB-14).

    torch's ``multi_margin_loss`` divides by C instead. Needs the (N, C) logits; with soft targets
    an (N, C, C) array.

    Args as :class:`MaxHinge`; the default is that of LMS 14.

    Example:
        >>> DenseHinge()(torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([0]))
        tensor(0.2500)
    """

    key: ClassVar[str] = "dense_hinge"
    refuses: ClassVar[dict[str, str]] = {"chunked": _DENSE}

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return dense_hinge(*inputs, margin=self.margin, **logits, **self.how)


def dense_hinge(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    margin: float | Tensor = 1.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Dense hinge per sample; :class:`DenseHinge` has equation, arguments and an example."""
    check_setting("margin", margin)
    logits, labels = _logits(features, prototypes, labels, options, "dense_hinge", relative=True)
    rivals = logits.shape[1] - 1
    required = at_target(margin, labels, rivals + 1, "margin")
    if isinstance(required, Tensor) and required.dim() > 0:
        required = required[..., None]
    if labels.dim() == 2:
        gaps = F.relu(logits[:, None, :] - logits[:, :, None] + required)
        own = torch.diagonal(gaps, dim1=1, dim2=2)
        return over_targets((gaps.sum(2) - own) / rivals, labels)
    index, target = target_of(logits, labels)
    return F.relu(logits - target + required).scatter(1, index, 0.0).sum(1) / rivals


class SoftHinge(LogitLoss):
    r"""One-against-rest logistic loss (ODN-SOFT).

    .. math:: \ell = \frac1C\Bigl[\mathrm{softplus}(-f_y)
                                + \sum_{i\ne y}\mathrm{softplus}(f_i)\Bigr]

    Departure: erratum D2; as printed the loss rewards wrong answers and is unbounded below.

    Args:
        similarity, scale, options: those of every :class:`LogitLoss`.

    Example:
        >>> SoftHinge()(torch.zeros(1, 3), torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "soft_hinge"
    refuses: ClassVar[dict[str, str]] = {"chunked": _DENSE}

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return soft_hinge(*inputs, **logits, **self.how)


def soft_hinge(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """One-against-rest loss per sample; :class:`SoftHinge` has equation, arguments and example."""
    logits, labels = _logits(features, prototypes, labels, options, "soft_hinge")
    if labels.dim() == 2:
        every = F.softplus(logits).sum(1, keepdim=True)
        return over_targets((every - logits) / logits.shape[1], labels)
    index, target = target_of(logits, labels)
    return F.softplus(logits.scatter(1, index, -target)).mean(1)


def _gap(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor | None,
    margin: float | Tensor,
    options: Any,
) -> tuple[Tensor, Tensor]:
    """rival - target + margin, and the labels."""
    check_setting("margin", margin)
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rival"), options)
    required = at_target(margin, labels, num_classes, "margin")
    return require(stats.rival) - require(stats.target) + required, labels


def _logits(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor | None,
    options: Any,
    name: str,
    *,
    relative: bool = False,
) -> tuple[Tensor, Tensor]:
    """The (N, C) logits, ``relative`` where only differences count, and the labels."""
    logits, labels = whole_logits(
        features, prototypes, labels, options, name, _DENSE, relative=relative
    )
    return with_prior(logits, options), labels
