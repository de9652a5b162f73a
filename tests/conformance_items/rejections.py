"""ERR: calls that must raise. Each is also made without its offence, and must succeed then."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

from .case import CannotRun, Case, Item, Outputs
from .centroids import BANK, CENTER, CENTROID_MARGIN, COMPACTNESS, DISCRIMINATIVE, ROBUST
from .losses import (
    BIASED,
    DIVERGENCE,
    HINGE,
    LOGITS,
    LOSSES,
    OPTIONS,
    SOFTPLUS,
    SPECIFIED,
    LossItem,
)
from .measures import DISTRIBUTION
from .networks import LAYERS

BATCH = ("N", "C", "d", "N_q", "N_y", "d_q", "d_W", "label", "labels")
WEIGHTS = ("len_class_weight", "len_sample_weight")
FOUR = ("NGY-3.3", "ZHO-COSFACE", "ZHO-LM", "KOB-11")
PHRASES = {
    "any loss": (
        *("NGY-3.3", "NGY-4.3", "ZHO-COSFACE", "ZHO-ARCFACE", "ZHO-LM", "KOB-1", "KOB-11"),
    ),
    "any loss with a max or sum over other classes": ("NGY-4.3", "ZHO-LM", "KOB-1", "KOB-11"),
    "any loss with q and W": ("NGY-3.3", "NGY-4.3", "ZHO-COSFACE", "ZHO-ARCFACE", "ZHO-LM"),
    "any loss with class weights": FOUR,
    "any loss with sample weights": FOUR,
    "simplex ETF construction": ("simplex",),
}


class Batch:
    """A valid batch of 4 samples, 3 classes and 3 dimensions, but for what the case says."""

    def __init__(self, given: Mapping[str, Any], dtype: torch.dtype) -> None:
        samples, classes, dim = given.get("N", 4), given.get("C", 3), given.get("d", 3)
        rows = given.get("N_q", samples)
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, dtype=dtype)

        self.dtype, self.classes, self.dim = dtype, classes, dim
        self.q, self.W = random(rows, given.get("d_q", dim)), random(classes, given.get("d_W", dim))
        self.f, self.noisy = random(rows, classes), random(*self.q.shape)
        self.y = torch.arange(given.get("N_y", samples)) % classes
        if "label" in given:
            self.y[-1] = given["label"]
        if given.get("labels") == "soft":
            self.y = random(len(self.y), classes).softmax(1)
        elif "labels" in given:
            raise CannotRun(f"unknown kind of labels {given['labels']!r}")
        self.options: dict[str, Any] = {
            ours: given[name] for name, ours in OPTIONS.items() if name in given
        }
        if "len_class_weight" in given:
            self.options["weight"] = torch.ones(given["len_class_weight"], dtype=dtype)
        self.at_call: dict[str, Any] = {}
        if "len_sample_weight" in given:
            length = given["len_sample_weight"]
            self.at_call["sample_weight"] = torch.ones(length, dtype=dtype)


class Target(NamedTuple):
    """Something a case may call: a call per way, and the names of its arguments."""

    calls: Mapping[str, Callable[[Batch, dict[str, Any]], Any]]
    names: Mapping[str, str] = {}
    """Hyper-parameters, golden name -> keyword."""
    batch: tuple[str, ...] = (*BATCH, *OPTIONS, *WEIGHTS)

    def knows(self, arguments: Mapping[str, Any]) -> bool:
        return set(arguments) <= {*self.names, *self.batch}

    def call(self, way: str, arguments: Mapping[str, Any], dtype: torch.dtype) -> Any:
        hyper = {ours: arguments[name] for name, ours in self.names.items() if name in arguments}
        return self.calls[way](Batch(arguments, dtype), hyper)


def loss_target(*losses: LossItem) -> Target:
    calls: dict[str, Callable[[Batch, dict[str, Any]], Any]] = {}

    def add(loss: LossItem, way: str) -> None:
        def call(batch: Batch, hyper: dict[str, Any]) -> Any:
            impl = "auto" if way == "logits" else way
            specified = SPECIFIED.get(loss.module, {})
            options = {**specified, "ignore_index": None, "impl": impl, **hyper, **batch.options}
            data = (batch.f,) if way == "logits" else (batch.q, batch.W)
            return loss.module(**options).to(batch.dtype)(*data, batch.y, **batch.at_call)

        calls[f"{loss.module.__name__} {way}"] = call

    for loss in losses:
        add(loss, "dense")
        if "chunked" not in loss.module.refuses:
            add(loss, "chunked")
        if loss.data == LOGITS:
            add(loss, "logits")
    return Target(calls, {**losses[0].params, **losses[0].tensors})


def discriminative(batch: Batch, hyper: dict[str, Any]) -> Any:
    options = {"ignore_index": None, **hyper, **batch.options}
    loss = lm.Discriminative(batch.classes, batch.W.shape[1], **options).to(batch.dtype)
    return loss(batch.q, batch.W, batch.y)


def robust(batch: Batch, hyper: dict[str, Any]) -> Any:
    options = {"ignore_index": None, **hyper, **batch.options}
    loss = lm.RobustDiscriminative(batch.classes, batch.W.shape[1], **options).to(batch.dtype)
    return loss(batch.q, batch.W, batch.y, batch.noisy)


def compactness(batch: Batch, hyper: dict[str, Any]) -> Any:
    own = {ours: hyper[ours] for ours in COMPACTNESS.values() if ours in hyper}
    of_bank = {ours: hyper[ours] for ours in BANK.values() if ours in hyper}
    bank = lm.CentroidBank(batch.classes, batch.W.shape[1], **of_bank).to(batch.dtype)
    loss = lm.Compactness(bank=bank, ignore_index=None, **own, **batch.options)
    return loss(batch.q, batch.W, batch.y)


def centroid_margin(batch: Batch, hyper: dict[str, Any]) -> Any:
    loss = lm.CentroidMargin(ignore_index=None, **hyper, **batch.options)
    return loss(batch.q, batch.W, batch.y)


def centroid_margin_terms(batch: Batch, hyper: dict[str, Any]) -> Any:
    return LF.centroid_margin(batch.q, batch.W, batch.y, **hyper)


def ldam(batch: Batch, hyper: dict[str, Any]) -> Any:
    counts = hyper.pop("class_counts", [10] * batch.classes)
    options = {**SPECIFIED[lm.LDAM], "ignore_index": None, **hyper, **batch.options}
    loss = lm.LDAM(counts, **options).to(batch.dtype)
    return loss(batch.q, torch.ones(len(counts), batch.dim, dtype=batch.dtype), batch.y)


def class_stats(batch: Batch, hyper: dict[str, Any]) -> Any:
    return lm.class_stats(batch.q, batch.W, batch.y, **hyper)


def similarity_logits(batch: Batch, hyper: dict[str, Any]) -> Any:
    return lm.class_stats_from_logits(LF.similarity_logits(batch.q, batch.W, **hyper), batch.y)


def center(batch: Batch, hyper: dict[str, Any]) -> Any:
    options = {"ignore_index": None, **hyper, **batch.options}
    loss = lm.CenterLoss(batch.classes, batch.W.shape[1], **options).to(batch.dtype)
    return loss(batch.q, batch.y)


def mixture(batch: Batch, hyper: dict[str, Any]) -> Any:
    return LF.gaussian_mixture(batch.q, batch.W, batch.y, **hyper)


def layer_margin(batch: Batch, hyper: dict[str, Any]) -> Any:
    inputs = batch.f.requires_grad_()
    loss = lm.LayerMargin(ignore_index=None, **hyper, **batch.options)
    return loss(2 * inputs, batch.y, [inputs])


def ramp_loss(batch: Batch, hyper: dict[str, Any]) -> Any:
    return geometry.ramp_loss(batch.q[:, 0], **{"rho": 1.0, **hyper})


def linear_bound(batch: Batch, hyper: dict[str, Any]) -> Any:
    valid = {"rho": 1.0, "weight_norm": 1.0, "radius": 1.0, "centroid_norm": 1.0}
    return geometry.linear_margin_bound(batch.q[:, 0], **{**valid, **hyper})


def ball_bound(batch: Batch, hyper: dict[str, Any]) -> Any:
    valid = {"rho": 1.0, "feature_norm": 1.0, "radius": 1.0, "centroid_norm": 1.0}
    return geometry.ball_bound(batch.q[:, 0], **{**valid, **hyper})


def distribution(batch: Batch, hyper: dict[str, Any]) -> Any:
    return LF.margin_distribution(batch.q[:, 0], **hyper)


def distribution_module(batch: Batch, hyper: dict[str, Any]) -> Any:
    inputs = batch.f.requires_grad_()
    loss = lm.MarginDistribution(ignore_index=None, **hyper, **batch.options)
    return loss(2 * inputs, batch.y, inputs)


def simplex(batch: Batch, hyper: dict[str, Any]) -> Any:
    return lm.simplex(batch.classes, batch.dim)


TARGETS = {
    **{name: loss_target(loss) for name, loss in LOSSES.items()},
    "KOB-1": loss_target(HINGE, SOFTPLUS),
    "KOB-8": loss_target(DIVERGENCE),
    "KOB-15": loss_target(BIASED),
    "BAS-CENTER": Target({"module": center}, CENTER, (*BATCH, *OPTIONS)),
    "BAS-LGM": Target({"function": mixture}, {"alpha": "alpha", "lam": "likelihood_weight"}, BATCH),
    "BAS-ELSAYED": Target({"module": layer_margin}, LAYERS, (*BATCH, *OPTIONS)),
    "ODN-G": Target(
        {"module": distribution_module}, {**DISTRIBUTION, "eps": "eps"}, (*BATCH, *OPTIONS)
    ),
    "NGY-4.3": Target(
        {"module": discriminative}, DISCRIMINATIVE, (*BATCH, *OPTIONS, "len_class_weight")
    ),
    "NGY-4.4": Target(
        {"module": compactness}, {**COMPACTNESS, **BANK}, (*BATCH, *OPTIONS, "len_class_weight")
    ),
    "NGY-4.5": Target(
        {"module": centroid_margin, "function": centroid_margin_terms}, CENTROID_MARGIN, BATCH
    ),
    "NGR-12": Target({"module": robust}, ROBUST, (*BATCH, *OPTIONS, "len_class_weight")),
    "NGR-13": Target({"module": robust}, ROBUST, (*BATCH, *OPTIONS, "len_class_weight")),
    "NGY-5": Target(
        {"ramp": ramp_loss, "linear": linear_bound, "ball": ball_bound}, {"rho": "rho"}, ("N",)
    ),
    "ODN-1": Target(
        {"function": distribution, "module": distribution_module}, DISTRIBUTION, ("N", "C")
    ),
    "BAS-LDAM": Target(
        {"module": ldam},
        {"counts": "class_counts", "max_m": "max_margin", "s": "scale", "beta": "beta"},
    ),
    "OPS-STATS": Target(
        {"statistics": class_stats, "logits": similarity_logits},
        {"similarity": "similarity"},
        BATCH,
    ),
    "simplex": Target({"function": simplex}, batch=("C", "d")),
}


def offence(name: str, way: str, arguments: Mapping[str, Any], dtype: torch.dtype) -> str:
    """The kind of exception a call raises, or "nothing"; CannotRun if it raises anyway."""
    target = TARGETS[name]
    try:
        target.call(way, {}, dtype)
    except Exception as error:
        raise CannotRun(f"{name} ({way}) fails without the offence: {error}") from error
    try:
        target.call(way, arguments, dtype)
    except ValueError as error:
        if "m" in arguments and name == "ZHO-ASOFTMAX" and "unified" not in str(error):
            raise CannotRun(f"the message names no unified margin: {error}") from error
        return "ValueError"
    except CannotRun:
        raise
    except Exception as error:
        return type(error).__name__
    return "nothing"


def rejections(case: Case, way: str) -> Outputs:
    phrase = case.param("target")
    arguments = {name: case.param(name) for name in case.params if name != "target"}
    names = PHRASES.get(phrase, (phrase,))
    if unknown := [name for name in names if name not in TARGETS]:
        raise CannotRun(f"unknown target {unknown[0]!r}")
    having = [name for name in names if TARGETS[name].knows(arguments)]
    if not having or not arguments:
        raise CannotRun(f"{phrase!r} has no arguments {sorted(arguments)}")

    def raises() -> str:
        for name in having:
            for call in TARGETS[name].calls:
                kind = offence(name, call, arguments, case.dtype)
                if kind != "ValueError":
                    raise CannotRun(f"{name} ({call}) raises {kind}")
        return "ValueError"

    return {"raises": raises}


ITEMS = {"ERR": Item(rejections)}
