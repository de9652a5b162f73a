"""Losses on the angle between a feature and its prototype.

All take (features, prototypes, labels), hard labels (N,) or soft targets (N, C), no bias, and
return (N,) unreduced unless said otherwise. LTLM is Zhou et al., "Learning Towards the Largest
Margins", ICLR 2022. Angles are radians.
"""

import math

import numpy as np

from oracles.options import of_class, of_sample, per_sample
from oracles.stats import (
    angle,
    cosine,
    dot,
    log_sum_exp,
    norm,
    rival_logit,
    similarity_logits,
    softplus,
    unit,
)
from oracles.stats import normalize as unit_rows


def margin_softmax(target, rivals):
    """Cross entropy of a modified target logit against the unmodified rivals."""
    return softplus(log_sum_exp(rivals) - target)


def cosine_rivals(q, prototypes, y, scale):
    """s cos(theta_j) for the classes j != y."""
    return [scale * cosine(w, q) for j, w in enumerate(prototypes) if j != y]


def normface(features, prototypes, labels, *, scale=64.0):
    """ZHO-NORMFACE: cross entropy on s cos(theta_j)."""

    def loss_of_class(n, y):
        q = features[n]
        target = scale * cosine(prototypes[y], q)
        return margin_softmax(target, cosine_rivals(q, prototypes, y, scale))

    return per_sample(loss_of_class, labels)


def cosface(features, prototypes, labels, *, margin=0.35, scale=64.0):
    """ZHO-COSFACE: target logit s (cos(theta_y) - m); m a number or (C,), the target's margin."""

    def loss_of_class(n, y):
        q = features[n]
        target = scale * (cosine(prototypes[y], q) - of_class(margin, y))
        return margin_softmax(target, cosine_rivals(q, prototypes, y, scale))

    return per_sample(loss_of_class, labels)


def arcface_target(theta, margin, mode):
    """T(theta) of ZHO-ARCFACE."""
    if mode == "none":
        return math.cos(theta + margin)
    if mode == "hard":
        if math.cos(theta) > math.cos(math.pi - margin):
            return math.cos(theta + margin)
        return math.cos(theta) - margin * math.sin(math.pi - margin)
    if mode == "easy":
        return math.cos(theta + margin) if math.cos(theta) > 0.0 else math.cos(theta)
    raise ValueError(f"unknown mode {mode!r}")


def arcface(
    features,
    prototypes,
    labels,
    *,
    margin=0.5,
    scale=64.0,
    mode="hard",
    gradient="exact",
    frozen_features=None,
    frozen_prototypes=None,
):
    """ZHO-ARCFACE: target logit s T(theta_y); m a number or (C,), the target's margin.

    gradient="detached" is s (cos(theta) + sg(T(theta) - cos(theta))): the shift is evaluated at the
    frozen inputs (by default the inputs themselves, so that the value is unchanged).
    """
    frozen_features = features if frozen_features is None else frozen_features
    frozen_prototypes = prototypes if frozen_prototypes is None else frozen_prototypes

    def loss_of_class(n, y):
        q, m = features[n], of_class(margin, y)
        theta = angle(prototypes[y], q)
        if gradient == "detached":
            frozen_theta = angle(frozen_prototypes[y], frozen_features[n])
            shift = arcface_target(frozen_theta, m, mode) - math.cos(frozen_theta)
            target = scale * (math.cos(theta) + shift)
        else:
            target = scale * arcface_target(theta, m, mode)
        return margin_softmax(target, cosine_rivals(q, prototypes, y, scale))

    return per_sample(loss_of_class, labels)


def psi(theta, margin):
    """psi(theta) = (-1)^k cos(m theta) - 2k, k = min(floor(m theta / pi), m - 1)."""
    k = min(math.floor(margin * theta / math.pi), margin - 1)
    return (-1) ** k * math.cos(margin * theta) - 2 * k


def sphereface_psi(theta, margin):
    """psi of ZHO-ASOFTMAX for every entry of ``theta``."""
    return np.array([psi(float(t), margin) for t in np.ravel(theta)]).reshape(np.shape(theta))


def annealed_psi(theta, margin, annealing):
    """(lambda cos(theta) + psi(theta)) / (1 + lambda)."""
    return (annealing * math.cos(theta) + psi(theta, margin)) / (1.0 + annealing)


def sphereface(features, prototypes, labels, *, margin=4, scale=None, annealing=0.0):
    """ZHO-ASOFTMAX: target |q| psi(theta_y), others |q| cos(theta_j); a scale s replaces |q|."""

    def loss_of_class(n, y):
        q = features[n]
        length = norm(q) if scale is None else scale
        target = length * annealed_psi(angle(prototypes[y], q), margin, annealing)
        if scale is None:
            rivals = [dot(unit(w), q) for j, w in enumerate(prototypes) if j != y]
        else:
            rivals = cosine_rivals(q, prototypes, y, scale)
        return margin_softmax(target, rivals)

    return per_sample(loss_of_class, labels)


def monotone_cosine(phi):
    """T(phi) = (-1)^k cos(phi) - 2k, k = floor(phi / pi): the decreasing continuation of cos."""
    k = math.floor(phi / math.pi)
    return (-1) ** k * math.cos(phi) - 2 * k


def unified_margin(features, prototypes, labels, *, m1=1.0, m2=0.0, m3=0.0, scale=64.0):
    """ZHO-UNI with erratum Z3: target logit s (T(m_1 theta + m_2) - m_3)."""

    def loss_of_class(n, y):
        q = features[n]
        target = scale * (monotone_cosine(m1 * angle(prototypes[y], q) + m2) - m3)
        return margin_softmax(target, cosine_rivals(q, prototypes, y, scale))

    return per_sample(loss_of_class, labels)


def gm_softmax(
    features,
    prototypes,
    labels,
    *,
    alpha1=1.0,
    beta1=0.0,
    alpha2=1.0,
    beta2=0.0,
    scale=64.0,
    check=True,
):
    """ZHO-GM with erratum Z5; alpha and beta are numbers or (N,).

    -log [ e^{s(a_1 cos(theta_y) + b_1)}
           / (e^{s(a_2 cos(theta_y) + b_2)} + sum_{j != y} e^{s cos(theta_j)}) ]
    """
    if check and (np.any(np.less(alpha1, 0.5)) or np.any(np.greater(alpha2, alpha1))):
        raise ValueError("alpha1 >= 1/2 and alpha2 <= alpha1 are required")

    def loss_of_class(n, y):
        q = features[n]
        cos_y = cosine(prototypes[y], q)
        numerator = scale * (of_sample(alpha1, n) * cos_y + of_sample(beta1, n))
        own_term = scale * (of_sample(alpha2, n) * cos_y + of_sample(beta2, n))
        return log_sum_exp([own_term, *cosine_rivals(q, prototypes, y, scale)]) - numerator

    return per_sample(loss_of_class, labels)


def lm_softmax(features, prototypes, labels, *, scale=64.0):
    """ZHO-LM: (1/s) LSE_{j != y} s (cos(theta_j) - cos(theta_y)), the target not in the sum."""

    def loss_of_class(n, y):
        q = features[n]
        cos_y = cosine(prototypes[y], q)
        gaps = [cosine(w, q) - cos_y for j, w in enumerate(prototypes) if j != y]
        return log_sum_exp([scale * gap for gap in gaps]) / scale

    return per_sample(loss_of_class, labels)


def sample_margin(features, prototypes, labels, *, normalize=True):
    """ZHO-RSM: max_{j != y} cos(theta_j) - cos(theta_y), or on raw inner products."""
    similarity = "cosine" if normalize else "dot"
    values = similarity_logits(features, prototypes, similarity=similarity)
    return per_sample(lambda n, y: rival_logit(values[n], y) - float(values[n, y]), labels)


def mean_row_norm_squared(rows):
    mean = [math.fsum(rows[:, k]) / len(rows) for k in range(rows.shape[1])]
    return math.fsum(value**2 for value in mean)


def zero_centroid(prototypes, *, normalize=True):
    """ZHO-RW without its weight: |(1/C) sum_j w_j|^2, on unit rows by default. A scalar."""
    rows = np.asarray(prototypes, dtype=np.float64)
    return mean_row_norm_squared(unit_rows(rows) if normalize else rows)


def ldam_margins(class_counts, *, max_margin=0.5):
    """BAS-LDAM: Delta_j = K n_j^(-1/4), K such that the largest is ``max_margin``. Shape (C,)."""
    raw = [float(count) ** -0.25 for count in class_counts]
    return np.array([max_margin * value / max(raw) for value in raw])


def balanced_weights(class_counts, *, beta=0.9999):
    """BAS-LDAM: w_j proportional to (1 - beta)/(1 - beta^{n_j}), summing to C. Shape (C,)."""
    raw = []
    for count in class_counts:
        # 1 - beta^n through expm1: beta^n is close to 1 for a rare class.
        effective = 1.0 if beta == 0.0 else -math.expm1(float(count) * math.log(beta))
        raw.append((1.0 - beta) / effective)
    total = math.fsum(raw)
    return np.array([len(raw) * value / total for value in raw])


def ldam(features, prototypes, labels, *, class_counts, max_margin=0.5, scale=30.0):
    """BAS-LDAM before the class weights: CosFace with the margin Delta_y."""
    margins = ldam_margins(class_counts, max_margin=max_margin)
    return cosface(features, prototypes, labels, margin=margins, scale=scale)
