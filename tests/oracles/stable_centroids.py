"""The discriminative loss in units of the feature scale, with a linear tail.

Features and bias are divided by sigma, the root mean square of the features' norms; the rest is
NGY-4.3 on the scaled numbers with the squared hinge continued by its tangent, and no norm term.
"""

import math

import numpy as np

from oracles.centroid_family import (
    STRATEGIES,
    centroid_margin,
    current_centroids,
    hinge,
    mean_or_zero,
    momentum_centroids,
    present_classes,
    updated_bank,
)
from oracles.stats import norm

SMALLEST = 1e-12


def feature_scale(features):
    """sigma = sqrt((1/N) sum |q_n|^2)."""
    squares = [norm(q) ** 2 for q in features]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0


def over(numbers, scale):
    """numbers / scale, and zeros where there is no scale."""
    return np.asarray(numbers) / scale if scale > SMALLEST else np.zeros_like(numbers)


def tailed_square(u, tail):
    return u**2 if u <= tail else tail**2 + 2 * tail * (u - tail)


def typical_distance(prototypes):
    """Root mean square of |W_c - W_i| over all pairs."""
    squares = [norm(a - b) ** 2 for a in prototypes for b in prototypes]
    return math.sqrt(math.fsum(squares) / (len(prototypes) * (len(prototypes) - 1)))


def scaled_inputs(features, prototypes, bias, gradient, frozen_features, frozen_bias):
    """z and b/sigma; numbers that carry no gradient are taken from the frozen inputs.

    "bounded" is linear around the frozen point, its slope times min(1, sigma) and min(1, omega),
    the typical distance of prototypes; the bias sees sigma as a constant there.
    """
    scale, held = feature_scale(features), feature_scale(frozen_features)
    bias = np.zeros(1) if bias is None else np.asarray(bias)
    frozen_bias = bias if frozen_bias is None else np.asarray(frozen_bias)
    if gradient == "exact":
        return over(features, scale), over(bias, scale)
    if gradient == "detached":
        return over(features, held), over(bias, held)
    slope = min(1.0, held) * min(1.0, typical_distance(prototypes))
    start, offset = over(frozen_features, held), over(frozen_bias, held)
    moved = start + slope * (over(features, scale) - start)
    return moved, offset + slope * (over(bias, held) - offset)


def stable_discriminative(
    features,
    prototypes,
    labels,
    *,
    bank,
    seen,
    bias=None,
    alpha=1.0,
    beta=1.0,
    radius=0.05,
    margin=0.6,
    tail=0.5,
    gradient="bounded",
    aggregate="max",
    strategy="partial",
    momentum=0.99,
    first_seen="scaled",
    ignore_index=None,
    weight=None,
    reduction="mean",
    frozen_features=None,
    frozen_bias=None,
):
    """(value, bank after) of one step; the bank holds centroids of scaled features.

    ``weight`` (C,) weighs the classes, in their mean or sum.
    """
    frozen_features = features if frozen_features is None else frozen_features
    kept = [n for n in range(len(labels)) if ignore_index is None or labels[n] != ignore_index]
    labels = np.asarray(labels)[kept]
    features, frozen_features = np.asarray(features)[kept], np.asarray(frozen_features)[kept]
    scaled, offset = scaled_inputs(
        features, prototypes, bias, gradient, frozen_features, frozen_bias
    )
    frozen = over(frozen_features, feature_scale(frozen_features))
    blended = momentum_centroids(
        *(scaled, labels, bank, seen),
        momentum=momentum,
        first_seen=first_seen,
        frozen_features=frozen,
    )
    centroids = {"current": current_centroids(scaled, labels), "momentum": blended}
    chosen = {term: centroids[kind] for term, kind in STRATEGIES[strategy].items()}
    classes = present_classes(labels)
    margins = centroid_margin(
        [chosen["margin"][c] for c in classes],
        *(prototypes, classes),
        bias=None if bias is None else offset,
        margin=margin,
        aggregate=aggregate,
    )
    total = mass = 0.0
    for c, to_boundary in zip(classes, margins, strict=True):
        distances = [norm(chosen["compact"][c] - scaled[n]) for n in np.flatnonzero(labels == c)]
        compact = mean_or_zero([tailed_square(hinge(d - radius), tail) for d in distances])
        share = 1.0 if weight is None else float(weight[c])
        total += share * (alpha * compact + beta * to_boundary)
        mass += share
    value = total / mass if reduction == "mean" and mass else total
    return value, updated_bank(bank, seen, blended)[0]
