"""``largemargin train`` as a user runs it: files, summary, Ctrl-C, resuming, wrong input."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
pytest.importorskip("sklearn", reason="the data of these tests come with scikit-learn")

from app.cli.command import SMALL, environment, largemargin, runs_in
from app.data.pictures import class_folders, picture

import largemargin as lm
from largemargin.app.cli import command as cli
from largemargin.app.cli.train import summary
from largemargin.app.training import Run, RunConfig


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run and what the command printed."""
    folder = tmp_path_factory.mktemp("train")
    words = ("--objective", "cosface", "--objective.settings.margin", "0.2", "--name", "face")
    done = largemargin("train", *words, *SMALL, folder=folder)
    assert "Traceback" not in done.stderr
    (run,) = runs_in(folder, "face")
    return run, done.stdout


def test_everything_about_the_run_is_in_its_folder(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    run = Run.open(folder)
    assert run.finished
    assert run.config.objective.settings == {"margin": 0.2}
    assert (run.config.epochs, run.config.batch_size) == (1, 256)
    assert {"config.yaml", "result.json", "metrics.jsonl", "geometry.json", "environment.json"} <= {
        path.name for path in folder.iterdir()
    }


def test_the_end_is_five_lines_with_what_came_out_and_what_is_next(
    trained: tuple[Path, str],
) -> None:
    folder, out = trained
    result = json.loads((folder / "result.json").read_text())
    start, epoch, *end = out.splitlines()
    assert start.startswith("training small_cnn on ")
    assert epoch.startswith("epoch 1 of 1: loss")
    validation, test, margins, run, after = end
    assert f"accuracy {100 * result['validation']['accuracy']:.2f} %" in validation
    assert f"accuracy {100 * result['test']['accuracy']:.2f} %" in test
    assert f"{result['geometry']['class_margin_degrees']:.1f}° between" in margins
    assert run.endswith(f"runs/{folder.name}, 1 epoch, the best was 1")
    assert f"largemargin report runs/{folder.name} " in after


def test_what_is_next_can_be_typed_whatever_the_name(trained: tuple[Path, str]) -> None:
    copy = shutil.copytree(trained[0], trained[0].parent / "a name; of words")
    assert f"largemargin report {shlex.quote(str(copy))} " in summary(Run.open(copy))


def test_a_summary_without_margins_and_with_notes(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(trained[0])
    result = {**run.result, "geometry": None, "notes": ["frozen"], "test": None, "best_epoch": None}
    monkeypatch.setattr(Run, "result", property(lambda _: result))
    kinds = [line.split()[0] for line in summary(run).splitlines()]
    assert kinds == ["validation", "note", "run", "next"]


def test_a_range_test_prints_a_curve_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_process("--model", "mlp", "--lr_range_test") == 0
    said = capsys.readouterr().out
    first, second, *_ = said.splitlines()
    assert first.startswith("trying rates of mlp on 1,131 images, 126 images to validate")
    assert second.split() == ["rate", "loss"]
    assert re.search(r"^suggestion  --lr 0\.\d+,", said, flags=re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_trained_again(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    before = (folder / "metrics.jsonl").read_text()
    assert cli.main(["train", "--resume", str(folder)]) == 0
    assert "test" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_resumed_run_keeps_its_settings(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the setting is the default, which is not what the run began with."""
    folder, _ = trained
    default = str(RunConfig().epochs)
    for words, name in (
        (["--epochs", "9"], "epochs"),
        (["--epochs", default], "epochs"),
        ([f"--epochs={default}"], "epochs"),
        (["--data", "digits"], "data.name"),
        (["--optimizer.lr", str(RunConfig().optimizer.lr)], "optimizer.lr"),
        (["--config", str(folder / "config.yaml")], "config"),
        (["--preset", "long_tail"], "preset"),
    ):
        for given in (["--resume", str(folder), *words], [*words, "--resume", str(folder)]):
            assert cli.main(["train", *given]) == 2
            assert f"{name} was given too. Leave it out" in capsys.readouterr().err


def test_wrong_input_is_a_message_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["--resume", "nowhere"], "nowhere is no run"),
        (["--objective", "cosfase"], "cosface"),
        (["--data", "cifar11"], "cifar1"),
        (["--epochs", "0"], "epochs must be"),
        (["--objective", "cross_entropy +"], "empty term"),
    ):
        assert cli.main(["train", *words]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("error: ")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise on Windows")
def test_ctrl_c_stops_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = ["--epochs", "400", "--batch_size", "64", "--device", "cpu", "--measure", "false"]
    process = subprocess.Popen(
        [sys.executable, "-m", "largemargin", "train", *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = [run for run in runs_in(tmp_path) if len(Run(run).metrics("epoch")) > 1]
        if found:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    (folder,) = runs_in(tmp_path)
    assert f"largemargin train --resume runs/{folder.name}" in err
    assert "Traceback" not in err
    assert not Run.open(folder).finished
    done_before = len(Run(folder).metrics("epoch"))
    assert 0 < done_before < 400


def in_process(*words: str) -> int:
    return cli.main(["train", *words, *SMALL, "--measure", "false", "--model", "mlp"])


def test_it_begins_with_what_is_trained_and_why_at_this_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = class_folders(tmp_path / "photos", ("a", "b"), 10, height=32, width=32)
    assert in_process("--data", "photos") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "training mlp on 18 images, 2 images to validate: 2 classes, 32 x 32 pixels, device cpu"
    )
    picture(photos / "a" / "odd.png", 77, 80, 60)
    assert in_process("--data", "photos") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert (
        "224 x 224 pixels (files of different or large sizes (20 of 32 x 32, 1 of 80 x 60)" in first
    )
    assert "become 224 x 224; --data.size N for another)" in first
    assert in_process("--data", "photos", "--data.size", "32") == 0
    assert ": 2 classes, 32 x 32 pixels, device" in capsys.readouterr().out.splitlines()[0]


def test_presets_say_which_optimizer_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_process("--preset", "few_labels", "--name", "plain") == 0
    said = capsys.readouterr().out
    assert "this run    lr 0.05, weight_decay 0.0005, clip_norm 5.0 (--preset_optimizer" in said
    assert in_process("--preset", "few_labels", "--preset_optimizer", "--name", "tuned") == 0
    said = capsys.readouterr().out
    tuned = lm.preset("few_labels").optimizer
    assert f"this run    lr {tuned['lr']}, weight_decay {tuned['weight_decay']}, clip_norm " in said
    assert "takes those of the preset" not in said
    used = {name: Run.open(runs_in(tmp_path, name)[0]).config for name in ("plain", "tuned")}
    assert used["plain"].optimizer == RunConfig().optimizer
    assert used["tuned"].optimizer == replace(RunConfig().optimizer, **tuned)
    assert used["tuned"].objective == used["plain"].objective
    for words, told in (
        (["--preset_optimizer"], "goes with --preset"),
        (["--preset_optimizer", "--preset", "few_labels", "--optimizer.lr", "1"], "optimizer.lr"),
    ):
        assert in_process(*words) == 2
        assert told in capsys.readouterr().err


def test_warnings_show_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = class_folders(tmp_path / "photos", ("a", "b"), 10, height=8, width=8)
    (photos / "a" / "broken.png").write_text("no image")
    before = warnings.formatwarning
    with pytest.warns(UserWarning, match="left out"):
        assert in_process("--data", "photos", "--data.corrupt", "skip") == 0
    assert warnings.formatwarning is before
    words = ("--data", "photos", "--data.corrupt", "skip", *SMALL)
    shown = largemargin("train", *words, "--model", "mlp", folder=tmp_path).stderr
    assert shown.startswith("warning: 1 unreadable images are left out: a/broken.png")
    assert ".py" not in shown


def test_trackers_that_are_not_installed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate leaves them out, and trains without."""
    tracking = pytest.importorskip("accelerate.tracking", reason="trackers need accelerate")
    monkeypatch.chdir(tmp_path)
    there = [tracking.LoggerType.TENSORBOARD]
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: there)
    assert in_process("--trackers", "wandb", "mlflow", "tensorboard") == 2
    shown = capsys.readouterr().err
    assert "no package was found for trackers: wandb, mlflow." in shown
    assert "pip install wandb mlflow. Or leave it out" in shown
    assert not (tmp_path / "runs").exists()
