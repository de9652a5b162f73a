"""Runs that come to their end without a sound model: a result that says so, and what to do."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.counting import Faults
from faults.small_runs import STEPS, assert_tidy, config, digits

from largemargin.app.cli.command import main
from largemargin.app.data import Data
from largemargin.app.report.page import report
from largemargin.app.training import (
    NoiseConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Run,
    RunConfig,
    train,
)
from largemargin.app.training.comparison import compare, read_methods
from largemargin.app.training.parallel_runs import train_many
from largemargin.app.training.run_scores import left_out
from largemargin.app.training.tuning import tune
from largemargin.dropin import MarginWarning
from largemargin.errors import LargeMarginError

WILD = OptimizerConfig(lr=1e30, clip_norm=None, schedule="constant", warmup_epochs=0)


def wild(**changes: Any) -> RunConfig:
    """Its first step makes weights whose outputs are not finite; too short to be stopped."""
    settings: dict[str, Any] = {
        "epochs": 1,
        "optimizer": WILD,
        "objective": ObjectiveConfig("cross_entropy"),
        "noise": NoiseConfig("none"),
        "ema": None,
        "gradients_every": 0,
        "measure": True,
        "max_bad_steps": STEPS,
        **changes,
    }
    return config(**settings)


def only_training(data: Data) -> Data:
    """No test images and no validation images: the last model counts, whatever it is."""
    return replace(data, validation=None, test=None)


@pytest.mark.parametrize("images", ["all", "train"])
def test_a_diverged_run_has_a_result(tmp_path: Path, faults: Faults, images: str) -> None:
    faults.inject("a learning rate of 1e30")
    data = digits() if images == "all" else only_training(digits())
    with pytest.warns(MarginWarning, match="the run diverged: its outputs are not finite for"):
        run = train(wild(), folder=tmp_path / "run", data=data, progress=False)
    assert run.finished
    assert run.result["status"] == "diverged"
    assert run.failure == run.result["failure"]
    assert "Lower optimizer.lr (1e+30) or set optimizer.clip_norm" in run.result["failure"]
    assert run.geometry() is None
    assert_tidy(run)
    with pytest.warns(MarginWarning, match="the run diverged"):
        again = train(run.config, folder=run.folder, resume=True, data=data, progress=False)
    assert again.failure == run.failure


def test_weights_that_are_not_finite_are_named(tmp_path: Path, faults: Faults) -> None:
    """Averages take what comes; the last one counts where there are no validation images."""
    data = only_training(digits())
    settings = wild(optimizer=OptimizerConfig(lr=0.01), epochs=2)
    faults.inject("weights that turn to NaN")

    def poison(row: dict[str, Any]) -> None:
        with torch.no_grad():
            for each in started[0].bare.parameters():
                each.fill_(math.nan)

    from largemargin.app.training import trainer as room

    started: list[Any] = []
    build = room.Trainer._build

    def built(self: Any) -> None:
        build(self)
        started.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.Trainer, "_build", built)
        with pytest.warns(MarginWarning, match="tensors of its model are not finite"):
            run = train(
                settings, folder=tmp_path / "run", data=data, progress=False, on_epoch=poison
            )
    assert run.result["status"] == "diverged"
    (note,) = run.result["notes"]
    assert note.startswith("all steps of the last epoch were skipped, because none was finite.")


def test_a_sound_model_whose_last_epochs_were_skipped(tmp_path: Path, faults: Faults) -> None:
    """The best model is that of before: the run is finished, measured, and says what happened."""
    data = digits()
    assert data.train.pixels is not None
    pixels = data.train.pixels.float().clone() / 255
    data = replace(data, train=replace(data.train, pixels=pixels))
    settings = wild(optimizer=OptimizerConfig(lr=0.01), epochs=4, max_bad_steps=100)
    faults.inject("a data set that turns to NaN during a run")

    def poison(row: dict[str, Any]) -> None:
        if row["epoch"] == 1:
            pixels.fill_(math.nan)

    run = train(settings, folder=tmp_path / "run", data=data, progress=False, on_epoch=poison)
    assert run.result["status"] == "finished"
    assert run.failure is None
    assert run.geometry() is not None
    (note,) = run.result["notes"]
    assert note.startswith("all steps of the last 2 epochs were skipped")


def test_an_image_that_is_not_finite_costs_the_geometry_alone(
    tmp_path: Path, faults: Faults
) -> None:
    data = digits()
    assert data.test is not None
    assert data.test.pixels is not None
    pixels = data.test.pixels.float().clone() / 255
    pixels[3] = math.nan
    data = replace(data, test=replace(data.test, pixels=pixels))
    faults.inject("a test image that is not finite")
    settings = wild(optimizer=OptimizerConfig(lr=0.01))
    run = train(settings, folder=tmp_path / "run", data=data, progress=False)
    assert (run.result["status"], run.geometry()) == ("finished", None)
    (note,) = run.result["notes"]
    assert note.startswith("the geometry could not be measured: features must be finite")
    assert_tidy(run)


def test_epochs_that_were_left_out_at_the_end() -> None:
    good, bad = {"loss": 1.0}, {"loss": None, "bad_steps": 9}
    some = {"loss": 0.5, "bad_steps": 3}
    assert left_out([bad, good], wild()) == []
    assert left_out([good, bad, some], wild()) == []
    assert "the last 2 epochs" in left_out([bad, some, bad, bad], wild())[0]


def test_runs_side_by_side_go_on(tmp_path: Path, faults: Faults) -> None:
    faults.inject("a learning rate of 1e30")
    sound = wild(optimizer=OptimizerConfig(lr=0.01))
    folders = [tmp_path / "wild", tmp_path / "sound"]
    runs = train_many([wild(), sound], folders=folders, data=digits(), progress=False)
    assert [run.failure is None for run in runs] == [False, True]


def test_tune_counts_it_as_diverged(tmp_path: Path, faults: Faults) -> None:
    faults.inject("a learning rate of 1e30")
    space = {"optimizer.lr": [1e30, 0.01, 0.02]}
    with pytest.warns(MarginWarning, match="the run diverged"):
        found = tune(wild(), folder=tmp_path, trials=5, space=space, data=digits(), progress=False)
    states = {each.settings["optimizer.lr"]: each.state for each in found.trials}
    assert states[1e30] == "diverged"
    assert found.best is not None
    assert found.best.optimizer.lr < 1


@pytest.mark.filterwarnings("ignore:the run diverged")
def test_compare_names_it(tmp_path: Path, faults: Faults) -> None:
    faults.inject("a learning rate of 1e30")
    with pytest.raises(LargeMarginError, match="softmax, seed 0: the run diverged: its outputs"):
        compare(
            wild(), read_methods("softmax,cosface"), folder=tmp_path, data=digits(), progress=False
        )


def test_the_command_fails_and_the_report_opens(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.inject("a learning rate of 1e30")
    words = f"train --out {tmp_path} --epochs 1 --batch_size 256 --optimizer.lr 1e30 --device cpu"
    more = "--optimizer.clip_norm null --optimizer.warmup_epochs 0 --model mlp"
    assert main(f"{words} {more}".split()) == 2
    said = capsys.readouterr()
    assert said.err.count("the run diverged: ") == 1
    assert "error: the run diverged: " in said.err
    (folder,) = tmp_path.iterdir()
    assert f"largemargin report {folder}" in said.out
    assert "largemargin predict" not in said.out
    assert main(["train", "--resume", str(folder)]) == 2
    page = report(Run.open(folder), tmp_path / "report.html", features="pca", max_samples=40)
    assert "the run diverged: " in page.read_text(encoding="utf-8")
