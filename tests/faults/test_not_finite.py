"""Steps that are not finite: skipped, counted, named, and the end of a run after too many."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.counting import Faults
from faults.small_runs import STEPS, config, digits

import largemargin as lm
from largemargin.app.data import Data
from largemargin.app.models import ModelConfig
from largemargin.app.training import NoiseConfig, ObjectiveConfig, OptimizerConfig, Run, train
from largemargin.app.training.journal import EpochTotals
from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES

QUIET: dict[str, Any] = {"noise": NoiseConfig("none"), "ema": None, "gradients_every": 0}


def own_digits() -> Data:
    """Digits as floats, whose images a test may break."""
    data = digits()
    assert data.train.pixels is not None
    pixels = data.train.pixels.float().clone() / 255
    return replace(data, train=replace(data.train, pixels=pixels))


def pixels_of(data: Data) -> torch.Tensor:
    assert data.train.pixels is not None
    return data.train.pixels


def test_the_term_and_the_samples_are_named(tmp_path: Path, faults: Faults) -> None:
    """And no state keeps what a bad step brought: as many steps are bad as hold such an image."""
    data = own_digits()
    pixels_of(data)[5], pixels_of(data)[40] = math.nan, math.inf
    faults.inject("an image that is not finite", 2)
    run = train(config(epochs=2, **QUIET), folder=tmp_path / "run", data=data, progress=False)
    rows = run.metrics("bad_steps")
    assert [row["epoch"] for row in rows] == [0, 1]
    broken = {str(data.train.ids[5]), str(data.train.ids[40])}
    for row in rows:
        assert 1 <= row["skipped"] <= 2
        assert set(row["samples"]) <= broken
        assert row["samples"]
        assert {"softmax", "center", "discriminative.compact"} <= set(row["terms"])
    assert all(tensor.isfinite().all() for tensor in run.model("last").state_dict().values())


def test_an_average_does_not_keep_what_a_bad_step_brought(tmp_path: Path, faults: Faults) -> None:
    """Its statistics of batches are copies of the model's, and follow them back."""
    data = own_digits()
    pixels_of(data)[5] = math.nan
    faults.inject("an image that is not finite")
    settings = config(epochs=1, **{**QUIET, "ema": 0.9, "model": ModelConfig("small_cnn")})
    run = train(settings, folder=tmp_path / "run", data=data, progress=False)
    assert run.metrics("epoch")[0]["bad_steps"] == 1
    assert run.metrics("epoch")[0]["validation"]["loss"] is not None
    assert run.failure is None
    assert all(tensor.isfinite().all() for tensor in run.model("last").state_dict().values())


def test_a_step_of_sound_images_names_all_of_them(tmp_path: Path, faults: Faults) -> None:
    """The numbers grew too large, no image is to blame: those of the step are written down."""
    wild = OptimizerConfig(lr=1e30, clip_norm=None, schedule="constant", warmup_epochs=0)
    settings = config(epochs=1, optimizer=wild, max_bad_steps=3, **QUIET)
    faults.inject("a learning rate of 1e30")
    with pytest.raises(LargeMarginError, match="steps in a row were not finite") as caught:
        train(settings, folder=tmp_path / "run", data=digits(), progress=False)
    assert "The last good checkpoint is not there: no epoch was finished" in str(caught.value)
    (row,) = Run(tmp_path / "run").metrics("bad_steps")
    order = [str(each) for each in digits().train.ids]
    assert len(row["samples"]) == len(set(row["samples"])) == len(digits().train) % 32
    assert set(row["samples"]) <= set(order)
    assert row["in_a_row"] > 3


def test_after_too_many_the_last_good_checkpoint_is_there(tmp_path: Path, faults: Faults) -> None:
    """The data go bad in the third epoch; with sound ones the run goes on as if nothing was."""
    gentle = OptimizerConfig(lr=0.01)  # at more all units of this network die
    settings = config(max_bad_steps=STEPS - 1, optimizer=gentle, **QUIET)
    data, calm = own_digits(), own_digits()

    def poison(row: dict[str, Any]) -> None:
        if row["epoch"] == 1:
            pixels_of(data).fill_(math.nan)

    faults.inject("a data set that turns to NaN during a run")
    folder = tmp_path / "run"
    with pytest.raises(LargeMarginError, match=rf"{STEPS} steps in a row were not finite") as told:
        train(settings, folder=folder, data=data, progress=False, on_epoch=poison)
    stopped = Run(folder)
    assert f"The last good checkpoint is {folder / 'checkpoints' / 'epoch-0002'}" in str(told.value)
    assert stopped.metrics("bad_steps")[-1]["in_a_row"] == STEPS
    assert all(tensor.isfinite().all() for tensor in stopped.model("last").state_dict().values())
    resumed = train(settings, folder=folder, resume=True, data=calm, progress=False)
    whole = train(settings, folder=tmp_path / "whole", data=calm, progress=False)
    for name, tensor in whole.model("last").state_dict().items():
        assert torch.equal(tensor, resumed.model("last").state_dict()[name]), name


def test_skipped_steps_within_the_limit_do_not_stop_the_run(tmp_path: Path, faults: Faults) -> None:
    data = own_digits()
    pixels_of(data).fill_(math.nan)
    faults.inject("an epoch without a finite step")
    settings = config(epochs=1, max_bad_steps=STEPS, objective=ObjectiveConfig("cosface"), **QUIET)
    run = train(settings, folder=tmp_path / "run", data=data, progress=False)
    assert run.metrics("epoch")[0]["bad_steps"] == STEPS
    assert run.metrics("epoch")[0]["loss"] is None


@pytest.mark.parametrize("on_host", [True, False], ids=["numbers", "tensors"])
def test_sums_remember_the_last_bad_step(on_host: bool) -> None:
    """As Python numbers on the CPU, in one tensor on an accelerator; also after a pause."""
    sums = EpochTotals(torch.device("cpu"))
    sums.on_host = on_host
    outcomes = [True, False, False, True, True]

    def add(good: bool) -> None:
        value = torch.tensor(1.0 if good else math.nan)
        sums.add(value, {"a": torch.tensor(2.0), "b": value}, torch.tensor(1.0), value.isfinite())

    for good in outcomes:
        add(good)
    seen = sums.read()
    assert (seen.steps, seen.bad, seen.bad_in_a_row, seen.last_bad) == (3, 2, 2, 2)
    assert seen.bad_terms == {"b": 2}
    state = sums.state()
    sums.clear()
    add(True)
    assert sums.read().last_bad == -1
    sums.restore(state)
    add(False)
    assert (sums.read().last_bad, sums.read().bad_terms) == (5, {"b": 3})


@pytest.mark.parametrize("on_host", [True, False], ids=["numbers", "tensors"])
def test_bad_steps_in_a_row_are_counted_across_epochs(on_host: bool) -> None:
    """The row goes on; how long one was in the epoch before is no matter of the next."""
    sums = EpochTotals(torch.device("cpu"))
    sums.on_host = on_host

    def add(*outcomes: bool) -> tuple[int, int]:
        for good in outcomes:
            value = torch.tensor(1.0 if good else math.nan)
            sums.add(value, {"a": value}, torch.tensor(1.0), value.isfinite())
        return sums.read().bad, sums.read().bad_in_a_row

    assert add(False, False, True, False) == (3, 2)
    sums.clear()
    assert add(False) == (1, 2)
    assert add(True, False) == (2, 2)
    sums.clear()
    assert add(True) == (0, 0)
    assert add(False) == (1, 1)


@pytest.mark.parametrize("name", ["center", "compactness", "discriminative"])
def test_state_does_not_keep_what_was_not_finite(name: str) -> None:
    """Its class stays where it was; the others move."""
    arguments = () if name == "compactness" else (3, 2)
    options = {"bank": lm.CentroidBank(3, 2)} if name == "compactness" else {}
    loss = LOSSES[name](*arguments, **options)
    features, labels = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 2, 2])
    given = {"features": features, "prototypes": torch.eye(3, 2), "labels": labels}
    loss(*(given[need] for need in loss.needs))
    (key,) = [key for key in loss.state_dict() if key.endswith(("centers", "centroids"))]
    before = loss.state_dict()[key].clone()
    features[0, 1] = math.inf
    features[2:] += 1
    loss(*(given[need] for need in loss.needs))
    after = loss.state_dict()[key]
    assert torch.equal(after[0], before[0])
    assert (after[1:] != before[1:]).all()
