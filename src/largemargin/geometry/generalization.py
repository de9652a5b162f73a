"""Generalization bounds of LMD section 5: the ramp loss and the right sides of (5.2) and (5.4).

They say how the error depends on margin, radius and sample size. As numbers they are nearly always
above 1; the docstrings say when they are not.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_number
from largemargin.ops.rows import promote


class LinearMarginBound(NamedTuple):
    """Right sides of LMD Theorem 5.2: see :func:`linear_margin_bound`."""

    empirical: Tensor
    confidence: Tensor
    fixed: Tensor
    union: Tensor


class BallBound(NamedTuple):
    """Right side of LMD Theorem 5.3: see :func:`ball_bound`."""

    empirical: Tensor
    confidence: Tensor
    bound: Tensor
    informative: bool


def _check_margins(margins: Tensor) -> Tensor:
    if not isinstance(margins, Tensor) or not margins.is_floating_point():
        given = margins.dtype if isinstance(margins, Tensor) else type(margins).__name__
        raise LargeMarginError(f"margins must be a floating point tensor, but {given} was given.")
    return promote(margins)


def ramp_loss(margins: Tensor, *, rho: float) -> Tensor:
    r"""The :math:`\rho`-margin loss (LMD 5.1, NGY-5).

    .. math:: \Phi_\rho(x) = \min(1, \max(0, 1 - x/\rho))

    1 for :math:`x \le 0`, 0 for :math:`x \ge \rho`, linear between: an upper bound of the 0-1 loss
    that asks for a margin.

    Args:
        margins: any shape; positive means correct.
        rho: :math:`\rho > 0` (the paper allows 0, which divides by it: erratum N6).

    Returns:
        Same shape as ``margins``.

    Example:
        >>> ramp_loss(torch.tensor([-1.0, 0.5, 3.0]), rho=2.0)
        tensor([1.0000, 0.7500, 0.0000])
    """
    check_number("rho", rho, above=0, hint="It is the margin asked for, and divides.")
    return (1 - _check_margins(margins) / rho).clamp(0, 1)


def _empirical_and_confidence(
    margins: Tensor, rho: float, delta: float, num_samples: int | None
) -> tuple[Tensor, Tensor, int]:
    check_number("delta", delta, above=0, below=1, hint="The bound holds with probability 1-delta.")
    empirical = ramp_loss(margins, rho=rho).mean()
    samples = margins.numel() if num_samples is None else num_samples
    check_number("num_samples", samples, at_least=1)
    confidence = 3 * math.sqrt(math.log(2 / delta) / (2 * samples))
    return empirical, torch.full_like(empirical, confidence), samples


def linear_margin_bound(
    margins: Tensor,
    *,
    rho: float,
    weight_norm: float,
    radius: float,
    centroid_norm: float,
    delta: float = 0.05,
    num_samples: int | None = None,
) -> LinearMarginBound:
    r"""Margin bound for linear classifiers on features in a ball (LMD Theorem 5.2, NGY-T5.2).

    .. math::
        R(h) \le \hat R_\rho(h) + \frac{2\Gamma\sqrt{(r+R)^2 + 1}}{\rho\sqrt N}
            + 3\sqrt{\frac{\log(2/\delta)}{2N}}

    is ``fixed``: the features are given, only the classifier was learned. ``union`` holds for
    learned features as well and lacks the :math:`\sqrt N`. With
    :math:`M = \Gamma\sqrt{(r+R)^2+1} \ge |h|` its empirical term is at least :math:`1 - M/\rho`, so
    it is always at least :math:`1 + M/\rho`: correct, never informative (erratum N7).

    Args:
        margins: h on the training samples, any shape.
        rho: margin of the empirical term, > 0.
        weight_norm: :math:`\Gamma`, bound on the norm of (weight, bias) of h.
        radius: r, features lie within it of their centroid.
        centroid_norm: R, bound on the norms of the centroids.
        delta: the bound holds with probability 1 - delta. Default 0.05 (the paper fixes none).
        num_samples: N; default the number of margins.

    Returns:
        ``empirical`` :math:`\hat R_\rho`, ``confidence`` (the last term), ``fixed`` and ``union``.

    Example:
        >>> h = torch.full((10000,), 2.0)
        >>> linear_margin_bound(h, rho=2.0, weight_norm=1.0, radius=0.0, centroid_norm=0.0).fixed
        tensor(0.0507)
    """
    for name, value in (
        ("weight_norm", weight_norm),
        ("radius", radius),
        ("centroid_norm", centroid_norm),
    ):
        check_number(name, value, at_least=0)
    empirical, confidence, samples = _empirical_and_confidence(margins, rho, delta, num_samples)
    complexity = 2 * weight_norm * math.sqrt((radius + centroid_norm) ** 2 + 1) / rho
    return LinearMarginBound(
        empirical,
        confidence,
        empirical + complexity / math.sqrt(samples) + confidence,
        empirical + complexity + confidence,
    )


def ball_bound(
    margins: Tensor,
    *,
    rho: float,
    feature_norm: float,
    centroid_norm: float,
    radius: float,
    delta: float = 0.05,
    num_samples: int | None = None,
) -> BallBound:
    r"""Probability of leaving the ball of one's class (LMD Theorem 5.3, ROB 19, NGY-T5.3).

    .. math::
        P(h < 0) \le \hat R'_\rho
            + \frac2\rho\Big(\Lambda^2 + 2R\Lambda + \frac{R^2}{\sqrt N}\Big)
            + 3\sqrt{\frac{\log(2/\delta)}{2N}}, \qquad h = r^2 - \|f - m\|^2

    With :math:`\delta_v^2 \le r^2 - \rho` and a compactness loss of 0 the empirical term is 0. Only
    :math:`R^2/\sqrt N` and the last term shrink with N. Since :math:`\rho \le r^2` is needed for a
    small empirical term, the bound can be below 1 only if :math:`r^2 > 2\Lambda^2 + 4R\Lambda`,
    which needs :math:`\Lambda < (\sqrt2-1)R` while a centroid of the features has norm at most
    :math:`\Lambda`: not informative in practice (erratum N8).

    Args:
        margins: h on the training samples of the class, any shape.
        rho: margin of the empirical term, > 0.
        feature_norm: :math:`\Lambda`, bound on the norms of the features.
        centroid_norm: R, bound on the norms of the centroids m.
        radius: r, radius of the ball; it enters ``margins`` and the test of informativeness.
        delta: the bound holds with probability 1 - delta. Default 0.05 (the paper fixes none).
        num_samples: N; default the number of margins.

    Returns:
        ``empirical``, ``confidence``, ``bound`` and ``informative``, whether
        :math:`r^2 > 2\Lambda^2 + 4R\Lambda`.

    Example:
        >>> ball_bound(torch.ones(9), rho=1.0, feature_norm=1.0, centroid_norm=0.5, radius=1.0)[3]
        False
    """
    for name, value in (
        ("feature_norm", feature_norm),
        ("centroid_norm", centroid_norm),
        ("radius", radius),
    ):
        check_number(name, value, at_least=0)
    empirical, confidence, samples = _empirical_and_confidence(margins, rho, delta, num_samples)
    constant = feature_norm**2 + 2 * centroid_norm * feature_norm
    complexity = 2 / rho * (constant + centroid_norm**2 / math.sqrt(samples))
    return BallBound(
        empirical,
        confidence,
        empirical + complexity + confidence,
        radius**2 > 2 * constant,
    )
