"""Centroid losses: compactness, margin to the boundaries, norm, the momentum bank, noise, centers.

LMD is Nguyen et al., "Large Margin Discriminative Loss for Classification"; ROB is its sequel on
Gaussian noise injection (TMLR). Class-wise losses take hard labels only and average inside a class
first, then over the classes present.
"""

import math
from dataclasses import dataclass

import numpy as np

from oracles.options import per_sample
from oracles.softmax_family import cross_entropy
from oracles.stats import dot, norm

DEGENERATE = 1e-12


def hinge(u, power=1):
    return max(u, 0.0) ** power


def mean_or_zero(values):
    """Mean of a list; an empty batch has the value 0 (rule N8)."""
    values = [float(v) for v in values]
    return math.fsum(values) / len(values) if values else 0.0


def present_classes(labels):
    return sorted({int(y) for y in labels})


def classwise_mean(terms, labels):
    """(1/|C_B|) sum_{c in C_B} (1/n_c) sum_{n: y_n = c} term_n."""
    class_means = []
    for c in present_classes(labels):
        class_means.append(mean_or_zero(terms[n] for n in range(len(labels)) if labels[n] == c))
    return mean_or_zero(class_means)


def compactness(features, centroids, labels, *, radius=0.5, power=2):
    """NGY-4.4, LMD (4.4), before the class-wise mean: [|m_c - q_n| - delta_v]_+^power, (N,).

    ``centroids`` is (C, D) or a mapping from class to vector.
    """
    terms = np.zeros(len(labels))
    for n in range(len(labels)):
        distance = norm(np.asarray(centroids[int(labels[n])]) - features[n])
        terms[n] = hinge(distance - radius, power)
    return terms


def noise_alignment(noisy_features, centroids, labels, *, radius=0.5, power=2):
    """NGR-12, ROB (12): compactness of the noisy features around the clean centroids, (N,)."""
    return compactness(noisy_features, centroids, labels, radius=radius, power=power)


def boundary_score(point, prototypes, bias, c, i, eps=DEGENERATE, frozen_prototypes=None):
    """NGY-4.6: s_ci(m) = (z_i(m) - z_c(m)) / |W_c - W_i|, the constant 0 for a degenerate pair.

    Whether the pair is degenerate is decided at ``frozen_prototypes``: the constant has no
    gradient, so a perturbed prototype must not revive the pair.
    """
    frozen = prototypes if frozen_prototypes is None else frozen_prototypes
    if norm(np.asarray(frozen[c]) - frozen[i]) <= eps:
        return 0.0
    difference = np.asarray(prototypes[i]) - prototypes[c]
    offset = 0.0 if bias is None else float(bias[i]) - float(bias[c])
    return (dot(difference, point) + offset) / norm(difference)


def signed_boundary_distance(points, prototypes, bias=None, *, eps=DEGENERATE):
    """NGY-4.6 for all points and pairs, (N, C, C); entry [n, c, i] is s_ci(m_n), diagonal 0."""
    classes = len(prototypes)
    signed = np.zeros((len(points), classes, classes))
    for n, point in enumerate(points):
        for c in range(classes):
            for i in range(classes):
                if i != c:
                    signed[n, c, i] = boundary_score(point, prototypes, bias, c, i, eps)
    return signed


def centroid_margin(
    centroids,
    prototypes,
    classes,
    *,
    bias=None,
    margin=6.0,
    power=1,
    aggregate="max",
    frozen_prototypes=None,
):
    """NGY-4.5, LMD (4.5), before the mean over classes: max_{i != c} [delta_d + s_ci(m_c)]_+, (K,).

    ``classes[k]`` is the class of ``centroids[k]``; i runs over all C classes of the classifier.
    aggregate="mean" averages the hinges over i != c instead.
    """
    terms = np.zeros(len(classes))
    for k, c in enumerate(int(c) for c in classes):
        hinges = []
        for i in range(len(prototypes)):
            if i != c:
                score = boundary_score(
                    centroids[k], prototypes, bias, c, i, frozen_prototypes=frozen_prototypes
                )
                hinges.append(hinge(margin + score, power))
        if aggregate == "max":
            terms[k] = max(hinges)
        elif aggregate == "mean":
            terms[k] = mean_or_zero(hinges)
        else:
            raise ValueError(f"unknown aggregate {aggregate!r}")
    return terms


def centroid_norm(centroids):
    """NGY-4.7, LMD (4.7), before the mean over classes: |m_c|, (K,)."""
    return np.array([norm(m) for m in centroids])


def current_centroids(features, labels):
    """m_c^cur = (1/n_c) sum_{y_n = c} q_n, as a mapping over the classes present."""
    centroids = {}
    for c in present_classes(labels):
        members = [features[n] for n in range(len(labels)) if labels[n] == c]
        centroids[c] = sum(members[1:], np.array(members[0], dtype=np.float64)) / len(members)
    return centroids


def momentum_centroids(
    features, labels, bank, seen, *, momentum, first_seen="scaled", frozen_features=None
):
    """NGY-PM: m_c^mom = gamma sg(bank_c) + (1 - gamma) m_c^cur over the classes present.

    First sight of a class: "scaled" blends with sg(m_c^cur), taken at ``frozen_features``; "full"
    uses m_c^cur itself. Both have the same value.
    """
    frozen_features = features if frozen_features is None else frozen_features
    current = current_centroids(features, labels)
    frozen_current = current_centroids(frozen_features, labels)
    blended = {}
    for c, m in current.items():
        if seen[c]:
            blended[c] = momentum * np.asarray(bank[c]) + (1.0 - momentum) * m
        elif first_seen == "scaled":
            blended[c] = momentum * frozen_current[c] + (1.0 - momentum) * m
        elif first_seen == "full":
            blended[c] = m
        else:
            raise ValueError(f"unknown first_seen {first_seen!r}")
    return blended


def updated_bank(bank, seen, blended):
    """bank_c <- sg(m_c^mom) for the classes present; absent classes keep their row."""
    bank_after, seen_after = np.array(bank, dtype=np.float64), np.array(seen, dtype=bool)
    for c, m in blended.items():
        bank_after[c] = m
        seen_after[c] = True
    return bank_after, seen_after


# Which centroid each term reads (table of NGY-PM; reg under "partial" is open point O1).
STRATEGIES = {
    "none": {"compact": "current", "margin": "current", "reg": "current", "noisy": "current"},
    "both": {"compact": "momentum", "margin": "momentum", "reg": "momentum", "noisy": "momentum"},
    "partial": {"compact": "momentum", "margin": "current", "reg": "current", "noisy": "momentum"},
}


@dataclass
class CentroidTerms:
    """Terms of one step and the state after it; ``noisy`` is 0 without noisy features."""

    compact: float
    margin: float
    reg: float
    noisy: float
    value: float
    bank_after: np.ndarray
    seen_after: np.ndarray


def discriminative(
    features,
    prototypes,
    labels,
    *,
    bank,
    seen,
    bias=None,
    noisy=None,
    alpha=1.0,
    beta=1.0,
    gamma_reg=1e-3,
    noise_weight=1.0,
    radius=0.5,
    margin=6.0,
    compact_power=2,
    margin_power=1,
    aggregate="max",
    strategy="partial",
    momentum=0.99,
    first_seen="scaled",
    ignore_index=None,
    frozen_features=None,
    frozen_prototypes=None,
):
    """NGY-4.3, LMD (4.3): alpha compact + beta margin + gamma_reg reg, one step from (bank, seen).

    With ``noisy`` features also noise_weight times the alignment NGR-12, ROB (12). The softmax loss
    is not included. An unseen class's bank row is never read.
    """
    frozen_features = features if frozen_features is None else frozen_features
    kept = [n for n in range(len(labels)) if ignore_index is None or labels[n] != ignore_index]
    labels = np.asarray(labels)[kept]
    features, frozen_features = np.asarray(features)[kept], np.asarray(frozen_features)[kept]

    centroids = {
        "current": current_centroids(features, labels),
        "momentum": momentum_centroids(
            features,
            labels,
            bank,
            seen,
            momentum=momentum,
            first_seen=first_seen,
            frozen_features=frozen_features,
        ),
    }
    chosen = {term: centroids[kind] for term, kind in STRATEGIES[strategy].items()}
    classes = present_classes(labels)
    compact_terms = compactness(
        features, chosen["compact"], labels, radius=radius, power=compact_power
    )
    margin_terms = []
    if prototypes is not None:
        margin_terms = centroid_margin(
            [chosen["margin"][c] for c in classes],
            prototypes,
            classes,
            bias=bias,
            margin=margin,
            power=margin_power,
            aggregate=aggregate,
            frozen_prototypes=frozen_prototypes,
        )
    noisy_terms = np.zeros(len(labels))
    if noisy is not None:
        noisy_terms = noise_alignment(
            np.asarray(noisy)[kept], chosen["noisy"], labels, radius=radius, power=compact_power
        )
    compact = classwise_mean(compact_terms, labels)
    margin_value = mean_or_zero(margin_terms)
    reg = mean_or_zero(centroid_norm([chosen["reg"][c] for c in classes]))
    noisy_value = classwise_mean(noisy_terms, labels)
    value = alpha * compact + beta * margin_value + gamma_reg * reg + noise_weight * noisy_value
    bank_after, seen_after = updated_bank(bank, seen, centroids["momentum"])
    return CentroidTerms(compact, margin_value, reg, noisy_value, value, bank_after, seen_after)


def robust_discriminative(features, prototypes, labels, *, noisy, bias=None, **settings):
    """NGR-13, ROB (13): softmax loss of the clean features + NGY-4.3 + weighted NGR-12."""
    ignore_index = settings.get("ignore_index")
    kept = [n for n in range(len(labels)) if ignore_index is None or labels[n] != ignore_index]
    softmax = cross_entropy(
        np.asarray(features)[kept], prototypes, np.asarray(labels)[kept], bias=bias
    )
    terms = discriminative(features, prototypes, labels, noisy=noisy, bias=bias, **settings)
    return mean_or_zero(softmax) + terms.value


def stability(features, noisy, *, squared=False):
    """NGR-STAB without its weight: |q_n - q~_n|, or its square, (N,)."""
    power = 2 if squared else 1
    return np.array(
        [norm(np.asarray(a) - b) ** power for a, b in zip(features, noisy, strict=True)]
    )


def center_loss(features, centers, labels, *, weight=0.003):
    """BAS-CENTER: (lambda/2) |q_n - c_{y_n}|^2, (N,); the original sums over the batch."""

    def loss_of_class(n, c):
        return 0.5 * weight * norm(np.asarray(features[n]) - centers[c]) ** 2

    return per_sample(loss_of_class, labels)


def center_update(features, centers, labels, *, rate=0.5):
    """BAS-CENTER: c_j <- c_j - alpha sum_{y_n = j} (c_j - q_n) / (1 + n_j). New centers, (C, D)."""
    after = np.array(centers, dtype=np.float64)
    for j in present_classes(labels):
        members = [n for n in range(len(labels)) if labels[n] == j]
        pull = sum(np.asarray(centers[j]) - features[n] for n in members)
        after[j] = after[j] - rate * pull / (1 + len(members))
    return after
