"""The same seed gives the same bits, in this process and in another; another seed gives others."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from app.cli.command import environment, runs_in
from faults.counting import Faults
from faults.small_runs import config, digits, timeless

from largemargin.app.data import Augment, Batches, DataConfig, Samples
from largemargin.app.models import ModelConfig
from largemargin.app.training import NoiseConfig, ObjectiveConfig, Run, train
from largemargin.app.training.engine import RunPlace, failure_messages
from largemargin.errors import LargeMarginError
from largemargin.measuring import embed


def bits(run: Run) -> dict[str, str]:
    """Checksums of everything that was trained, the optimizer included."""
    return {
        path.relative_to(run.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.folder.rglob("*.safetensors"))
    }


OBJECTIVES = (
    "discriminative + center",
    pytest.param("cosface", marks=pytest.mark.slow),
    pytest.param("lm_softmax + 0.1*compactness", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_deterministic_runs_are_equal_to_the_last_bit(
    tmp_path: Path, faults: Faults, objective: str
) -> None:
    settings = config(
        deterministic=True,
        epochs=1,
        objective=ObjectiveConfig(objective),
        model=ModelConfig("mnist_cnn", dropout=0.3),
    )
    runs = [train(settings, folder=tmp_path / name, data=digits(), progress=False) for name in "ab"]
    faults.attempt("a deterministic run repeated")
    assert bits(runs[0]) == bits(runs[1])
    assert len(bits(runs[0])) == 4
    assert timeless(runs[0].metrics()) == timeless(runs[1].metrics())
    assert not torch.are_deterministic_algorithms_enabled()


def test_it_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(deterministic=True, epochs=1)
    run = train(settings, folder=tmp_path / "run", data=digits(), progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "It costs 0 to 4 % on a CPU; on a GPU some operations get slower" in said
    assert any("costs" in note for note in run.result["notes"])


def test_what_cannot_be_deterministic_is_refused_in_words(tmp_path: Path) -> None:
    place = RunPlace()
    place.folder = tmp_path
    with (
        pytest.raises(LargeMarginError, match=r"deterministic is true, but .*Use another network"),
        failure_messages(place, timeout=1.0),
    ):
        raise RuntimeError("max_pool3d does not have a deterministic implementation")


SEEDED: dict[str, dict[str, Any]] = {
    "order of the data": {"noise": NoiseConfig("none")},
    "augmentation": {"data": DataConfig(fraction=0.3, augment="crop_flip")},
    "noise": {"noise": NoiseConfig("noisy", level=0.2)},
    "dropout": {"model": ModelConfig("mlp", dropout=0.5, options={"hidden": (8,)})},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SEEDED)
def test_the_seed_covers(tmp_path: Path, faults: Faults, what: str) -> None:
    changes = {"epochs": 1, "noise": NoiseConfig("none"), **SEEDED[what]}
    augment = changes.get("data", DataConfig()).augment
    data = replace(digits(), augment=Augment("none" if augment == "auto" else augment))
    runs = []
    for name in "ab":
        torch.manual_seed(len(runs))  # what happened in the process before must not matter
        settings = config(seed=3, **changes)
        runs.append(train(settings, folder=tmp_path / name, data=data, progress=False))
    faults.attempt("a seed repeated")
    assert bits(runs[0]) == bits(runs[1])


def test_order_and_augmentation_depend_on_seed_and_epoch_alone(tmp_path: Path) -> None:
    samples = digits().train
    first, again, other = (
        Batches(samples, 32, seed=seed, augment=Augment("crop_flip")) for seed in (0, 0, 1)
    )
    for epoch in (0, 1):
        assert torch.equal(first.order(epoch), again.order(epoch))
        for mine, theirs in zip(first.plan(epoch).draws, again.plan(epoch).draws, strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(first.order(0), other.order(0))
    assert not torch.equal(first.order(0), first.order(1))
    assert not torch.equal(first.plan(0).draws.dx, other.plan(0).draws.dx)


@pytest.mark.slow
def test_a_projection_depends_on_its_seed_alone(faults: Faults) -> None:
    pytest.importorskip("sklearn", reason="t-SNE is scikit-learn's")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    samples: Samples = digits().train
    batches = Batches(samples.subset(range(60)), 60, shuffle=False)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + len(found))  # which must not matter
        found.append(embed(model, batches, noise=0.1, max_samples=40, seed=seed).layers)
    faults.attempt("a seed repeated")
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.slow
def test_another_process_gives_the_same_bits(tmp_path: Path, faults: Faults) -> None:
    words = ["train", "--epochs", "2", "--deterministic", "true", "--device", "cpu", "--ema", "0.9"]
    for hash_seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-m", "largemargin", *words, "--name", f"n{hash_seed}"],
            cwd=tmp_path,
            env={**environment(), "PYTHONHASHSEED": hash_seed},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    faults.attempt("a deterministic run repeated in another process")
    one, other = (Run.open(runs_in(tmp_path, f"n{seed}")[0]) for seed in "12")
    # The name of the run is in config.json, so only tensors can be equal.
    assert bits(one) == bits(other)
    assert os.path.getsize(one.folder / "result.json") > 0
