"""Losses on plain logits: softmax, Kobayashi's margin view, hinges, smoothing, focal.

Every function takes (logits, labels) or (features, prototypes, labels) and the keywords ``bias``,
``similarity``, ``scale``; hard labels (N,) or soft targets (N, C). It returns (N,) unreduced.
LMS is Kobayashi, "Large Margin In Softmax Cross-Entropy Loss", BMVC 2019.
"""

import math

from oracles.options import of_class, per_sample
from oracles.stats import (
    log_sum_exp,
    logits_and_labels,
    others,
    rest_logit,
    rival_logit,
    softplus,
)


def softmax_loss(row, y):
    """LSE_j z_j - z_y, written as softplus(LSE_{j != y} z_j - z_y) to keep digits when p_y -> 1."""
    return softplus(rest_logit(row, y) - float(row[y]))


def symmetric_divergence(row, y):
    """LMS (10): 1/2 sum_{c != y} (q_c - 1/n) log q_c, n = C - 1, q the rivals' softmax."""
    rivals = others(row, y)
    n = len(rivals)
    rest = log_sum_exp(rivals)
    log_q = [value - rest for value in rivals]
    return 0.5 * math.fsum((math.exp(lq) - 1.0 / n) * lq for lq in log_q)


def rivals_to_uniform_divergence(row, y):
    """LMS (8): D(q || u) = sum_{c != y} q_c log(n q_c)."""
    rivals = others(row, y)
    n = len(rivals)
    rest = log_sum_exp(rivals)
    return math.fsum(math.exp(v - rest) * (math.log(n) + v - rest) for v in rivals)


def uniform_to_rivals_divergence(row, y):
    """LMS (9): D(u || q) = -(1/n) sum_{c != y} log(n q_c)."""
    rivals = others(row, y)
    n = len(rivals)
    rest = log_sum_exp(rivals)
    return -math.fsum(math.log(n) + v - rest for v in rivals) / n


DIVERGENCES = {
    "symmetric": symmetric_divergence,
    "rivals_to_uniform": rivals_to_uniform_divergence,
    "uniform_to_rivals": uniform_to_rivals_divergence,
}


def cross_entropy(*inputs, **head):
    """NGY-3.3: LSE_j z_j - z_y."""
    logits, labels = logits_and_labels(inputs, **head)
    return per_sample(lambda n, c: softmax_loss(logits[n], c), labels)


def implicit_bias(*inputs, **head):
    """KOB-7: LSE_{c != y} (f_c - f_{c*}), between 0 and log(C-1)."""
    logits, labels = logits_and_labels(inputs, **head)

    def bias_of_class(n, c):
        rival = rival_logit(logits[n], c)
        return log_sum_exp([value - rival for value in others(logits[n], c)])

    return per_sample(bias_of_class, labels)


def rival_divergence(*inputs, kind="symmetric", **head):
    """KOB-8: divergence between the non-target posterior and the uniform distribution."""
    logits, labels = logits_and_labels(inputs, **head)
    divergence = DIVERGENCES[kind]
    return per_sample(lambda n, c: divergence(logits[n], c), labels)


def kobayashi(*inputs, strength=0.3, **head):
    """KOB-11, LMS (11): CE + lambda D~."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, c):
        return softmax_loss(logits[n], c) + strength * symmetric_divergence(logits[n], c)

    return per_sample(loss_of_class, labels)


def label_smoothing(*inputs, smoothing=0.1, **head):
    """KOB-13, LMS (13): -(1 - lambda) log p_y - (lambda/C) sum_c log p_c."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        row = logits[n]
        minus_log_p = [softmax_loss(row, c) for c in range(len(row))]
        return (1.0 - smoothing) * minus_log_p[y] + smoothing / len(row) * math.fsum(minus_log_p)

    return per_sample(loss_of_class, labels)


def max_hinge(*inputs, margin=1.0, **head):
    """KOB-1, LMS (1): [f_{c*} - f_y + rho]_+."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        return max(rival_logit(logits[n], y) - float(logits[n, y]) + margin, 0.0)

    return per_sample(loss_of_class, labels)


def max_softplus(*inputs, margin=1.0, **head):
    """KOB-1: softplus(f_{c*} - f_y + rho)."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        return softplus(rival_logit(logits[n], y) - float(logits[n, y]) + margin)

    return per_sample(loss_of_class, labels)


def dense_hinge(*inputs, margin=1.0, **head):
    """KOB-14, LMS (14): (1/(C-1)) sum_{c != y} [f_c - f_y + rho]_+."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        rivals = others(logits[n], y)
        return math.fsum(max(v - float(logits[n, y]) + margin, 0.0) for v in rivals) / len(rivals)

    return per_sample(loss_of_class, labels)


def biased_softmax(*inputs, margin=1.0, strength=0.0, **head):
    """KOB-15, LMS (15): softplus(LSE_{c != y} f_c - f_y + rho), plus lambda D~ when asked."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        row = logits[n]
        biased = softplus(rest_logit(row, y) - float(row[y]) + margin)
        return biased + strength * symmetric_divergence(row, y)

    return per_sample(loss_of_class, labels)


def soft_hinge(*inputs, **head):
    """ODN-SOFT with erratum D2: (1/C) [softplus(-f_y) + sum_{i != y} softplus(f_i)]."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        row = logits[n]
        rivals = math.fsum(softplus(value) for value in others(row, y))
        return (softplus(-float(row[y])) + rivals) / len(row)

    return per_sample(loss_of_class, labels)


def focal(*inputs, gamma=2.0, alpha=None, **head):
    """BAS-FOCAL: -alpha_y (1 - p_y)^gamma log p_y.

    With u = LSE_{j != y} f_j - f_y: 1 - p_y = 1/(1 + e^{-u}), so log(1 - p_y) = -softplus(-u).
    """
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        u = rest_logit(logits[n], y) - float(logits[n, y])
        factor = 1.0 if alpha is None else of_class(alpha, y)
        return factor * math.exp(-gamma * softplus(-u)) * softplus(u)

    return per_sample(loss_of_class, labels)
