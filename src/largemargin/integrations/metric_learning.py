"""From pytorch-metric-learning (PML): its classification losses as a loss and a head of ours.

PML keeps the class vectors inside the loss as W (D, C) and angles in degrees. Here they are a head
(C, D), which predicts, and margins are radians. PML itself is not imported.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from largemargin.errors import LargeMarginError
from largemargin.heads.class_head import ClassHead
from largemargin.heads.head_spec import HeadSpec
from largemargin.heads.sub_center_head import SubCenterHead
from largemargin.losses.arcface import ArcFace
from largemargin.losses.base.loss import Loss
from largemargin.losses.cosface import CosFace
from largemargin.losses.cross_entropy import CrossEntropy
from largemargin.losses.normface import NormFace
from largemargin.losses.sphereface import LSoftmax, SphereFace

REDUCTIONS = {"MeanReducer": "mean", "SumReducer": "sum"}

NO_COUNTERPART = {
    "ProxyAnchorLoss": "it compares proxies with all samples of a batch.",
    "ProxyNCALoss": "it sums over proxies of other classes only.",
    "SoftTripleLoss": "it averages over a class's centers; lm.SubCenterHead takes the nearest.",
    "MultipleLosses": "convert each of its losses and add them up in an lm.Objective.",
    "CrossBatchMemory": "convert the loss inside it.",
    "DistributedLossWrapper": "convert the loss inside it; losses here take sync=True.",
}


class Converted(NamedTuple):
    """A loss and the head it trains: ``loss(features, head, labels)``, ``head(features)``."""

    loss: Loss
    head: ClassHead


def from_pml(pml_loss: nn.Module) -> Converted:
    """The loss and head that compute what ``pml_loss(embeddings, labels)`` computes.

    ======================  ==================================================================
    PML                     here
    ======================  ==================================================================
    ArcFaceLoss             ``ArcFace``, margin in radians, and a cosine head
    SubCenterArcFaceLoss    the same and a ``SubCenterHead``, whose ``own_cosines`` and
                            ``dominant`` do what ``get_outliers`` does
    CosFaceLoss             ``CosFace`` and a cosine head
    NormalizedSoftmaxLoss   ``NormFace`` with scale = 1 / temperature and a cosine head; with
                            ``DotProductSimilarity(normalize_embeddings=False)`` ``CrossEntropy``
                            on a "cosine_prototypes" head
    SphereFaceLoss          ``SphereFace`` and a "cosine_prototypes" head
    LargeMarginSoftmaxLoss  ``LSoftmax`` and a dot-product head without bias
    ======================  ==================================================================

    The head owns a transposed copy of W: train its parameters with the model's. Miners are given
    to a call, not to the loss, so they cannot be seen here: there is no counterpart to the weights
    they put on samples (``sample_weight`` can carry them).

    Warns where PML does not do what its arguments say: an ArcFace margin that looks like radians
    but was read as degrees, a multiplicative margin that ``int()`` cut down to 1, which is none.

    Raises:
        LargeMarginError: for what has no counterpart: regularizers, other reducers and
            distances, a scale on top of feature norms, subclasses.

    Example:
        >>> from pytorch_metric_learning.losses import ArcFaceLoss
        >>> loss, head = from_pml(ArcFaceLoss(num_classes=10, embedding_size=32, margin=28.6479))
        >>> round(loss.margin, 4), head.similarity, tuple(head.weight.shape)
        (0.5, 'cosine', (10, 32))
    """
    name = type(pml_loss).__name__
    if not type(pml_loss).__module__.startswith("pytorch_metric_learning."):
        raise LargeMarginError(
            "from_pml takes a loss of pytorch-metric-learning itself, but "
            f"{type(pml_loss).__module__}.{name} was given. A subclass may compute anything: "
            "convert its base and write the difference down."
        )
    if name not in CONVERTERS:
        known = f"those that can be converted are {', '.join(CONVERTERS)}."
        raise LargeMarginError(f"{name} has no counterpart: {NO_COUNTERPART.get(name, known)}")
    _check_extras(pml_loss)
    W: Any = pml_loss.W
    loss, form = CONVERTERS[name](pml_loss, {"reduction": _reduction(pml_loss)})
    weight = from_pml_state_dict({"W": W})["weight"]
    centers = getattr(pml_loss, "sub_centers", None)
    if centers is not None:
        weight = weight.unflatten(0, (-1, int(centers)))  # type: ignore[no-untyped-call]
    how: Any = {"similarity": form.similarity, "scale": form.scale, "bias": False}
    how |= {} if centers is None else {"centers": int(centers)}
    kind = ClassHead if centers is None else SubCenterHead
    head = kind(weight.shape[-1], weight.shape[0], device="meta", **how)
    head.weight = nn.Parameter(weight, requires_grad=W.requires_grad)
    return Converted(loss, head)


def from_pml_state_dict(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state dict of a ``ClassHead`` from that of a PML loss: ``W`` (D, C) as ``weight`` (C, D).

    Sub-centers are rows one after the other: ``weight.unflatten(0, (C, K))`` is that of a
    ``SubCenterHead``.

    Args:
        state: of the loss, or of a model that holds it.
        prefix: of the loss in it, such as "criterion."; found automatically if there is one W.

    Example:
        >>> from_pml_state_dict({"W": torch.ones(32, 10)})["weight"].shape
        torch.Size([10, 32])
    """
    key = f"{prefix}W"
    if key not in state:
        candidates = [name for name in state if name == "W" or name.endswith(".W")]
        if prefix or len(candidates) != 1:
            raise LargeMarginError(
                f"the state dict has no entry {key!r}; those that could be class vectors of PML "
                f"are {candidates}. Pass what comes before the W as prefix."
            )
        key = candidates[0]
    if state[key].dim() != 2:
        raise LargeMarginError(
            f"{key!r} must be the (D, C) class vectors of a PML loss, but its shape is "
            f"{tuple(state[key].shape)}."
        )
    return {"weight": state[key].detach().t().contiguous().clone()}


Conversion = tuple[Loss, HeadSpec]


def _arcface(pml: Any, options: Any) -> Conversion:
    margin = float(pml.margin)  # PML has converted it to radians already
    degrees = math.degrees(margin)
    if 0 < degrees <= math.pi:
        warnings.warn(
            f"this ArcFaceLoss has a margin of {degrees:.4g} degrees, {margin:.4g} radians: PML "
            f"reads margins as degrees. If {degrees:.4g} radians were meant, use "
            f"lm.ArcFace(margin={degrees:.4g}).",
            stacklevel=3,
        )
    scale = float(pml.scale)
    return ArcFace(margin=margin, scale=scale, **options), HeadSpec("cosine", scale)


def _cosface(pml: Any, options: Any) -> Conversion:
    scale = float(pml.scale)
    return CosFace(margin=float(pml.margin), scale=scale, **options), HeadSpec("cosine", scale)


def _normalized_softmax(pml: Any, options: Any) -> Conversion:
    scale = 1 / float(pml.temperature)
    if pml.distance.normalize_embeddings:
        return NormFace(scale=scale, **options), HeadSpec("cosine", scale)
    form = HeadSpec("cosine_prototypes", scale)
    return CrossEntropy(similarity=form.similarity, scale=scale, **options), form


def _sphereface(pml: Any, options: Any) -> Conversion:
    _check_factor(pml)
    return SphereFace(margin=pml.margin, **options), HeadSpec("cosine_prototypes")


def _large_margin_softmax(pml: Any, options: Any) -> Conversion:
    _check_factor(pml)
    return LSoftmax(margin=pml.margin, **options), HeadSpec("dot")


CONVERTERS: dict[str, Callable[[Any, Any], Conversion]] = {
    "ArcFaceLoss": _arcface,
    "SubCenterArcFaceLoss": _arcface,
    "CosFaceLoss": _cosface,
    "NormalizedSoftmaxLoss": _normalized_softmax,
    "SphereFaceLoss": _sphereface,
    "LargeMarginSoftmaxLoss": _large_margin_softmax,
}


def _check_factor(pml: Any) -> None:
    name = type(pml).__name__
    if pml.scale != 1:
        raise LargeMarginError(
            f"{name} with scale={pml.scale} has no counterpart: its logits already carry the norms "
            "of the features. Multiply the features by the scale, or use a cosine head with "
            "lm.SphereFace(scale=...)."
        )
    if pml.margin == 1:
        warnings.warn(
            f"this {name} has margin=1, which is no margin. PML cuts margins down to integers, so "
            "1.35 became 1. For a real factor use lm.UnifiedMargin(m1=1.35).",
            stacklevel=4,
        )


def _check_extras(pml: Any) -> None:
    name = type(pml).__name__
    for extra in ("weight_regularizer", "embedding_regularizer"):
        found = getattr(pml, extra, None)
        if found is not None:
            raise LargeMarginError(
                f"this {name} has {extra}={type(found).__name__}, which has no counterpart. "
                "Convert the loss without it and add a term to an lm.Objective, for example "
                "lm.ZeroCentroid() or lm.SuperSymmetry()."
            )
    distance = pml.distance
    allowed = ["CosineSimilarity"]
    if name == "NormalizedSoftmaxLoss":
        allowed.append("DotProductSimilarity")
    if type(distance).__name__ not in allowed or distance.p != 2 or distance.power != 1:
        raise LargeMarginError(
            f"this {name} measures by {distance}, which has no counterpart: only "
            f"{' and '.join(allowed)} with p=2 and power=1 has one."
        )


def _reduction(pml: Any) -> str:
    name = type(pml.reducer).__name__
    if name not in REDUCTIONS:
        hint = {
            "ClassWeightedReducer": "Losses here take weight=..., which divides by the weights' sum"
            " as torch does, PML by the number of samples.",
            "DoNothingReducer": 'Losses here take reduction="none".',
        }.get(name, "Convert the loss with a mean or sum reducer.")
        raise LargeMarginError(
            f"this {type(pml).__name__} has a {name}, which has no counterpart. {hint}"
        )
    return REDUCTIONS[name]
