"""L-Softmax, the Gaussian mixture, super-symmetry and the losses on a given margin."""

import math

import numpy as np

from oracles.cosine_family import annealed_psi, margin_softmax
from oracles.options import per_sample
from oracles.stats import angle, dot, norm


def lsoftmax(features, prototypes, labels, *, margin=4, annealing=0.0):
    """BAS-LSOFTMAX: target |W_y| |q| (lambda cos + psi)/(1 + lambda), others <W_j, q>, no bias."""

    def loss_of_class(n, y):
        q, w = features[n], prototypes[y]
        target = norm(w) * norm(q) * annealed_psi(angle(w, q), margin, annealing)
        rivals = [dot(v, q) for j, v in enumerate(prototypes) if j != y]
        return margin_softmax(target, rivals)

    return per_sample(loss_of_class, labels)


def gaussian_mixture(
    features, means, labels, *, log_variances=None, alpha=0.3, likelihood_weight=0.1
):
    """BAS-LGM with a uniform prior and diagonal covariances e^v (v = 0 when not given).

    d_k = 1/2 sum_l (q_l - mu_kl)^2 e^{-v_kl}, logdet_k = 1/2 sum_l v_kl. Logits -d_k - logdet_k for
    k != y, -(1 + alpha) d_y - logdet_y for y; loss CE + lambda (d_y + logdet_y).
    """
    if log_variances is None:
        log_variances = np.zeros(np.shape(means))

    def half_distance(n, k):
        gaps = zip(features[n], means[k], log_variances[k], strict=True)
        return 0.5 * math.fsum((q - mu) ** 2 * math.exp(-v) for q, mu, v in gaps)

    def half_log_determinant(k):
        return 0.5 * math.fsum(log_variances[k])

    def loss_of_class(n, y):
        d_y, logdet_y = half_distance(n, y), half_log_determinant(y)
        rivals = [
            -half_distance(n, k) - half_log_determinant(k) for k in range(len(means)) if k != y
        ]
        classification = margin_softmax(-(1.0 + alpha) * d_y - logdet_y, rivals)
        return classification + likelihood_weight * (d_y + logdet_y)

    return per_sample(loss_of_class, labels)


def super_symmetry(prototypes):
    """KOB-SS: |G/v - (C I - 1 1^T)/(C - 1)|_F, G = W W^T, v = mean diag G. A scalar."""
    classes = len(prototypes)
    gram = [[dot(u, w) for w in prototypes] for u in prototypes]
    v = math.fsum(gram[c][c] for c in range(classes)) / classes
    total = 0.0
    for i in range(classes):
        for j in range(classes):
            wanted = 1.0 if i == j else -1.0 / (classes - 1)
            total += (gram[i][j] / v - wanted) ** 2
    return math.sqrt(total)


def super_symmetry_penalty(prototypes):
    """KOB-SS: residual squared. A scalar."""
    return super_symmetry(prototypes) ** 2


def margin_distribution(margins, *, r=1.2, theta=0.7, mu=0.1, squared=False):
    """ODN-1, ODN (1), for every margin gamma; ``squared`` squares the first branch (appendix A).

    (r - theta - gamma)/(r - theta)           gamma <= r - theta
    0                                         r - theta < gamma <= r + theta
    mu (gamma - r - theta)^2 / (r + theta)^2  gamma > r + theta
    """
    losses = np.zeros(len(margins))
    for n, gamma in enumerate(float(g) for g in margins):
        if gamma <= r - theta:
            losses[n] = ((r - theta - gamma) / (r - theta)) ** (2 if squared else 1)
        elif gamma > r + theta:
            losses[n] = mu * (gamma - r - theta) ** 2 / (r + theta) ** 2
    return losses


def margin_hinge(margins, *, threshold=1.0):
    """ODN-HINGE with erratum D1: [gamma_0 - gamma]_+."""
    return np.array([max(threshold - float(gamma), 0.0) for gamma in margins])
