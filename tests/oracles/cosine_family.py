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


def adaface(
    features,
    prototypes,
    labels,
    *,
    margin=0.4,
    concentration=0.333,
    scale=64.0,
    norm_mean=20.0,
    norm_std=100.0,
    frozen_features=None,
):
    """BAS-ADAFACE: Kim et al. 2022, eq. 13 to 15, with the authors' clip of the angle.

    The norm is evaluated at the frozen features (by default the features themselves).
    """
    frozen_features = features if frozen_features is None else frozen_features

    def loss_of_class(n, y):
        q, m = features[n], of_class(margin, y)
        quality = concentration * (norm(frozen_features[n]) - norm_mean) / (norm_std + 1e-3)
        quality = min(max(quality, -1.0), 1.0)
        theta = min(max(angle(prototypes[y], q) - m * quality, 0.0), math.pi)
        target = scale * (math.cos(theta) - (m * quality + m))
        return margin_softmax(target, cosine_rivals(q, prototypes, y, scale))

    return per_sample(loss_of_class, labels)


def norm_statistics(batches, *, norm_mean=20.0, norm_std=100.0, rate=0.01):
    """Mean and standard deviation of the norms of AdaFace after some batches of features."""
    for rows in batches:
        norms = [norm(q) for q in rows]
        mean = math.fsum(norms) / len(norms)
        norm_mean = (1 - rate) * norm_mean + rate * mean
        if len(norms) > 1:
            variance = math.fsum((each - mean) ** 2 for each in norms) / (len(norms) - 1)
            norm_std = (1 - rate) * norm_std + rate * math.sqrt(variance)
    return norm_mean, norm_std


def magface(
    features,
    prototypes,
    labels,
    *,
    min_norm=10.0,
    max_norm=110.0,
    min_margin=0.45,
    max_margin=0.8,
    strength=None,
    scale=64.0,
    mode="easy",
):
    """BAS-MAGFACE: Meng et al. 2021, eq. 3, linear m(a) and g(a) = 1/a + a/u_a^2.

    lambda_g is 35 at the paper's scale of 64, and in proportion at others.
    """
    strength = 35 * scale / 64 if strength is None else strength

    def loss_of_class(n, y):
        q = features[n]
        a = min(max(norm(q), min_norm), max_norm)
        m = min_margin + (max_margin - min_margin) * (a - min_norm) / (max_norm - min_norm)
        target = scale * arcface_target(angle(prototypes[y], q), m, mode)
        loss = margin_softmax(target, cosine_rivals(q, prototypes, y, scale))
        return loss + strength * (1 / a + a / max_norm**2)

    return per_sample(loss_of_class, labels)


def elasticface(
    features,
    prototypes,
    labels,
    *,
    margin=0.5,
    std=0.05,
    noise=None,
    form="arc",
    plus=False,
    scale=64.0,
):
    """BAS-ELASTIC: Boutros et al. 2022, eq. 7 and 8; ``plus`` for hard labels."""
    draws = np.zeros(len(features)) if noise is None else np.asarray(noise, dtype=np.float64)
    if plus and noise is not None:
        own = [cosine(prototypes[y], q) for q, y in zip(features, labels, strict=True)]
        nearest_first = sorted(range(len(own)), key=lambda n: -own[n])
        narrowest_first, draws = sorted(draws), np.empty(len(own))
        for n, draw in zip(nearest_first, narrowest_first, strict=True):
            draws[n] = draw

    def loss_of_class(n, y):
        q, m = features[n], of_class(margin, y) + std * draws[n]
        theta = angle(prototypes[y], q)
        target = scale * (math.cos(theta + m) if form == "arc" else math.cos(theta) - m)
        return margin_softmax(target, cosine_rivals(q, prototypes, y, scale))

    return per_sample(loss_of_class, labels)


def curricularface(features, prototypes, labels, *, margin=0.5, scale=64.0, progress=0.0):
    """BAS-CURRICULAR: Huang et al. 2020, eq. 5 and 6; ``progress`` is t."""

    def loss_of_class(n, y):
        q, m = features[n], of_class(margin, y)
        theta = angle(prototypes[y], q)
        rivals = []
        for j, w in enumerate(prototypes):
            c = cosine(w, q)
            if j != y:
                rivals.append(scale * (c if c <= math.cos(theta + m) else c * (progress + c)))
        return margin_softmax(scale * arcface_target(theta, m, "hard"), rivals)

    return per_sample(loss_of_class, labels)


def adacos_scale(num_classes):
    """Zhang et al. 2019, eq. 12: the fixed scale."""
    return math.sqrt(2) * math.log(num_classes - 1)


def adacos_step(features, prototypes, labels, *, scale):
    """Zhang et al. 2019, eq. 15: the scale of a batch from that of the batch before."""
    mass = [
        math.exp(scale * cosine(w, q))
        for q, y in zip(features, labels, strict=True)
        for j, w in enumerate(prototypes)
        if j != y
    ]
    angles = sorted(angle(prototypes[y], q) for q, y in zip(features, labels, strict=True))
    median = angles[(len(angles) - 1) // 2]
    return math.log(math.fsum(mass) / len(labels)) / math.cos(min(math.pi / 4, median))


def nearest_centers(features, centers, similarity="cosine"):
    """(N, C): of the sub-centers (C, K, D) of each class, the one nearest to each sample."""
    flat = np.reshape(centers, (-1, np.shape(centers)[2]))
    scores = similarity_logits(features, flat, similarity=similarity)
    return np.argmax(scores.reshape(len(features), *np.shape(centers)[:2]), axis=2)


def of_sub_centers(oracle, features, centers, labels, *, chosen=None, **hyper):
    """A loss on sub-centers (Deng et al. 2020): every sample with the nearest ones as prototypes.

    Losses that look at other samples, or at what is given per sample, are not of this kind.
    ``chosen`` holds the nearest ones where the gradient is taken.
    """
    chosen = nearest_centers(features, centers) if chosen is None else chosen
    classes = np.arange(len(centers))
    values = [
        oracle(features[n : n + 1], centers[classes, chosen[n]], labels[n : n + 1], **hyper)
        for n in range(len(features))
    ]
    return np.concatenate(values)


def dominant_centers(features, centers, labels):
    """(C,) sub-center that most samples of a class are nearest to, and (N,) angles to it."""
    chosen = nearest_centers(features, centers)
    counts = np.zeros(np.shape(centers)[:2], dtype=np.int64)
    for n, y in enumerate(labels):
        counts[y, chosen[n, y]] += 1
    dominant = np.argmax(counts, axis=1)
    return dominant, np.array(
        [angle(centers[y][dominant[y]], q) for q, y in zip(features, labels, strict=True)]
    )


def dynamic_margins(class_counts, *, factor=0.5, offset=0.05, power=0.25):
    """Ha et al. 2020: m_c = a n_c^(-lambda) + b. Shape (C,)."""
    return np.array([factor * float(count) ** -power + offset for count in class_counts])


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
