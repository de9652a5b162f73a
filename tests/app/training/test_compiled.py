"""``compile: true`` gives the numbers of a run without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import NoiseConfig, ObjectiveConfig, OptimizerConfig, RunConfig, train

CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "cosface": {"objective": ObjectiveConfig("cosface", {"scale": 8.0})},
    "two terms": {"objective": ObjectiveConfig("cosface + 0.5*sample_margin", {})},
    "lmd": {"objective": ObjectiveConfig("discriminative", {"margin": 3.0})},
    "clean and noisy": {"noise": NoiseConfig("clean_and_noisy", level=0.1)},
    "joined": {"noise": NoiseConfig("clean_and_noisy", level=0.1, joined=True)},
    "robust": {
        "noise": NoiseConfig("pair", level=0.1),
        "objective": ObjectiveConfig("robust_discriminative", {"margin": 3.0}),
    },
}


@pytest.mark.needs_cxx
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_runs_are_plain_runs(tmp_path: Path, name: str) -> None:
    settings = RunConfig(
        data=DataConfig("digits"),
        model=ModelConfig("mlp"),
        optimizer=OptimizerConfig(lr=0.05),
        epochs=2,
        batch_size=128,
        gradients_every=0,
        geometry_samples=0,
        device="cpu",
        **CASES[name],
    )
    data = load_data(settings.data)
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        run = train(
            replace(settings, compile=compiled),
            folder=tmp_path / str(compiled),
            data=data,
            progress=False,
        )
        rows = run.metrics("epoch")
        found.append((rows, run.model("last").state_dict()))
    (plain, want), (compiled_rows, got) = found
    assert plain[1]["loss"] < 0.9 * plain[0]["loss"]
    for row, other in zip(plain, compiled_rows, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-3)
        assert other["gradient_norm"] == pytest.approx(row["gradient_norm"], rel=1e-2)
    for each, tensor in want.items():
        torch.testing.assert_close(got[each], tensor, rtol=1e-2, atol=1e-3)
