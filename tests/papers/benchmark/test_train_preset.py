"""``largemargin train --preset``."""

from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

from largemargin import LargeMarginError, RunConfig
from largemargin.app.cli.train import _with_preset
from largemargin.app.training import ObjectiveConfig, preset


def test_the_objective_is_that_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    base = RunConfig(epochs=3)
    config = _with_preset(base, "few_labels")
    assert config == preset("few_labels").config(base)
    assert config.epochs == 3
    assert "preset few_labels:" in capsys.readouterr().out
    assert _with_preset(base, None) is base


def test_two_objectives_are_one_too_many() -> None:
    for objective, named in (
        (ObjectiveConfig("cosface"), "objective.name"),
        (ObjectiveConfig(class_weights="balanced"), "objective.class_weights"),
    ):
        with pytest.raises(LargeMarginError, match=f"but {named} was given too. Leave one of"):
            _with_preset(RunConfig(objective=objective), "few_labels")


@pytest.mark.slow
def test_as_a_user_runs_it(tmp_path: Path) -> None:
    from app.cli.command import SMALL, largemargin, runs_in

    done = largemargin("train", "--preset", "few_labels", *SMALL, folder=tmp_path)
    assert "source      papers/benchmark/" in done.stdout
    assert len(runs_in(tmp_path, "run")) == 1
    wrong = largemargin("train", "--preset", "few", *SMALL, folder=tmp_path, status=2)
    assert "few_labels" in wrong.stderr
