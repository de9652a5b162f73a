"""Several processes that train together: one is killed, hangs or is told to stop."""

import os
import shlex
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.children import LONGEST, NEEDS_FORK, Child, Ended
from faults.counting import Faults
from faults.small_runs import config, digits, steps_in, trained
from two_ranks import NEEDS_GLOO

from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.training import NoiseConfig, ObjectiveConfig, Run, train

pytestmark = [NEEDS_FORK, NEEDS_GLOO]
pytest.importorskip("accelerate", reason="accelerate joins the processes")

# Nothing drawn while training, and 336 images that 1 to 4 processes share evenly to the last one:
# then their number changes rounding alone.
EVEN = 336 / 1131
STEPS = 7
ALIKE: dict[str, Any] = {
    "model": ModelConfig("mlp", options={"hidden": (16,)}),
    "objective": ObjectiveConfig("discriminative"),
    "noise": NoiseConfig("none"),
    "gradients_every": 0,
    "batch_size": 48,
    "epochs": 8,
    "data": DataConfig(fraction=EVEN),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def together(
    folder: Path,
    world: int,
    *,
    log: Path,
    timeout: float = 60.0,
    lingers: tuple[int, int] = (-1, 0),
    **changes: Any,
) -> Any:
    """As many children as torchrun would start; a rank may linger after so many steps."""
    port = free_port()

    def rank(number: int) -> Any:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()  # another test of this process may have used it
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        own = log.with_suffix(f".{number}")
        linger = lingers[1] if number == lingers[0] else None
        given = {**ALIKE, **changes}
        run = trained(folder, log=own, linger=linger, timeout=timeout, **given)
        torch.distributed.destroy_process_group()
        return run.result

    return [Child(lambda number=number: rank(number)) for number in range(world)]


def wait_for(log: Path, rank: int, steps: int) -> None:
    limit = time.monotonic() + LONGEST
    while steps_in(log.with_suffix(f".{rank}")) < steps:
        assert time.monotonic() < limit, "the processes do not train"
        time.sleep(0.001)


def assert_alike(one: Run, other: Run) -> None:
    mine, theirs = one.model("last").state_dict(), other.model("last").state_dict()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    for row, again in zip(one.metrics("epoch"), other.metrics("epoch"), strict=True):
        assert row["images"] == again["images"]
        assert row["loss"] == pytest.approx(again["loss"], rel=1e-2)
    assert one.result["epochs"] == other.result["epochs"]


def assert_told(ends: list[Ended], world: int, folder: Path) -> None:
    for end in ends:
        assert end.kind == "LargeMarginError", end.error
        assert f"another of the {world} processes ended, or did not answer" in end.error
        assert f"largemargin train --resume {shlex.quote(str(folder))}" in end.error


@pytest.mark.parametrize(
    ("world", "killed", "then"),
    [
        (2, 1, 1),
        pytest.param(2, 0, 4, marks=pytest.mark.slow),
        pytest.param(4, 2, 3, marks=pytest.mark.slow),
        pytest.param(3, 0, 2, marks=pytest.mark.slow),
    ],
)
def test_one_of_several_processes_is_killed(
    tmp_path: Path, faults: Faults, world: int, killed: int, then: int
) -> None:
    digits(EVEN)
    folder, log = tmp_path / "run", tmp_path / "log"
    children = together(folder, world, log=log, lingers=(killed, 3 * STEPS))
    wait_for(log, killed, 2 * STEPS)
    children[killed].kill()
    ends = [child.wait() for child in children]
    faults.inject("SIGKILL of one process of several")
    assert ends.pop(killed).signal == signal.SIGKILL
    assert_told(ends, world, folder)
    assert not Run(folder).finished
    if then == 1:
        train(Run(folder).config, folder=folder, resume=True, data=digits(EVEN), progress=False)
    else:
        for end in [child.wait() for child in together(folder, then, log=log)]:
            assert end.error == ""
    faults.attempt("resumed with another number of processes")
    alone = trained(tmp_path / "alone", **ALIKE)
    assert_alike(alone, Run.open(folder))


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up_after_the_timeout(tmp_path: Path, faults: Faults) -> None:
    digits(EVEN)
    folder, log = tmp_path / "run", tmp_path / "log"
    children = together(folder, 2, timeout=5.0, log=log, lingers=(1, 2 * STEPS))
    wait_for(log, 1, STEPS)
    children[1].kill(signal.SIGSTOP)
    end = children[0].wait()  # fails where it does not end
    faults.inject("one process of several that hangs")
    assert_told([end], 2, folder)
    assert "5 s (timeout)" in end.error
    children[1].kill(signal.SIGKILL)
    children[1].wait()


@pytest.mark.slow
def test_several_processes_stop_at_the_same_step_when_one_is_told_to(
    tmp_path: Path, faults: Faults
) -> None:
    digits(EVEN)
    folder, log = tmp_path / "run", tmp_path / "log"
    noisy = {"noise": NoiseConfig("noisy", level=0.05), "epochs": 6}
    for child in together(tmp_path / "whole", 2, log=tmp_path / "whole.log", **noisy):
        assert child.wait().error == ""
    children = together(folder, 2, log=log, lingers=(1, STEPS + 3), **noisy)
    wait_for(log, 1, STEPS + 3)
    children[1].kill(signal.SIGTERM)
    ends = [child.wait() for child in children]
    faults.inject("SIGTERM of one process of several")
    assert {end.kind for end in ends} == {"Interrupted"}
    assert len({end.error for end in ends}) == 1
    assert list(folder.glob("checkpoints/step-*"))
    for child in together(folder, 2, log=log, **noisy):
        assert child.wait().error == ""
    whole, resumed = Run.open(tmp_path / "whole"), Run.open(folder)
    for name, tensor in whole.model("last").state_dict().items():
        assert torch.equal(tensor, resumed.model("last").state_dict()[name]), name
    assert [row["loss"] for row in whole.metrics("epoch")] == [
        row["loss"] for row in resumed.metrics("epoch")
    ]


def test_the_timeout_must_be_a_time(tmp_path: Path, faults: Faults) -> None:
    from largemargin.errors import LargeMarginError

    for timeout in (0.0, -1.0, float("nan")):
        faults.attempt("a timeout that is none")
        with pytest.raises(LargeMarginError, match="timeout must be"):
            train(config(timeout=timeout), folder=tmp_path / "run", data=digits())
