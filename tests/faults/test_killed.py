"""Runs that are killed at any moment, also while they write, end as if nothing had happened."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from app.cli.command import environment, largemargin, runs_in
from faults.children import NEEDS_FORK, Child, ended, kill_at
from faults.counting import Faults
from faults.small_runs import (
    EPOCHS,
    STEPS,
    assert_same,
    assert_tidy,
    digits,
    steps_in,
    trained,
)

from largemargin.app.training import Run

pytestmark = NEEDS_FORK
WRITES = (
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (os, "mkdir"),
    (os, "unlink"),
    (shutil, "rmtree"),
)
"""What a checkpoint consists of: a process can die before each of these."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    digits()  # so that children have it
    return trained(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(
    tmp_path: Path, faults: Faults, kills: int
) -> None:
    chance = random.Random(kills)
    folder, log = tmp_path / "run", tmp_path / "steps"
    epochs = 2 * kills + 2  # more than it can come to between all of them
    whole = trained(tmp_path / "whole", epochs=epochs)
    for _ in range(kills):
        goal = steps_in(log) + chance.randint(1, STEPS + STEPS // 2)
        last = goal + STEPS // 2
        child = Child(lambda last=last: trained(folder, log=log, linger=last, epochs=epochs))
        child.until(lambda goal=goal: steps_in(log) >= goal)
        time.sleep(chance.uniform(0, 0.02))
        child.kill()
        assert child.wait().signal == signal.SIGKILL
        faults.inject("SIGKILL at a random moment")
    end = ended(lambda: str(trained(folder, log=log, epochs=epochs).folder))
    assert end.value == str(folder), end.error
    assert_same(whole, Run.open(folder))
    assert_tidy(Run.open(folder))
    # At most one interval between checkpoints is repeated after each of them.
    assert steps_in(log) <= (epochs + kills) * STEPS


@pytest.mark.parametrize(
    "points", [(90, 109, 118), pytest.param(tuple(range(1, 151, 2)), marks=pytest.mark.slow)],
    ids=["some", "every other"],
)  # fmt: skip
def test_a_run_killed_between_any_two_writes_ends_like_one_that_was_not(
    tmp_path: Path, faults: Faults, points: tuple[int, ...]
) -> None:
    short = trained(tmp_path / "whole", epochs=2)
    for point in points:
        folder = tmp_path / f"{point}"

        def dying(folder: Path = folder, point: int = point) -> str:
            kill_at(point, *WRITES)
            return str(trained(folder, epochs=2).folder)

        if ended(dying).signal != signal.SIGKILL:
            assert point > 100, "a run of two epochs writes more often than that"
            break
        faults.inject("SIGKILL before a write, a rename or a deletion")
        resumed = ended(lambda folder=folder: str(trained(folder, epochs=2).folder))
        assert resumed.value == str(folder), f"{point}: {resumed.error}"
        assert_same(short, Run.open(folder))
        assert_tidy(Run.open(folder))
        shutil.rmtree(folder)


def test_a_run_that_is_killed_can_be_looked_at(tmp_path: Path, faults: Faults) -> None:
    folder, log = tmp_path / "run", tmp_path / "steps"
    digits()
    child = Child(lambda: trained(folder, log=log, linger=3 * STEPS))
    child.until(lambda: steps_in(log) > 2 * STEPS)
    child.kill()
    child.wait()
    faults.inject("SIGKILL at a random moment")
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "epoch", "step": 9')  # a row cut short
    run = Run.open(folder)
    assert len(run.metrics("epoch")) >= 2
    assert run.model("last") is not None
    assert not run.finished


@pytest.mark.slow
def test_the_command_killed_at_20_random_moments(tmp_path: Path, faults: Faults) -> None:
    words = [
        "train", "--model", "mlp", "--data.fraction", "0.3", "--epochs", "40", "--batch_size", "8",
        "--objective", "discriminative", "--ema", "0.9", "--device", "cpu", "--deterministic",
        "true",
    ]  # fmt: skip
    largemargin(*words, "--name", "whole", folder=tmp_path)
    chance = random.Random(20)
    start = [*words, "--name", "killed"]
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-m", "largemargin", *start],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = epochs_of(tmp_path)
        limit = time.monotonic() + 120
        while epochs_of(tmp_path) <= before and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.wait()
        faults.inject("SIGKILL of the command at a random moment")
        start = ["train", "--resume", str(runs_in(tmp_path, "killed")[0])]
    largemargin(*start, folder=tmp_path)
    one, other = (Run.open(runs_in(tmp_path, name)[0]) for name in ("whole", "killed"))
    assert_same(one, other)
    assert_tidy(other)


def epochs_of(folder: Path) -> int:
    """Epochs in its metrics; -1 before there is a run that could be continued."""
    found = [each for each in runs_in(folder, "killed") if (each / "config.yaml").is_file()]
    return len(Run(found[0]).metrics("epoch")) if found else -1


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_run_asked_to_stop_writes_a_checkpoint_in_the_middle_of_an_epoch(
    tmp_path: Path, whole: Run, faults: Faults, number: signal.Signals
) -> None:
    folder, log = tmp_path / "run", tmp_path / "steps"
    for _ in range(2):
        goal = steps_in(log) + STEPS + 5
        child = Child(lambda goal=goal: trained(folder, log=log, linger=goal))
        child.until(lambda goal=goal: steps_in(log) >= goal)
        child.kill(number)
        end = child.wait()
        faults.inject(f"{number.name} in the middle of an epoch")
        assert end.kind == "Interrupted"
        assert f"Continue: largemargin train --resume {shlex.quote(str(folder))}" in end.error
    assert list(folder.glob("checkpoints/step-*"))
    ended(lambda: trained(folder, log=log).result)
    assert_same(whole, Run.open(folder))
    assert_tidy(Run.open(folder))
    assert steps_in(log) == EPOCHS * STEPS  # nothing was done twice
