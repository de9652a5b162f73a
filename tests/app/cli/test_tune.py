"""``largemargin tune`` as a user runs it."""

import csv
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
pytest.importorskip("optuna", reason="the search is optuna's")
pytest.importorskip("sklearn", reason="the data of these tests come with scikit-learn")

from app.cli.command import SMALL, largemargin, runs_in

from largemargin.app.cli import command as cli
from largemargin.app.training import read_config


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished search and what the command printed."""
    folder = tmp_path_factory.mktemp("tune")
    words = ("--objective", "kobayashi", "--trials", "2", "--space", "{optimizer.clip_norm: null}")
    done = largemargin("tune", *words, *SMALL, folder=folder)
    assert "Traceback" not in done.stderr
    (made,) = runs_in(folder, "tune")
    return made, done.stdout


def trials_in(folder: Path) -> list[dict[str, str]]:
    with open(folder / "trials.csv") as file:
        return list(csv.DictReader(file))


def test_files_and_report(tuned: tuple[Path, str]) -> None:
    folder, out = tuned
    best = read_config(folder / "best.yaml")
    assert best.objective.name == "kobayashi"
    assert best.objective.settings.keys() == {"strength"}
    rows = trials_in(folder)
    assert rows[0]["optimizer.lr"] == "0.05"
    assert "optimizer.clip_norm" not in rows[0]
    # The best is named as it was when it was told, and as its row and folder are.
    assert "   2 of 2, trial 1: accuracy" in out
    assert "\non 1,131 images, 126 images to validate" in out
    best = re.search(r"best: trial (\d+), validation accuracy ([\d.]+ %)", out)
    assert best is not None
    assert f"trial {best[1]}: accuracy {best[2]} after 1 epoch (" in out
    assert f"largemargin train --config runs/{folder.name}/best.yaml" in out
    assert (folder / "study.log").exists()


def test_more_trials_later(tuned: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = tuned
    before = trials_in(folder)[:2]
    assert cli.main(["tune", "--resume", str(folder), "--trials", "3"]) == 0
    assert trials_in(folder)[:2] == before
    assert len(trials_in(folder)) == 3
    assert "   3 of 3, trial 2:" in capsys.readouterr().out


def test_a_folder_of_another_search_is_left_alone(
    tuned: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = tuned
    before = (folder / "plan.yaml").read_text()
    words = ["tune", "--objective", "cosface", "--trials", "2", *SMALL, "--folder", str(folder)]
    assert cli.main(words) != 0
    assert "holds another search" in capsys.readouterr().err
    assert (folder / "plan.yaml").read_text() == before


def test_the_best_settings_train(
    tuned: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = tuned
    assert cli.main(["train", "--config", str(folder / "best.yaml"), "--print_config"]) == 0
    assert "name: kobayashi" in capsys.readouterr().out


def test_wrong_questions(
    tuned: tuple[Path, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tuned[0])
    for words, message in (
        (["--objective", "cosfase"], "cosface"),
        (["--pruner", "hyper"], "one of 'median', 'asha', 'none'"),
        (["--space", "{optimizer.rate: [0.1, 1]}"], "nothing that can be tuned here"),
        (["--trials", "-3"], "trials must be"),
        (["--trials", "0"], "trials must be"),
        (["--data.validation", "0"], "data.validation"),
        (["--resume", str(tmp_path)], "is no search"),
        (["--resume", folder, "--epochs", "7"], "epochs was given too"),
        (["--resume", folder, "--epochs", "20"], "epochs was given too (only --trials may be)"),
        (["--resume", folder, "--pruner", "asha"], "pruner was given too"),
        (["--folder", folder, "--objective", "cosface"], "holds another search"),
    ):
        assert cli.main(["tune", *words]) == 2, words
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["tune"]) == 2
    assert "tuning needs optuna" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # no folder was made for nothing
