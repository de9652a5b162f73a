"""What ``largemargin compare`` and ``largemargin tune`` do alike."""

from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
pytest.importorskip("scipy", reason="the paired tests are scipy's")
pytest.importorskip("optuna", reason="the search is optuna's")
pytest.importorskip("sklearn", reason="the data of these tests come with scikit-learn")

from app.cli.command import SMALL, runs_in

from largemargin.app.cli import command as cli
from largemargin.app.training import Interrupted

BOTH = pytest.mark.parametrize(
    ("words", "started"),
    [
        (("compare", "--methods", "cosface"), "largemargin.app.training.comparison.compare"),
        (("tune", "--objective", "cosface"), "largemargin.app.training.tuning.tune"),
    ],
    ids=["compare", "tune"],
)


@BOTH
@pytest.mark.parametrize("stop", [Interrupted("asked to stop"), KeyboardInterrupt()])
def test_ctrl_c_says_how_to_go_on(
    words: tuple[str, ...],
    started: str,
    stop: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise stop

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(started, interrupted)
    assert cli.main([*words, *SMALL]) == 130
    (folder,) = runs_in(tmp_path)
    assert f"largemargin {words[0]} --resume runs/{folder.name}" in capsys.readouterr().err


@BOTH
def test_several_processes_are_refused(
    words: tuple[str, ...],
    started: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([*words, *SMALL]) == 2
    assert "without torchrun" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
