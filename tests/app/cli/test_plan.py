"""``largemargin plan``: on how many GPUs a head fits."""

import json

import pytest
import torch

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")

from largemargin.app.cli import command as cli
from largemargin.heads import estimate_memory


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_more_gpus_until_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "--classes", "100000000", "--memory", "70", "--optimizer", "adamw")
    rows = [line.split() for line in out.splitlines() if line.endswith((" yes", " no"))]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32"]
    assert [row[-1] for row in rows] == ["no"] * 5 + ["yes"]
    assert "3,125,000 classes each" in out
    assert "Not counted: the backbone" in out
    assert "Most classes within 70 GiB on 32 GPUs" in out
    assert max(map(len, out.splitlines())) <= 120


def test_numbers_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--classes 5000000 --dim 256 --batch_size 128 --gpus 3 --dtype bfloat16 --optimizer sgd"
    options = "--sample_rate 0.2 --fused true --impl chunked --json true"
    (row,) = json.loads(planned(capsys, *words.split(), *options.split()))
    plan = estimate_memory(
        128,
        5_000_000,
        256,
        world_size=3,
        dtype=torch.bfloat16,
        optimizer="sgd",
        sample_rate=0.2,
        fused=True,
        impl="chunked",
    )
    assert row == plan.as_dict()
    words = words.replace("--batch_size", "--batch")  # its name once
    options = "--sample_rate 0.2 --fused true --impl chunked --json"
    assert json.loads(planned(capsys, *words.split(), *options.split())) == [row]


def test_it_says_when_no_number_of_gpus_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "--classes", "1000", "--memory", "0.001")
    assert "It fits on no number of GPUs" in out
    assert "Most classes within 0.001 GiB" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dim", "4"], "required: classes"),
        (["--classes", "1"], "at least 2 classes"),
        (["--classes", "9", "--gpus", "0"], "world_size must be"),
        (["--classes", "9", "--memory", "-1"], "--memory must be above 0"),
        (["--classes", "9", "--optimizer", "adma"], "adma was given, but one of 'sgd'"),
        (["--classes", "9", "--opimizer", "adam"], "Did you mean --optimizer?"),
    ],
)
def test_wrong_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    assert message in capsys.readouterr().err
