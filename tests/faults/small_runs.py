"""A run that takes a second, and what must be equal of two of them."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from largemargin.app.data import Data, DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import NoiseConfig, ObjectiveConfig, Run, RunConfig, train
from largemargin.app.training.engine import Session

TIMES = {"seconds", "images_per_s"}
EPOCHS = 4
STEPS = 11
"""Of an epoch: 339 images, 32 at a time, the last 19."""


def config(**changes: Any) -> RunConfig:
    """Four epochs with everything that has a state: dropout, noise, centroids, averages."""
    settings: dict[str, Any] = {
        "model": ModelConfig("mlp", dropout=0.2, options={"hidden": (32,)}),
        "epochs": EPOCHS,
        "batch_size": 32,
        "device": "cpu",
        "gradients_every": STEPS,
        "data": DataConfig(fraction=0.3),
        "objective": ObjectiveConfig("discriminative + center"),
        "noise": NoiseConfig("noisy", level=0.05),
        "ema": 0.9,
        "measure": False,
        "geometry_samples": 0,
        **changes,
    }
    return RunConfig(**settings)


@cache
def digits(fraction: float = 0.3) -> Data:
    return load_data(DataConfig(fraction=fraction))


def trained(
    folder: Path, *, log: Path | None = None, linger: int | None = None, **changes: Any
) -> Run:
    """The run in this folder, begun or continued; ``log`` gets a byte for every step.

    With ``linger`` it stands still once the log has so many, until it is killed, told to stop or
    :func:`released`: whoever does that may come late on a busy machine, and finds it training.
    """
    if log is not None:
        count_steps(log, linger)
    resume = (folder / "config.yaml").is_file()
    if not resume and folder.is_dir():  # killed before its settings were written
        for each in folder.iterdir():
            each.unlink()
    settings = config(**changes)
    data = digits(settings.data.fraction)
    return train(settings, folder=folder, resume=resume, data=data, progress=False)


def count_steps(log: Path, linger: int | None = None) -> None:
    real: Callable[[Session], None] = Session.pause_if_asked

    def counted(session: Session) -> None:
        with open(log, "ab", buffering=0) as file:
            file.write(b".")
        while linger is not None and steps_in(log) >= linger and not _may_go_on(session, log):
            time.sleep(0.001)
        real(session)

    Session.pause_if_asked = counted  # type: ignore[method-assign]


def _may_go_on(session: Session, log: Path) -> bool:
    return session.trainer.stop_requested or log.with_suffix(".released").exists()


def released(log: Path) -> None:
    """Let a run go on that lingers."""
    log.with_suffix(".released").touch()


def steps_in(log: Path) -> int:
    return os.stat(log).st_size if log.exists() else 0


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def assert_same(one: Run, other: Run) -> None:
    """Weights to the last bit, metrics and results."""
    for which in ("last", "best"):
        mine, theirs = one.model(which).state_dict(), other.model(which).state_dict()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), f"{which}: {name}"
    assert timeless(one.metrics()) == timeless(other.metrics())
    assert timeless([one.result]) == timeless([other.result])


def assert_tidy(run: Run) -> None:
    """Nothing half-written is left, and every file is what was written."""
    from largemargin.app.training.checkpoints import Checkpoints

    left = [path for path in run.folder.rglob("*") if path.name.startswith((".draft", ".model"))]
    assert left == []
    kept = {path.name for path in (run.folder / "checkpoints").iterdir() if path.is_dir()}
    found = {Checkpoints(run.folder).find(which) for which in ("last", "best")}
    assert kept == {path.name for path in found if path is not None}
