"""Everything a measurement of features and a linear head holds, as loops over samples."""

import math

import numpy as np

from oracles.stats import (
    angle,
    cosine,
    norm,
    rest_logit,
    rival_class,
    rival_logit,
    similarity_logits,
    softplus,
    unit,
)

DEGENERATE = 1e-12


def boundary_form(weight, bias, similarity):
    """The linear classifier with the same decision boundaries."""
    weight = np.asarray(weight, dtype=np.float64)
    bias = np.zeros(len(weight)) if bias is None else np.asarray(bias, dtype=np.float64)
    if similarity == "cosine":
        return np.array([unit(w) for w in weight]), np.zeros(len(weight))
    if similarity == "cosine_prototypes":
        return np.array([unit(w) for w in weight]), bias
    if similarity == "euclidean":
        return weight, bias - np.array([0.5 * norm(w) ** 2 for w in weight])
    return weight, bias


def boundary_distances(q, y, weight, bias):
    """Signed distances of one sample to the boundaries of class ``y``."""
    found = []
    for j in range(len(weight)):
        if j == y:
            continue
        normal = weight[y] - weight[j]
        length = norm(normal)
        gap = float(q @ normal + bias[y] - bias[j])
        found.append(0.0 if length <= DEGENERATE else gap / length)
    return found


def per_sample(features, labels, weight, bias=None, similarity="dot", scale=1.0):
    """(N,) arrays of what is known of each sample."""
    features, weight = np.asarray(features, np.float64), np.asarray(weight, np.float64)
    logits = similarity_logits(features, weight, bias=bias, similarity=similarity, scale=scale)
    planes, offsets = boundary_form(weight, bias, similarity)
    columns = {}

    def put(name, value):
        columns.setdefault(name, []).append(value)

    for q, row, y in zip(features, logits, labels, strict=True):
        y, best = int(y), int(np.argmax(row))
        cosines = [cosine(q, w) for w in weight]
        put("predicted", best)
        put("rival", rival_class(row, y))
        put("norm", norm(q))
        put("raw", row[y] - rival_logit(row, y))
        put("cosine", cosines[y] - rival_logit(cosines, y))
        apart = boundary_distances(q, y, planes, offsets)
        put("distance", min(apart))
        put("boundary", min(abs(each) for each in apart))
        put("softmax_bias", rest_logit(row, y) - rival_logit(row, y))
        put("loss", softplus(rest_logit(row, y) - row[y]))
        put("lead_raw", row[best] - rival_logit(row, best))
        put("lead_cosine", cosines[best] - rival_logit(cosines, best))
        put("lead_distance", min(boundary_distances(q, best, planes, offsets)))
        total = math.fsum(math.exp(v - row[best]) for v in row)
        put("confidence", 1 / total)
        put("max_logit", row[best])
        put("energy", row[best] + math.log(total))
    return {name: np.array(values) for name, values in columns.items()}


def class_means(features, labels, num_classes):
    """Rows of NaN for classes without samples."""
    features = np.asarray(features, dtype=np.float64)
    return np.array(
        [
            features[labels == c].mean(0) if (labels == c).any() else [np.nan] * features.shape[1]
            for c in range(num_classes)
        ]
    )


def variance(features, labels):
    features = np.asarray(features, dtype=np.float64)
    center, count = features.mean(0), len(features)
    within = between = 0.0
    for c in np.unique(labels):
        own = features[labels == c]
        within += sum(norm(q - own.mean(0)) ** 2 for q in own) / count
        between += len(own) / count * norm(own.mean(0) - center) ** 2
    return {"within": within, "between": between, "total": within + between}


def collapse(features, labels, weight, predicted):
    """NC1 to NC4 of Papyan, Han and Donoho, over the classes that have samples."""
    features, weight = np.asarray(features, np.float64), np.asarray(weight, np.float64)
    classes = np.unique(labels)
    means = np.array([features[labels == c].mean(0) for c in classes])
    centred = means - means.mean(0)
    dim, count = features.shape[1], len(classes)
    within, between = np.zeros((dim, dim)), np.zeros((dim, dim))
    for q, y in zip(features, labels, strict=True):
        apart = q - means[list(classes).index(y)]
        within += np.outer(apart, apart) / len(features)
    for row in centred:
        between += np.outer(row, row) / count
    lengths = np.array([norm(row) for row in centred])
    cosines = np.array(
        [cosine(centred[i], centred[j]) for i in range(count) for j in range(count) if i != j]
    )
    own = weight[classes]
    nearest = [int(classes[np.argmin([norm(q - m) for m in means])]) for q in features]
    return {
        "variability": np.trace(within @ np.linalg.pinv(between, hermitian=True)) / count,
        "norm_spread": lengths.std() / lengths.mean(),
        "angle_spread": cosines.std(),
        "simplex_gap": np.abs(cosines + 1 / (count - 1)).mean(),
        "duality": np.linalg.norm(own / np.linalg.norm(own) - centred / np.linalg.norm(centred)),
        "nearest_center": float(np.mean(np.array(nearest) != predicted)),
    }


def compactness(features, labels, num_classes, radius):
    features = np.asarray(features, dtype=np.float64)
    table = np.array([[norm(p - q) for q in features] for p in features])
    same = labels[:, None] == labels
    dispersion = [
        table[np.ix_(labels == c, labels == c)].max() if (labels == c).any() else np.nan
        for c in range(num_classes)
    ]
    means = class_means(features, labels, num_classes)
    inside = np.mean([norm(q - means[y]) <= radius for q, y in zip(features, labels, strict=True)])
    return {
        "dispersion": np.array(dispersion),
        "separation": table[~same].min() if (~same).any() else math.inf,
        "inside_radius": inside,
    }


def prototypes(weight):
    weight = np.asarray(weight, dtype=np.float64)
    count = len(weight)
    angles = np.array([[math.degrees(angle(u, v)) for v in weight] for u in weight])
    np.fill_diagonal(angles, 0)
    units = [unit(w) for w in weight]
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    gram = weight @ weight.T
    wanted = (count * np.eye(count) - 1) / (count - 1)
    lengths = [norm(w) for w in weight]
    return {
        "angles": angles,
        "class_margin": min(angles[i, j] for i, j in pairs),
        "magnitude_ratio": max(lengths) / min(lengths),
        "symmetry": np.linalg.norm(gram / (np.trace(gram) / count) - wanted),
        "riesz_energy": math.fsum(norm(units[i] - units[j]) ** -2 for i, j in pairs),
        "smallest_distance": min(norm(units[i] - units[j]) for i, j in pairs),
    }


def calibration_error(confidence, correct, bins=15):
    """Guo et al. 2017: bins (i/M, (i+1)/M]."""
    total, largest = 0.0, 0.0
    for i in range(bins):
        inside = (confidence > i / bins) & (confidence <= (i + 1) / bins)
        if inside.any():
            gap = abs(correct[inside].mean() - confidence[inside].mean())
            total += gap * inside.sum() / len(confidence)
            largest = max(largest, gap)
    return total, largest


def auroc(positive, negative):
    """Share of pairs in the right order, ties counting half."""
    wins = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    return float(np.mean(wins)) if wins else math.nan
