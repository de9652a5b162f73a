"""Which epoch is the best one, and what an averaged model is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import OptimizerConfig, Run, RunConfig, train
from largemargin.app.training.step import AveragedModel
from largemargin.measuring import accuracy_of

# A rate this high makes the validation results go up and down.
WILD = OptimizerConfig(lr=1.0, schedule="constant", clip_norm=1.0)


def run(out: Path, **changes: Any) -> Run:
    config = RunConfig(
        data=DataConfig(fraction=0.3),
        model=ModelConfig("mlp"),
        optimizer=WILD,
        epochs=8,
        batch_size=32,
        gradients_every=0,
        device="cpu",
        measure=False,
        out=str(out),
        **changes,
    )
    return train(config, progress=False)


@pytest.mark.parametrize(
    ("select", "sign"), [("accuracy", 1), ("balanced_accuracy", 1), ("loss", -1)]
)
def test_the_best_epoch_is_the_best(tmp_path: Path, select: Any, sign: int) -> None:
    done = run(tmp_path, select=select)
    scores = [sign * row["validation"][select] for row in done.metrics("epoch")]
    assert len(set(scores)) > 3
    assert done.result["best_epoch"] == scores.index(max(scores))
    assert done.result["validation"][select] == sign * max(scores)


def test_the_best_model_is_the_one_of_that_epoch(tmp_path: Path) -> None:
    done = run(tmp_path)
    validation = load_data(done.config.data).validation
    accuracies = [row["validation"]["accuracy"] for row in done.metrics("epoch")]
    batch = [
        (torch.stack([validation.image(i) for i in range(len(validation))]), validation.labels)
    ]
    assert accuracy_of(done.model("best"), batch).accuracy == pytest.approx(max(accuracies))
    assert accuracy_of(done.model("last"), batch).accuracy == pytest.approx(accuracies[-1])


def test_an_average_follows_slowly() -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    average = AveragedModel(model, 0.75)
    nn.init.constant_(model.weight, 5.0)
    average.update()
    assert average.model.weight.item() == 2.0  # a quarter of the way
    average.update()
    assert average.model.weight.item() == 2.75
    assert not average.model.weight.requires_grad
