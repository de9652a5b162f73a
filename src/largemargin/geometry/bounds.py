"""Bounds, with what they assume: on errors, on divergences, on losses and on network complexity.

Generalization bounds of LMD section 5 say how the error depends on margin, radius and sample size;
as numbers they are nearly always above 1, and the docstrings say when they are not. The complexity
measures and PAC-Bayes quantities of ODN are of ReLU networks without biases, to compare networks
with: hidden constants are set to 1. The bounds on GM-Softmax and LM-Softmax are given with the
values at their optimum.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_length,
    check_matrix,
    check_num_classes,
    check_number,
)
from largemargin.geometry.pairs import blocks
from largemargin.ops.class_stats import class_stats
from largemargin.ops.norms import promote, safe_norm
from largemargin.shapes import Features, Labels, Prototypes
from largemargin.tracing import values_are_checked


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
    if not isinstance(margins, Tensor) or not margins.is_floating_point():
        given = margins.dtype if isinstance(margins, Tensor) else type(margins).__name__
        raise LargeMarginError(f"margins must be a floating point tensor, but {given} was given.")
    return (1 - promote(margins) / rho).clamp(0, 1)


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
    _check_sizes(weight_norm=weight_norm, radius=radius, centroid_norm=centroid_norm)
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
        feature_norm: :math:`\Lambda`, bound on the norms of the features.
        radius: r, radius of the ball; it enters ``margins`` and the test of informativeness.
        rho, centroid_norm, delta, num_samples: as in :func:`linear_margin_bound`.

    Returns:
        ``empirical``, ``confidence``, ``bound`` and ``informative``, whether
        :math:`r^2 > 2\Lambda^2 + 4R\Lambda`.

    Example:
        >>> ball_bound(torch.ones(9), rho=1.0, feature_norm=1.0, centroid_norm=0.5, radius=1.0)[3]
        False
    """
    _check_sizes(feature_norm=feature_norm, centroid_norm=centroid_norm, radius=radius)
    empirical, confidence, samples = _empirical_and_confidence(margins, rho, delta, num_samples)
    constant = feature_norm**2 + 2 * centroid_norm * feature_norm
    complexity = 2 / rho * (constant + centroid_norm**2 / math.sqrt(samples))
    bound = empirical + complexity + confidence
    return BallBound(empirical, confidence, bound, radius**2 > 2 * constant)


def _check_sizes(**sizes: float) -> None:
    for name, size in sizes.items():
        check_number(name, size, at_least=0)


def _empirical_and_confidence(
    margins: Tensor, rho: float, delta: float, num_samples: int | None
) -> tuple[Tensor, Tensor, int]:
    check_number("delta", delta, above=0, below=1, hint="The bound holds with probability 1-delta.")
    empirical = ramp_loss(margins, rho=rho).mean()
    samples = margins.numel() if num_samples is None else num_samples
    check_number("num_samples", samples, at_least=1)
    confidence = 3 * math.sqrt(math.log(2 / delta) / (2 * samples))
    return empirical, torch.full_like(empirical, confidence), samples


class JsdLowerBound(NamedTuple):
    """Two lower bounds of a Jensen-Shannon divergence: see :func:`jsd_lower_bound`."""

    paper: float
    tight: float


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

    Args as in :func:`kl_divergence`.

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

    Args as in :func:`kl_divergence`.

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


class SimplexOptimum(NamedTuple):
    """Values at the regular simplex: see :func:`simplex_optimum`."""

    class_margin: float
    sample_margin: float
    lm_softmax: float


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


class LMSoftmaxInequality(NamedTuple):
    """Two sides of the LM-Softmax inequality: see :func:`lm_softmax_inequality`."""

    left: Tensor
    right: Tensor
    gamma_min: Tensor


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


JACOBIAN_SAMPLES = 64
"""Samples whose Jacobians are held at a time."""


class SpectralComplexity(NamedTuple):
    """Spectral complexity and its parts: see :func:`spectral_complexity`."""

    spectral_norms: Tensor
    product: Tensor
    norms_21: Tensor
    complexity: Tensor


class NoiseCushions(NamedTuple):
    """How noise passes through a network: see :func:`noise_cushions`."""

    layer_cushion: Tensor
    minimal_interlayer_cushion: Tensor
    activation_contraction: Tensor
    stable_rank: Tensor
    width: int


class CushionComplexity(NamedTuple):
    """The complexity term of ODN Theorem 1, twice: see :func:`cushion_complexity`."""

    ratio_factor: float
    printed: Tensor
    derived: Tensor


class PacBayesQuantities(NamedTuple):
    """Everything in the PAC-Bayes step of ODN: see :func:`pac_bayes_quantities`."""

    sigma: Tensor
    perturbation_norm: Tensor
    kl: Tensor
    emp_zero_one: Tensor
    emp_margin: Tensor
    slack_pac_bayes: Tensor
    slack_lemma1: Tensor
    bound_pac_bayes: Tensor
    bound_lemma1: Tensor


def spectral_complexity(
    weights: Sequence[Tensor], *, reference: str = "identity", norm: str = "rows"
) -> SpectralComplexity:
    r"""Spectral complexity of a network (ODN 3, after Bartlett et al. 2017; ODN-SPEC).

    .. math::
        R = \Big(\prod_i \|W_i\|_2\Big)
            \Big(\sum_i \big(\|W_i - M_i\|_{2,1} / \|W_i\|_2\big)^{2/3}\Big)^{3/2}

    A layer equal to its reference contributes 0. Evaluated without the division, so that a zero
    layer is harmless.

    Args:
        weights: W_1 ... W_L, each (outputs, inputs). Reshape convolutions to (outputs, -1).
        reference: "identity" (as printed; ones on the main diagonal of a rectangular matrix) or
            "zero".
        norm: "rows", the sum of the row norms (default: the original transposes, erratum D9), or
            "columns", the literal reading (O21).

    Returns:
        ``spectral_norms`` (L,), ``product`` 0-dim, ``norms_21`` (L,), ``complexity`` 0-dim.

    Example:
        >>> spectral_complexity([torch.eye(2), 3 * torch.eye(2)], reference="zero").product
        tensor(3.)
    """
    check_choice("reference", reference, ("identity", "zero"))
    check_choice("norm", norm, ("rows", "columns"))
    layers = _check_network(weights)
    spectral = torch.stack([torch.linalg.matrix_norm(layer, 2) for layer in layers])
    norms_21 = []
    for layer in layers:
        if reference == "identity":
            layer = layer - torch.eye(*layer.shape, dtype=layer.dtype, device=layer.device)
        norms_21.append(safe_norm(layer, dim=1 if norm == "rows" else 0).sum())
    lengths = torch.stack(norms_21)
    others = [torch.cat([spectral[:i], spectral[i + 1 :]]).prod() for i in range(len(layers))]
    complexity = (lengths * torch.stack(others)).pow(2 / 3).sum().pow(3 / 2)
    return SpectralComplexity(spectral, spectral.prod(), lengths, complexity)


def noise_cushions(weights: Sequence[Tensor], inputs: Tensor) -> NoiseCushions:
    r"""Cushions and contraction of a bias-free ReLU network (ODN Definitions 1-3, ODN-BOUND).

    With pre-activations :math:`f^i`, :math:`\phi(f^0) = x`, last layer linear:

    .. math::
        \mu_i = \min_x \frac{\|f^i\|}{\|W_i\|_F \|\phi(f^{i-1})\|},\qquad
        \mu_{i\to} = \min_{i\le j\le L}\ \min_x \frac{\|f^j\|}{\|J^{ij}\|_F\|f^i\|},\qquad
        c = \max_{x,\,i<L} \frac{\|f^i\|}{\|\phi(f^i)\|}

    with :math:`J^{ij} = \partial f^j/\partial f^i` (erratum D7 corrected; the term j = i is
    :math:`1/\sqrt{\text{width}}`). Large cushions mean that noise injected at a layer dies out.

    Args:
        weights: W_1 ... W_L, each (outputs, inputs).
        inputs: (N, D), the training samples.

    Returns:
        ``layer_cushion`` (L,), ``minimal_interlayer_cushion`` (L,), ``activation_contraction``
        0-dim (1 for L = 1; NaN when all units of a hidden layer are off for some sample, where it
        is not defined), ``stable_rank`` (L,) = :math:`\|W\|_F^2/\|W\|_2^2`, and ``width``, the
        largest number of outputs of a layer, as the paper defines it. (Its proof bounds square
        perturbations; where the inputs are more, that step needs their number.)
        Samples with a zero denominator are skipped in the cushions.

    Example:
        >>> noise_cushions([torch.eye(2)], torch.tensor([[3.0, 4.0]])).layer_cushion
        tensor([0.7071])
    """
    layers = _check_network(weights, inputs)
    dtype = layers[0].dtype
    rows = promote(inputs.detach()).to(dtype)
    count = len(layers)
    layer_cushion = rows.new_full((count,), torch.inf)
    interlayer = rows.new_full((count,), torch.inf)
    contraction = rows.new_ones(())
    for block in blocks(len(rows), JACOBIAN_SAMPLES):
        below = rows[block]
        outputs: list[Tensor] = []
        for i, layer in enumerate(layers):
            outputs.append(below @ layer.T)
            size = torch.linalg.matrix_norm(layer) * safe_norm(below)
            layer_cushion[i] = torch.minimum(layer_cushion[i], _smallest(outputs[i], size))
            below = outputs[i].relu()
            if i + 1 < count:
                # 0/0 and x/0 are both undefined here; NaN survives the maximum.
                ratio = safe_norm(outputs[i]) / safe_norm(below)
                ratio = torch.where(ratio.isinf(), torch.nan, ratio)
                contraction = torch.maximum(contraction, ratio.max())
        for i in range(count):
            own = safe_norm(outputs[i])
            identity = torch.full_like(own, math.sqrt(layers[i].shape[0]))
            interlayer[i] = torch.minimum(interlayer[i], _smallest(outputs[i], identity * own))
            jacobian = None
            for j in range(i + 1, count):
                active = (outputs[j - 1] > 0).to(dtype)
                if jacobian is None:
                    jacobian = layers[j] * active[:, None, :]
                else:
                    jacobian = layers[j] @ (active[:, :, None] * jacobian)
                size = torch.linalg.matrix_norm(jacobian) * own
                interlayer[i] = torch.minimum(interlayer[i], _smallest(outputs[j], size))
    norm = torch.linalg.matrix_norm
    stable_rank = torch.stack([(norm(w) / norm(w, 2)).square() for w in layers])
    width = max(layer.shape[0] for layer in layers)
    return NoiseCushions(layer_cushion, interlayer, contraction, stable_rank, width)


def _smallest(outputs: Tensor, size: Tensor) -> Tensor:
    """min over samples of ||output||/size, without the samples of size 0."""
    safe = torch.where(size > 0, size, 1.0)
    return torch.where(size > 0, safe_norm(outputs) / safe, torch.inf).min()


def cushion_complexity(
    cushions: NoiseCushions,
    *,
    num_samples: int,
    r: float = 1.2,
    theta: float = 0.7,
    delta: float = 0.05,
) -> CushionComplexity:
    r"""Complexity term of ODN Theorem 1 with all hidden constants 1 (ODN-BOUND).

    .. math::
        \text{printed} &= \sqrt{\frac{c^2L^2\varrho\ln(L\varrho)(r+\theta)^2
            \sum_i \frac{\|W_i\|_F^2}{\|W_i\|_2^2\mu_i\mu_{i\to}} + \ln(Lm/\delta)}
            {m(r-\theta)^2}} \\
        \text{derived} &= \sqrt{\frac{c^2\varrho\ln(4L\varrho)\big(\frac{r+\theta}{r-\theta}\big)^2
            \big(\sum_i\frac{1}{\mu_i\mu_{i\to}}\big)^2\sum_i\frac{\|W_i\|_F^2}{\|W_i\|_2^2}
            + \ln(Lm/\delta)}{m}}

    The second is the form the proof supports (erratum D8). :math:`\varrho` is the largest width.

    Args:
        cushions: from :func:`noise_cushions`.
        num_samples: m, the training set size.
        r, theta: of the margin distribution loss. Defaults 1.2 and 0.7, ODN Table 1 without batch
            norm (30 and 0.7 with it).
        delta: confidence parameter. Default 0.05 (the paper fixes none).

    Returns:
        ``ratio_factor`` :math:`((r+\theta)/(r-\theta))^2`, ``printed`` and ``derived``.

    Example:
        >>> cushions = noise_cushions([torch.eye(2)], torch.ones(1, 2))
        >>> cushion_complexity(cushions, num_samples=1000, r=3.0, theta=1.0).ratio_factor
        4.0
    """
    _check_range(r, theta, delta, num_samples, 1)
    depth, width = len(cushions.layer_cushion), cushions.width
    product = cushions.layer_cushion * cushions.minimal_interlayer_cushion
    contraction = cushions.activation_contraction.square()
    rest = math.log(depth * num_samples / delta)
    factor = ((r + theta) / (r - theta)) ** 2
    mixed = (cushions.stable_rank / product).sum()
    printed = contraction * depth**2 * width * math.log(depth * width) * (r + theta) ** 2 * mixed
    split = (1 / product).sum().square() * cushions.stable_rank.sum()
    derived = contraction * width * math.log(4 * depth * width) * factor * split
    return CushionComplexity(
        factor,
        ((printed + rest) / (num_samples * (r - theta) ** 2)).sqrt(),
        ((derived + rest) / num_samples).sqrt(),
    )


def pac_bayes_quantities(
    margins: Tensor,
    parameters: Tensor,
    layer_cushion: Tensor,
    minimal_interlayer_cushion: Tensor,
    *,
    num_samples: int,
    width: int,
    contraction: float,
    spectral_norm: float,
    r: float = 1.2,
    theta: float = 0.7,
    delta: float = 0.05,
) -> PacBayesQuantities:
    r"""The PAC-Bayes step behind ODN Theorem 1 (ODN 2, Lemma 1, ODN-PAC).

    Posterior :math:`N(w, \sigma^2 I)`, prior :math:`N(0, \sigma^2 I)`, with the largest
    :math:`\sigma` whose perturbations move the output by at most :math:`(r-\theta)/4`:

    .. math::
        \sigma = \frac{r-\theta}{4c(r+\theta)\,
            \sum_i \frac{1}{\beta\mu_i\mu_{i\to}}\,\sqrt{2\varrho\ln(4L\varrho)}},\qquad
        \mathrm{KL} = \frac{\|w\|^2}{2\sigma^2}

    .. math::
        L_0 \le \hat L_0 + \sqrt{\tfrac{\mathrm{KL} + \ln(m/\delta)}{2(m-1)}},\qquad
        L_0 \le \hat L_{r,\theta} + \sqrt{\tfrac{\mathrm{KL} + \ln(3m/\delta)}{m-1}}

    (in expectation over the posterior, and for the network itself). The printed
    :math:`\sigma` drops the 4 and the :math:`\sqrt2`. Lemma 1 controls raw logits while
    :math:`\hat L_{r,\theta}` thresholds normalised margins: valid for raw margins (erratum D6).

    Args:
        margins: (m',), of training samples.
        parameters: w, all weights, any shape.
        layer_cushion, minimal_interlayer_cushion: (L,) each, from :func:`noise_cushions`.
        num_samples: m >= 2, the training set size.
        width: :math:`\varrho`, the largest layer width.
        contraction: c, the activation contraction.
        spectral_norm: :math:`\beta`, the common spectral norm of the layers.
        r, theta: of the margin distribution loss. Defaults 1.2 and 0.7 (ODN Table 1).
        delta: the bounds hold with probability 1 - delta. Default 0.05 (the paper fixes none).

    Returns:
        0-dim tensors. ``perturbation_norm`` is :math:`\sigma\sqrt{2\varrho\ln(4L\varrho)}`, the
        spectral norm that the perturbation of every layer keeps with probability 1/2;
        ``emp_zero_one`` the share of margins <= 0; ``emp_margin`` the share <= r-theta plus the
        share >= r+theta, both ends counted.

    Example:
        >>> one = torch.ones(1)
        >>> settings = dict(num_samples=100, width=1, contraction=1.0, spectral_norm=1.0)
        >>> pac_bayes_quantities(torch.tensor([-1.0, 1.0]), one, one, one, **settings).emp_zero_one
        tensor(0.5000)
    """
    _check_range(r, theta, delta, num_samples, 2)
    check_number("width", width, at_least=1)
    check_number("contraction", contraction, above=0)
    check_number("spectral_norm", spectral_norm, above=0)
    if margins.numel() == 0:
        raise LargeMarginError("margins must hold at least one margin, but none was given.")
    depth = layer_cushion.numel()
    name = "minimal_interlayer_cushion"
    check_length(name, minimal_interlayer_cushion, depth, "one entry per layer")
    margins = promote(margins)
    product = promote(layer_cushion) * promote(minimal_interlayer_cushion)
    growth = math.sqrt(2 * width * math.log(4 * depth * width))
    sensitivity = (1 / (spectral_norm * product)).sum()
    sigma = (r - theta) / (4 * contraction * (r + theta) * sensitivity * growth)
    kl = promote(parameters).square().sum() / (2 * sigma.square())
    zero_one = (margins <= 0).to(margins.dtype).mean()
    low = (margins <= r - theta).to(margins.dtype).mean()
    high = (margins >= r + theta).to(margins.dtype).mean()
    slack = ((kl + math.log(num_samples / delta)) / (2 * (num_samples - 1))).sqrt()
    slack_lemma1 = ((kl + math.log(3 * num_samples / delta)) / (num_samples - 1)).sqrt()
    return PacBayesQuantities(
        sigma=sigma,
        perturbation_norm=sigma * growth,
        kl=kl,
        emp_zero_one=zero_one,
        emp_margin=low + high,
        slack_pac_bayes=slack,
        slack_lemma1=slack_lemma1,
        bound_pac_bayes=zero_one + slack,
        bound_lemma1=low + high + slack_lemma1,
    )


def _check_network(weights: Sequence[Tensor], inputs: Tensor | None = None) -> list[Tensor]:
    if len(weights) == 0:
        raise LargeMarginError("weights must hold at least one layer, but none was given.")
    for position, weight in enumerate(weights):
        check_matrix(f"weights[{position}]", weight, "(outputs, inputs)")
    widths = [weight.shape for weight in weights]
    for position, (before, after) in enumerate(pairwise(widths)):
        if before[0] != after[1]:
            raise LargeMarginError(
                f"weights must fit together, but layer {position} has {before[0]} outputs and "
                f"layer {position + 1} takes {after[1]} inputs. Shapes are (outputs, inputs)."
            )
    if inputs is not None:
        check_matrix("inputs", inputs, "(N, D)")
        if inputs.shape[1] != widths[0][1] or inputs.shape[0] == 0:
            raise LargeMarginError(
                f"inputs must have shape (N, {widths[0][1]}) with N >= 1, to fit the first layer, "
                f"but theirs is {tuple(inputs.shape)}."
            )
    return [promote(weight.detach()) for weight in weights]


def _check_range(r: float, theta: float, delta: float, num_samples: int, least: int) -> None:
    check_number("theta", theta, at_least=0)
    check_number("r", r, above=theta, hint="The zero-loss band is [r-theta, r+theta].")
    check_number("delta", delta, above=0, below=1)
    check_number("num_samples", num_samples, at_least=least)
