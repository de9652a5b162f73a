"""Losses on plain logits: softmax, Kobayashi's margin view, hinges, smoothing, focal, priors.

Every function takes (logits, labels) or (features, prototypes, labels) and the keywords ``bias``,
``similarity``, ``scale``; hard labels (N,) or soft targets (N, C). It returns (N,) unreduced.
LMS is Kobayashi, "Large Margin In Softmax Cross-Entropy Loss", BMVC 2019.
"""

import math

import numpy as np

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


def class_shares(class_counts):
    total = math.fsum(float(n) for n in class_counts)
    return [float(n) / total for n in class_counts]


def logit_adjustment(*inputs, class_counts, tau=1.0, **head):
    """BAS-LOGITADJ, Menon et al. 2021 (10): LSE_j (f_j + tau log pi_j) - (f_y + tau log pi_y)."""
    return vs_loss(*inputs, class_counts=class_counts, gamma=0.0, tau=tau, **head)


def balanced_softmax(*inputs, class_counts, **head):
    """Ren et al. 2020 (4): -log(n_y e^{f_y} / sum_j n_j e^{f_j})."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        top = max(logits[n])
        masses = [c * math.exp(f - top) for c, f in zip(class_counts, logits[n], strict=True)]
        return -math.log(masses[y] / math.fsum(masses))

    return per_sample(loss_of_class, labels)


def logit_adjusted(logits, class_counts, *, tau=1.0):
    """Menon et al. 2021 (9): f_j - tau log pi_j."""
    shares = class_shares(class_counts)
    return np.array(
        [[f - tau * math.log(p) for f, p in zip(r, shares, strict=True)] for r in logits]
    )


def vs_loss(*inputs, class_counts, gamma=0.3, tau=1.0, **head):
    """BAS-VS, Kini et al. 2021 (2): Delta_j = (n_j / n_max)^gamma, iota_j = tau log pi_j."""
    logits, labels = logits_and_labels(inputs, **head)
    largest = float(max(class_counts))
    delta = [(float(n) / largest) ** gamma for n in class_counts]
    iota = [tau * math.log(p) for p in class_shares(class_counts)]

    def loss_of_class(n, y):
        row = [d * f + i for d, f, i in zip(delta, logits[n], iota, strict=True)]
        return softmax_loss(row, y)

    return per_sample(loss_of_class, labels)


def generalized_cross_entropy(*inputs, q=0.7, **head):
    """BAS-GCE, Zhang & Sabuncu 2018 (6): (1 - p_y^q) / q."""
    logits, labels = logits_and_labels(inputs, **head)
    return per_sample(lambda n, y: -math.expm1(-q * softmax_loss(logits[n], y)) / q, labels)


def symmetric_cross_entropy(*inputs, alpha=0.1, beta=1.0, log_zero=-4.0, **head):
    """BAS-SCE, Wang et al. 2019 (7): alpha CE - beta sum_k p_k log t_k, where log 0 = A."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        whole = log_sum_exp(logits[n])
        others_mass = math.fsum(math.exp(float(f) - whole) for f in others(logits[n], y))
        return alpha * softmax_loss(logits[n], y) - beta * log_zero * others_mass

    return per_sample(loss_of_class, labels)


def logit_norm(*inputs, temperature=0.04, **head):
    """BAS-LOGITNORM, Wei et al. 2022 (5): cross entropy of f / (tau (|f| + 1e-7))."""
    logits, labels = logits_and_labels(inputs, **head)

    def loss_of_class(n, y):
        length = math.sqrt(math.fsum(float(f) ** 2 for f in logits[n])) + 1e-7
        return softmax_loss([float(f) / (temperature * length) for f in logits[n]], y)

    return per_sample(loss_of_class, labels)
