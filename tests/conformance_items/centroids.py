"""Losses on class centroids and centers, with their state."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import largemargin as lm
import largemargin.functional as LF

from .case import CannotRun, Case, Item, Outputs

BANK = {"strategy": "strategy", "gamma": "momentum", "first_seen": "first_seen"}
COMPACTNESS = {"delta_v": "radius", "compact_power": "power"}
CENTROID_MARGIN = {"delta_d": "margin", "margin_power": "power", "agg": "aggregate"}
ROBUST = {
    "alpha": "alpha",
    "beta": "beta",
    "gamma_reg": "gamma_reg",
    "delta_v": "radius",
    "delta_d": "margin",
    "strategy": "strategy",
    "gamma": "momentum",
    "lam": "noise_weight",
    "compact_power": "compact_power",
    "margin_power": "margin_power",
    "agg": "aggregate",
    "first_seen": "first_seen",
}
DISCRIMINATIVE = {name: ours for name, ours in ROBUST.items() if name != "lam"}
CENTER = {"lam": "strength", "alpha": "rate", "reduction": "reduction"}


def number_of_classes(case: Case) -> int:
    """The param, or what the prototypes or the bank say."""
    if case.has("num_classes"):
        return int(case.param("num_classes"))
    for name in ("W", "bank"):
        if name in case.inputs:
            return len(case.inputs[name])
    raise CannotRun("the number of classes is not given")


def fill(bank: lm.CentroidBank, case: Case) -> None:
    """Copy the state before the call into a bank; without one it stays empty."""
    rows, seen = case.get("bank"), case.get("seen")
    if rows is not None:
        bank.centroids.copy_(rows.detach())
        bank.seen.copy_(torch.ones_like(bank.seen) if seen is None else seen)


def filled_bank(case: Case, dim: int, **options: Any) -> lm.CentroidBank:
    bank = lm.CentroidBank(number_of_classes(case), dim, **options).to(case.dtype)
    fill(bank, case)
    return bank


def compactness(case: Case, way: str) -> Outputs:
    q, labels = case.need("q"), case.need("y")
    bank = filled_bank(case, q.shape[1], **case.options(BANK))
    loss = lm.Compactness(
        bank=bank, ignore_index=case.param("ignore_index"), **case.options(COMPACTNESS)
    )

    @cache
    def value() -> Tensor:
        # The prototypes only tell the number of classes here.
        return loss(q, torch.zeros_like(bank.centroids), labels)

    return {"value": value, **state_after(bank, value)}


def state_after(bank: lm.CentroidBank, forward: Any) -> Outputs:
    def after(name: str) -> Tensor:
        forward()
        return getattr(bank, name).clone()

    return {"bank_after": lambda: after("centroids"), "seen_after": lambda: after("seen")}


def centroid_margin(case: Case, way: str) -> Outputs:
    centroids, prototypes, classes = case.need("m"), case.need("W"), case.need("classes")
    bias, hyper = case.get("b"), case.options(CENTROID_MARGIN)
    loss = lm.CentroidMargin(ignore_index=None, **hyper)
    # A batch of one feature per class has these centroids.
    return {
        "value": lambda: loss(centroids, prototypes, classes, bias=bias),
        "per_class": lambda: LF.centroid_margin(centroids, prototypes, classes, bias=bias, **hyper),
    }


def centroid_norm(case: Case, way: str) -> Outputs:
    centroids = case.need("m")
    count, dim = centroids.shape
    loss = lm.CentroidNorm(ignore_index=None)
    prototypes = centroids.new_zeros(count + 2, dim)  # only tells the number of classes
    return {"value": lambda: loss(centroids, prototypes, torch.arange(count))}


def boundary(case: Case, way: str) -> Outputs:
    points, prototypes, bias = case.need("m"), case.need("W"), case.get("b")
    case.param("alpha")  # informational: m and b are multiplied already
    eps = case.options({"eps": "eps"})

    def signed() -> Tensor:
        return LF.signed_boundary_distance(points, prototypes, bias, **eps)

    return {"signed": signed, "distance": lambda: signed().abs()}


def momentum_margin(case: Case, way: str) -> Outputs:
    q, prototypes, labels = case.need("q"), case.need("W"), case.need("y")
    bias, margin = case.get("b"), case.options({"delta_d": "margin"})
    momentum = case.options({"gamma": "momentum"})

    def value(strategy: str) -> Tensor:
        bank = filled_bank(case, q.shape[1], strategy=strategy, **momentum)
        loss = lm.CentroidMargin(bank=bank, ignore_index=None, **margin)
        return loss(q, prototypes, labels, bias=bias)

    case.get("bank"), case.get("seen")
    return {"value_naive": lambda: value("none"), "value_momentum": lambda: value("both")}


def build(
    module: type[lm.Discriminative], case: Case, names: Mapping[str, str], **options: Any
) -> Any:
    hyper = {**case.options(names), **options}
    return module(number_of_classes(case), case.need("q").shape[1], **hyper).to(case.dtype)


def discriminative(case: Case, way: str) -> Outputs:
    """One batch of a sequence; the loss, and with it the bank, is handed on in the state."""
    q, prototypes, labels = case.need("q"), case.need("W"), case.need("y")
    bias, ignored = case.get("b"), case.param("ignore_index")
    loss = build(lm.Discriminative, case, DISCRIMINATIVE, ignore_index=ignored)
    before = case.state.get("loss")
    if before is None:
        fill(loss.bank, case)
    elif before[1] == case.params:
        loss = before[0]
    else:
        loss.load_state_dict(before[0].state_dict())
    case.state["loss"] = (loss, case.params)

    @cache
    def result() -> lm.LossValue:
        return loss.named_terms(q, prototypes, labels, bias=bias)

    return {
        "value": lambda: result().total,
        **{term: lambda term=term: result().terms[term] for term in ("compact", "margin", "reg")},
        **state_after(loss.bank, result),
    }


def robust_outputs(case: Case, softmax_weight: float) -> Outputs:
    batch = [case.need(name) for name in ("q", "W", "y", "q_noisy")]
    bias = case.get("b")
    loss = build(
        lm.RobustDiscriminative, case, ROBUST, softmax_weight=softmax_weight, ignore_index=None
    )
    fill(loss.bank, case)

    @cache
    def result() -> lm.LossValue:
        return loss.named_terms(*batch, bias=bias)

    terms = ("compact", "margin", "reg", "noisy")
    return {
        "value": lambda: result().total,
        **{term: lambda term=term: result().terms[term] for term in terms},
        "softmax": lambda: lm.CrossEntropy(ignore_index=None)(*batch[:3], bias=bias),
    }


def noisy(case: Case, way: str) -> Outputs:
    return robust_outputs(case, softmax_weight=0.0)


def robust(case: Case, way: str) -> Outputs:
    return {"value": robust_outputs(case, softmax_weight=1.0)["value"]}


def center(case: Case, way: str) -> Outputs:
    q, labels, centers = case.need("q"), case.need("y"), case.need("centers")
    loss = lm.CenterLoss(*centers.shape, ignore_index=None, **case.options(CENTER)).to(case.dtype)
    loss.centers.copy_(centers.detach())

    @cache
    def value() -> Tensor:
        return loss(q, labels)

    def after() -> Tensor:
        value()
        return loss.centers.clone()

    return {"value": value, "centers_after": after}


def stability(case: Case, way: str) -> Outputs:
    q, noisy_features = case.need("q"), case.need("q_noisy")
    loss = lm.Stability(**case.options({"alpha": "strength", "squared": "squared"}))
    return {"value": lambda: loss(q, noisy_features)}


def zero_centroid(case: Case, way: str) -> Outputs:
    prototypes = case.need("W")
    loss = lm.ZeroCentroid(**case.options({"lam": "strength", "normalize": "normalize"}))
    return {"value": lambda: loss(prototypes)}


def super_symmetry(case: Case, way: str) -> Outputs:
    prototypes = case.need("W")
    return {
        "residual": lambda: LF.super_symmetry(prototypes),
        "penalty": lambda: lm.SuperSymmetry()(prototypes),
    }


ITEMS = {
    "NGY-4.3": Item(discriminative, steps=True),
    "NGY-4.4": Item(compactness),
    "NGY-4.5": Item(centroid_margin),
    "NGY-4.6": Item(boundary),
    "NGY-4.7": Item(centroid_norm),
    "NGY-P4.3": Item(momentum_margin),
    "NGR-12": Item(noisy),
    "NGR-13": Item(robust),
    "NGR-STAB": Item(stability),
    "BAS-CENTER": Item(center),
    "ZHO-RW": Item(zero_centroid),
    "KOB-SS": Item(super_symmetry),
}
