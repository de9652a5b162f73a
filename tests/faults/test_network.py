"""Nothing is fetched from anywhere unless a download was asked for."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from app.cli.command import environment
from app.data.pictures import class_folders
from faults.counting import Faults

from largemargin.app.cli import main
from largemargin.app.data import DataConfig, load_data
from largemargin.errors import LargeMarginError

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

TRAIN = ["--epochs", "1", "--batch_size", "256", "--device", "cpu"]


class Asked(Exception):
    """Somebody tried to reach another machine."""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every attempt is an error and is counted, also where the error is caught."""
    attempts: list[str] = []

    def refuse(*args: Any, **options: Any) -> Any:
        attempts.append(repr(args[-1:]))
        raise Asked(f"a connection to {args[-1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    yield attempts
    assert attempts == []


def commands(folder: Path) -> list[list[str]]:
    """What people do with a run."""
    photos = class_folders(folder / "photos", ("0", "1"), 2, height=8, width=8)
    quick = ["--perturbations", "none", "--gaussian", "[]", "--attacks", "[]", "--draws", "1"]
    return [
        ["train", *TRAIN, "--out", str(folder / "runs")],
        ["predict", "RUN", str(photos), "--device", "cpu"],
        ["measure", "RUN", "--device", "cpu"],
        ["evaluate", "RUN", *quick, "--device", "cpu"],
        ["report", "RUN"],
        ["export", "RUN", "--format", "onnx"],
    ]


def test_training_and_predicting_reach_for_nothing(
    tmp_path: Path, faults: Faults, no_network: Any
) -> None:
    for words in commands(tmp_path)[:2]:
        run = [str(path) for path in tmp_path.glob("runs/*")]
        faults.attempt("a command without a network")
        assert main([run[0] if word == "RUN" else word for word in words]) == 0, words


CHILD = """
import json, os, socket, sys
attempts = []
def refuse(*args, **options):
    attempts.append(repr(args[-1:]))
    raise OSError("no network")
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, refuse)
from largemargin.app.cli import main
folder, commands = sys.argv[1], json.loads(sys.argv[2])
statuses = []
for words in commands:
    runs = [os.path.join(folder, "runs", name) for name in os.listdir(folder + "/runs")] \
        if os.path.isdir(folder + "/runs") else []
    statuses.append(main([runs[0] if word == "RUN" else word for word in words]))
print("RESULT " + json.dumps({"attempts": attempts, "statuses": statuses}))
"""


@pytest.mark.slow
def test_a_fresh_process_reaches_for_nothing_either(tmp_path: Path, faults: Faults) -> None:
    """Libraries that ask for news when they are imported would be found here."""
    pytest.importorskip("onnxruntime", reason="models are exported to ONNX")
    pytest.importorskip("plotly", reason="reports are drawn by plotly")
    words = commands(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), json.dumps(words)],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "RESULT " in done.stdout, done.stderr
    found = json.loads(done.stdout.partition("RESULT ")[2])
    faults.attempt("a command without a network", len(words))
    assert found == {"attempts": [], "statuses": [0] * len(words)}, done.stderr


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "mnist", "fashion_mnist"])
def test_data_that_is_not_there_is_not_fetched(
    tmp_path: Path, faults: Faults, no_network: Any, name: str
) -> None:
    if name in ("cifar10", "cifar100", "svhn"):
        pytest.importorskip("torchvision", reason="torchvision reads it")
    faults.attempt("data that is missing")
    with pytest.raises(LargeMarginError, match="set download: true"):
        load_data(DataConfig(name, str(tmp_path)))


def test_names_on_the_hub_are_not_fetched_without_download(
    tmp_path: Path, faults: Faults, no_network: Any
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    faults.attempt("data that is missing")
    with pytest.raises(LargeMarginError, match="from the hub, set download: true"):
        load_data(DataConfig("huggingface", "mnist"))


def test_an_attempt_is_noticed(monkeypatch: pytest.MonkeyPatch, no_network: Any) -> None:
    with pytest.raises(Asked):
        socket.create_connection(("127.0.0.1", 9))
    assert len(no_network) == 1
    no_network.clear()
