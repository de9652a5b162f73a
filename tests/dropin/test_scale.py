"""``scale="auto"``: the simplex optimum of a loss has p_y = 0.9; functions, modules, heads."""

import inspect
import math

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin import functional
from largemargin.losses.base.scale import PROBABILITY, auto_scale
from largemargin.losses.base.schedules import Ramp

LOSSES = {
    "cosface": (lm.CosFace, {"margin": 0.2}, 0.8),
    "arcface": (lm.ArcFace, {"margin": 0.4}, math.cos(0.4)),
    "normface": (lm.NormFace, {}, 1.0),
    "lm_softmax": (lm.LMSoftmax, {}, 1.0),
    "sphereface": (lm.SphereFace, {"margin": 3}, 1.0),
    "annealed sphereface": (lm.SphereFace, {"margin": 3, "annealing": 5.0}, 1.0),
    "unified_margin": (lm.UnifiedMargin, {"m1": 1.5, "m2": 0.3, "m3": 0.1}, math.cos(0.3) - 0.1),
    "gm_softmax": (
        lm.GMSoftmax,
        {"alpha1": 1.0, "beta1": 0.1, "alpha2": 0.8, "beta2": -0.1},
        0.7,
    ),
}


def at_the_optimum(num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every feature on its prototype, prototypes the simplex; lengths must not matter."""
    prototypes = lm.simplex(num_classes, num_classes - 1, dtype=torch.float64)
    return 3.0 * prototypes, 0.5 * prototypes


def oracle(num_classes: int, aligned: float) -> float:
    """The scale found by bisection on the probability itself."""

    def probability(s: float) -> float:
        rivals = math.log(num_classes - 1) - s / (num_classes - 1)
        return 1 / (1 + math.exp(rivals - s * aligned))

    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < 0.9 else (low, middle)
    return low


@pytest.mark.parametrize("num_classes", [2, 3, 10, 57])
@pytest.mark.parametrize("name", LOSSES)
def test_the_simplex_optimum_has_probability_0_9(name: str, num_classes: int) -> None:
    kind, options, aligned = LOSSES[name]
    features, prototypes = at_the_optimum(num_classes)
    labels = torch.arange(num_classes)
    loss = kind(**options, scale="auto", reduction="none")
    s = loss.scale_for(num_classes)
    assert s == pytest.approx(oracle(num_classes, aligned), rel=1e-9)
    values = loss(features, prototypes, labels)
    if name == "lm_softmax":  # no target in its denominator: l = log((1-p)/p) / s
        expected = math.log(0.1 / 0.9) / s
    elif name == "gm_softmax":  # q = 0.9 of the denominator's line, numerator higher by s/0.4
        expected = -math.log(0.9) - s * (1.1 - 0.7)
    else:
        expected = -math.log(0.9)
    torch.testing.assert_close(values, torch.full_like(values, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["cosface", "arcface", "unified_margin"])
def test_margins_per_class_use_the_widest(name: str) -> None:
    kind, setting = {
        "cosface": (lm.CosFace, "margin"),
        "arcface": (lm.ArcFace, "margin"),
        "unified_margin": (lm.UnifiedMargin, "m3"),
    }[name]
    margins = torch.tensor([0.1, 0.3, 0.2, 0.05], dtype=torch.float64)
    features, prototypes = at_the_optimum(4)
    loss = kind(**{setting: margins}, scale="auto", reduction="none")
    p = torch.exp(-loss(features, prototypes, torch.arange(4)))
    assert p[1].item() == pytest.approx(PROBABILITY, abs=1e-12)
    assert (p[[0, 2, 3]] > PROBABILITY).all()
    assert loss.scale_for(4) == pytest.approx(kind(**{setting: 0.3}, scale="auto").scale_for(4))


def test_ldam_and_class_counts_use_the_rarest_class() -> None:
    features, prototypes = at_the_optimum(3)
    for loss in (
        lm.LDAM([100, 10, 1], max_margin=0.4, scale="auto", reduction="none"),
        lm.CosFace(margin=0.4, class_counts=[100, 10, 1], scale="auto", reduction="none"),
    ):
        p = torch.exp(-loss.double()(features, prototypes, torch.arange(3)))
        assert p[2].item() == pytest.approx(PROBABILITY, abs=1e-12)
        assert (p[:2] > PROBABILITY).all()


@pytest.mark.parametrize("impl", ["dense", "chunked"])
def test_function_and_module_agree_with_the_number(impl: str) -> None:
    features, prototypes = torch.randn(6, 5), torch.randn(7, 5)
    labels = torch.randint(7, (6,))
    number = lm.CosFace(margin=0.2, scale="auto").scale_for(7)
    for scale in ("auto", number):
        values = functional.cosface(
            features, prototypes, labels, margin=0.2, scale=scale, impl=impl
        )
        module = lm.CosFace(margin=0.2, scale=scale, impl=impl, reduction="none")
        torch.testing.assert_close(module(features, prototypes, labels), values)
        if scale == "auto":
            kept = values
    torch.testing.assert_close(kept, values)


def test_soft_targets_and_gradients() -> None:
    features = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    prototypes = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.softmax(torch.randn(4, 6, dtype=torch.float64), 1)
    margins = torch.rand(6, dtype=torch.float64) * 0.3
    loss = lm.ArcFace(margin=margins, scale="auto")
    assert torch.autograd.gradcheck(lambda f, w: loss(f, w, targets), (features, prototypes))


@pytest.mark.parametrize("name", LOSSES)
def test_repr_keeps_auto_and_rebuilds(name: str) -> None:
    kind, options, _ = LOSSES[name]
    loss = kind(**options, scale="auto")
    assert loss.scale == "auto"
    again = eval(repr(loss), vars(lm) | {"torch": torch})
    assert repr(again) == repr(loss)
    assert again.scale_for(10) == loss.scale_for(10)
    assert "scale=7.5" in repr(kind(**options, scale=7.5))


@pytest.mark.parametrize("kind", sorted({*lm.LOSSES.values()}, key=lambda kind: kind.key))
def test_the_default_scale_of_a_loss_on_cosines_is_auto(kind: type[lm.Loss]) -> None:
    taken = inspect.signature(kind.__init__).parameters
    if kind.head_similarity == "cosine" and "scale" in taken:
        assert taken["scale"].default == "auto"
        of_function = inspect.signature(getattr(functional, kind.key, kind)).parameters
        assert [
            of_function[name].default for name in ("scale", "margin") if name in of_function
        ] == [taken[name].default for name in ("scale", "margin") if name in taken]


def test_the_default_margins_are_those_of_a_classifier() -> None:
    assert (lm.CosFace().margin, lm.ArcFace().margin, lm.AdaFace().margin) == (0.2, 0.3, 0.2)
    assert lm.CosFace().scale_for(10) == pytest.approx(oracle(10, 0.8), rel=1e-9)


def test_a_margin_without_an_answer_is_refused() -> None:
    features, prototypes = at_the_optimum(3)
    with pytest.raises(lm.LargeMarginError, match='scale="auto" has no answer'):
        functional.arcface(features, prototypes, torch.arange(3), margin=2.6, scale="auto")
    with pytest.raises(lm.LargeMarginError, match="Lower the margin"):
        lm.ArcFace(margin=2.6, scale="auto").scale_for(3)
    with pytest.raises(lm.LargeMarginError, match="above 1/C"):
        auto_scale(4, probability=0.2)


@pytest.mark.parametrize("kind", [kind for kind, _, _ in LOSSES.values()] + [lm.LDAM])
@pytest.mark.parametrize("scale", ["automatic", 0.0, -3.0, math.nan])
def test_other_scales_are_refused_when_the_loss_is_built(kind: type, scale: object) -> None:
    counts = ([3, 2, 1],) if kind is lm.LDAM else ()
    with pytest.raises(lm.LargeMarginError, match="scale must be"):
        kind(*counts, scale=scale)


def test_the_head_predicts_with_the_number_and_follows_the_margin() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 10))
    loss = lm.CosFace(margin=0.4, scale="auto")
    assert loss.head_form(10).scale == loss.scale_for(10)
    criterion = lm.attach(model, loss, schedule=Ramp("margin", 0.0, steps=4), warn=False)
    scales = []
    for _ in range(6):
        criterion(model(torch.randn(3, 4)), torch.tensor([0, 5, 9]))
        scales.append(model[1].scale)
    expected = [lm.CosFace(margin=m, scale="auto").scale_for(10) for m in (0.1, 0.2, 0.3, 0.4)]
    assert scales == pytest.approx([*expected, expected[-1], expected[-1]])


@pytest.mark.gpu
# The debug mode announces itself with a warning.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_margins_per_class_do_not_wait_for_the_device() -> None:
    loss = lm.CosFace(margin=torch.rand(9) * 0.3, scale="auto").cuda()
    features, prototypes = torch.randn(5, 4).cuda(), torch.randn(9, 4).cuda()
    labels = torch.randint(9, (5,)).cuda()
    value = loss(features, prototypes, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = loss(features, prototypes, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = loss.cpu()(features.cpu(), prototypes.cpu(), labels.cpu())
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(value.cpu(), expected)
