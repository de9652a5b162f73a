"""Schedules: what they set, when, what they remember, what they refuse."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.losses.base import schedules
from largemargin.losses.base.schedules import (
    Annealing,
    DeferredReweighting,
    Ramp,
    Schedule,
    preset_schedule,
)
from largemargin.losses.base.settings import find_setting, settings_of

COUNTS = [40, 20, 10, 5, 2]


def objective_of(loss: lm.Loss) -> lm.Objective:
    return lm.Objective(term=loss)


def at(schedule: Schedule, objective: lm.Objective, step: int, name: str) -> object:
    schedule.apply(objective, step)
    return find_setting(objective, name).value


class TestValues:
    def test_ramps(self) -> None:
        shapes = {
            "linear": lambda t: 2 + 6 * t,
            "cosine": lambda t: 5 - 3 * math.cos(math.pi * t),
            "exponential": lambda t: math.exp((1 - t) * math.log(2) + t * math.log(8)),
        }
        for curve, shape in shapes.items():
            ramp = Ramp("margin", 2.0, 8.0, steps=10, begin=5, curve=curve)
            for step in range(5, 16):
                assert ramp.value(step) == pytest.approx(shape((step - 5) / 10), rel=1e-12)
            assert [ramp.value(step) for step in (0, 4, 5)] == [2.0] * 3
            assert [ramp.value(step) for step in (15, 16, 10**9)] == [8.0] * 3

    def test_annealing_of_both_papers(self) -> None:
        sphere = Annealing()
        assert sphere.value(0) == 1000.0
        assert sphere.value(100) == pytest.approx(1000 / 13)
        assert sphere.value(1658) > 5.0
        assert sphere.value(1659) == 5.0
        lsoftmax = Annealing(rate=2.5e-5, power=35.0, floor=0.0)
        assert lsoftmax.value(10_000) == pytest.approx(1000 * 1.25**-35)

    def test_down_as_well_as_up(self) -> None:
        assert Ramp("weight", 1.0, 0.0, steps=4).value(3) == 0.25


class TestTargets:
    objective = lm.Objective(face=lm.CosFace(), lmd=0.5 * lm.Discriminative(5, 4))

    def test_the_only_term_that_has_it(self) -> None:
        assert find_setting(self.objective, "scale").path == "face.scale"
        assert find_setting(self.objective, "radius").path == "lmd.radius"
        assert find_setting(self.objective, "lmd.weight").value == 0.5

    def test_ambiguous(self) -> None:
        with pytest.raises(lm.LargeMarginError, match=r"face\.margin, lmd\.margin\. Name one"):
            Ramp("margin", 0.0, steps=3).apply(self.objective, 0)

    def test_absent(self) -> None:
        with pytest.raises(lm.LargeMarginError, match=r"called 'margn'.*face\.margin.*lmd\.weight"):
            Ramp("margn", 0.0, steps=3).apply(self.objective, 0)

    def test_what_is_no_number_is_not_offered(self) -> None:
        for loss in (lm.SphereFace(), lm.Discriminative(5, 4), lm.LDAM(COUNTS)):
            names = {setting.name for setting in settings_of(objective_of(loss))}
            assert not names & {"num_classes", "dim", "momentum", "power", "class_counts"}
        assert "margin" not in {s.name for s in settings_of(objective_of(lm.SphereFace()))}

    @pytest.mark.parametrize("kind", ["cosface", "unified_margin", "kobayashi", "focal"])
    def test_every_setting_can_be_moved(self, kind: str) -> None:
        objective = objective_of(lm.LOSSES[kind]())
        for setting in settings_of(objective):
            Ramp(setting.path, 0.5, 0.75, steps=2).apply(objective, 1)
            assert setting.value == 0.625

    def test_the_weight_of_a_term(self) -> None:
        objective = copy.deepcopy(self.objective)
        features, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, 0])
        Ramp("lmd.weight", 0.0, steps=4).apply(objective, 2)
        value = objective.eval()(features, torch.randn(5, 4), labels)
        parts = value.terms
        lmd = parts["lmd.compact"] + parts["lmd.margin"] + 1e-3 * parts["lmd.reg"]
        torch.testing.assert_close(value.total, parts["face"] + 0.25 * lmd)
        assert objective.term_weights["lmd.margin"] == 0.25


class TestWhatItWasBuiltWith:
    ramp = Ramp("margin", 0.0, steps=10)

    def test_applying_twice_or_backwards_does_not_compound(self) -> None:
        objective = objective_of(lm.CosFace(margin=0.4))
        for step, expected in ((3, 0.12), (3, 0.12), (9, 0.36), (1, 0.04), (50, 0.4)):
            assert at(self.ramp, objective, step, "margin") == pytest.approx(expected)

    @pytest.mark.parametrize("margin", [0.4, torch.tensor([0.1, 0.4, 0.2])])
    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_half_way_still_knows(self, margin: float, how: str) -> None:
        objective = objective_of(lm.CosFace(margin=margin))
        self.ramp.apply(objective, 5)
        if how == "deepcopy":
            twin = copy.deepcopy(objective)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(objective))
        else:
            file = io.BytesIO()
            torch.save(objective, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        copy.deepcopy(self.ramp).apply(twin, 10)
        torch.testing.assert_close(
            torch.as_tensor(twin.terms["term"].margin), torch.as_tensor(margin)
        )
        half = torch.as_tensor(objective.terms["term"].margin)
        torch.testing.assert_close(half, 0.5 * torch.as_tensor(margin))

    def test_attached_again_half_way(self) -> None:
        model, loss = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), lm.CosFace(margin=0.4)
        for _ in range(2):
            criterion = lm.attach(model, loss, schedule=copy.copy(self.ramp), warn=False)
            assert loss.margin == 0.0
            for _ in range(5):
                criterion.step()
            assert loss.margin == 0.2
            criterion.undo()

    def test_a_number_set_by_hand_counts(self) -> None:
        objective = objective_of(lm.CosFace(margin=0.4))
        self.ramp.apply(objective, 5)
        objective.terms["term"].margin = 0.1
        assert at(self.ramp, objective, 5, "margin") == pytest.approx(0.05)
        assert at(self.ramp, objective, 10, "margin") == pytest.approx(0.1)

    def test_plain_losses_stay_plain(self) -> None:
        model, loss = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), lm.CosFace(margin=0.4)
        before = repr(loss)
        lm.attach(model, loss, warn=False)(model(torch.randn(2, 3)), torch.tensor([0, 1]))
        assert repr(loss) == before
        assert type(loss.margin) is float
        assert not list(loss.children())
        assert not list(loss.buffers())
        assert preset_schedule(objective_of(loss), 100)
        assert not list(loss.children())


class TestMarginsPerClass:
    margins = torch.tensor([0.1, 0.4, 0.2])

    def test_tensors_keep_their_proportions(self) -> None:
        objective = objective_of(lm.ArcFace(margin=self.margins))
        for step in (0, 5, 5, 10):
            moved = at(Ramp("margin", 0.2, steps=10), objective, step, "margin")
            torch.testing.assert_close(moved, self.margins * (0.2 + 0.02 * step) / 0.4)

    @pytest.mark.parametrize("kind", ["cosface", "ldam"])
    def test_margins_from_counts(self, kind: str) -> None:
        loss = (
            lm.CosFace(margin=0.4, class_counts=COUNTS)
            if kind == "cosface"
            else lm.LDAM(COUNTS, max_margin=0.4)
        )
        objective, full = objective_of(loss), loss.class_margins.clone()
        name = "margin" if kind == "cosface" else "max_margin"
        ramp = Ramp(name, 0.0, steps=4)
        ramp.apply(objective, 1)
        torch.testing.assert_close(loss.class_margins, full / 4)
        objective.double()  # makes them again, in the new precision
        torch.testing.assert_close(loss.class_margins, full.double() / 4, rtol=1e-6, atol=0)
        objective.half()
        assert loss.class_margins.dtype == torch.float32
        assert at(ramp, objective, 4, name) == 0.4
        torch.testing.assert_close(loss.class_margins, full)

    def test_not_between_forward_and_backward(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        loss = lm.GMSoftmax(beta1=torch.full((2,), 0.3), beta2=torch.full((2,), 0.3), scale=8.0)
        ramps = [Ramp("beta1", 0.1, steps=5), Ramp("beta2", 0.1, steps=5)]
        criterion = lm.attach(model, loss, schedule=ramps, warn=False)
        for _ in range(3):
            criterion(model(torch.randn(2, 3)), torch.tensor([0, 1])).backward()


class TestRefusals:
    def refused(self, loss: lm.Loss, *given: Schedule) -> str:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 10))
        with pytest.raises(lm.LargeMarginError) as info:
            lm.attach(model, loss, schedule=list(given), warn=False)
        return str(info.value)

    def test_margins_no_ten_classes_have(self) -> None:
        said = self.refused(lm.CosFace(), Ramp("margin", 0.0, 1.2, steps=5))
        assert "end (cosface.margin) must be" in said
        assert "< 1.1111" in said
        assert "1.2 was given" in said

    def test_degrees(self) -> None:
        assert "radians" in self.refused(lm.ArcFace(), Ramp("margin", 0.0, 28.6, steps=5))
        assert "radians" in self.refused(lm.UnifiedMargin(), Ramp("m2", 28.6, 0.0, steps=5))

    def test_numbers_out_of_range(self) -> None:
        assert "start (normface.scale)" in self.refused(
            lm.NormFace(scale=64.0), Ramp("scale", 0.0, steps=5)
        )
        assert "> 0" in self.refused(lm.NormFace(), Ramp("scale", 1.0, -2.0, steps=5))
        assert "> 0" in self.refused(lm.UnifiedMargin(), Ramp("m1", 0.0, steps=5))
        assert ">= 0" in self.refused(lm.Kobayashi(), Ramp("strength", -0.1, steps=5))

    def test_exponential_from_zero(self) -> None:
        given = Ramp("margin", 0.0, steps=5, curve="exponential")
        assert "same sign" in self.refused(lm.CosFace(), given)

    def test_two_for_one(self) -> None:
        two = Ramp("margin", 0.0, steps=5), Ramp("cosface.margin", 0.1, steps=5)
        assert "two schedules set cosface.margin" in self.refused(lm.CosFace(), *two)

    def test_other_objects(self) -> None:
        said = self.refused(lm.CosFace(), "linear")  # type: ignore[arg-type]
        assert "str was given" in said

    def test_auto_has_no_number_to_reach(self) -> None:
        loss = lm.CosFace(scale="auto")
        assert "Give end=" in self.refused(loss, Ramp("scale", 1.0, steps=5))
        objective = objective_of(lm.CosFace(scale="auto"))
        assert at(Ramp("scale", 1.0, 9.0, steps=4), objective, 2, "scale") == 5.0

    def test_margins_that_are_all_zero(self) -> None:
        loss = lm.CosFace(margin=torch.zeros(10))
        assert "no positive number" in self.refused(loss, Ramp("margin", 0.0, 0.1, steps=5))

    def test_reweighting_without_ldam(self) -> None:
        assert "'cosface' (CosFace)" in self.refused(lm.CosFace(), DeferredReweighting(3))

    def test_what_is_no_schedule(self) -> None:
        wrong: Any = 3
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 10))
        for given in (wrong, [wrong]):
            with pytest.raises(lm.LargeMarginError, match="another Schedule, but int was given"):
                lm.attach(model, lm.CosFace(), schedule=given)
        alone = lm.attach(model, lm.CosFace(), schedule=Ramp("margin", 0.0, steps=3))
        assert alone.schedules == [Ramp("margin", 0.0, steps=3)]

    @pytest.mark.parametrize(
        "arguments", [{"steps": 0}, {"steps": 5, "begin": -1}, {"steps": 5, "curve": "quadratic"}]
    )
    def test_bad_arguments(self, arguments: dict[str, object]) -> None:
        with pytest.raises(lm.LargeMarginError):
            Ramp("margin", 0.0, **arguments)  # type: ignore[arg-type]


ALL = (
    Ramp("margin", 0.1, steps=7, begin=2, curve="cosine"),
    Ramp("lmd.weight", 0.0, 2.0, steps=7),
    Annealing(rate=0.3, floor=None),
    DeferredReweighting(9, term="ldam"),
)


@pytest.mark.parametrize("schedule", ALL, ids=lambda each: type(each).__name__)
def test_repr_rebuilds_and_states_travel(schedule: Schedule) -> None:
    again = eval(repr(schedule), vars(schedules))
    assert again == schedule
    assert pickle.loads(pickle.dumps(schedule)) == copy.deepcopy(schedule) == schedule
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    other = Annealing() if isinstance(schedule, Ramp) else Ramp("scale", 3.0, steps=1)
    with pytest.raises(lm.LargeMarginError, match="the checkpoint holds a"):
        other.load_state_dict(schedule.state_dict())
    fresh = type(schedule).__new__(type(schedule))
    fresh.load_state_dict(torch.load(file))
    assert fresh == schedule
    assert fresh != other
