"""A run that is stopped in the middle of an epoch goes on as if it had not been, whatever it is."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.counting import Faults
from faults.small_runs import STEPS, assert_same, config, digits

from largemargin.app.data import Data, DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.training import (
    Interrupted,
    NoiseConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Run,
    RunConfig,
    train,
)
from largemargin.app.training.engine import Session
from largemargin.app.training.trainer import RunRng

SETTINGS: dict[str, dict[str, Any]] = {
    "everything": {},
    "fp16": {"precision": "fp16"},
    "adamw": {"optimizer": OptimizerConfig("adamw", lr=0.002, warmup_epochs=0.5)},
    "checkpoints far apart": {"checkpoint_every": 3, "ema": None},
    "both passes": {"noise": NoiseConfig("clean_and_noisy", level=0.1)},
    "schedules": {"objective": ObjectiveConfig("lsoftmax", schedule="preset")},
    "steps that are skipped": {
        "optimizer": OptimizerConfig(lr=1e25, clip_norm=None, schedule="constant"),
        "max_bad_steps": 1000,
        "objective": ObjectiveConfig(),
        "ema": None,
    },
    "batch normalisation": {"model": ModelConfig("small_cnn")},
}


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next run is told to stop after this step."""
    real = Session.pause_if_asked

    def told(session: Session) -> None:
        session.trainer.stop_requested = session.trainer.done == step
        real(session)

    monkeypatch.setattr(Session, "pause_if_asked", told)


def stopped_and_resumed(
    settings: RunConfig, folder: Path, data: Data, steps: tuple[int, ...]
) -> Run:
    for number, step in enumerate(steps):
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Interrupted, match=f"after step {step}, with a checkpoint"):
                train(settings, folder=folder, resume=number > 0, data=data, progress=False)
        assert (folder / "checkpoints" / f"step-{step:08d}").is_dir()
    return train(settings, folder=folder, resume=True, data=data, progress=False)


QUICK = ("everything",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SETTINGS],
)
@pytest.mark.filterwarnings("ignore:the run diverged")
def test_stopped_in_the_middle_of_an_epoch(tmp_path: Path, faults: Faults, name: str) -> None:
    settings = config(epochs=2, **SETTINGS[name])
    whole = train(settings, folder=tmp_path / "whole", data=digits(), progress=False)
    # After the first step, at the end of an epoch, and in the middle.
    steps = (1, STEPS, STEPS + 4)
    resumed = stopped_and_resumed(settings, tmp_path / "run", digits(), steps)
    faults.inject("stopped in the middle of an epoch", len(steps))
    assert_same(whole, resumed)


def test_all_generators_are_put_back() -> None:
    stream = RunRng(torch.device("cpu"))
    states = stream.states()
    drawn = torch.rand(3), random.random()
    torch.rand(5)
    stream.restore(states)
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_stopped_in_the_middle_of_an_epoch_on_a_gpu(
    tmp_path: Path, faults: Faults, graph: Any, deterministic: bool
) -> None:
    """Graphs go on with the random numbers of the device, and with the sums on it."""
    settings = config(
        epochs=3,
        graph=graph,
        device="cuda",
        batch_size=8,
        model=ModelConfig("mlp", dropout=0.3, options={"hidden": (32,)}),
        deterministic=deterministic,
        data=DataConfig(fraction=0.3),
        optimizer=OptimizerConfig(lr=0.01),  # at 0.05 all 32 units die and nothing is compared
    )
    whole = train(settings, folder=tmp_path / "whole", data=digits(), progress=False)
    resumed = stopped_and_resumed(settings, tmp_path / "run", digits(), (17, 60))
    faults.inject("stopped in the middle of an epoch on a GPU", 2)
    if deterministic:
        assert_same(whole, resumed)
        return
    for one, other in zip(whole.metrics("epoch"), resumed.metrics("epoch"), strict=True):
        assert one["images"] == other["images"]
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
    for name, tensor in whole.model("last").state_dict().items():
        found = resumed.model("last").state_dict()[name]
        torch.testing.assert_close(found, tensor, rtol=2e-2, atol=2e-3)
