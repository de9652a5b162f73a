"""Losses on logits, or on features and prototypes, and the options they share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import largemargin as lm
import largemargin.functional as LF

from .case import CannotRun, Case, Item, Outputs, batch_mean

OPTIONS = {"label_smoothing": "label_smoothing", "reduction": "reduction"}
SPECIFIED: dict[type[lm.Loss], dict[str, Any]] = {
    lm.NormFace: {"scale": 64.0},
    lm.CosFace: {"margin": 0.35, "scale": 64.0},
    lm.ArcFace: {"margin": 0.5, "scale": 64.0},
    lm.SphereFace: {"margin": 4, "scale": None, "annealing": 0.0},
    lm.LSoftmax: {"margin": 4, "annealing": 0.0},
    lm.UnifiedMargin: {"scale": 64.0},
    lm.GMSoftmax: {"scale": 64.0},
    lm.LMSoftmax: {"scale": 64.0},
    lm.LDAM: {"max_margin": 0.5, "scale": 30.0},
    lm.AdaFace: {"margin": 0.4, "scale": 64.0},
    lm.MagFace: {"min_margin": 0.45, "max_margin": 0.8, "scale": 64.0},
    lm.ElasticFace: {"margin": 0.5, "scale": 64.0},
    lm.CurricularFace: {"margin": 0.5, "scale": 64.0},
}
"""What holds where a case leaves a param out; a loss's own defaults are those of a classifier."""


class LossItem(NamedTuple):
    """A loss by its module and its pure function, and how the golden names map to keywords."""

    module: type[lm.Loss]
    function: Callable[..., Tensor]
    params: Mapping[str, str] = {}
    tensors: Mapping[str, str] = {}
    """Inputs that are keyword arguments; numbers and lists may also be params."""
    data: tuple[str, ...] = ("q", "W")
    """Names of features and prototypes, or of the logits alone."""
    bias: str | None = None

    def ways(self, case: Case) -> tuple[str, ...]:
        """Dense and chunked, where the loss has both and the targets are class indices."""
        soft = case.get("soft_target") is not None or bool(case.param("label_smoothing"))
        chunked = () if soft or "chunked" in self.module.refuses else ("chunked",)
        if self.data != LOGITS:
            return ("dense", *chunked)
        # Features times the identity are the logits themselves unless 0 * inf takes part.
        finite = bool(torch.isfinite(case.need("f")).all())
        return ("logits", "dense", *chunked) if finite else ("logits",)

    def arguments(self, case: Case, way: str) -> tuple[list[Tensor], dict[str, Any]]:
        """Positional arguments before the labels, and keyword arguments of the call."""
        positional = [case.need(name) for name in self.data]
        if way != "logits" and self.data == LOGITS:
            (logits,) = positional
            positional.append(torch.eye(logits.shape[1], dtype=logits.dtype))
        return positional, {} if self.bias is None else {"bias": case.get(self.bias)}

    def keywords(self, case: Case, way: str) -> dict[str, Any]:
        """Hyper-parameters of the module or the function."""
        tensors = {ours: self.tensor(case, name) for name, ours in self.tensors.items()}
        given = {ours: tensor for ours, tensor in tensors.items() if tensor is not None}
        impl = "auto" if way == "logits" else way
        return {
            **SPECIFIED.get(self.module, {}),
            "impl": impl,
            **case.options(self.params),
            **given,
        }

    def tensor(self, case: Case, name: str) -> Tensor | None:
        """An input or param of numbers; a single one holds for all samples."""
        value = case.get(name)
        if value is None and case.has(name):
            value = torch.as_tensor(case.param(name), dtype=case.dtype)
        return value.reshape(()) if value is not None and value.numel() == 1 else value

    def build(self, case: Case, way: str, **options: Any) -> lm.Loss:
        # Modules ignore label -100 by default, the specification no row unless told so.
        options = {"ignore_index": None, **self.keywords(case, way), **options}
        loss = self.module(**options)
        case.scale = getattr(loss, "scale", None)
        return loss.to(case.dtype)


LOGITS = ("f",)


MARGIN_SCALE = {"m": "margin", "s": "scale"}
MAX_BASED = {"rho": "margin"}

LOSSES = {
    "NGY-3.3": LossItem(lm.CrossEntropy, LF.cross_entropy, bias="b"),
    "ZHO-NORMFACE": LossItem(lm.NormFace, LF.normface, {"s": "scale"}),
    "ZHO-COSFACE": LossItem(lm.CosFace, LF.cosface, MARGIN_SCALE),
    "ZHO-ARCFACE": LossItem(
        lm.ArcFace, LF.arcface, {**MARGIN_SCALE, "mode": "mode", "gradient": "gradient"}
    ),
    "ZHO-ASOFTMAX": LossItem(lm.SphereFace, LF.sphereface, {**MARGIN_SCALE, "lam": "annealing"}),
    "ZHO-UNI": LossItem(
        lm.UnifiedMargin, LF.unified_margin, {"m1": "m1", "m2": "m2", "m3": "m3", "s": "scale"}
    ),
    "ZHO-GM": LossItem(
        lm.GMSoftmax,
        LF.gm_softmax,
        {"s": "scale"},
        {name: name for name in ("alpha1", "beta1", "alpha2", "beta2")},
    ),
    "ZHO-LM": LossItem(lm.LMSoftmax, LF.lm_softmax, {"s": "scale"}),
    "ZHO-RSM": LossItem(lm.SampleMargin, LF.sample_margin, {"normalize": "normalize"}),
    "KOB-11": LossItem(lm.Kobayashi, LF.kobayashi, {"lam": "strength"}, data=LOGITS),
    "KOB-13": LossItem(lm.LabelSmoothing, LF.label_smoothing, {"lam": "smoothing"}, data=LOGITS),
    "KOB-14": LossItem(lm.DenseHinge, LF.dense_hinge, {"rho": "margin"}, data=LOGITS),
    "ODN-SOFT": LossItem(lm.SoftHinge, LF.soft_hinge, data=LOGITS),
    "BAS-FOCAL": LossItem(lm.Focal, LF.focal, {"gamma": "gamma"}, {"alpha": "alpha"}, data=LOGITS),
    "BAS-GCE": LossItem(
        lm.GeneralizedCrossEntropy, LF.generalized_cross_entropy, {"q": "q"}, data=LOGITS
    ),
    "BAS-LOGITNORM": LossItem(lm.LogitNorm, LF.logit_norm, {"tau": "temperature"}, data=LOGITS),
    "BAS-SCE": LossItem(
        lm.SymmetricCrossEntropy,
        LF.symmetric_cross_entropy,
        {"alpha": "alpha", "beta": "beta", "A": "log_zero"},
        data=LOGITS,
    ),
    "BAS-LSOFTMAX": LossItem(lm.LSoftmax, LF.lsoftmax, {"m": "margin", "lam": "annealing"}),
}
HINGE = LossItem(lm.MaxHinge, LF.max_hinge, MAX_BASED, data=LOGITS)
SOFTPLUS = LossItem(lm.MaxSoftplus, LF.max_softplus, MAX_BASED, data=LOGITS)
DIVERGENCE = LossItem(lm.RivalDivergence, LF.rival_divergence, data=LOGITS)
BIASED = LossItem(lm.BiasedSoftmax, LF.biased_softmax, {"rho": "margin"}, data=LOGITS)
KINDS = {"d_qu": "rivals_to_uniform", "d_uq": "uniform_to_rivals", "d_sym": "symmetric"}


def both_forms(
    loss: LossItem,
    case: Case,
    way: str,
    name: str,
    per_sample: str,
    *,
    training: bool = True,
    **hyper: Any,
) -> Outputs:
    """The mean from the module and the terms before it from the function."""
    module = loss.build(case, way, **hyper).train(training)
    keywords = loss.keywords(case, way)
    positional, bias = loss.arguments(case, way)
    labels = case.need("y")
    return {
        name: lambda: module(*positional, labels, **bias),
        per_sample: lambda: loss.function(*positional, labels, **bias, **keywords, **hyper),
    }


def plain(loss: LossItem) -> Item:
    per_sample = "value_per_sample" if loss.data == LOGITS else "per_sample"

    def run(case: Case, way: str) -> Outputs:
        return both_forms(loss, case, way, "value", per_sample)

    return Item(run, loss.ways)


def sphereface(case: Case, way: str) -> Outputs:
    theta, margin = case.get("theta"), case.options({"m": "margin"})
    if theta is not None:
        return {"psi": lambda: LF.sphereface_psi(theta, **margin)}
    return both_forms(LOSSES["ZHO-ASOFTMAX"], case, way, "value", "per_sample")


def max_based(case: Case, way: str) -> Outputs:
    return {
        **both_forms(HINGE, case, way, "hinge", "hinge_per_sample"),
        **both_forms(SOFTPLUS, case, way, "softplus", "softplus_per_sample"),
    }


def divergences(case: Case, way: str) -> Outputs:
    outputs: Outputs = {}
    for name, kind in KINDS.items():
        outputs |= both_forms(DIVERGENCE, case, way, name, f"{name}_per_sample", kind=kind)
    return outputs


def biased(case: Case, way: str) -> Outputs:
    # BiasedSoftmax leaves the divergence out by default; its weight is that of KOB-11.
    strength = case.param("lam", lm.Kobayashi().strength)
    return {
        **both_forms(BIASED, case, way, "value", "value_per_sample"),
        **both_forms(BIASED, case, way, "with_reg", "with_reg_per_sample", strength=strength),
    }


def mixture(case: Case, way: str) -> Outputs:
    q, means, labels = case.need("q"), case.need("mu"), case.need("y")
    logvar = case.get("logvar")
    hyper = case.options({"alpha": "alpha", "lam": "likelihood_weight"})

    def value() -> Tensor:
        terms = LF.gaussian_mixture(q, means, labels, log_variances=logvar, impl=way, **hyper)
        return batch_mean(terms)

    return {"value": value}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ldam(case: Case, way: str) -> Outputs:
    counts, weight = case.need("counts"), case.get("weight")
    specified, beta = SPECIFIED[lm.LDAM], case.options({"beta": "beta"})
    margins = {"max_margin": case.param("max_m", specified["max_margin"])}
    scale = {"scale": case.param("s", specified["scale"])}
    weighted = case.param("weighted", weight is not None)
    batch = [case.get(name) for name in ("q", "W", "y")]

    def value() -> Tensor:
        given = {"weight": weight} if weighted and weight is not None else {}
        with default_dtype(case.dtype):  # in which the margins are made
            loss = lm.LDAM(counts, impl=way, ignore_index=None, **margins, **scale, **beta, **given)
        case.scale = loss.scale
        if weighted and weight is None:
            loss.reweight()
        return loss.to(case.dtype)(*batch)

    return {
        "margins": lambda: LF.ldam_margins(counts, dtype=case.dtype, **margins),
        "weights": lambda: LF.balanced_weights(counts, dtype=case.dtype, **beta),
        "value": value,
    }


def counted(module: type[lm.Loss], function: Callable[..., Tensor], case: Case) -> Outputs:
    """A loss made with class counts, and the logits of the post-hoc form."""
    logits, labels, counts = case.need("f"), case.need("y"), case.need("counts")
    hyper = case.options({"gamma": "gamma", "tau": "tau"})
    tau = case.options({"tau": "tau"})
    return {
        "value": lambda: module(counts, ignore_index=None, **hyper).to(case.dtype)(logits, labels),
        "value_per_sample": lambda: function(logits, labels, class_counts=counts, **hyper),
        "adjusted": lambda: LF.logit_adjusted(logits, counts, **tau),
    }


def prior(case: Case, way: str) -> Outputs:
    batch = [case.need(name) for name in ("q", "W", "y")]
    settings = {"prior": case.need("counts"), "ignore_index": None, "impl": way}
    settings |= SPECIFIED[lm.CosFace] | case.options(MARGIN_SCALE)
    case.scale = settings["scale"]

    def values(reduction: str) -> Tensor:
        return lm.CosFace(reduction=reduction, **settings).to(case.dtype)(*batch)

    return {"value": lambda: values("mean"), "value_per_sample": lambda: values("none")}


def option_loss(case: Case) -> LossItem:
    name = case.param("loss")
    if name not in LOSSES:
        raise CannotRun(f"unknown loss {name!r}")
    return LOSSES[name]


def option_ways(case: Case) -> tuple[str, ...]:
    return option_loss(case).ways(case)


def with_options(case: Case, way: str) -> Outputs:
    loss = option_loss(case)
    labels = case.get("soft_target")
    labels = case.need("y") if labels is None else labels
    options = {"ignore_index": case.param("ignore_index"), **case.options(OPTIONS)}
    for name, ours in (("class_weight", "weight"), ("margin_per_class", "margin")):
        tensor = case.get(name)
        if tensor is not None:
            options[ours] = tensor
    sample_weight = case.get("sample_weight")
    module = loss.build(case, way, **options)
    positional, keywords = loss.arguments(case, way)
    return {"value": lambda: module(*positional, labels, sample_weight=sample_weight, **keywords)}


def statistics(case: Case, way: str) -> Outputs:
    q, prototypes, labels = case.need("q"), case.need("W"), case.need("y")
    form = {"bias": case.get("b"), **case.options({"similarity": "similarity"})}
    stats = lm.class_stats(q, prototypes, labels, impl=way, **form)
    names = ("target", "rival", "rest", "spread", "mean")
    return {
        "logits": lambda: LF.similarity_logits(q, prototypes, **form),
        **{name: lambda name=name: getattr(stats, name) for name in names},
    }


def dense_and_chunked(case: Case) -> tuple[str, ...]:
    return ("dense", "chunked")


MOVING = {"mu": "norm_mean", "sigma": "norm_std"}
ADAFACE = LossItem(
    lm.AdaFace, LF.adaface, {**MARGIN_SCALE, "h": "concentration", "rate": "rate", **MOVING}
)
CURRICULAR = LossItem(lm.CurricularFace, LF.curricularface, {**MARGIN_SCALE, "rate": "rate"})
ELASTIC = LossItem(
    lm.ElasticFace,
    LF.elasticface,
    {**MARGIN_SCALE, "sigma": "std", "form": "form", "plus": "plus"},
    {"eps": "noise"},
)
MAGFACE = LossItem(
    lm.MagFace,
    LF.magface,
    {"l_a": "min_norm", "u_a": "max_norm", "l_m": "min_margin", "u_m": "max_margin"}
    | {"lam": "strength", "s": "scale", "mode": "mode"},
)


def moved(module: lm.Loss, case: Case) -> tuple[Tensor, Tensor]:
    """The loss of the case's batch in training, and the statistics it leaves."""
    value = module(case.need("q"), case.need("W"), case.need("y"))
    return value, next(each for name, each in module.named_buffers() if name.endswith("values"))


def adaface(case: Case, way: str) -> Outputs:
    module = ADAFACE.build(case, way)
    if not case.has("rate"):
        return both_forms(ADAFACE, case, way, "value", "per_sample", training=False)
    value, statistics = moved(module, case)
    return {
        "value": lambda: value,
        "mu_after": lambda: statistics[0],
        "sigma_after": lambda: statistics[1],
        **function_of(ADAFACE, case, way, zip(("norm_mean", "norm_std"), statistics, strict=True)),
    }


def curricular(case: Case, way: str) -> Outputs:
    case.scale = case.param("s", SPECIFIED[lm.CurricularFace]["scale"])
    if not case.has("rate"):
        per_sample = function_of(CURRICULAR, case, way, {"progress": case.param("t", 0.0)})
        return {"value": lambda: batch_mean(per_sample["per_sample"]()), **per_sample}
    value, statistics = moved(CURRICULAR.build(case, way), case)
    return {
        "value": lambda: value,
        "t_after": lambda: statistics[0],
        **function_of(CURRICULAR, case, way, {"progress": statistics[0]}),
    }


def elastic(case: Case, way: str) -> Outputs:
    case.scale = case.param("s", SPECIFIED[lm.ElasticFace]["scale"])
    per_sample = function_of(ELASTIC, case, way, {})
    return {"value": lambda: batch_mean(per_sample["per_sample"]()), **per_sample}


def function_of(loss: LossItem, case: Case, way: str, state: Any) -> Outputs:
    """The terms before the mean, from the function with the given statistics."""
    rows = [case.need(name) for name in ("q", "W", "y")]
    keywords = {**loss.keywords(case, way), **dict(state)}
    keywords.pop("rate", None)
    return {"per_sample": lambda: loss.function(*rows, **keywords)}


def adacos(case: Case, way: str) -> Outputs:
    num_classes = len(case.need("W"))
    with default_dtype(case.dtype):  # in which the scale is made
        module = lm.AdaCos(num_classes, ignore_index=None, impl=way)
    value, statistics = moved(module, case)
    return {
        "fixed": lambda: LF.adacos_scale(num_classes),
        "scale_after": lambda: statistics[0],
        "value": lambda: value,
    }


def sub_centers(case: Case, way: str) -> Outputs:
    loss, (q, W, labels) = option_loss(case), (case.need(name) for name in ("q", "W", "y"))
    head = lm.SubCenterHead(W.shape[2], W.shape[0], centers=W.shape[1], dtype=case.dtype)
    with torch.no_grad():
        head.weight.copy_(W)
    found = head.dominant(head.own_cosines(q.detach(), labels), labels)
    return {
        **both_forms(loss, case, way, "value", "per_sample"),
        "dominant": lambda: found.centers,
        "angles": lambda: found.angles,
    }


def dynamic_margins(case: Case, way: str) -> Outputs:
    hyper = case.options({"a": "factor", "b": "offset", "lam": "power"})
    counts = case.need("counts")
    return {"margins": lambda: LF.dynamic_margins(counts, dtype=case.dtype, **hyper)}


ITEMS = {
    "BAS-ADACOS": Item(adacos, dense_and_chunked),
    "BAS-ADAFACE": Item(adaface, ADAFACE.ways),
    "BAS-CURRICULAR": Item(curricular, CURRICULAR.ways),
    "BAS-DYNAMIC": Item(dynamic_margins),
    "BAS-ELASTIC": Item(elastic, ELASTIC.ways),
    "BAS-MAGFACE": plain(MAGFACE),
    "BAS-SUBCENTER": Item(sub_centers, option_ways),
    **{name: plain(loss) for name, loss in LOSSES.items()},
    "ZHO-ASOFTMAX": Item(sphereface, LOSSES["ZHO-ASOFTMAX"].ways),
    "KOB-1": Item(max_based, HINGE.ways),
    "KOB-8": Item(divergences, DIVERGENCE.ways),
    "KOB-15": Item(biased, BIASED.ways),
    "BAS-LGM": Item(mixture, dense_and_chunked),
    "BAS-LDAM": Item(ldam, dense_and_chunked),
    "BAS-LOGITADJ": Item(lambda case, way: counted(lm.LogitAdjustment, LF.logit_adjustment, case)),
    "BAS-PRIOR": Item(prior, dense_and_chunked),
    "BAS-VS": Item(lambda case, way: counted(lm.VSLoss, LF.vs_loss, case)),
    "OPT": Item(with_options, option_ways),
    "OPS-STATS": Item(statistics, dense_and_chunked),
}
