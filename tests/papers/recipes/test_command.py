"""``largemargin reproduce`` as a user calls it."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with it")

from app.cli.command import largemargin

from largemargin.app.cli import main

PAPERS = Path(__file__).resolve().parents[3] / "papers"
CLAIMS = "method,error\nsoftmax,50.0\nours,40.0\n"
RECIPE = """
title: Digits in one epoch
claims: claims.csv
data_needed: digits are bundled
base:
  data: {name: digits, fraction: 0.2}
  epochs: 2
  device: cpu
  measure: false
grid:
  - column: method
    values:
      softmax: {objective.name: cross_entropy}
      ours: {objective: {name: cosface, settings: {margin: 0.2, scale: 16.0}}}
measures:
  error: {metric: error, better: lower}
baseline: {method: softmax}
readings: [everything]
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("sklearn", reason="digits are scikit-learn's")
    monkeypatch.chdir(tmp_path)
    return written(tmp_path)


def written(folder: Path) -> str:
    (folder / "claims.csv").write_text(CLAIMS)
    (folder / "table1.yaml").write_text(RECIPE)
    return "table1.yaml"


def test_a_table_is_run_printed_and_kept(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", recipe, "--epochs_fraction", "0.5", "--only", "method=ours"]
    assert main([*words, "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Digits in one epoch\nProtocol: 0.5 of the epochs." in shown
    assert "1 other protocol" in shown
    assert "1 not measured" in shown
    assert len(list((tmp_path / "runs" / "reproduce").iterdir())) == 1
    assert (tmp_path / "measured" / "table1.json").is_file()
    assert main(words[:-2]) == 0
    assert "direction" in capsys.readouterr().out
    assert len(list((tmp_path / "runs" / "reproduce").iterdir())) == 2


@pytest.mark.slow
def test_as_another_process(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="digits are scikit-learn's")
    words = ("reproduce", written(tmp_path), "--epochs_fraction", "0.5", "--only", "softmax")
    done = largemargin(*words, folder=tmp_path)
    assert "Digits in one epoch" in done.stdout
    assert "reported" in done.stdout
    assert "measured" in done.stdout
    assert (tmp_path / "measured" / "table1.json").is_file()
    wrong = largemargin("reproduce", "nowhere.yaml", folder=tmp_path, status=2)
    assert "nowhere.yaml" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_settings_and_paths(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", recipe, "--no_train", "--set", "optimizer.lr=0.3", "epochs=1"]
    assert main([*words, "--path", "mnist=there"]) == 0
    assert "Protocol: epochs 1, optimizer.lr 0.3." in capsys.readouterr().out


def test_listing(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", str(PAPERS / "lmd/table4.yaml"), "--list"]) == 0
    shown = capsys.readouterr().out
    assert "10 cells, 10 runs" in shown
    assert "MobileNetV3, ours, 0.99    torchvision/mobilenet_v3_large" in shown
    assert "center loss, none: quoted" in shown
    assert "data/rscd" in shown
    assert "Batch size (128)" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.yaml"], "cannot read missing.yaml"),
        (["table1.yaml", "--epochs_fraction", "2"], "epochs_fraction must be"),
        (["table1.yaml", "--set", "epochs"], "NAME=VALUE is expected"),
        (["table1.yaml", "--only", "none"], "no cell of the table matches"),
        (["table1.yaml", "--seeds", "0,one"], "--seeds must be a number or a list"),
    ],
)
def test_wrong_input(
    recipe: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_failed_run_is_exit_status_1(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(recipe, "broken.yaml")
    path = tmp_path / "broken.yaml"
    path.write_text(path.read_text().replace("margin: 0.2", "margins: 0.2"))
    assert main(["reproduce", "broken.yaml", "--epochs_fraction", "0.5"]) == 1
    assert "ours failed: seed 0:" in capsys.readouterr().out


def test_the_listing_is_of_what_was_asked_for(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", recipe, "--list", "--epochs_fraction", "0.5", "--seeds", "3"]
    assert main([*words, "--only", "method=ours", "--set", "objective.name=arcface"]) == 0
    shown = capsys.readouterr().out
    assert "Protocol: 0.5 of the epochs, objective.name arcface." in shown
    assert "1 cells, 3 runs:" in shown
    assert "ours    small_cnn, arcface, 1 epochs" in shown
    assert "softmax" not in shown
    assert main(["reproduce", recipe, "--list", "--only", "nosuch"]) == 2
    assert "no cell of the table matches nosuch" in capsys.readouterr().err


def test_every_protocol_that_was_measured_is_shown(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", recipe, "--only", "softmax"]
    assert main([*words, "--epochs_fraction", "0.5"]) == 0
    assert "other settings" not in capsys.readouterr().out
    assert main([*words, "--set", "batch_size=256"]) == 0
    shown = capsys.readouterr().out
    other = "Measured with other settings (--no_train alone shows them): 0.5 of the epochs."
    assert shown.endswith(f"{other}\n")
    # Nothing was measured as printed: that table is no news.
    assert main(["reproduce", recipe, "--no_train"]) == 0
    shown = capsys.readouterr().out
    assert "Protocol: 0.5 of the epochs." in shown
    assert "Protocol: batch_size 256." in shown
    assert "Protocol: as printed." not in shown
    assert "other settings" not in shown
    # A protocol that is asked for is shown alone.
    assert main(["reproduce", recipe, "--no_train", "--epochs_fraction", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "Protocol: 0.5 of the epochs." in shown
    assert "Protocol: batch_size 256." not in shown


def test_without_measurements_the_table_is_shown_all_the_same(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", recipe, "--no_train"]) == 0
    assert "Protocol: as printed." in capsys.readouterr().out
