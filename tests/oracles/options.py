"""Options common to the losses (specification OPT), stated once for a callable.

``loss_of_class(n, c)`` is the loss of sample n if its class were c. Everything else (soft targets,
weights, ignored rows, smoothing, reduction) is bookkeeping on top of it.
"""

import numpy as np


def is_soft(labels):
    """Soft targets are an (N, C) matrix, hard labels an (N,) vector."""
    return np.ndim(labels) == 2


def per_sample(loss_of_class, labels):
    """Unreduced losses (N,): the class's own loss; of soft targets sum_c t_nc loss(n, c)."""
    labels = np.asarray(labels)
    losses = np.zeros(len(labels))
    for n in range(len(labels)):
        if is_soft(labels):
            for c in range(labels.shape[1]):
                losses[n] += labels[n, c] * loss_of_class(n, c)
        else:
            losses[n] = loss_of_class(n, int(labels[n]))
    return losses


def of_class(parameter, c):
    """A per-class hyper-parameter (C,) at class c; a scalar is the same for every class."""
    return float(parameter) if np.ndim(parameter) == 0 else float(parameter[c])


def of_sample(parameter, n):
    """A per-sample hyper-parameter (N,) at sample n; a scalar is the same for every sample."""
    return float(parameter) if np.ndim(parameter) == 0 else float(parameter[n])


def loss_of_class(oracle, *inputs, num_classes, **hyper):
    """Turn an unreduced oracle ``oracle(*inputs, labels, **hyper)`` into loss_of_class(n, c)."""
    count = len(inputs[0])
    columns = [
        oracle(*inputs, np.full(count, c, dtype=np.int64), **hyper) for c in range(num_classes)
    ]
    return lambda n, c: columns[c][n]


def target_distribution(labels, n, num_classes, label_smoothing):
    """Rule (e): t = (1 - eps) t + eps/C, where a hard label is a one-hot t."""
    if is_soft(labels):
        target = np.array(labels[n], dtype=np.float64)
    else:
        target = np.zeros(num_classes)
        target[int(labels[n])] = 1.0
    return (1.0 - label_smoothing) * target + label_smoothing / num_classes


def apply_options(
    loss_of_class,
    labels,
    num_classes,
    *,
    weight=None,
    sample_weight=None,
    ignore_index=None,
    label_smoothing=0.0,
    reduction="mean",
):
    """Weighted, smoothed and reduced loss; a scalar, or (N,) with reduction "none".

    (b), (c): loss_n = a_n sum_c w_c t_nc loss(n, c). The mean divides by sum_n a_n w_{y_n} for hard
    labels, smoothed or not, and by sum_n a_n for soft targets. (d): an ignored row is dropped
    before anything else; a denominator of 0 gives the value 0.
    """
    labels = np.asarray(labels)
    soft = is_soft(labels)
    losses = np.zeros(len(labels))
    denominator = 0.0
    for n in range(len(labels)):
        if not soft and ignore_index is not None and labels[n] == ignore_index:
            continue
        a = 1.0 if sample_weight is None else float(sample_weight[n])
        target = target_distribution(labels, n, num_classes, label_smoothing)
        for c in range(num_classes):
            w = 1.0 if weight is None else float(weight[c])
            if target[c] != 0.0:
                losses[n] += a * w * target[c] * loss_of_class(n, c)
        if soft or weight is None:
            denominator += a
        else:
            denominator += a * float(weight[int(labels[n])])
    if reduction == "none":
        return losses
    if reduction == "sum":
        return float(sum(losses))
    if reduction == "mean":
        return float(sum(losses)) / denominator if denominator != 0.0 else 0.0
    raise ValueError(f"unknown reduction {reduction!r}")
