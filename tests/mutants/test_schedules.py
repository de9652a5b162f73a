"""Schedules at their limits: exact ends, equal settings, numbers that are just allowed."""

import pytest
import torch

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.losses.base.schedules import Annealing, DeferredReweighting, Ramp, preset_schedule


def test_schedules_are_equal_with_equal_settings():
    ramp = Ramp("margin", 0.0, steps=3)
    assert ramp == Ramp("margin", 0.0, steps=3)
    assert ramp != Ramp("margin", 0.0, steps=4)
    assert ramp != Annealing("margin")
    assert ramp != 3


@pytest.mark.parametrize("ends", [(1e16, 0.1), (0.1, 1e16), (-3e38, 3e38)])
@pytest.mark.parametrize("curve", ["linear", "cosine"])
def test_ramps_end_exactly(ends, curve):
    """start + (end - start) would be off by a rounding error, or overflow."""
    ramp = Ramp("margin", *ends, steps=4, curve=curve)
    assert [ramp.value(step) for step in (0, 4)] == [*ends]


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (1.0, -1.0), (-1.0, 1.0)])
def test_exponential_ramps_keep_to_one_side_of_zero(start, end):
    ramp = Ramp("margin", start, end, steps=4, curve="exponential")
    with pytest.raises(LargeMarginError, match="same sign and not be 0"):
        ramp.ends(None)
    below = Ramp("margin", -abs(start or end), -2.0, steps=4, curve="exponential")
    assert below.ends(None) == {"start": -1.0, "end": -2.0}


def test_where_schedules_may_begin():
    assert Annealing(start=0.5).start == 0.5
    assert DeferredReweighting(0).step == 0
    for build, name in (
        (lambda: Annealing(start=-0.1), "start"),
        (lambda: DeferredReweighting(-1), "step"),
    ):
        with pytest.raises(LargeMarginError, match=name):
            build()
    with pytest.raises(LargeMarginError, match="total_steps"):
        preset_schedule(lm.Objective(face=lm.CosFace()), 0)


def test_margins_of_classes_without_a_positive_one_cannot_be_ramped():
    ramp = Ramp("margin", 0.0, 1.0, steps=3)
    for margins in ([-1.0, -2.0], [0.0, 0.0], [0.0, -2.0]):
        objective = lm.Objective(hinge=lm.DenseHinge(margin=torch.tensor(margins)))
        with pytest.raises(LargeMarginError, match="no positive number"):
            ramp.check(objective)
    ramp.check(lm.Objective(hinge=lm.DenseHinge(margin=torch.tensor([0.5, -2.0]))))


def test_what_is_saved_of_a_schedule_has_no_gradient():
    ramp = Ramp("margin", 0.0, steps=3)
    ramp._built = torch.tensor([0.1, 0.2], requires_grad=True)
    saved = ramp.state_dict()["built"]
    assert not saved.requires_grad
    assert saved.data_ptr() != ramp._built.data_ptr()


def test_class_weights_are_switched_once_and_again_where_somebody_took_them_away():
    objective = lm.Objective(ldam=lm.LDAM([100, 1]))
    loss, schedule = objective.terms["ldam"], DeferredReweighting(5)
    schedule.apply(objective, 4)
    assert loss.weight is None
    schedule.apply(objective, 5)
    balanced = loss.weight
    assert balanced.tolist() == pytest.approx([0.0199, 1.9801], abs=1e-4)
    schedule.apply(objective, 6)
    assert loss.weight is balanced
    loss.weight = None
    schedule.apply(objective, 7)
    assert torch.equal(loss.weight, balanced)


def test_class_weights_that_were_given_are_replaced_at_once():
    objective = lm.Objective(ldam=lm.LDAM([100, 1], weight=[1.0, 1.0]))
    DeferredReweighting(0).apply(objective, 0)
    assert objective.terms["ldam"].weight.tolist() == pytest.approx([0.0199, 1.9801], abs=1e-4)


LONG = 1_200_000_000
PRESETS = {
    "unified margin": (
        lm.UnifiedMargin(m1=1.5, m2=0.5, m3=0.25),
        [
            Ramp("t.m1", 1.0, steps=LONG * 20 // 150, begin=LONG * 20 // 150),
            Ramp("t.m2", 0.0, steps=LONG * 20 // 150, begin=LONG * 20 // 150),
            Ramp("t.m3", 0.0, steps=LONG * 20 // 150, begin=LONG * 20 // 150),
        ],
    ),
    "sphereface": (lm.SphereFace(), [Annealing("t.annealing", rate=0.12 * 28_000 / LONG)]),
    "lsoftmax": (
        lm.LSoftmax(),
        [Annealing("t.annealing", floor=0.0, rate=2.5e-5 * 30_000 / LONG, power=35.0)],
    ),
    "gaussian mixture": (
        lm.GaussianMixture(2, 2, alpha=0.3),
        [Ramp("t.alpha", 0.3 / 3, steps=LONG // 12, curve="exponential")],
    ),
    "gaussian mixture without a margin": (lm.GaussianMixture(2, 2, alpha=0.0), []),
    "ldam": (lm.LDAM([3, 1]), [DeferredReweighting(LONG * 8 // 10, term="t")]),
    "discriminative": (
        lm.Discriminative(2, 2, margin=0.5),
        [Ramp("t.margin", 0.0, steps=LONG // 10)],
    ),
    "discriminative without a margin": (lm.Discriminative(2, 2, margin=0.0), []),
}


@pytest.mark.parametrize(("loss", "want"), PRESETS.values(), ids=PRESETS.keys())
def test_presets(loss, want):
    assert preset_schedule(lm.Objective(t=loss), LONG) == want
