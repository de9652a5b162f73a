"""What each loss does along a path of features: its value and its slope, computed by the loss."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import largemargin as lm

CLASSES = 10
COUNTS = [5000] * 5 + [50] * 5
EXAMPLES = {
    "unified_margin": {"m1": 1.0, "m2": 0.3, "m3": 0.2},
    "gm_softmax": {"beta1": -0.2, "beta2": -0.1},
    "adacos": {"num_classes": CLASSES},
}
"""Settings for losses whose defaults have no margin, or that need some."""


class Curve(NamedTuple):
    """Lines over one axis, and the sentence that says what moves.

    Args:
        axis: what x is.
        told: the set-up in one sentence.
        x: (P,).
        lines: values and slopes by name, both (P,).
    """

    axis: str
    told: str
    x: Tensor
    lines: dict[str, tuple[Tensor, Tensor]]


Values = Callable[[Tensor], Tensor]
"""``(P,)`` places on the axis to ``(P,)`` losses."""


def curve(name: str) -> Curve:
    """The curve of the loss called ``name`` in ``lm.LOSSES``, with its defaults or EXAMPLES."""
    loss = lm.LOSSES[name]
    if name in SPECIAL:
        return SPECIAL[name]()
    if loss.takes_logits:
        lines = {loss.__name__: over_logits(loss())}
        if name != "cross_entropy":
            lines["CrossEntropy"] = over_logits(lm.CrossEntropy())
        return drawn(-6.0, 6.0, LOGIT_AXIS, LOGITS, lines)
    shown = EXAMPLES.get(name, {})
    told = ", ".join(f"{key}={value}" for key, value in shown.items())
    lines = {
        loss.__name__ + (f"({told})" if told else ""): over_angle(loss(reduction="none", **shown))
    }
    if name not in ("normface", "sample_margin", "lm_softmax"):
        lines["NormFace, no margin"] = over_angle(lm.NormFace(reduction="none"))
    return drawn(-REACH, REACH, COSINE_AXIS, COSINES, lines)


def drawn(
    low: float, high: float, axis: str, told: str, lines: dict[str, Values], points: int = 161
) -> Curve:
    x = torch.linspace(low, high, points, dtype=torch.float64)
    return Curve(axis, told, x, {name: _with_slope(values, x) for name, values in lines.items()})


def _with_slope(values: Values, x: Tensor) -> tuple[Tensor, Tensor]:
    place = x.clone().requires_grad_(True)
    found = values(place)
    slope = torch.zeros_like(x)
    if found.requires_grad:
        (slope,) = torch.autograd.grad(found.sum(), place)
    return found.detach(), slope


COSINE_AXIS = "sample margin: cosine to the own class minus that to the nearest rival"
COSINES = (
    "Ten classes at equal angles; the feature turns from the rival's class vector (left end) to "
    "its own (right end)."
)
LOGIT_AXIS = "logit margin: target minus nearest rival"
LOGITS = "Ten classes: the nearest rival has logit 0, the others -2; the target's logit moves."
REACH = 0.999 * CLASSES / (CLASSES - 1)


def over_angle(loss: lm.Loss, length: float = 1.0, label: int = 0) -> Values:
    """Features that turn from class 1 to class 0 in the plane of both."""
    prototypes = lm.simplex(CLASSES, CLASSES - 1, dtype=torch.float64)
    own, rival = prototypes[label], prototypes[1]
    along, across = own - rival, own + rival

    def values(x: Tensor) -> Tensor:
        sine = (x / along.norm())[:, None]
        unit = sine * along / along.norm() + (1 - sine**2).sqrt() * across / across.norm()
        return loss.eval()(length * unit, prototypes, torch.full((len(x),), label))

    return values


def over_logits(loss: lm.Loss) -> Values:
    loss.reduction = "none"

    def values(x: Tensor) -> Tensor:
        rest = x.new_tensor([0.0] + [-2.0] * (CLASSES - 2)).expand(len(x), -1)
        return loss(torch.cat([x[:, None], rest], 1), torch.zeros(len(x), dtype=torch.long))

    return values


def one_by_one(value: Callable[[Tensor], Tensor]) -> Values:
    """For losses on the classes of a batch: every place is a batch of its own."""
    return lambda x: torch.stack([value(each) for each in x])


def at(x: Tensor, *others: float) -> Tensor:
    """The row (x, others...)."""
    return torch.stack([x, *(x.new_tensor(each) for each in others)])


HEAD = torch.tensor([[0.5, 0.0], [-0.5, 0.0]], dtype=torch.float64)
"""Two class vectors whose boundary is the second axis, at distance |x|."""
FIRST = torch.tensor([0])
BOTH = torch.tensor([0, 0])
TO_BOUNDARY = "distance of the centroid to the boundary, negative on the wrong side"
INPUTS = "A linear model of two classes; the input moves across the boundary."


def _rival_moves(loss: lm.Loss) -> Values:
    loss.reduction = "none"

    def values(x: Tensor) -> Tensor:
        target, others = x.new_full((len(x), 1), 4.0), x.new_zeros(len(x), CLASSES - 2)
        logits = torch.cat([target, 4.0 - x[:, None], others], 1)
        return loss(logits, torch.zeros(len(x), dtype=torch.long))

    return values


def _kobayashi(loss: lm.Loss) -> Curve:
    told = "Ten classes: the target has logit 4, eight others 0; the nearest rival's logit moves."
    lines = {type(loss).__name__: _rival_moves(loss)}
    if isinstance(loss, lm.Kobayashi):
        lines["CrossEntropy"] = _rival_moves(lm.CrossEntropy())
    return drawn(-2.0, 8.0, "logit margin: target minus the moving rival", told, lines)


def _long_softmax(loss: type[lm.SphereFace] | type[lm.LSoftmax]) -> Curve:
    lines = {
        loss.__name__: over_angle(loss(reduction="none"), length=10.0),
        "margin=1, no margin": over_angle(loss(margin=1, reduction="none"), length=10.0),
    }
    return drawn(-REACH, REACH, COSINE_AXIS, COSINES + " Features have length 10.", lines)


def _ldam() -> Curve:
    loss = lm.LDAM(COUNTS, reduction="none")
    lines = {
        "a class of 50 samples": over_angle(loss, label=9),
        "a class of 5000 samples": over_angle(loss, label=0),
    }
    return drawn(-REACH, REACH, COSINE_AXIS, COSINES, lines)


def _counted(kind: Callable[[list[int]], lm.Loss]) -> Curve:
    lines = {
        "a class of 50 samples": over_logits(kind(COUNTS[::-1])),
        "a class of 5000 samples": over_logits(kind(COUNTS)),
    }
    return drawn(-6.0, 6.0, LOGIT_AXIS, LOGITS, lines)


def _compactness() -> Curve:
    values = one_by_one(lambda x: lm.Compactness()(torch.stack([at(x, 0), at(-x, 0)]), HEAD, BOTH))
    told = "Two features of one class on both sides of their centroid."
    return drawn(0.0, 3.0, "distance to the centroid", told, {"Compactness": values}, 61)


def _centroid(loss: Callable[[], lm.Loss], name: str) -> Curve:
    values = one_by_one(lambda x: loss()(torch.stack([at(x, 0.2), at(x, -0.2)]), HEAD, BOTH))
    told = "Two classes; the two features of one move with their centroid, 0.4 apart."
    return drawn(-3.0, 9.0, TO_BOUNDARY, told, {name: values}, 61)


def _centroid_norm() -> Curve:
    values = one_by_one(lambda x: lm.CentroidNorm()(at(x, 0.0)[None], HEAD, FIRST))
    told = "One feature, which is the centroid of its class."
    return drawn(0.0, 6.0, "length of the centroid", told, {"CentroidNorm": values}, 61)


def _robust() -> Curve:
    def value(x: Tensor) -> Tensor:
        clean = torch.stack([at(x * 0 + 5.0, 0.0)] * 2)
        return lm.RobustDiscriminative(2, 2)(
            clean, HEAD, BOTH, torch.stack([at(x * 0 + 5.0, 0.0) + at(x * 0, 1.0) * x] * 2)
        )

    told = "Clean features keep the margin of 5; the features of their noised inputs move away."
    axis = "distance of the noisy feature to the clean centroid"
    return drawn(0.0, 3.0, axis, told, {"RobustDiscriminative": one_by_one(value)}, 61)


def _stable() -> Curve:
    def value(x: Tensor) -> Tensor:
        feature = torch.stack([x, (1 - x**2).sqrt()])[None]
        return lm.StableDiscriminative(2, 2)(feature, HEAD, FIRST)

    told = "Two classes; a feature of length 1 turns from the other class to its own."
    axis = "distance to the boundary in units of the feature scale"
    return drawn(-0.99, 0.99, axis, told, {"StableDiscriminative": one_by_one(value)}, 61)


def _stability() -> Curve:
    values = one_by_one(lambda x: lm.Stability()(at(x * 0, 0.0)[None], at(x, 0.0)[None]))
    told = "One feature; that of its noised input moves away."
    return drawn(0.0, 3.0, "distance of clean and noisy feature", told, {"Stability": values}, 61)


def _center() -> Curve:
    values = one_by_one(lambda x: lm.CenterLoss(2, 2).double()(at(x, 0.0)[None], FIRST))
    told = "One feature; the center of its class is at 0."
    return drawn(0.0, 6.0, "distance to the center", told, {"CenterLoss": values}, 61)


def _mixture() -> Curve:
    means = 4.0 * lm.simplex(CLASSES, CLASSES - 1, dtype=torch.float64) / math.sqrt(20 / 9)
    loss = lm.GaussianMixture(CLASSES, CLASSES - 1, reduction="none").double()

    def values(x: Tensor) -> Tensor:
        along = (means[0] - means[1]) / (means[0] - means[1]).norm()
        features = (means[0] + means[1]) / 2 + x[:, None] * along
        return loss(features, means, torch.zeros(len(x), dtype=torch.long))

    told = "Ten class means, 4 apart; the feature moves on the line through two of them."
    axis = "distance to the plane between the two means"
    return drawn(-4.0, 4.0, axis, told, {"GaussianMixture": values})


def _input_margin(loss: lm.Loss) -> Curve:
    def values(x: Tensor) -> Tensor:
        inputs = torch.stack([x, torch.zeros_like(x)], 1)
        return loss(inputs @ HEAD.T, torch.zeros(len(x), dtype=torch.long), inputs)

    axis = "margin: distance of the input to the boundary"
    return drawn(-1.0, 4.0, axis, INPUTS, {type(loss).__name__: values})


def _layer_margin() -> Curve:
    loss = lm.LayerMargin(reduction="none")

    def values(x: Tensor) -> Tensor:
        inputs = torch.stack([x, torch.zeros_like(x)], 1)
        return loss(inputs @ HEAD.T, torch.zeros(len(x), dtype=torch.long), [inputs])

    axis = "margin: distance of the input to the boundary"
    return drawn(-1.0, 4.0, axis, INPUTS, {"LayerMargin": values}, 51)


def _zero_centroid() -> Curve:
    def value(x: Tensor) -> Tensor:
        side = (1 - x**2).sqrt()
        return lm.ZeroCentroid()(torch.stack([torch.stack([side, x]), torch.stack([-side, x])]))

    told = "Two class vectors of length 1 that lean the same way."
    axis = "length of the mean of the class vectors"
    return drawn(0.0, 0.99, axis, told, {"ZeroCentroid": one_by_one(value)}, 61)


def _super_symmetry() -> Curve:
    def value(x: Tensor) -> Tensor:
        angle = torch.deg2rad(x)
        return lm.SuperSymmetry()(torch.stack([at(x * 0 + 1, 0.0), _unit(angle)]))

    told = "Two class vectors of equal length."
    axis = "angle between the class vectors, degrees"
    return drawn(10.0, 180.0, axis, told, {"SuperSymmetry": one_by_one(value)}, 61)


def _unit(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()])


SPECIAL: dict[str, Callable[[], Curve]] = {
    "center": _center,
    "centroid_margin": lambda: _centroid(lm.CentroidMargin, "CentroidMargin"),
    "centroid_norm": _centroid_norm,
    "compactness": _compactness,
    "discriminative": lambda: _centroid(lambda: lm.Discriminative(2, 2), "Discriminative"),
    "gaussian_mixture": _mixture,
    "kobayashi": lambda: _kobayashi(lm.Kobayashi()),
    "layer_margin": _layer_margin,
    "ldam": _ldam,
    "logit_adjustment": lambda: _counted(lm.LogitAdjustment),
    "lsoftmax": lambda: _long_softmax(lm.LSoftmax),
    "margin_distribution": lambda: _input_margin(lm.MarginDistribution(reduction="none")),
    "margin_hinge": lambda: _input_margin(lm.MarginHinge(reduction="none")),
    "rival_divergence": lambda: _kobayashi(lm.RivalDivergence()),
    "robust_discriminative": _robust,
    "sphereface": lambda: _long_softmax(lm.SphereFace),
    "stability": _stability,
    "stable_discriminative": _stable,
    "super_symmetry": _super_symmetry,
    "vs_loss": lambda: _counted(lm.VSLoss),
    "zero_centroid": _zero_centroid,
}
