"""A training run that is killed at any moment is continued to the result of one that was not."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

from app.cli.command import environment, largemargin, runs_in

from largemargin.app.training import Run

TRAIN = (
    "train", "--model", "mlp", "--data.fraction", "0.3", "--epochs", "12", "--batch_size", "16",
    "--objective", "discriminative", "--gradients_every", "0", "--device", "cpu",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are killed otherwise on Windows")
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    largemargin(*TRAIN, "--name", "whole", folder=tmp_path)
    whole = Run.open(runs_in(tmp_path, "whole")[0])
    chance = random.Random(0)
    words = [*TRAIN, "--name", "killed"]
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "largemargin", *words],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + 120
        before = progress(tmp_path)
        while progress(tmp_path) <= before and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        words = ["train", "--resume", str(runs_in(tmp_path, "killed")[0])]
    largemargin(*words, folder=tmp_path)
    killed = Run.open(runs_in(tmp_path, "killed")[0])
    for name, tensor in whole.model("last").state_dict().items():
        assert torch.equal(tensor, killed.model("last").state_dict()[name]), name
    assert killed.result["test"] == whole.result["test"]
    assert [row["loss"] for row in killed.metrics("epoch")] == [
        row["loss"] for row in whole.metrics("epoch")
    ]


def progress(folder: Path) -> int:
    """Epochs that the run has written so far."""
    found = runs_in(folder, "killed")
    return len(Run(found[0]).metrics("epoch")) if found else -1
