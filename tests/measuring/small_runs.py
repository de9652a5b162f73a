"""Runs on a few image files, trained in a moment."""

from pathlib import Path

from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.training import Run, RunConfig, train

NONE = ["--perturbations", "none", "--gaussian", "[]", "--uniform", "[]", "--attacks", "[]"]
"""Options of an evaluation that asks for the accuracy alone."""
CLASSES = ("ant", "bee", "cat")


def trained(data: DataConfig, out: Path) -> Run:
    config = RunConfig(
        data=data, model=ModelConfig("mlp"), epochs=1, batch_size=8, device="cpu", out=str(out)
    )
    return train(config, progress=False)
