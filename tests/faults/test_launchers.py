"""Runs that torchrun starts: it is told to stop, and the command it leaves behind goes on."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from app.cli.command import environment, runs_in
from faults.counting import Faults
from faults.small_runs import assert_same, assert_tidy, config
from two_ranks import NEEDS_GLOO

from largemargin.app.training import Run
from largemargin.app.training.processes import (
    AGREE_EVERY,
    AGREE_SECONDS,
    StopAgreement,
    _accelerator,
)
from largemargin.app.training.runs import resume_command

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
"""What the command ``torchrun`` is, at a port that nobody else has."""
TWO = ("--nproc-per-node", "2", "-m", "largemargin", "train")
SETTINGS = (
    *("--model", "mlp", "--model.dropout", "0.2", "--data.fraction", "0.3", "--epochs", "12"),
    *("--batch_size", "32", "--objective", "discriminative", "--ema", "0.9", "--device", "cpu"),
    *("--measure", "false", "--geometry_samples", "0"),
)
LONGEST = 240


class Launched:
    """torchrun as a user starts it, with a process group of its own, as a terminal gives it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [*TORCHRUN, *words],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ended(self) -> tuple[int, str]:
        """Its exit status, and what it said to stderr."""
        try:
            _, said = self.process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"torchrun did not end: {self.process.communicate()}")
        return self.process.returncode, said

    def wait_for_epochs(self, folder: Path, name: str, count: int) -> None:
        limit = time.monotonic() + LONGEST
        while not any(len(Run(run).metrics("epoch")) >= count for run in runs_in(folder, name)):
            if self.process.poll() is not None or time.monotonic() > limit:
                os.killpg(self.process.pid, signal.SIGKILL)
                pytest.fail(f"nothing is trained: {self.ended()}")
            time.sleep(0.01)


@NEEDS_GLOO
@pytest.mark.slow
def test_torchrun_is_told_to_stop_and_the_run_goes_on_as_it_would_have(
    tmp_path: Path, faults: Faults
) -> None:
    """SIGTERM goes to the agent alone, as schedulers send it; Ctrl-C to everybody at once."""
    status, said = Launched(tmp_path, *TWO, *SETTINGS, "--name", "whole").ended()
    assert status == 0, said
    words = [*TWO, *SETTINGS, "--name", "told"]
    for number, send, epochs in ((signal.SIGTERM, os.kill, 2), (signal.SIGINT, os.killpg, 6)):
        launched = Launched(tmp_path, *words)
        launched.wait_for_epochs(tmp_path, "told", epochs)
        send(launched.process.pid, number)
        status, said = launched.ended()
        faults.inject(f"{number.name} of torchrun, which started two processes")
        assert status != 0
        told = Run.open(runs_in(tmp_path, "told")[0])
        assert not told.finished
        assert list(told.folder.glob("checkpoints/step-*")), said
        (command,) = re.findall(r"with a checkpoint\. Continue: (.+)", said)
        launcher, *words = shlex.split(command)
        assert launcher == "torchrun"
        assert words == [*TWO, "--resume", f"runs/{told.folder.name}"]
    status, said = Launched(tmp_path, *words).ended()
    assert status == 0, said
    assert_same(Run.open(runs_in(tmp_path, "whole")[0]), told)
    assert_tidy(told)


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({}, "largemargin train --resume 'my runs/a'"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            "torchrun --nproc-per-node 4 -m largemargin train --resume 'my runs/a'",
        ),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            "torchrun --nnodes 2 --nproc-per-node 4 -m largemargin train --resume 'my runs/a'",
        ),
    ],
)
def test_the_command_that_continues_a_run_starts_as_many_processes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], command: str
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resume_command("my runs/a") == command


def test_buffers_stay_as_they_are_between_two_passes_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processes' would be written over them in the second, before the backward pass."""
    accelerate = pytest.importorskip("accelerate")
    asked: dict[str, Any] = {}

    def made(**settings: Any) -> Any:
        asked.update(settings)
        return SimpleNamespace(log_with=[])

    monkeypatch.setattr(accelerate, "Accelerator", made)
    _accelerator(config(timeout=7.0))
    several, waiting = asked["kwargs_handlers"]
    assert several.to_kwargs() == {"broadcast_buffers": False}
    assert waiting.timeout == timedelta(seconds=7)


class Two:
    """This process and another one, which takes ``slowest`` seconds for a step."""

    several = True

    def __init__(self, slowest: float) -> None:
        self.slowest = slowest
        self.questions = 0

    def largest(self, asked: float, seconds: float) -> list[float]:
        self.questions += 1
        return [asked, max(seconds, self.slowest)]


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e-4, AGREE_EVERY), (0.5, 4), (AGREE_SECONDS, 1), (60.0, 1)]
)
def test_slow_steps_are_no_reason_to_be_told_late(seconds: float, steps: int) -> None:
    """Whoever starts processes kills them half a minute after it told them to stop."""
    two: Any = Two(seconds)
    agreement = StopAgreement(two)
    for step in range(1, 4 * steps + 1):
        assert not agreement.any(False, step)
    assert two.questions == 4
    assert [agreement.any(True, 4 * steps + n) for n in range(1, steps + 1)].index(True) == 0
