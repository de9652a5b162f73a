"""What a trainer is built from, and what it decides between the steps."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults.small_runs import STEPS, config, digits

from largemargin.app.training import NoiseConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from largemargin.app.training.journal import Journal, Totals, whole_rows
from largemargin.app.training.processes import Processes
from largemargin.app.training.step import Step
from largemargin.app.training.trainer import Trainer, training_batches
from largemargin.errors import LargeMarginError
from largemargin.losses.base.schedules import DeferredReweighting


def trainer(folder: Path, settings: RunConfig | None = None, **changes: Any) -> Trainer:
    settings = config(**changes) if settings is None else settings
    return Trainer(settings, digits(), Journal(folder), processes=Processes(settings))


def test_a_schedule_is_stretched_over_all_steps(tmp_path: Path) -> None:
    objective = ObjectiveConfig("ldam", schedule="preset")
    made = trainer(tmp_path, objective=objective, noise=NoiseConfig())
    (schedule,) = made.criterion.schedules
    assert isinstance(schedule, DeferredReweighting)
    assert schedule.step == round(0.8 * 4 * STEPS)
    for number, _ in enumerate(made.steps(), 1):
        assert made.criterion.steps == number  # once for every step, by the trainer alone
        if number == 3:
            break
    plain = trainer(tmp_path, objective=replace(objective, schedule="none"))
    assert plain.criterion.schedules == []


def test_a_step_with_two_losses_is_one_step_of_the_criterion(tmp_path: Path) -> None:
    both = trainer(tmp_path, noise=NoiseConfig("clean_and_noisy"))
    assert both.criterion.accumulate == 2
    joined = trainer(tmp_path, noise=NoiseConfig("clean_and_noisy", joined=True))
    assert joined.criterion.accumulate == 1


def test_layers_are_those_of_the_objective(tmp_path: Path) -> None:
    objective = ObjectiveConfig("layer_margin", layers=("backbone.1",))
    made = trainer(tmp_path, objective=objective, noise=NoiseConfig())
    next(made.steps())
    assert made.totals.read().steps == 1


def test_all_weights_of_the_model_are_trained(tmp_path: Path) -> None:
    """Those of the head, too, which attach may have put in."""
    made = trainer(tmp_path, objective=ObjectiveConfig("cosface"))
    trained = {id(each) for group in made.optimizer.param_groups for each in group["params"]}
    assert trained == {id(each) for each in made.bare.parameters()}
    assert id(made.criterion.head.weight) in trained


def test_the_step_gets_the_settings_of_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, optimizer=OptimizerConfig(clip_norm=0.25), precision="bf16")
    assert isinstance(made.step, Step)
    assert made.step.clip_norm == 0.25
    assert made.step.noise == made.config.noise
    assert made.step.average is made.average is not None
    assert (made.step.usual_size, made.step.alone, made.step.losses) == (32, True, None)
    with made.step.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.bfloat16


def test_a_scaled_loss_is_unscaled_by_the_scaler_that_scaled_it(tmp_path: Path) -> None:
    made = trainer(tmp_path, precision="fp16")
    assert made.step.scaler is made.processes.scaler is not None
    assert made.step.backward == made.processes.backward


def test_batches_are_drawn_by_the_seed_of_the_run(tmp_path: Path) -> None:
    def order(seed: int) -> list[int]:
        return next(iter(trainer(tmp_path, seed=seed).batches.epoch(0))).labels.tolist()

    assert order(3) == order(3) != order(4)
    made = trainer(tmp_path, data=replace(config().data, workers=2))
    assert (made.batches.augment, made.batches.workers) == (digits().augment, 2)


@pytest.mark.parametrize(
    ("over", "steps"), [(0, 1), (1, 1), (2, 2)], ids=["none", "a single one", "two"]
)
def test_a_last_batch_of_a_single_image_is_left_out(tmp_path: Path, over: int, steps: int) -> None:
    """Batch normalisation has no statistics of it."""
    size = len(digits().train) - over
    assert len(trainer(tmp_path, batch_size=size).batches) == steps


def test_every_process_has_two_images_in_every_step() -> None:
    settings = config(batch_size=8)
    few = replace(digits(), train=digits().train.subset(range(3)))
    two = SimpleNamespace(world=2, rank=0, device=torch.device("cpu"))
    with pytest.raises(LargeMarginError, match=r"4 in all, but got 3 \(processes: 2\)"):
        training_batches(settings, few, two)
    four = replace(digits(), train=digits().train.subset(range(4)))
    assert len(training_batches(settings, four, two)) == 1
    with pytest.raises(LargeMarginError, match=r"but 2 was given for 2 processes. Give 4 or more"):
        training_batches(config(batch_size=2), four, two)
    assert len(training_batches(config(batch_size=4), four, two)) == 1


def test_rates_are_set_before_every_step(tmp_path: Path) -> None:
    schedule = OptimizerConfig(schedule="log_linear", lr=0.01, final_lr=1e-4, warmup_epochs=0.5)
    made = trainer(tmp_path, optimizer=schedule, epochs=2, gradients_every=0)
    seen = [made.optimizer.param_groups[0]["lr"] for _ in made.steps()]
    assert seen == [made.rate.at(step) for step in range(2 * STEPS)]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("objective", "noise", "said"),
    [
        ("stability", "none", "'stability' needs pairs .* but noise.use is none"),
        ("cosface", "pair", "'cosface' does not look at pairs .* but noise.use is pair"),
    ],
)
def test_pairs_are_for_losses_that_look_at_them(
    tmp_path: Path, objective: str, noise: Any, said: str
) -> None:
    with pytest.raises(LargeMarginError, match=said):
        trainer(tmp_path, objective=ObjectiveConfig(objective), noise=NoiseConfig(noise))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"_world": 2}, "several processes"),
        ({"precision": "fp16"}, "fp16"),
        ({"pixels": None}, "not held in device memory"),
        ({"objective": ObjectiveConfig("cosface", schedule="preset")}, "schedules"),
        ({"batch_size": len(digits().train) + 1}, "no full batch"),
        ({"batch_size": len(digits().train)}, ""),
    ],
)
def test_what_speaks_against_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    """As on a GPU, which nothing here is made on."""
    made = trainer(tmp_path, noise=NoiseConfig())
    assert made._uses_graph() is False  # without one
    made.device = torch.device("cuda")
    monkeypatch.setattr(Trainer, "_world", change.pop("_world", 1))
    made.batches.pixels = change.pop("pixels", torch.zeros(1))
    made.config = replace(made.config, **change)
    assert made._uses_graph() is not bool(reason)
    made.config = replace(made.config, graph="off")
    assert made._uses_graph() is False
    made.config = replace(made.config, graph="on")
    if reason:
        with pytest.raises(LargeMarginError, match=f"graph is on, but .*{reason}"):
            made._uses_graph()
    else:
        assert made._uses_graph() is True


def test_every_epoch_is_trained_in_training_mode(tmp_path: Path) -> None:
    made = trainer(tmp_path, epochs=2)
    assert all(made.bare.training for _ in made.steps())
    assert made.done == 2 * STEPS


def test_totals_are_read_after_so_many_steps_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every epoch."""
    monkeypatch.setattr("largemargin.app.training.trainer.READ_EVERY", 4)
    made, read = trainer(tmp_path, epochs=2), []
    monkeypatch.setattr(made, "_read_totals", lambda: read.append(made.done))
    assert sum(1 for _ in made.steps()) == 2 * STEPS == 22
    assert read == [4, 8, 11, 15, 19, 22]


def test_gradients_are_measured_in_every_so_many_steps(tmp_path: Path) -> None:
    made = trainer(tmp_path, epochs=1, gradients_every=4)
    looks = [made.criterion.measures_gradients for _ in made.steps()]
    assert not any(looks)  # only while the step is made
    rows = [row for row in whole_rows(made.journal.path)[0] if row["kind"] == "gradients"]
    assert [row["step"] for row in rows] == [0, 4, 8]
    made.config = replace(made.config, gradients_every=0)
    assert not made._measures_gradients()


def row(epoch: int, **scores: float) -> dict[str, Any]:
    return {"epoch": epoch, "validation": {"accuracy": 0.5, "loss": 1.0, **scores}}


def test_only_a_better_epoch_becomes_the_best(tmp_path: Path) -> None:
    made = trainer(tmp_path, select="accuracy", patience=2, ema=None)
    weight = next(made.bare.parameters())
    found = []
    for epoch, accuracy in enumerate((math.nan, 0.5, 0.7, 0.7, 0.6, 0.8)):
        with torch.no_grad():
            weight.fill_(epoch)
        made._compare(row(epoch, accuracy=accuracy))
        assert made.best is not None
        kept = int(next(made.best_model.parameters()).flatten()[0])
        assert kept == made.best["epoch"]
        found.append((kept, made.waited, made._out_of_patience()))
    assert found == [
        (0, 0, False),
        (1, 0, False),
        (2, 0, False),
        (2, 1, False),
        (2, 2, True),
        (5, 0, False),
    ]


def test_the_best_loss_is_the_smallest(tmp_path: Path) -> None:
    made = trainer(tmp_path, select="loss", patience=None)
    for epoch, loss in enumerate((2.0, 1.0, 3.0)):
        made._compare(row(epoch, loss=loss))
    assert made.best is not None
    assert (made.best["epoch"], made.best["loss"], made.waited) == (1, 1.0, 1)
    assert not made._out_of_patience()


def test_counters_come_back_with_a_checkpoint(tmp_path: Path) -> None:
    began = time.perf_counter()
    settings = config(patience=3, precision="fp16")
    first = trainer(tmp_path, settings)
    for number, _ in enumerate(first.steps(), 1):
        if number == STEPS + 4:
            break
    first.waited, first.seconds = 2, 12.5
    first.processes.scaler.load_state_dict({**first.processes.scaler.state_dict(), "scale": 7.0})
    first.epoch_started -= 1000
    first.pause()
    state = json.loads((tmp_path / f"checkpoints/step-{first.done:08d}/state.json").read_text())
    assert state["best_checkpoint"] == "best-0001"
    assert len(state["best_state"]) == 64
    again = trainer(tmp_path, settings)
    assert again.resume()
    assert (again.epoch, again.done) == (1, STEPS + 4)
    assert (again.best, again.waited, again.seconds) == (first.best, 2, 12.5)
    assert again.processes.scaler.get_scale() == 7.0
    assert again.mid_epoch is not None
    assert again.mid_epoch["steps"] == 4
    assert sum(1 for _ in again._train_epoch()) == STEPS - 4
    assert 1000 < again.epoch_seconds <= 1000 + time.perf_counter() - began


def test_a_row_counts_images_by_the_seconds_of_its_epoch(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    made = trainer(tmp_path, epochs=1, batch_size=len(digits().train))
    made.on_epoch = rows.append
    assert sum(1 for _ in made.steps()) == 1
    assert rows[0]["images"] == len(digits().train)
    assert rows[0]["images_per_s"] == pytest.approx(rows[0]["images"] / rows[0]["seconds"])
    assert 0 < made.seconds <= rows[0]["seconds"]


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    """It was killed before the first one; what it wrote down comes again."""
    killed = trainer(tmp_path, gradients_every=1)
    next(killed.steps())
    assert [row["step"] for row in whole_rows(killed.journal.path)[0]] == [0]
    again = trainer(tmp_path)
    assert again.resume() is False
    assert whole_rows(again.journal.path)[0] == []
    assert (again.epoch, again.done, again.seconds) == (0, 0, 0.0)
    assert [again.checkpoints.find(which) for which in ("last", "best")] == [None, None]


def test_checkpoints_come_after_so_many_epochs_and_at_the_end(tmp_path: Path) -> None:
    names = []
    made = trainer(tmp_path, epochs=3, checkpoint_every=2)
    made.on_epoch = lambda _: names.append(made.checkpoints.where())
    for _ in made.steps():
        pass
    assert [each and each.name for each in names] == [None, "epoch-0002", "epoch-0003"]


def test_buffers_are_kept_while_steps_are_finite_and_put_back_after_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(tmp_path, max_bad_steps=3)
    done: list[str] = []
    monkeypatch.setattr(made.snapshot, "keep", lambda: done.append("keep"))
    monkeypatch.setattr(made.snapshot, "restore", lambda: done.append("restore"))
    for seen in (
        Totals(steps=5),
        Totals(steps=8, bad=1, bad_in_a_row=1, last_bad=3),
        Totals(steps=10, bad=1, bad_in_a_row=1, last_bad=3),  # reported already
        Totals(steps=10, bad=3, bad_in_a_row=3, last_bad=4),
    ):
        monkeypatch.setattr(made.totals, "read", lambda seen=seen: seen)
        made._read_totals()
    assert done == ["keep", "restore", "restore"]
    rows = [row["skipped"] for row in whole_rows(made.journal.path)[0]]
    assert rows == [1, 3]
