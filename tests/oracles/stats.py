"""Similarities and the five class statistics (specification OPS-STATS, rules N2 to N5)."""

import math
from dataclasses import dataclass

import numpy as np

from oracles.options import is_soft

EPSILON = 1e-12


def log_sum_exp(values):
    """log sum_i exp(v_i), shifted by the maximum so that nothing overflows."""
    values = [float(v) for v in values]
    top = max(values)
    return top + math.log(math.fsum(math.exp(v - top) for v in values))


def softplus(u):
    """log(1 + e^u) without overflow."""
    return max(u, 0.0) + math.log1p(math.exp(-abs(u)))


def dot(u, v):
    return math.fsum(float(a) * float(b) for a, b in zip(u, v, strict=True))


def norm(u):
    return math.sqrt(math.fsum(float(a) ** 2 for a in u))


def safe_norm(x):
    """Euclidean norms of the rows (rule N3 concerns gradients only)."""
    return np.array([norm(row) for row in np.asarray(x, dtype=np.float64)])


def unit(u):
    """Rule N4: u / max(|u|, eps), so that a zero vector stays zero."""
    return np.asarray(u, dtype=np.float64) / max(norm(u), EPSILON)


def normalize(x):
    """Rows of ``x`` scaled to unit length (rule N4)."""
    return np.array([unit(row) for row in np.asarray(x, dtype=np.float64)]).reshape(np.shape(x))


def cosine(u, v):
    """Rule N5: cosine clipped to [-1, 1]; 0 when either vector is zero."""
    return min(1.0, max(-1.0, dot(unit(u), unit(v))))


def angle(u, v):
    """Angle of two vectors, 2 atan2(|u^ - v^|, |u^ + v^|), pi/2 when one of them is zero.

    arccos of a rounded cosine loses half the digits near 0 and pi.
    """
    u, v = unit(u), unit(v)
    return 2.0 * math.atan2(norm(u - v), norm(u + v))


def similarity_of(q, w, similarity):
    """One logit l_j of the feature ``q`` and the prototype ``w``, before bias and scale."""
    if similarity == "dot":
        return dot(w, q)
    if similarity == "cosine":
        return cosine(w, q)
    if similarity == "cosine_prototypes":
        return dot(unit(w), q)
    if similarity == "euclidean":
        return -0.5 * norm(np.asarray(q) - np.asarray(w)) ** 2
    raise ValueError(f"unknown similarity {similarity!r}")


def similarity_logits(features, prototypes, *, bias=None, similarity="dot", scale=1.0):
    """Logits s (l_j + b_j), shape (N, C); the bias is added after the similarity."""
    logits = np.zeros((len(features), len(prototypes)))
    for n, q in enumerate(features):
        for j, w in enumerate(prototypes):
            offset = 0.0 if bias is None else float(bias[j])
            logits[n, j] = scale * (similarity_of(q, w, similarity) + offset)
    return logits


def logits_and_labels(inputs, *, bias=None, similarity="dot", scale=1.0):
    """Two inputs are (logits, labels), three are (features, prototypes, labels)."""
    if len(inputs) == 2:
        logits, labels = inputs
        return scale * np.asarray(logits, dtype=np.float64), np.asarray(labels)
    features, prototypes, labels = inputs
    logits = similarity_logits(features, prototypes, bias=bias, similarity=similarity, scale=scale)
    return logits, np.asarray(labels)


def others(row, y):
    """The logits of the classes j != y, in class order."""
    return [float(row[j]) for j in range(len(row)) if j != y]


def target_logit(row, y):
    return float(row[y])


def rival_logit(row, y):
    """max over j != y."""
    return max(others(row, y))


def rival_class(row, y):
    """The class that attains the rival, the first one at a tie."""
    return max((j for j in range(len(row)) if j != y), key=lambda j: (row[j], -j))


def rest_logit(row, y):
    """LSE over j != y."""
    return log_sum_exp(others(row, y))


def spread_logit(row, y):
    """sum_{j != y} q_j l_j with q the softmax over the classes j != y."""
    rest = rest_logit(row, y)
    return math.fsum(math.exp(value - rest) * value for value in others(row, y))


def mean_logit(row, y):
    """(1/(C-1)) sum_{j != y} l_j."""
    rivals = others(row, y)
    return math.fsum(rivals) / len(rivals)


STATISTICS = {
    "target": target_logit,
    "rival": rival_logit,
    "rest": rest_logit,
    "spread": spread_logit,
    "mean": mean_logit,
}


@dataclass
class ClassStats:
    """Statistics of shape (N,) for hard labels, (N, C) for soft ones (each class the target)."""

    target: np.ndarray
    rival: np.ndarray
    rival_index: np.ndarray
    rest: np.ndarray
    spread: np.ndarray
    mean: np.ndarray


def class_stats_from_logits(logits, labels, *, scale=1.0):
    logits = scale * np.asarray(logits, dtype=np.float64)
    samples, classes = logits.shape

    def gather(statistic):
        if is_soft(labels):
            return np.array([[statistic(row, c) for c in range(classes)] for row in logits])
        return np.array([statistic(logits[n], int(labels[n])) for n in range(samples)])

    values = {name: gather(statistic) for name, statistic in STATISTICS.items()}
    return ClassStats(rival_index=gather(rival_class), **values)


def class_stats(features, prototypes, labels, *, bias=None, similarity="dot", scale=1.0):
    logits = similarity_logits(features, prototypes, bias=bias, similarity=similarity, scale=scale)
    return class_stats_from_logits(logits, labels)
