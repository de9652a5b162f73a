"""Geometry after every epoch: the numbers of ``measure``, and training that does not notice."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import largemargin as lm
from largemargin.app.data import Batches, Data, DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import ObjectiveConfig, Run, RunConfig, train
from largemargin.app.training.run_scores import PAIRED, spread, summary
from largemargin.errors import LargeMarginError
from largemargin.heads.head_spec import HeadView


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(DataConfig(fraction=0.3))


def config(**changes: Any) -> RunConfig:
    settings = {"model": ModelConfig("mlp"), "epochs": 2, "batch_size": 64, "gradients_every": 0}
    return RunConfig(**{**settings, "device": "cpu", "measure": False, **changes})


def assert_same_weights(one: Run, other: Run) -> None:
    theirs = other.model("last").state_dict()
    for name, tensor in one.model("last").state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("objective", ["cross_entropy", "cosface"])
def test_the_last_row_is_what_measure_finds(tmp_path: Path, data: Data, objective: str) -> None:
    settings = config(objective=ObjectiveConfig(objective))
    run = train(settings, data=data, folder=tmp_path / "run", progress=False)
    first, last = (row["geometry"] for row in run.metrics("epoch"))
    assert first["mean_cosine_margin"] < last["mean_cosine_margin"]
    assert data.validation is not None
    assert (last["split"], last["samples"]) == ("validation", len(data.validation))
    batches = Batches(data.validation, 50, shuffle=False)
    found = lm.measure(run.model("last"), batches, pairwise=True)
    assert found.compactness is not None
    expected = {
        "class_margin_degrees": found.prototypes.class_margin,
        "mean_cosine_margin": found.margins["cosine"].overall.mean,
        "min_cosine_margin": found.margins["cosine"].overall.minimum,
        "largest_dispersion": found.compactness.largest_dispersion,
        "magnitude_ratio": found.prototypes.magnitude_ratio,
        "softmax_bias": found.softmax_bias.mean,
    }
    assert {key: last[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_training_does_not_notice(tmp_path: Path, data: Data) -> None:
    changes = {"model": ModelConfig("mnist_cnn", dropout=0.5), "epochs": 2, "ema": 0.9}
    with_rows, without = (
        train(
            config(geometry_samples=count, **changes),
            data=data,
            folder=tmp_path / str(count),
            progress=False,
        )
        for count in (40, 0)
    )
    assert_same_weights(with_rows, without)
    assert [row["geometry"] for row in without.metrics("epoch")] == [None, None]
    assert all(row["geometry"]["samples"] == 40 for row in with_rows.metrics("epoch"))


def test_training_images_stand_in_for_validation_images(tmp_path: Path, data: Data) -> None:
    alone = replace(data, validation=None)
    run = train(
        config(epochs=1, geometry_samples=30), data=alone, folder=tmp_path / "run", progress=False
    )
    (row,) = run.metrics("epoch")
    assert (row["geometry"]["split"], row["geometry"]["samples"]) == ("train", 30)


def test_a_negative_number_of_samples(tmp_path: Path, data: Data) -> None:
    with pytest.raises(LargeMarginError, match="geometry_samples"):
        train(config(geometry_samples=-1), data=data, folder=tmp_path / "run", progress=False)


def test_samples_are_the_same_number_of_each_class() -> None:
    labels = torch.cat([torch.zeros(900), torch.ones(90), torch.full((10,), 2)]).long()
    chosen = spread(labels, 60)
    assert torch.equal(chosen, spread(labels, 60))
    assert torch.equal(chosen, chosen.unique())
    assert torch.bincount(labels[chosen]).tolist() == [25, 25, 10]
    assert len(spread(labels[:7], 60)) == 7


def test_of_many_classes_some_are_looked_at_with_four_samples_each() -> None:
    labels = torch.arange(5000) % 1000
    counts = torch.bincount(labels[spread(labels, 40)])
    assert len(counts[counts > 0]) == 10
    assert set(counts[counts > 0].tolist()) == {4}


def test_what_cannot_be_known_is_nothing() -> None:
    features, labels = torch.randn(4, 3), torch.arange(4)
    found = summary(features, labels, HeadView(torch.randn(4, 3)))
    assert found["largest_dispersion"] is None
    assert found["class_margin_degrees"] is not None
    broken = summary(features, labels, HeadView(torch.full((4, 3), math.nan)))
    assert set(broken.values()) == {None}
    assert list(broken) == list(found)


def test_very_many_classes_are_not_compared_with_each_other() -> None:
    classes = math.isqrt(PAIRED // 4) + 1
    labels = torch.tensor([0, 0, classes - 1])
    found = summary(torch.randn(3, 4), labels, HeadView(torch.randn(classes, 4)))
    assert found["class_margin_degrees"] is None
    assert found["softmax_bias"] is not None
    assert 0 < found["softmax_bias"] < math.log(classes - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"graph": "on"}, {"compile": True, "precision": "bf16"}])
def test_graphs_and_compiled_steps_do_not_notice(
    tmp_path: Path, data: Data, changes: dict[str, Any]
) -> None:
    runs = [
        train(
            config(device="cuda", epochs=3, geometry_samples=count, **changes),
            data=data,
            folder=tmp_path / str(count),
            progress=False,
        )
        for count in (40, 0)
    ]
    theirs = runs[1].model("last").state_dict()
    for name, tensor in runs[0].model("last").state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    rows = [row["geometry"] for row in runs[0].metrics("epoch")]
    assert all(row["magnitude_ratio"] >= 1 for row in rows)
