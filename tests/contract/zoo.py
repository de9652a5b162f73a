"""One entry per loss: how it is built, which settings are worth testing, and its NumPy oracle."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from oracles import cosine_family, others, softmax_family

from contract.adapters import (
    adacos,
    by_class,
    center,
    class_counts,
    class_wise,
    counted,
    gaussian_mixture,
    layer_margin,
    ldam,
    of_features,
    of_logits,
    of_margins,
    stability,
    stable_discriminative,
    without_state,
)
from contract.problems import Sizes, restore
from largemargin import CentroidBank
from largemargin.losses import LOSSES
from largemargin.losses.base.classwise import ClassWise


@dataclass(frozen=True)
class Entry:
    """Everything the suite needs to know about a loss.

    ``oracle(arrays, labels, **hyper)`` returns (N,) values for a loss of kind "samples", one number
    for the kinds "classes" (mean over the classes present) and "prototypes" (no samples at all).
    Hyper-parameters may be functions of the sizes: per-class margins, a bank.
    """

    oracle: Callable[..., Any] | None = None
    kind: Literal["samples", "classes", "prototypes"] = "samples"
    arguments: Callable[[Sizes], tuple[Any, ...]] = lambda sizes: ()
    settings: tuple[dict[str, Any], ...] = ({},)
    """Settings whose gradient is the derivative of their value; the first is the usual one."""
    stopped: tuple[dict[str, Any], ...] = ()
    """Settings with a stopped gradient: their values are compared, not their derivatives."""
    sample_part: Callable[..., Any] | None = None
    """A per-sample loss that a class-wise one adds to its own terms."""
    scale_free: bool = False
    """Whether the length of a feature does not matter."""
    joint: bool = False
    """Whether the terms of a class depend on the rows of the others."""


class Zoo(dict[str, Entry]):
    """The entries below; one made from the class for a loss that has none yet."""

    def __missing__(self, name):
        kind = LOSSES[name]
        taken = inspect.signature(kind).parameters.values()
        required = [
            each.name
            for each in taken
            if each.default is each.empty and each.kind is not each.VAR_KEYWORD
        ]
        of_sizes = {
            "num_classes": lambda sizes: sizes.classes,
            "dim": lambda sizes: sizes.dim,
            "class_counts": counts_of,
        }
        of_classes = "classes" if issubclass(kind, ClassWise) else "samples"
        return Entry(
            kind="prototypes" if kind.needs == ("prototypes",) else of_classes,
            arguments=lambda sizes: tuple(of_sizes[each](sizes) for each in required),
        )


def per_class(low, high):
    """A margin, weight or factor for every class."""
    return lambda sizes: torch.linspace(low, high, sizes.classes, dtype=torch.float64)


def per_sample(low, high):
    return lambda sizes: torch.linspace(low, high, sizes.samples, dtype=torch.float64)


def counts_of(sizes):
    return class_counts(sizes.classes)


def bank(**settings):
    return lambda sizes: CentroidBank(sizes.classes, sizes.dim, **settings)


def classes_and_dim(sizes):
    return (sizes.classes, sizes.dim)


ONLY = {"alpha": 0.0, "beta": 0.0, "gamma_reg": 0.0}
COMPACT, MARGIN, NORM = (ONLY | {name: 1.0} for name in ("alpha", "beta", "gamma_reg"))
GENTLE = {"scale": 6.0}
UNITS = {"radius": 0.1, "margin": 0.9, "tail": 0.3, "momentum": 0.7, "detach_classifier": False}
EXACT = UNITS | {"gradient": "exact"}
WIDE = {"radius": 0.2, "margin": 2.0, "gamma_reg": 0.3, "momentum": 0.7}

ZOO = Zoo(
    {
        "adacos": Entry(
            # Of two classes it has no scale: it is made for three, and called with two.
            adacos,
            arguments=lambda sizes: (max(sizes.classes, 3),),
            scale_free=True,
        ),
        "adaface": Entry(
            without_state("adaface"),
            # Qualities of 1 and -1 are constants of the features, others stop the gradient.
            settings=(
                GENTLE | {"norm_mean": 0.0, "norm_std": 0.01},
                GENTLE | {"norm_mean": 60.0, "norm_std": 1.0},
                GENTLE | {"norm_mean": 0.0, "norm_std": 0.01, "margin": per_class(0.1, 0.9)},
            ),
            stopped=(
                {},
                GENTLE | {"norm_mean": 2.0, "norm_std": 0.5},
                GENTLE | {"norm_mean": 2.0, "norm_std": 0.5, "margin": per_class(0.1, 0.9)},
            ),
        ),
        "arcface": Entry(
            of_features("arcface"),
            settings=(
                GENTLE,
                {},
                GENTLE | {"mode": "easy"},
                GENTLE | {"mode": "none", "margin": 1.0},
                GENTLE | {"margin": per_class(0.1, 0.9)},
                GENTLE | {"margin": 0.6, "class_counts": counts_of},
            ),
            stopped=(GENTLE | {"gradient": "detached"},),
            scale_free=True,
        ),
        "biased_softmax": Entry(
            by_class(of_logits("biased_softmax"), "margin"),
            settings=({}, {"strength": 0.4}, {"margin": per_class(-0.5, 2.0)}),
        ),
        "center": Entry(
            center,
            arguments=classes_and_dim,
            settings=({"strength": 0.7}, {}),
        ),
        "centroid_margin": Entry(
            class_wise({"power": "margin_power"}, **MARGIN),
            kind="classes",
            settings=(
                {"margin": 2.0},
                {},
                {"margin": 2.0, "power": 2, "bank": bank(strategy="both", momentum=0.6)},
                {"margin": 2.0, "aggregate": "mean"},
            ),
            stopped=({"margin": 2.0, "detach_classifier": True},),
        ),
        "centroid_norm": Entry(
            class_wise(**NORM),
            kind="classes",
            settings=({}, {"bank": bank(strategy="both", momentum=0.6)}),
        ),
        "compactness": Entry(
            class_wise({"power": "compact_power"}, **COMPACT),
            kind="classes",
            settings=(
                {"radius": 0.2},
                {},
                {"radius": 0.2, "power": 1, "bank": bank(momentum=0.8)},
                {"radius": 0.2, "bank": bank(strategy="none")},
            ),
        ),
        "cosface": Entry(
            of_features("cosface"),
            settings=(
                GENTLE,
                {},
                GENTLE | {"margin": per_class(0.1, 0.9)},
                GENTLE | {"class_counts": counts_of},
            ),
            scale_free=True,
        ),
        "cross_entropy": Entry(of_logits("cross_entropy"), settings=({}, {"scale": 2.5})),
        "curricularface": Entry(
            without_state("curricularface"),
            settings=(GENTLE, {}, GENTLE | {"margin": per_class(0.1, 0.9)}),
            scale_free=True,
        ),
        "dense_hinge": Entry(
            by_class(of_logits("dense_hinge"), "margin"),
            settings=({}, {"margin": 2.5}, {"margin": per_class(0.5, 4.0)}),
        ),
        "discriminative": Entry(
            class_wise(strategy="partial"),
            kind="classes",
            arguments=classes_and_dim,
            settings=(
                WIDE,
                {},
                WIDE | {"strategy": "both", "first_seen": "full", "compact_power": 1},
                WIDE | {"strategy": "none", "margin_power": 2, "aggregate": "mean"},
                WIDE | {"accumulate": 2, "alpha": 0.5, "beta": 2.0},
            ),
            stopped=(WIDE | {"detach_classifier": True},),
        ),
        "elasticface": Entry(
            of_features("elasticface"),
            settings=(
                GENTLE,
                {},
                GENTLE | {"form": "cos", "margin": 0.35, "std": 0.3, "plus": True},
                GENTLE | {"margin": per_class(0.1, 0.9)},
            ),
            scale_free=True,
        ),
        "focal": Entry(
            of_logits("focal"), settings=({}, {"gamma": 0.5, "alpha": per_class(0.5, 2.0)})
        ),
        "gaussian_mixture": Entry(
            gaussian_mixture,
            arguments=classes_and_dim,
            settings=({}, {"learn_variances": True, "alpha": 1.0, "likelihood_weight": 0.5}),
        ),
        "generalized_cross_entropy": Entry(
            of_logits("generalized_cross_entropy"), settings=({}, {"q": 0.2}, {"q": 1.0})
        ),
        "gm_softmax": Entry(
            of_features("gm_softmax"),
            settings=(
                GENTLE | {"alpha1": 1.2, "beta1": -0.2, "alpha2": 0.7, "beta2": 0.1},
                {},
                GENTLE
                | {
                    "alpha1": per_sample(0.8, 1.5),
                    "alpha2": per_sample(0.1, 0.7),
                    "beta1": per_sample(-0.5, 0.2),
                    "beta2": per_sample(0.3, -0.1),
                },
                GENTLE | {"alpha1": 0.3, "alpha2": 0.9, "check": False},
            ),
            scale_free=True,
        ),
        "kobayashi": Entry(of_logits("kobayashi"), settings=({}, {"strength": 1.5})),
        "label_smoothing": Entry(of_logits("label_smoothing"), settings=({}, {"smoothing": 0.6})),
        "layer_margin": Entry(
            layer_margin,
            settings=(
                {"differentiable_norm": True},
                {"differentiable_norm": True, "gamma": 2.0, "p": 1},
                {"differentiable_norm": True, "gamma": 2.0, "p": float("inf"), "aggregate": "sum"},
            ),
            stopped=({}, {"gamma": 2.0, "aggregate": "sum", "topk": 2, "eps": 1e-3}),
        ),
        "ldam": Entry(
            ldam,
            arguments=lambda sizes: (counts_of(sizes),),
            settings=(GENTLE, {}, GENTLE | {"max_margin": 0.9, "beta": 0.9}),
            scale_free=True,
        ),
        "lm_softmax": Entry(of_features("lm_softmax"), settings=(GENTLE, {}), scale_free=True),
        "logit_adjustment": Entry(
            counted(softmax_family.logit_adjustment),
            arguments=lambda sizes: (counts_of(sizes),),
            settings=({}, {"tau": 1.7}),
        ),
        "logit_norm": Entry(
            of_logits("logit_norm"), settings=({"temperature": 0.5}, {"temperature": 2.0}, {})
        ),
        "lsoftmax": Entry(
            of_features("lsoftmax"),
            settings=({}, {"margin": 2}, {"margin": 3, "annealing": 5.0}, {"margin": 1}),
        ),
        "magface": Entry(
            of_features("magface"),
            settings=(
                GENTLE | {"min_norm": 0.2, "max_norm": 9.0, "mode": "hard"},
                {},
                GENTLE | {"min_norm": 0.2, "max_norm": 9.0, "strength": 3.0},
                GENTLE | {"min_norm": 1.9, "max_norm": 2.5, "max_margin": 1.2, "mode": "none"},
            ),
        ),
        "margin_distribution": Entry(
            of_margins(others.margin_distribution, lambda r=1.2, theta=0.7, **rest: r - theta),
            settings=(
                {"differentiable_norm": True},
                {"differentiable_norm": True, "r": 0.6, "theta": 0.1, "mu": 0.7, "squared": True},
            ),
            stopped=({}, {"r": 0.6, "theta": 0.1, "mu": 0.7, "eps": 1e-3}),
        ),
        "margin_hinge": Entry(
            of_margins(others.margin_hinge, lambda threshold=1.0: threshold),
            settings=(
                {"differentiable_norm": True},
                {"differentiable_norm": True, "threshold": 3.0},
            ),
            stopped=({}, {"threshold": 3.0, "eps": 1e-3}),
        ),
        "max_hinge": Entry(
            by_class(of_logits("max_hinge"), "margin"),
            settings=({}, {"margin": 3.0}, {"margin": per_class(0.5, 4.0)}),
        ),
        "max_softplus": Entry(
            by_class(of_logits("max_softplus"), "margin"),
            settings=({}, {"margin": 3.0}, {"margin": per_class(0.5, 4.0)}),
        ),
        "normface": Entry(of_features("normface"), settings=(GENTLE, {}), scale_free=True),
        "rival_divergence": Entry(
            of_logits("rival_divergence"),
            settings=({}, {"kind": "rivals_to_uniform"}, {"kind": "uniform_to_rivals"}),
        ),
        "robust_discriminative": Entry(
            class_wise(strategy="partial", margin=5.0, momentum=0.9, with_noise=True),
            kind="classes",
            arguments=classes_and_dim,
            settings=(WIDE | {"noise_weight": 0.5}, {}, WIDE | {"strategy": "none"}),
            sample_part=lambda a, labels, **_: of_logits("cross_entropy")(a, labels),
        ),
        "sample_margin": Entry(
            of_features("sample_margin"), settings=({}, {"normalize": False}), scale_free=True
        ),
        "soft_hinge": Entry(of_logits("soft_hinge")),
        "sphereface": Entry(
            of_features("sphereface"),
            settings=(
                {"margin": 3},
                {},
                {"margin": 2, "annealing": 4.0},
                GENTLE,
                {"margin": 1, "scale": 64.0},
            ),
        ),
        "stability": Entry(stability, settings=({}, {"strength": 0.3, "squared": True})),
        "stable_discriminative": Entry(
            stable_discriminative,
            kind="classes",
            arguments=classes_and_dim,
            settings=(
                EXACT,
                EXACT | {"strategy": "both", "first_seen": "full", "tail": 2.0},
                EXACT | {"strategy": "none", "aggregate": "mean", "tail": float("inf")},
                EXACT | {"accumulate": 2, "alpha": 0.5, "beta": 2.0},
            ),
            joint=True,
            stopped=(
                {},
                UNITS,
                UNITS | {"gradient": "detached"},
                EXACT | {"detach_classifier": True},
            ),
        ),
        "super_symmetry": Entry(
            lambda a, labels, strength=1.0: strength * others.super_symmetry_penalty(a.prototypes),
            kind="prototypes",
            settings=({}, {"strength": 0.4}),
        ),
        "symmetric_cross_entropy": Entry(
            of_logits("symmetric_cross_entropy"),
            settings=({}, {"alpha": 6.0, "beta": 0.1, "log_zero": -9.0}),
        ),
        "unified_margin": Entry(
            by_class(of_features("unified_margin"), "m2", "m3"),
            settings=(
                GENTLE | {"m1": 1.3, "m2": 0.2, "m3": 0.1},
                {},
                {"m1": 1.35},
                {"m1": 0.9, "m2": 0.4, "m3": 0.15},
                GENTLE | {"m2": per_class(0.1, 0.9), "m3": per_class(0.5, 0.0)},
            ),
            scale_free=True,
        ),
        "vs_loss": Entry(
            counted(softmax_family.vs_loss),
            arguments=lambda sizes: (counts_of(sizes),),
            settings=({}, {"gamma": 0.1, "tau": 1.7}),
        ),
        "zero_centroid": Entry(
            lambda a, labels, strength=1.0, normalize=True: (
                strength * cosine_family.zero_centroid(a.prototypes, normalize=normalize)
            ),
            kind="prototypes",
            settings=({}, {"strength": 0.4, "normalize": False}),
        ),
    }
)

# A loss without an entry fails one test, in test_oracle.py; it runs through the others.
NAMES = sorted(LOSSES)
OF_SAMPLES = [name for name in NAMES if ZOO[name].kind == "samples"]
OF_CLASSES = [name for name in NAMES if ZOO[name].kind == "classes"]
LABELLED = [name for name in NAMES if "labels" in LOSSES[name].needs]


def supporting(option, names=NAMES):
    """The losses that have an option."""
    return [name for name in names if option not in LOSSES[name].refuses]


def takes(name, parameter):
    """Whether the constructor has a parameter of its own by that name."""
    return parameter in inspect.signature(LOSSES[name].__init__).parameters


def implementations(name):
    return ["auto"] if "chunked" in LOSSES[name].refuses else ["dense", "chunked"]


def resolve(hyper, sizes):
    """Hyper-parameters at these sizes."""
    return {name: value(sizes) if callable(value) else value for name, value in hyper.items()}


def build(name, problem, hyper=None, *, dtype=torch.float64, **options):
    """The loss with the problem's state in it; ``hyper`` defaults to the entry's first settings."""
    entry, sizes = ZOO[name], problem.sizes
    hyper = entry.settings[0] if hyper is None else hyper
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        loss = LOSSES[name](*entry.arguments(sizes), **resolve(hyper, sizes), **options)
    finally:
        torch.set_default_dtype(before)
    return restore(loss, problem)


def defaults_of(name):
    """Scale and margins of the class where they are not those of the paper, the oracle's."""
    taken = inspect.signature(LOSSES[name].__init__).parameters
    if "scale" not in taken or taken["scale"].default != "auto":
        return {}
    return {key: taken[key].default for key in ("scale", "margin") if key in taken}


PSI0 = {
    "adaface": lambda margin, **_: 1 - 2 * margin,
    "arcface": lambda margin, **_: np.cos(margin),
    "cosface": lambda margin, **_: 1 - margin,
    "curricularface": lambda margin, **_: np.cos(margin),
    "elasticface": lambda margin, form="arc", **_: np.cos(margin) if form == "arc" else 1 - margin,
    "gm_softmax": lambda alpha2=1.0, beta2=0.0, **_: alpha2 + beta2,
    "ldam": lambda max_margin=0.5, **_: 1 - max_margin,
    "magface": lambda max_margin=0.8, **_: np.cos(max_margin),
    "unified_margin": lambda m2=0.0, m3=0.0, **_: np.cos(m2) - m3,
}


def auto_scale(name, hyper, sizes):
    """The scale at which the simplex has probability 0.9, worked out by hand."""
    aligned = PSI0[name](**hyper) if name in PSI0 else 1.0
    return np.log(9 * (sizes.classes - 1)) / (np.min(aligned) + 1 / (sizes.classes - 1))


def for_oracle(name, hyper, sizes):
    """Hyper-parameters with the class's defaults and the scale as a number."""
    hyper = resolve(defaults_of(name) | hyper, sizes)
    if hyper.get("scale") == "auto":
        hyper["scale"] = auto_scale(name, hyper, sizes)
    return hyper


def oracle_of(name, problem, hyper, part="oracle"):
    """``labels -> value`` by the entry's oracle, on the problem's numbers."""
    entry = ZOO[name]
    if entry.oracle is None:
        pytest.skip(f"{name} has no entry with an oracle yet")
    settings = {
        key: value.numpy() if isinstance(value, torch.Tensor) else value
        for key, value in for_oracle(name, hyper, problem.sizes).items()
    }
    arrays = problem.arrays()
    return lambda labels: getattr(entry, part)(arrays, np.asarray(labels), **settings)


def settings_of(names=NAMES, stopped=False):
    """(name, hyper) of every setting, with readable test ids."""
    return [
        pytest.param(name, hyper, id=f"{name}-{number}")
        for name in names
        for number, hyper in enumerate(ZOO[name].settings + ZOO[name].stopped * stopped)
    ]
