"""Two gloo processes on the CPU, started as users start them, give the run of one process."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from two_ranks import NEEDS_GLOO

from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import ObjectiveConfig, Run, RunConfig, train, write_config
from largemargin.measuring import accuracy_of

SCRIPT = """
import sys
from pathlib import Path
import torch
from largemargin.app.training import read_config, train

torch.set_num_threads(1)
for path in sys.argv[1:]:
    train(read_config(path), folder=Path(path).with_suffix(""), progress=False)
"""

# 377 training images: the last batch is cut to a multiple of two, so 32 would leave one out.
COMMON: dict[str, Any] = {
    "model": ModelConfig("mlp"),
    "epochs": 2,
    "batch_size": 26,
    "device": "cpu",
    "gradients_every": 0,
    "data": DataConfig(fraction=0.3),
}
CASES = {
    "softmax": RunConfig(trackers=("tensorboard",), **COMMON),
    "lmd": RunConfig(objective=ObjectiveConfig("discriminative", {"margin": 3.0}), **COMMON),
    "mixture": RunConfig(objective=ObjectiveConfig("lm_softmax + center"), ema=0.9, **COMMON),
}
# Statistics of batches are those of the process, so no process alone has the same.
NORMALISED = RunConfig(ema=0.9, **{**COMMON, "model": ModelConfig("small_cnn")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two processes for each case."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "script.py").write_text(SCRIPT)
    files = []
    for name, config in {**CASES, "normalised": NORMALISED}.items():
        write_config(replace(config, name=name), folder / f"{name}.yaml")
        files.append(str(folder / f"{name}.yaml"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    launch += ["--master_addr=127.0.0.1", "--master_port=0", "--rdzv_backend=c10d"]
    launch += ["--rdzv_endpoint=127.0.0.1:0", str(folder / "script.py"), *files]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def alone(config: RunConfig, folder: Path) -> Run:
    """The same in this process, which must not become accelerate's."""
    return train(replace(config, trackers=()), folder=folder, progress=False)


@NEEDS_GLOO
def test_two_processes_train_what_one_does(folder: Path) -> None:
    """One test, so that the processes are started once, whoever shares the tests out."""
    for name, config in CASES.items():
        assert_same(Run.open(folder / name), alone(config, folder / f"{name}-alone"))
    assert_tracked(Run.open(folder / "softmax"))
    assert_validated(Run.open(folder / "normalised"))


def assert_same(two: Run, one: Run) -> None:
    for mine, theirs in zip(two.metrics("epoch"), one.metrics("epoch"), strict=True):
        assert mine["images"] == theirs["images"]
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
        assert mine["validation"] == pytest.approx(theirs["validation"], rel=1e-4)
        assert mine["geometry"].pop("split") == theirs["geometry"].pop("split") == "validation"
        assert mine["geometry"] == pytest.approx(theirs["geometry"], rel=1e-3)
    weights = one.model("last").state_dict()
    for key, tensor in two.model("last").state_dict().items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-4, atol=1e-5)
    assert two.result["test"] == pytest.approx(one.result["test"], rel=1e-4)
    assert two.result["geometry"] == pytest.approx(one.result["geometry"], rel=1e-3)


def assert_validated(run: Run) -> None:
    """Both processes have validated the model that was saved, not each one of its own."""
    validation = load_data(run.config.data).validation
    assert validation is not None
    found = accuracy_of(run.model("last"), validation, batch_size=64)
    assert run.metrics("epoch")[-1]["validation"]["loss"] == pytest.approx(found.loss, rel=1e-4)


def assert_tracked(run: Run) -> None:
    """Trackers got the metrics."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next(run.folder.rglob("events.out.tfevents*"))
    found = EventAccumulator(str(events.parent)).Reload()
    rows = run.metrics("epoch")
    logged = found.Scalars("validation/accuracy")
    assert [each.step for each in logged] == [row["step"] for row in rows]
    assert [each.value for each in logged] == pytest.approx(
        [row["validation"]["accuracy"] for row in rows]
    )
    assert found.Scalars("terms/softmax")
