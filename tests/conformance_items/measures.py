"""Metrics, bounds, perturbations and class profiles: numbers to look at, nothing to train."""

import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import largemargin.functional as LF
from largemargin import geometry
from largemargin.app.data.modify import class_counts_profile
from largemargin.measuring import robust

from .case import CannotRun, Case, Item, Outputs, batch_mean

DISTRIBUTION = {name: name for name in ("r", "theta", "mu", "squared")}


def fields(compute: Callable[[], Any], names: Iterable[str] | dict[str, str]) -> Outputs:
    """Outputs that are fields of one result, under their own or (golden name -> field) names."""
    result = cache(compute)
    pairs = names if isinstance(names, dict) else {name: name for name in names}
    return {name: lambda field=field: getattr(result(), field) for name, field in pairs.items()}


def scale_of(case: Case, function: Callable[..., Any]) -> dict[str, Any]:
    """The scale s as a keyword, if given; the case's scale is the function's default otherwise."""
    given = case.options({"s": "scale"})
    default = inspect.signature(function).parameters["scale"].default
    case.scale = given.get("scale", default)
    return given


def class_margin(case: Case, way: str) -> Outputs:
    prototypes = case.need("W")
    return {
        "radians": lambda: geometry.class_margin(prototypes),
        "degrees": lambda: geometry.class_margin(prototypes, degrees=True),
    }


def sample_margins(case: Case, way: str) -> Outputs:
    q, prototypes, labels = case.need("q"), case.need("W"), case.need("y")

    def margins(similarity: str) -> Tensor:
        return geometry.sample_margins(q, prototypes, labels, similarity=similarity)

    summary = {
        "per_class_min_cosine": "class_minimum",
        "gamma_min_cosine": "minimum",
        "mean_cosine": "mean",
    }
    return {
        "raw": lambda: margins("dot"),
        "cosine": lambda: margins("cosine"),
        **fields(
            lambda: geometry.summarize_margins(margins("cosine"), labels, len(prototypes)), summary
        ),
    }


def riesz(case: Case, way: str) -> Outputs:
    prototypes, exponent = case.need("W"), case.param("t")
    return {
        "energy": lambda: geometry.riesz_energy(prototypes, exponent),
        "root": lambda: geometry.riesz_root(prototypes, exponent),
        "min_distance": lambda: geometry.min_distance(prototypes),
    }


def dispersion(case: Case, way: str) -> Outputs:
    q, prototypes, labels, bias = case.need("q"), case.get("W"), case.need("y"), case.get("b")
    num_classes = case.param("num_classes", None if prototypes is None else len(prototypes))
    return {
        "dispersion": lambda: geometry.class_dispersion(q, labels, num_classes),
        **fields(
            lambda: geometry.boundary_margins(q, prototypes, labels, bias=bias),
            {"margin": "unsigned", "signed_margin": "signed"},
        ),
    }


def variance(case: Case, way: str) -> Outputs:
    embedding, labels = case.need("E"), case.need("y")
    return fields(
        lambda: geometry.variance_split(embedding, labels),
        ("within", "between", "total", "ratio"),
    )


def implicit_bias(case: Case, way: str) -> Outputs:
    logits, labels = case.need("f"), case.need("y")

    def bias() -> Tensor:
        return geometry.implicit_bias(logits, labels)

    return {"bias_per_sample": bias, "bias": lambda: batch_mean(bias())}


def distribution(case: Case, way: str) -> Outputs:
    margins, hyper = case.need("gamma"), case.options(DISTRIBUTION)

    def losses() -> Tensor:
        return LF.margin_distribution(margins, **hyper)

    return {"per_sample": losses, "value": lambda: batch_mean(losses())}


def generalization(case: Case, way: str) -> Outputs:
    margins, rho = case.need("h"), case.options({"rho": "rho"})
    shared = case.options(
        {"R": "centroid_norm", "r": "radius", "delta": "delta", "N": "num_samples"}
    )
    linear, ball = case.options({"Gamma": "weight_norm"}), case.options({"Lambda": "feature_norm"})

    def in_ball(**missing: float) -> geometry.BallBound:
        return geometry.ball_bound(margins, **rho, **missing | shared | ball)

    def of_margins() -> geometry.BallBound:
        """Terms that do not depend on the norms, which a case may then leave out."""
        return in_ball(feature_norm=1.0, centroid_norm=1.0, radius=1.0)

    def of_linear() -> geometry.LinearMarginBound:
        return geometry.linear_margin_bound(margins, **rho, **shared, **linear)

    return {
        "phi": lambda: geometry.ramp_loss(margins, **rho),
        **fields(
            of_linear if linear else of_margins, {"emp": "empirical", "confidence": "confidence"}
        ),
        **fields(of_linear, {"bound_5_2_fixed": "fixed", "bound_5_2_union": "union"}),
        # The radius decides only whether the bound says anything, so it too may be left out.
        **fields(lambda: in_ball(radius=1.0), {"bound_5_3": "bound"}),
    }


def divergence_bound(case: Case, way: str) -> Outputs:
    p, q, tau = case.get("p"), case.get("q"), case.param("tau")
    return {
        "jsd": lambda: geometry.jensen_shannon(p, q),
        "tv": lambda: geometry.total_variation(p, q),
        "kl_pq": lambda: geometry.kl_divergence(p, q),
        **fields(lambda: geometry.jsd_lower_bound(tau), {"bound": "paper", "bound_tight": "tight"}),
    }


def simplex_optimum(case: Case, way: str) -> Outputs:
    num_classes = case.param("C")
    scale = scale_of(case, geometry.simplex_optimum)
    names = {name: name for name in ("alpha1", "beta1", "alpha2", "beta2")}
    line = {
        name: torch.tensor(value, dtype=case.dtype) if isinstance(value, list) else value
        for name, value in case.options(names).items()
    }
    return {
        "lower_bound": lambda: geometry.gm_softmax_bound(num_classes, **scale, **line),
        **fields(
            lambda: geometry.simplex_optimum(num_classes, **scale),
            ("class_margin", "sample_margin", "lm_softmax"),
        ),
    }


def lm_inequality(case: Case, way: str) -> Outputs:
    batch = [case.need(name) for name in ("q", "W", "y")]
    scale = scale_of(case, geometry.lm_softmax_inequality)
    return fields(
        lambda: geometry.lm_softmax_inequality(*batch, **scale), ("left", "right", "gamma_min")
    )


def curvature_groups(case: Case, way: str) -> Outputs:
    curvature, correct = case.need("curvature"), case.get("correct")
    count, shares = case.get("count"), case.get("p")
    if case.param("quantile", "linear") != "linear":
        raise CannotRun("only linear interpolation of quantiles is defined")
    return {
        **fields(
            lambda: geometry.low_curvature_accuracy(curvature, correct, shares.detach()),
            {"acc_strict": "strict", "acc_weak": "weak", "n_strict": "size_strict"},
        ),
        **fields(
            lambda: geometry.curvature_by_robustness(curvature, count),
            {"group_mean": "mean", "pearson": "pearson"},
        ),
    }


def perturbation(case: Case, way: str) -> Outputs:
    images, corners, lefts = case.need("img"), case.get("coords"), case.get("lefts")
    gaussian, uniform = case.get("eps"), case.get("u")
    sampling = case.options({"factor": "factor", "mode": "mode"})
    patch = case.options({"patch_h": "height", "patch_w": "width"})
    stripe = case.options({"thickness": "thickness"})
    noise = case.options({"sigma": "sigma", "a": "amplitude"})
    # The one part whose params may all be absent: without draws nothing else is left.
    alone = all(each is None for each in (corners, lefts, gaussian, uniform))
    applied = robust.Perturbation(
        down_up=robust.DownUp(**sampling) if sampling or alone else None,
        occlusion=None if corners is None else robust.Patches(len(corners), **patch),
        stripes=None if lefts is None else robust.Stripes(len(lefts), **stripe),
        **noise,
        **case.options({"fill": "fill"}),
    )
    draws = robust.PerturbationDraws(
        corners=corners, lefts=lefts, gaussian=gaussian, uniform=uniform
    )
    for drawn, size in (
        (corners, bool(patch)),
        (lefts, bool(stripe)),
        (gaussian, "sigma" in noise),
        (uniform, "amplitude" in noise),
    ):
        if (drawn is None) == size:
            raise CannotRun("a part of the perturbation has a size but no draws, or no size")
    return {"image": lambda: applied.apply(images, draws)}


def class_profile(case: Case, way: str) -> Outputs:
    num_classes = case.param("C")
    names = {"n_max": "largest", "ratio": "ratio", "kind": "kind"}
    hyper = case.options(names)
    return {"counts": lambda: class_counts_profile(num_classes, **hyper)}


def layers_of(case: Case) -> list[Tensor]:
    """W1 .. WL in order."""
    found = [name for name in case.inputs if re.fullmatch(r"W[1-9]\d*", name)]
    return [case.need(f"W{index}") for index in range(1, len(found) + 1)]


def spectral(case: Case, way: str) -> Outputs:
    layers = layers_of(case)
    hyper = case.options({"reference": "reference", "norm21": "norm"})
    return fields(
        lambda: geometry.spectral_complexity(layers, **hyper),
        ("spectral_norms", "product", "norms_21", "complexity"),
    )


def cushions(case: Case, way: str) -> Outputs:
    layers, inputs = layers_of(case), case.need("X")
    names = {"m": "num_samples", "r": "r", "theta": "theta", "delta": "delta"}
    hyper = case.options(names)

    @cache
    def found() -> geometry.NoiseCushions:
        return geometry.noise_cushions(layers, inputs)

    return {
        **fields(
            found,
            (
                "layer_cushion",
                "minimal_interlayer_cushion",
                "activation_contraction",
                "stable_rank",
            ),
        ),
        **fields(
            lambda: geometry.cushion_complexity(found(), **hyper),
            {
                "ratio_factor": "ratio_factor",
                "complexity_printed": "printed",
                "complexity_derived": "derived",
            },
        ),
    }


def pac_bayes(case: Case, way: str) -> Outputs:
    names = ("gamma", "w", "layer_cushion", "minimal_interlayer_cushion")
    given = [case.need(name) for name in names]
    same = {name: name for name in ("r", "theta", "delta", "width", "contraction")}
    hyper = case.options({**same, "m": "num_samples", "beta": "spectral_norm"})
    return fields(
        lambda: geometry.pac_bayes_quantities(*given, **hyper),
        (
            *("sigma", "perturbation_norm", "kl", "emp_zero_one", "emp_margin"),
            *("slack_pac_bayes", "slack_lemma1", "bound_pac_bayes", "bound_lemma1"),
        ),
    )


ITEMS = {
    "ZHO-MC": Item(class_margin),
    "ZHO-MS": Item(sample_margins),
    "ZHO-RIESZ": Item(riesz),
    "NGY-D4": Item(dispersion),
    "ODN-VAR": Item(variance),
    "KOB-7": Item(implicit_bias),
    "ODN-1": Item(distribution),
    "NGY-5": Item(generalization),
    "NGY-6.1": Item(divergence_bound),
    "ZHO-T5": Item(simplex_optimum),
    "ZHO-LMJ": Item(lm_inequality),
    "NGR-7.3": Item(curvature_groups),
    "NGR-PERT": Item(perturbation),
    "BAS-IMB": Item(class_profile),
    "ODN-SPEC": Item(spectral),
    "ODN-BOUND": Item(cushions),
    "ODN-PAC": Item(pac_bayes),
}
