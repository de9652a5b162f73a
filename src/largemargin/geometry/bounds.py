"""Bounds on divergences, on GM-Softmax and on LM-Softmax, with the values at their optimum.

Generalization bounds of LMD section 5: the ramp loss and the right sides of (5.2) and (5.4).

They say how the error depends on margin, radius and sample size. As numbers they are nearly always
above 1; the docstrings say when they are not.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_num_classes, check_number
from largemargin.ops.class_stats import class_stats
from largemargin.ops.norms import promote
from largemargin.shapes import Features, Labels, Prototypes
from largemargin.tracing import values_are_checked


class JsdLowerBound(NamedTuple):
    """Two lower bounds of a Jensen-Shannon divergence: see :func:`jsd_lower_bound`."""

    paper: float
    tight: float


class SimplexOptimum(NamedTuple):
    """Values at the regular simplex: see :func:`simplex_optimum`."""

    class_margin: float
    sample_margin: float
    lm_softmax: float


class LMSoftmaxInequality(NamedTuple):
    """Two sides of the LM-Softmax inequality: see :func:`lm_softmax_inequality`."""

    left: Tensor
    right: Tensor
    gamma_min: Tensor


def _check_distributions(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    for name, values in (("p", p), ("q", q)):
        if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() == 0:
            raise LargeMarginError(
                f"{name} must be a floating point tensor of probabilities along its last "
                f"dimension, but {values!r} was given."
            )
    if p.shape != q.shape:
        raise LargeMarginError(
            f"p and q must have the same shape, but theirs are {tuple(p.shape)} and "
            f"{tuple(q.shape)}."
        )
    if values_are_checked(p, None):
        for name, values in (("p", p), ("q", q)):
            total = promote(values).sum(-1)
            if bool((values < 0).any()) or bool(((total - 1).abs() > 1e-3).any()):
                raise LargeMarginError(
                    f"{name} must hold probabilities that sum to 1 along its last dimension, but "
                    f"its smallest entry is {float(values.min()):.3g} and its sums lie in "
                    f"[{float(total.min()):.6g}, {float(total.max()):.6g}]. Normalise it first."
                )
    return promote(p), promote(q)


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    positive = p > 0
    ratio = torch.where(positive, p, 1.0) / torch.where(positive, q, 1.0)
    return (p * ratio.log()).sum(-1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    r"""Kullback-Leibler divergence :math:`\sum_k p_k \log(p_k/q_k)`, natural logarithm.

    Args:
        p, q: (..., K) probabilities; zeros are allowed.

    Returns:
        (...); +inf where q vanishes and p does not.

    Example:
        >>> kl_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
        tensor(0.6931)
    """
    return _relative_entropy(*_check_distributions(p, q))


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    r"""Total variation distance :math:`\tfrac12\sum_k |p_k - q_k|`, in [0, 1].

    Args:
        p, q: (..., K) probabilities.

    Returns:
        (...).

    Example:
        >>> total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
        tensor(0.5000)
    """
    p, q = _check_distributions(p, q)
    return (p - q).abs().sum(-1) / 2


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    r"""Jensen-Shannon divergence, natural logarithm, in [0, log 2].

    .. math:: \mathrm{JSD}(p, q) = \tfrac12 \mathrm{KL}(p\|m) + \tfrac12 \mathrm{KL}(q\|m),
        \qquad m = \tfrac12(p + q)

    Args:
        p, q: (..., K) probabilities; zeros are allowed.

    Returns:
        (...).

    Example:
        >>> jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        tensor(0.6931)
    """
    p, q = _check_distributions(p, q)
    middle = (p + q) / 2
    return (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2


def jsd_lower_bound(tau: float) -> JsdLowerBound:
    r"""Divergence of two classes at any earlier layer (LMD Theorem 6.3, ROB 20, NGY-6.1).

    .. math:: \mathrm{JSD} \ge \frac{(2\tau-1)^2}{2}, \qquad
        \text{sharper: } \mathrm{JSD} \ge \log 2 - h(\tau)

    with h the binary entropy. Assumed: every class keeps at least the mass :math:`\tau` in its own
    ball of features, and the balls are disjoint (unstated in the paper, implied by
    :math:`\delta_d > \delta_v`). Informative for every :math:`\tau > 1/2`.

    Args:
        tau: mass in one's own ball, in [1/2, 1].

    Returns:
        ``paper`` and ``tight``; paper <= tight <= log 2.

    Example:
        >>> jsd_lower_bound(1.0).paper
        0.5
    """
    check_number("tau", tau, at_least=0.5, at_most=1, hint="It is the mass inside one's own ball.")
    entropy = -sum(share * math.log(share) for share in (tau, 1 - tau) if share > 0)
    return JsdLowerBound((2 * tau - 1) ** 2 / 2, math.log(2) - entropy)


def simplex_optimum(num_classes: int, *, scale: float = 64.0) -> SimplexOptimum:
    r"""What the regular simplex reaches with every feature on its prototype (LTLM L1, P3, T7).

    .. math::
        \theta = \arccos\frac{-1}{C-1}, \qquad \gamma = \frac{C}{C-1}, \qquad
        L_{\mathrm{LM}} = -\frac{C}{C-1} + \frac{\log(C-1)}{s}

    No unit prototypes have a larger class margin or a larger smallest sample margin. The simplex
    exists for D >= C - 1 only; below that the ceilings stand but are not reached.

    Args:
        num_classes: C >= 2.
        scale: s of LM-Softmax. Default 64, the largest of LTLM's 10, 20, 64.

    Returns:
        ``class_margin`` in radians, ``sample_margin`` in cosine units and ``lm_softmax``, the value
        of the LM-Softmax loss.

    Example:
        >>> simplex_optimum(3).sample_margin
        1.5
    """
    check_num_classes(num_classes)
    check_number("scale", scale, above=0)
    margin = num_classes / (num_classes - 1)
    return SimplexOptimum(
        math.acos(-1 / (num_classes - 1)), margin, -margin + math.log(num_classes - 1) / scale
    )


def gm_softmax_bound(
    num_classes: int,
    *,
    scale: float = 64.0,
    alpha1: float | Tensor = 1.0,
    beta1: float | Tensor = 0.0,
    alpha2: float | Tensor = 1.0,
    beta2: float | Tensor = 0.0,
    check: bool = True,
) -> Tensor:
    r"""Lower bound of the GM-Softmax risk (LTLM Theorems 5 and 8, signs corrected: Z6, Z7).

    .. math::
        \frac1N\sum_i \log\Big[ e^{s(\alpha_{i2}+\beta_{i2}-\alpha_{i1}-\beta_{i1})}
            + (C-1)\, e^{-s(\frac{1}{C-1}+\alpha_{i1}+\beta_{i1})} \Big]

    Reached exactly at the regular simplex with :math:`z_i = w_{y_i}`. Theorem 5: balanced data and
    constant parameters. Theorem 8: any data, if :math:`\sum_j w_j = 0`. For CosFace
    :math:`\alpha = 1, \beta = -m` on both lines.

    Args:
        num_classes: C >= 2.
        scale: s > 0. Default 64, as in :func:`largemargin.losses.gm_softmax`.
        alpha1, beta1, alpha2, beta2: numbers, or (N,) tensors for per-sample parameters. Defaults:
            NormFace.
        check: raise unless alpha1 >= 1/2 and alpha2 <= alpha1, which the theorem assumes.

    Returns:
        0-dim tensor; float64 unless a tensor was given.

    Example:
        >>> gm_softmax_bound(2, scale=1.0)
        tensor(0.1269, dtype=torch.float64)
    """
    check_num_classes(num_classes)
    check_number("scale", scale, above=0)
    given = [alpha1, beta1, alpha2, beta2]
    like = next((promote(v) for v in given if isinstance(v, Tensor)), None)
    like = torch.zeros((), dtype=torch.float64) if like is None else like
    a1, b1, a2, b2 = (torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in given)
    if check and values_are_checked(like, None) and not bool(((a1 >= 0.5) & (a2 <= a1)).all()):
        raise LargeMarginError(
            f"alpha1 must be >= 1/2 and alpha2 <= alpha1, but alpha1 = {alpha1} and alpha2 = "
            f"{alpha2} were given. The theorem needs it; pass check=False to evaluate anyway."
        )
    first = scale * (a2 + b2 - a1 - b1)
    second = math.log(num_classes - 1) - scale * (1 / (num_classes - 1) + a1 + b1)
    return torch.logaddexp(first, second).mean()


def lm_softmax_inequality(
    features: Features, prototypes: Prototypes, labels: Labels, *, scale: float = 64.0
) -> LMSoftmaxInequality:
    r"""LM-Softmax against the smallest sample margin (LTLM, corrected: Z8; ZHO-LMJ).

    .. math::
        \frac1s \log\sum_i\sum_{j\ne y_i} e^{s(\cos_{ij} - \cos_{iy_i})}
            \ \ge\ \frac1N\sum_i L_i + \frac{\log N}{s}

    The left side tends to :math:`-\gamma_{\min}` as s grows:
    :math:`-\gamma_{\min} \le \mathrm{left} \le -\gamma_{\min} + \log(N(C-1))/s`. So minimising the
    mean LM-Softmax loss pushes on a lower bound of it. The paper divides the mean by s once more.

    Args:
        features: (N, D), N >= 1.
        prototypes: (C, D), C >= 2.
        labels: (N,) class indices.
        scale: s > 0. Default 64, as in :func:`largemargin.losses.lm_softmax`.

    Returns:
        ``left``, ``right`` and ``gamma_min``, the smallest cosine margin, 0-dim.

    Example:
        >>> lm_softmax_inequality(torch.eye(2), torch.eye(2), torch.tensor([0, 1])).gamma_min
        tensor(1.)
    """
    stats = class_stats(
        features,
        prototypes,
        labels,
        similarity="cosine",
        scale=scale,
        want=("target", "rival", "rest"),
        precision="highest",
    )
    assert stats.target is not None
    assert stats.rival is not None
    assert stats.rest is not None
    if labels.dim() != 1 or len(labels) == 0:
        raise LargeMarginError(
            f"labels must be (N,) class indices with N >= 1, but their shape is "
            f"{tuple(labels.shape)}. Pass labels.argmax(1) for soft targets."
        )
    excess = stats.rest - stats.target
    return LMSoftmaxInequality(
        torch.logsumexp(excess, 0) / scale,
        (excess.mean() + math.log(len(labels))) / scale,
        (stats.target - stats.rival).min() / scale,
    )


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
