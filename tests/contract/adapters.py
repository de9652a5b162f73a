"""Oracles as ``oracle(arrays, labels, **hyper)``, under the names the modules give to settings."""

import numpy as np
from oracles import (
    FEATURE_ORACLES,
    LOGIT_ORACLES,
    centroid_family,
    cosine_family,
    input_margins,
    options,
    others,
    stable_centroids,
)


def class_counts(classes):
    return [5 * 3 ** min(c, 30) for c in range(classes)]


def of_logits(name):
    def oracle(a, labels, **hyper):
        return LOGIT_ORACLES[name](a.features, a.prototypes, labels, bias=a.bias, **hyper)

    return oracle


def of_features(name):
    def oracle(a, labels, class_counts=None, **hyper):
        if class_counts is not None:
            largest = hyper["margin"]
            hyper["margin"] = cosine_family.ldam_margins(class_counts, max_margin=largest)
        return FEATURE_ORACLES[name](a.features, a.prototypes, labels, **hyper)

    return oracle


def by_class(oracle, *names):
    """For an oracle that takes one margin for all classes: it is asked class by class."""

    def wrapped(a, labels, **hyper):
        columns = []
        for c in range(len(a.prototypes)):
            own = {key: options.of_class(hyper[key], c) for key in names if key in hyper}
            columns.append(oracle(a, np.full(len(a.features), c), **(hyper | own)))
        return options.per_sample(lambda n, c: columns[c][n], labels)

    return wrapped


def center(a, labels, strength=0.003, rate=0.5):
    return centroid_family.center_loss(a.features, a.bank, labels, weight=strength)


def gaussian_mixture(a, labels, learn_variances=False, **hyper):
    variances = a.log_variances if learn_variances else None
    return others.gaussian_mixture(
        a.features, a.prototypes, labels, log_variances=variances, **hyper
    )


def ldam(a, labels, **hyper):
    counts = class_counts(len(a.prototypes))
    hyper.pop("beta", None)
    return cosine_family.ldam(a.features, a.prototypes, labels, class_counts=counts, **hyper)


def counted(oracle):
    def of_counts(a, labels, **hyper):
        counts = class_counts(len(a.prototypes))
        return oracle(a.features, a.prototypes, labels, bias=a.bias, class_counts=counts, **hyper)

    return of_counts


def without_state(name):
    """Evaluation reads statistics as they start: how they move is not the oracle's business."""

    def oracle(a, labels, rate=0.01, **hyper):
        return FEATURE_ORACLES[name](a.features, a.prototypes, labels, **hyper)

    return oracle


def adacos(a, labels):
    scale = cosine_family.adacos_scale(max(len(a.prototypes), 3))
    return cosine_family.normface(a.features, a.prototypes, labels, scale=scale)


def stability(a, labels, strength=1.0, squared=False):
    return strength * centroid_family.stability(a.features, a.noisy, squared=squared)


def network(a):
    """Logits and Jacobians of the network that ``problems.arguments`` evaluates."""
    dim = a.features.shape[1]
    return input_margins.small_network(a.features, np.eye(dim), np.zeros(dim), a.prototypes, a.bias)


def of_margins(loss, reach):
    """``reach``: from which margin on there is no loss, of the settings."""

    def oracle(a, labels, eps=None, differentiable_norm=False, **hyper):
        eps = 0.1 / reach(**hyper) if eps is None else eps
        logits, jacobians = network(a)
        margins, _ = input_margins.linearized_margins(logits, labels, jacobians[0], eps=eps)
        return loss(margins, **hyper)

    return oracle


def layer_margin(a, labels, differentiable_norm=False, eps=None, **hyper):
    logits, jacobians = network(a)
    eps = 0.1 / hyper.get("gamma", 1.0) if eps is None else eps
    return input_margins.layer_margin(logits, labels, jacobians, eps=eps, **hyper)


def class_wise(renamed=(), **fixed):
    """Terms of the discriminative loss; a loss without bank uses the batch's own centroids."""

    def oracle(a, labels, bank=None, detach_classifier=False, softmax_weight=1.0, **hyper):
        settings = {"strategy": "none"} if "strategy" not in fixed else {}
        if bank is not None:
            names = ("strategy", "momentum", "first_seen")
            settings = {name: getattr(bank, name) for name in names}
        settings |= fixed | {dict(renamed).get(name, name): v for name, v in hyper.items()}
        settings.pop("accumulate", None)
        if settings.pop("with_noise", False):
            settings["noisy"] = a.noisy
        return centroid_family.discriminative(
            *(a.features, a.prototypes, labels), bank=a.bank, seen=a.seen, bias=a.bias, **settings
        ).value

    return oracle


def stable_discriminative(a, labels, accumulate=1, detach_classifier=True, **hyper):
    state = {"bank": a.bank, "seen": a.seen, "bias": a.bias}
    return stable_centroids.stable_discriminative(
        a.features, a.prototypes, labels, **state, **hyper
    )[0]
