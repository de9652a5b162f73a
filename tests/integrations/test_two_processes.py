"""Trainers on two processes take the step of one process on the whole batch, loss included."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from integrations.ranks import WORLD, hugging_face_rank, one_process, timm_rank

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()),
        reason="torch was built without gloo",
    ),
]


def check(folder: Path, ignored: bool) -> None:
    wanted = one_process(ignored)
    assert "objective.terms.loss.factor" in wanted
    assert wanted["objective.terms.loss.factor"] != 0
    for rank in range(WORLD):
        got = torch.load(folder / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    mp.spawn(timm_rank, args=(str(tmp_path),), nprocs=WORLD, join=True)
    check(tmp_path, ignored=False)


def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    arguments: tuple[Any, ...] = (str(tmp_path), free_port())
    mp.spawn(hugging_face_rank, args=arguments, nprocs=WORLD, join=True)
    check(tmp_path, ignored=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
