"""Schedules in a training run: resuming, presets, deferred re-weighting, the head's scale."""

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.losses.base.schedules import (
    Annealing,
    DeferredReweighting,
    Ramp,
    Schedule,
    preset_schedule,
)
from largemargin.losses.base.settings import find_setting

COUNTS = [40, 20, 10, 5, 2]
MARGINS = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.1])

RUNS: dict[str, tuple[Callable[[int, int], lm.Loss | lm.Objective], list[Schedule]]] = {
    "margin": (lambda c, d: lm.CosFace(scale=8.0), [Ramp("margin", 0.0, steps=9)]),
    "margins": (
        lambda c, d: lm.ArcFace(margin=MARGINS, scale=8.0),
        [Ramp("margin", 0.0, steps=9, curve="cosine")],
    ),
    "scale": (lambda c, d: lm.NormFace(scale=16.0), [Ramp("scale", 1.0, steps=9)]),
    "auto": (lambda c, d: lm.CosFace(scale="auto"), [Ramp("margin", 0.0, steps=9)]),
    "annealing": (lambda c, d: lm.LSoftmax(), [Annealing(rate=3.0)]),
    "alpha": (
        lambda c, d: lm.GaussianMixture(c, d),
        [Ramp("alpha", 0.01, steps=9, curve="exponential")],
    ),
    "ldam": (
        lambda c, d: lm.LDAM(COUNTS),
        [Ramp("max_margin", 0.0, steps=9), DeferredReweighting(5)],
    ),
    "lmd": (
        lambda c, d: lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(c, d)),
        [Ramp("margin", 0.0, steps=9), Ramp("lmd.weight", 0.0, steps=4, begin=2)],
    ),
}


class Run:
    """One small training run, batch by batch."""

    def __init__(self, name: str, accumulate: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
        make, given = RUNS[name]
        self.criterion = lm.attach(
            self.model,
            make,
            schedule=copy.deepcopy(given),
            accumulate=accumulate,
            warn=False,
        )
        self.accumulate = accumulate
        groups = self.criterion.param_groups(self.model)
        self.optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def train(self, first: int, last: int) -> list[float]:
        values = []
        for batch in range(first, last):
            draw = torch.Generator().manual_seed(batch)
            inputs = torch.randn(10, 6, generator=draw)
            labels = torch.randint(5, (10,), generator=draw)
            value = self.criterion(self.model(inputs), labels)
            value.backward()
            values.append(value.item())
            if (batch + 1) % self.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return values

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        parts = self.model, self.criterion, self.optimizer
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        parts = self.model, self.criterion, self.optimizer
        for part, state in zip(parts, torch.load(file), strict=True):
            part.load_state_dict(state)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, accumulate: int) -> None:
    whole = Run(name, accumulate)
    values = whole.train(0, 6 * accumulate)
    saved = whole.save()
    values += whole.train(6 * accumulate, 14 * accumulate)

    resumed = Run(name, accumulate)
    resumed.load(saved)
    assert resumed.criterion.steps == 6
    assert resumed.train(6 * accumulate, 14 * accumulate) == values[6 * accumulate :]
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    path = resumed.criterion.schedules[0].target  # type: ignore[attr-defined]
    end = find_setting(resumed.criterion.objective, path).value
    built = find_setting(Run(name, 1).criterion.objective, path).built
    if path != "annealing":
        torch.testing.assert_close(torch.as_tensor(end), torch.as_tensor(built))


@pytest.mark.parametrize("name", RUNS)
def test_going_back_to_an_earlier_checkpoint(name: str) -> None:
    run = Run(name, 1)
    run.train(0, 3)
    saved = run.save()
    values = run.train(3, 12)
    saved.seek(0)
    run.load(saved)
    assert run.train(3, 12) == values


def test_the_checkpoint_knows_better_than_the_script() -> None:
    old = Run("margin", 1)
    old.train(0, 4)
    state = old.criterion.state_dict()
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    criterion = lm.attach(
        model, lm.CosFace(margin=0.1), schedule=Ramp("margin", 0.05, steps=2), warn=False
    )
    criterion.load_state_dict(state)
    assert criterion.schedules == old.criterion.schedules
    loss = criterion.objective.terms["cosface"]
    assert loss.margin == old.criterion.objective.terms["cosface"].margin
    for _ in range(20):
        criterion.step()
    assert loss.margin == 0.2


def test_copies_go_their_own_way() -> None:
    run = Run("margin", 1)
    run.train(0, 3)
    model, criterion = copy.deepcopy((run.model, run.criterion))
    run.train(3, 6)
    assert criterion.objective.terms["cosface"].margin == pytest.approx(0.2 * 3 / 9)
    criterion(model(torch.randn(2, 6)), torch.tensor([0, 1]))
    assert criterion.objective.terms["cosface"].margin == pytest.approx(0.2 * 4 / 9)
    assert run.criterion.objective.terms["cosface"].margin == pytest.approx(0.2 * 6 / 9)


def test_the_head_predicts_at_the_scale_of_the_step() -> None:
    run = Run("scale", 1)
    inputs = torch.randn(4, 6)
    for step in (0, 3, 9):
        while run.criterion.steps < step:
            run.train(run.criterion.steps, run.criterion.steps + 1)
        features = run.model[:2](inputs)
        cosines = nn.functional.cosine_similarity(
            features[:, None], run.model[2].weight[None], dim=-1
        )
        torch.testing.assert_close(run.model(inputs), (1 + 15 * step / 9) * cosines)


def test_the_trained_model_is_exported_at_its_last_scale() -> None:
    run = Run("scale", 1)
    run.train(0, 4)
    inputs = torch.randn(4, 6)
    exported = torch.export.export(run.model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), run.model(inputs))
    assert "moving" not in "".join(run.model.state_dict())
    assert "moving" not in "".join(run.criterion.state_dict())


class TestDeferredReweighting:
    def weights(self, steps: list[int], **options: object) -> list[list[float] | None]:
        objective = lm.Objective(ldam=lm.LDAM([9, 3, 1], beta=0.5, **options))
        found = []
        for step in steps:
            DeferredReweighting(10).apply(objective, step)
            weight = objective.terms["ldam"].weight
            found.append(None if weight is None else weight.tolist())
        return found

    def test_there_and_back(self) -> None:
        unnormalised = [0.5 / (1 - 0.5**n) for n in (9, 3, 1)]
        balanced = [w * 3 / sum(unnormalised) for w in unnormalised]
        first, second, third, fourth = self.weights([9, 10, 500, 0])
        assert first is None
        assert second == third == pytest.approx(balanced)
        assert fourth is None

    def test_own_weights_come_back(self) -> None:
        own = [1.0, 2.0, 3.0]
        found = self.weights([0, 10, 3], weight=own)
        assert found[0] == found[2] == own
        assert found[1] != own

    def test_after_loading_without_the_schedule(self) -> None:
        late = lm.Objective(ldam=lm.LDAM([9, 3, 1]))
        DeferredReweighting(10).apply(late, 20)
        objective = lm.Objective(ldam=lm.LDAM([9, 3, 1]))
        DeferredReweighting(10).apply(objective, 0)
        objective.load_state_dict(late.state_dict())
        assert objective.terms["ldam"].weight is not None
        DeferredReweighting(10).apply(objective, 1)
        assert objective.terms["ldam"].weight is None


class TestPresets:
    def of(self, loss: lm.Loss, total: int = 1500) -> list[Schedule]:
        return preset_schedule(lm.Objective(term=loss), total)

    def test_margin_warm_up(self) -> None:
        expected = [Ramp("term.margin", 0.0, steps=200, begin=200)]
        assert self.of(lm.CosFace()) == expected
        assert self.of(lm.ArcFace(margin=MARGINS)) == expected
        assert self.of(lm.CosFace(margin=0.0)) == []
        assert self.of(lm.UnifiedMargin(m1=1.5, m3=0.1)) == [
            Ramp("term.m1", 1.0, steps=200, begin=200),
            Ramp("term.m3", 0.0, steps=200, begin=200),
        ]

    def test_annealing_is_the_originals_at_their_length(self) -> None:
        (sphere,) = self.of(lm.SphereFace(), 28_000)
        (lsoftmax,) = self.of(lm.LSoftmax(), 30_000)
        assert isinstance(sphere, Annealing)
        assert isinstance(lsoftmax, Annealing)
        assert sphere.value(700) == pytest.approx(1000 / (1 + 0.12 * 700))
        assert sphere.value(28_000) == 5.0
        assert lsoftmax.value(700) == pytest.approx(1000 * (1 + 2.5e-5 * 700) ** -35)
        (short,) = self.of(lm.SphereFace(annealing=2.0), 280)
        assert isinstance(short, Annealing)
        assert short.value(7) == pytest.approx(sphere.value(700))
        assert short.value(280) == 2.0

    def test_the_others(self) -> None:
        (alpha,) = self.of(lm.GaussianMixture(5, 4, alpha=0.3), 120_000)
        assert isinstance(alpha, Ramp)
        assert alpha.value(0, 0.3) == pytest.approx(0.1)
        assert alpha.value(10_000, 0.3) == 0.3
        assert self.of(lm.LDAM(COUNTS), 200) == [DeferredReweighting(160, term="term")]
        for loss in (lm.Discriminative(5, 4), lm.RobustDiscriminative(5, 4)):
            assert self.of(loss) == [Ramp("term.margin", 0.0, steps=150)]

    @pytest.mark.parametrize("loss", [lm.CrossEntropy(), lm.Kobayashi(), lm.NormFace(), lm.Focal()])
    def test_none(self, loss: lm.Loss) -> None:
        assert self.of(loss) == []

    def test_one_per_term_through_attach_also_half_way(self) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
        objective = lm.Objective(face=lm.CosFace(margin=0.3), push=0.5 * lm.SampleMargin())
        for _ in range(2):
            criterion = lm.attach(model, objective, schedule="preset", total_steps=30, warn=False)
            assert criterion.schedules == [Ramp("face.margin", 0.0, steps=4, begin=4)]
            assert objective.terms["face"].margin == 0.0
            criterion.undo()
        with pytest.raises(lm.LargeMarginError, match="total_steps"):
            lm.attach(model, objective, schedule="preset")

    def test_of_a_preset_that_was_measured_with_one(self) -> None:
        def preset(num_classes: int, dim: int) -> lm.Loss:
            return lm.CosFace(margin=0.3)

        usual, own = [Ramp("cosface.margin", 0.0, steps=4, begin=4)], Ramp("margin", 0.1, steps=7)
        for scheduled, given, found in (
            (True, None, usual),
            (True, own, [own]),
            (False, None, []),
        ):
            preset.scheduled = scheduled  # type: ignore[attr-defined]
            model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
            criterion = lm.attach(model, preset, schedule=given, total_steps=30, warn=False)
            assert criterion.schedules == found

    def test_short_trainings(self) -> None:
        for loss in (lm.CosFace(), lm.GaussianMixture(5, 4), lm.SphereFace(), lm.LDAM(COUNTS)):
            for each in self.of(loss, 1):
                each.apply(lm.Objective(term=loss), 1)


@pytest.mark.gpu
def test_the_numbers_follow_the_model_to_its_device() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).cuda()
    ramps = [Ramp("margin", 0.0, steps=9), Ramp("scale", 1.0, steps=9)]
    criterion = lm.attach(model, lm.CosFace(), schedule=ramps, stepping="manual", warn=False)
    for buffer in (*criterion.buffers(), *model.buffers()):
        assert buffer.device.type == "cuda"
    compiled = torch.compile(lambda x, y: criterion(model(x), y), backend="aot_eager")
    inputs, labels = torch.randn(4, 6).cuda(), torch.tensor([0, 1, 2, 3]).cuda()
    for _ in range(3):
        value = compiled(inputs, labels)
        torch.testing.assert_close(value, criterion(model(inputs), labels))
        value.backward()
        criterion.step()


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "schedules.md"


@pytest.mark.parametrize(
    "block", re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
)
def test_the_page_about_schedules_runs_and_prints_what_it_says(
    block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(block, PAGE.name, "exec"), {})
    printed = capsys.readouterr().out.split()
    said = re.findall(r"^# (.*)|print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
    assert [word.strip(",") for word in printed] == [
        word.strip(",") for pair in said for word in "".join(pair).split()
    ]
