"""``largemargin compare`` as a user runs it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
pytest.importorskip("scipy", reason="the paired tests are scipy's")
pytest.importorskip("sklearn", reason="the data of these tests come with scikit-learn")

from app.cli.command import SMALL, environment, largemargin, runs_in
from app.data.pictures import class_folders
from PIL import Image

from largemargin import LargeMarginError
from largemargin.app.cli import command as cli
from largemargin.app.cli.compare import read_seeds
from largemargin.app.config import DataConfig, ModelConfig, OptimizerConfig
from largemargin.app.training import Run
from largemargin.app.training.comparison import Comparison
from largemargin.app.training.config_file import settings_from

PLAN = """\
methods:
  - kobayashi
  - {name: cosface, label: wide, settings: {margin: 0.5}, optimizer: {lr: 0.1}}
seeds: [3, 4]
epochs: 1
batch_size: 256
device: cpu
measure: false
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished comparison, from YAML, and what the command printed."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "plan.yaml").write_text(PLAN)
    done = largemargin("compare", "--config", "plan.yaml", folder=folder)
    assert "Traceback" not in done.stderr
    (made,) = runs_in(folder, "compare")
    return made, done.stdout


def test_files_and_table(compared: tuple[Path, str]) -> None:
    folder, out = compared
    found = Comparison.load(folder / "compare.json")
    assert [method.method for method in found.methods] == ["cross_entropy", "kobayashi", "wide"]
    assert found.seeds == (3, 4)
    assert found.images == 540
    assert str(found) in out
    assert (folder / "table.txt").read_text().strip() == str(found).strip()
    assert "wide, seed 4: test" in out
    assert "\non 1,131 images, 126 images to validate, 540 images to test: 10 classes, 8 x 8" in out
    assert f"largemargin report runs/{folder.name}" in out
    stored = json.loads((folder / "compare.json").read_text())
    assert {"trials", "tuning_seconds", "std", "mean"} <= stored["methods"][0].keys()


def test_runs_have_their_own_settings_and_the_same_seeds(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    wide = Run.open(folder / "runs" / "wide-seed3").config
    plain = Run.open(folder / "runs" / "cross_entropy-seed3").config
    assert (wide.objective.settings, wide.optimizer.lr) == ({"margin": 0.5}, 0.1)
    assert plain.optimizer.lr == 0.05
    assert wide.seed == plain.seed == 3
    assert wide.data == plain.data


def test_a_finished_comparison_prints_its_table_again(
    compared: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = compared
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}
    assert cli.main(["compare", "--resume", str(folder)]) == 0
    assert str(Comparison.load(folder / "compare.json")) in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}


def test_a_comparison_that_was_cut_short_goes_on(
    compared: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = compared
    whole = Comparison.load(folder / "compare.json")
    (folder / "compare.json").unlink()
    (folder / "runs" / "kobayashi-seed4" / "result.json").unlink()
    assert cli.main(["compare", "--resume", str(folder)]) == 0
    again = Comparison.load(folder / "compare.json")
    assert [m.accuracies for m in again.methods] == [m.accuracies for m in whole.methods]


def test_the_plan_is_a_config(
    compared: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = compared
    assert cli.main(["compare", "--config", str(folder / "plan.yaml"), "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    for group in (DataConfig, ModelConfig, OptimizerConfig):  # later settings stand where set
        for each in fields(group):
            if "later" in each.metadata:
                values = printed[group.__name__.removesuffix("Config").lower()]
                assert settings_from({each.name: values.pop(each.name)}, group) == group()
    assert printed == yaml.safe_load((folder / "plan.yaml").read_text())


def test_wrong_questions(
    compared: tuple[Path, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(compared[0])
    unequal = "[{name: cosface, trials: 9}]"
    class_folders(tmp_path / "photos", ("a", "b"), 1)
    for words, message in (
        ([], "--methods cosface,kobayashi"),
        (["--methods", "cross_entropy"], "beside softmax"),
        (["--methods", "cosfase"], "cosface"),
        (["--methods", "cosface", "--seeds", "none"], "how many, as 5"),
        (["--methods", unequal, "--trials", "3"], "Unequal budgets"),
        (["--methods", "discriminative", "--mixup", "0.2"], "error: discriminative: data.mixup"),
        (["--methods", "[{name: cosface, settings: {a: 1}}]"], "cosface: CosFace has no argument"),
        (["--methods", "cosface", "--freeze", "backbone.x"], "model.freeze must name"),
        (["--resume", folder, "--epochs", "3"], "epochs was given too"),
        (["--resume", folder, "--epochs", "20"], "epochs was given too"),
        (["--resume", folder, "--trials", "3"], "only --seeds"),
        (["--resume", folder, "--trials", "0"], "only --seeds"),
        (["--resume", str(tmp_path)], "is no comparison"),
        (["--objective", "cosface"], "unrecognized"),
        (["--methods", "cosface", "--folder", "photos"], "photos exists already and holds other"),
    ):
        assert cli.main(["compare", *words, *(() if "--resume" in words else SMALL)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_comparison_that_cannot_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does a wrong range, which only tuning knows to be wrong, or what is not installed."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (8, 8), (number, ord(name), 0)).save(f"photos/{name}/{number}.png")
    words = ["compare", "--methods", "cosface", "--trials", "2", *SMALL]
    assert cli.main([*words, "--data", "photos", "--data.validation", "0"]) == 2
    assert "there are none. Set data.validation" in capsys.readouterr().err
    assert cli.main([*words, "--space", "{optimizer.lr: [1, 0.1]}"]) == 2
    assert "optimizer.lr" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(words) == 2
    assert "tuning needs optuna" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_tuned_methods_are_compared_on_images_held_out_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a folder with train/ and val/ alone, whose validation images chose the settings."""
    pytest.importorskip("optuna", reason="tuning needs optuna")
    monkeypatch.chdir(tmp_path)
    class_folders(Path("photos/train"), ("a", "b"), 10, height=8, width=8)
    class_folders(Path("photos/val"), ("a", "b"), 4, first=5000, height=8, width=8)
    words = ["compare", "--methods", "cosface", "--trials", "1", "--seeds", "1", *SMALL]
    assert cli.main([*words, "--data", "photos", "--model", "mlp", "--batch_size", "8"]) == 0
    said = capsys.readouterr().out
    assert "The data has no test images: 4 of the training images are held out" in said
    (folder,) = runs_in(tmp_path)
    found = Comparison.load(folder / "compare.json")
    assert (found.split, found.images) == ("test", 4)
    run = Run.open(folder / "runs" / "cosface-seed0")
    assert run.config.data.test == 0.2
    data = run.data()
    assert data.test is not None
    assert data.validation is not None
    assert set(data.test.ids).isdisjoint({*data.train.ids, *data.validation.ids})
    assert cli.main(["compare", "--resume", str(folder)]) == 0


def test_seeds_are_a_number_or_a_list() -> None:
    assert read_seeds(3) == [0, 1, 2]
    assert read_seeds(None) == [0, 1, 2]
    assert read_seeds([5, 7]) == [5, 7]
    assert read_seeds("5, 7") == [5, 7]
    for wrong in (0, "many", "5,x", "5,", [], [1.5], [True, 2], True):
        with pytest.raises(LargeMarginError, match="--seeds must be"):
            read_seeds(wrong)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are killed otherwise on Windows")
def test_a_killed_comparison_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    words = ["compare", "--methods", "kobayashi", "--seeds", "2", "--folder", "here"]
    small = ["--epochs", "12", "--batch_size", "128", "--device", "cpu", "--measure", "false"]
    process = subprocess.Popen(
        [sys.executable, "-m", "largemargin", *words, *small],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    second = Run(tmp_path / "here" / "runs" / "kobayashi-seed0")
    deadline = time.monotonic() + 300
    while not second.metrics("epoch") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (tmp_path / "here" / "compare.json").exists()
    assert not second.finished
    largemargin("compare", "--resume", "here", folder=tmp_path)
    largemargin(*words[:-1], "there", *small, folder=tmp_path)
    here, there = (Comparison.load(tmp_path / each / "compare.json") for each in ("here", "there"))
    assert [m.accuracies for m in here.methods] == [m.accuracies for m in there.methods]
