"""Margins measured in the space of an activation, from logits and their Jacobian.

There is no automatic differentiation here: where the library takes inputs that require gradients,
these take ``jacobian`` (N, C, K), row [n, j] being the gradient of logit j. ``small_network`` gives
logits and Jacobians of a two-layer network in closed form.
"""

import math

import numpy as np

from oracles.stats import norm, rival_class


def small_network(x, A, a, W, b, activation="tanh"):
    """hidden = act(A x + a), logits = W hidden + b.

    Returns the logits (N, C) and their Jacobians [to the input (N, C, k), to the hidden output].
    """
    logits, to_input, to_hidden = [], [], []
    for sample in x:
        before = A @ sample + a
        if activation == "tanh":
            hidden = np.array([math.tanh(u) for u in before])
            slope = 1.0 - hidden**2
        elif activation == "relu":
            hidden = np.array([max(u, 0.0) for u in before])
            slope = np.array([1.0 if u > 0.0 else 0.0 for u in before])
        else:
            raise ValueError(f"unknown activation {activation!r}")
        logits.append(W @ hidden + b)
        to_hidden.append(np.array(W, dtype=np.float64))
        to_input.append(W @ np.diag(slope) @ A)
    return np.array(logits), [np.array(to_input), np.array(to_hidden)]


def linear_network(x, W, b):
    """logits = W x + b, with the Jacobian (N, C, k)."""
    logits = np.array([W @ sample + b for sample in x])
    return logits, np.array([np.array(W, dtype=np.float64) for _ in x])


def linearized_margins(logits, labels, jacobian, *, eps=1e-6, frozen_jacobian=None):
    """ODN-G: (f_y - f_{c*}) / (|grad f_y - grad f_{c*}|_2 + eps), c* the runner-up by logit.

    Returns the margins (N,) and the runner-up classes (N,). The denominator is a constant in
    backpropagation: difference with ``frozen_jacobian`` held at the unperturbed network.
    """
    frozen = jacobian if frozen_jacobian is None else frozen_jacobian
    margins, rivals = np.zeros(len(labels)), np.zeros(len(labels), dtype=np.int64)
    for n, y in enumerate(int(label) for label in labels):
        rivals[n] = rival_class(logits[n], y)
        gap = logits[n][y] - logits[n][rivals[n]]
        margins[n] = gap / (norm(frozen[n][y] - frozen[n][rivals[n]]) + eps)
    return margins, rivals


def dual_norm(u, p):
    """The norm of order q, 1/p + 1/q = 1, for p in {1, 2, inf}."""
    if p == 1:
        return max(abs(float(value)) for value in u)
    if p == 2:
        return norm(u)
    if p == math.inf:
        return math.fsum(abs(float(value)) for value in u)
    raise ValueError(f"p must be 1, 2 or inf, got {p!r}")


def layer_margin(
    logits,
    labels,
    jacobians,
    *,
    gamma=1.0,
    p=2,
    aggregate="max",
    topk=None,
    eps=1e-6,
    frozen_jacobians=None,
):
    """BAS-ELSAYED: sum over layers of A_{i != y} [gamma + (f_i - f_y)/(eps + |D_i|_q)]_+, (N,).

    D_i is the gradient of f_i - f_y in that layer, A the max or the sum over the rivals, optionally
    over the ``topk`` rivals of largest logit only. ``jacobians``: one (N, C, K) array per layer.
    """
    frozen = jacobians if frozen_jacobians is None else frozen_jacobians
    losses = np.zeros(len(labels))
    for n, y in enumerate(int(label) for label in labels):
        rivals = [i for i in range(len(logits[n])) if i != y]
        rivals.sort(key=lambda i: -logits[n][i])
        if topk is not None:
            rivals = rivals[:topk]
        for jacobian in frozen:
            hinges = []
            for i in rivals:
                slope = dual_norm(jacobian[n][i] - jacobian[n][y], p)
                hinges.append(max(gamma + (logits[n][i] - logits[n][y]) / (eps + slope), 0.0))
            losses[n] += max(hinges) if aggregate == "max" else math.fsum(hinges)
    return losses
