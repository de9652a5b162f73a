"""Bounds on divergences, on GM-Softmax and on LM-Softmax, with the values at their optimum."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_num_classes,
    check_number,
    values_are_checked,
)
from largemargin.ops import class_stats
from largemargin.ops.rows import promote
from largemargin.shapes import Features, Labels, Prototypes


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
