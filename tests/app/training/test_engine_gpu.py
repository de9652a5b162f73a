"""The CUDA-graph path of the engine gives the numbers of the plain path."""

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from largemargin.app.data import Augment, Data, DataConfig, Samples
from largemargin.app.models import ModelConfig
from largemargin.app.training import (
    NoiseConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Run,
    RunConfig,
    train,
    train_many,
)
from largemargin.errors import LargeMarginError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def split(count: int, seed: int) -> Samples:
    """Four classes of 16 x 16 images: a bright band in noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 120, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % 4
    for c in range(4):
        pixels[labels == c, :, 4 * c : 4 * c + 4] += 60
    return Samples(labels, tuple(str(i) for i in range(count)), pixels)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding grows over steps, so it has to begin small: no TF32, the same algorithms."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(scope="module")
def data() -> Data:
    return Data(
        name="bands",
        classes=("a", "b", "c", "d"),
        channels=3,
        size=(16, 16),
        mean=(0.3, 0.3, 0.3),
        std=(0.2, 0.2, 0.2),
        licence="none",
        train=split(530, 0),
        validation=split(100, 1),
        test=split(100, 2),
        augment=Augment("crop_flip", padding=1),
        record={},
    )


def config(out: Path, **changes: Any) -> RunConfig:
    settings = {
        "model": ModelConfig("small_cnn"),
        "optimizer": OptimizerConfig(lr=0.02),
        "epochs": 3,
        "batch_size": 64,
        "gradients_every": 5,
        "device": "cuda",
        **changes,
    }
    return RunConfig(out=str(out), data=DataConfig(), **settings)


def assert_close(one: Run, other: Run, tolerance: float = 2e-3) -> None:
    for first, second in zip(one.metrics("epoch"), other.metrics("epoch"), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=tolerance)
        assert first["gradient_norm"] == pytest.approx(second["gradient_norm"], rel=10 * tolerance)
        assert first["images"] == second["images"]
    first, second = one.model("last").state_dict(), other.model("last").state_dict()
    for name, tensor in first.items():
        distance = (tensor - second[name]).double().norm()
        assert distance <= 0.01 * tensor.double().norm() + 1e-3, name


CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "lmd": {"objective": ObjectiveConfig("discriminative", {"margin": 3.0})},
    "cosface": {"objective": ObjectiveConfig("cosface + zero_centroid"), "ema": 0.9},
    "adamw": {"optimizer": OptimizerConfig("adamw", lr=0.002, clip_norm=None)},
    "dropout": {"model": ModelConfig("mnist_cnn", dropout=0.5)},
    "noisy": {"noise": NoiseConfig("noisy", level=0.1)},
    "both": {"noise": NoiseConfig("clean_and_noisy", level=0.1)},
    "joined": {"noise": NoiseConfig("clean_and_noisy", level=0.1, joined=True)},
    "robust": {
        "noise": NoiseConfig("pair", level=0.1),
        "objective": ObjectiveConfig("robust_discriminative", {"margin": 3.0}),
    },
    "crops": {"noise": NoiseConfig("clean_and_noisy", level=0.1, crop="own")},
    "joined pair": {
        "noise": NoiseConfig("pair", level=0.1, joined=True),
        "objective": ObjectiveConfig("robust_discriminative", {"margin": 3.0}),
    },
    "inputs": {"objective": ObjectiveConfig("margin_distribution")},
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_gives_the_numbers_of_the_plain_path(
    tmp_path: Path, data: Data, name: str
) -> None:
    settings = config(tmp_path, **CASES[name])
    graph = train(replace(settings, graph="on"), data=data, progress=False)
    plain = train(replace(settings, graph="off"), data=data, progress=False)
    assert_close(graph, plain)


@pytest.mark.parametrize("name", ["softmax", "lmd", "dropout"])
def test_compiled_graphs_too(tmp_path: Path, data: Data, name: str) -> None:
    settings = config(tmp_path, compile=True, **CASES[name])
    graph = train(replace(settings, graph="on"), data=data, progress=False)
    plain = train(replace(settings, graph="off"), data=data, progress=False)
    assert_close(graph, plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["softmax", "lmd", "cosface", "noisy", "both", "robust"])
def test_compiled_steps_learn_what_plain_ones_learn(
    tmp_path: Path, data: Data, name: str, precision: str
) -> None:
    settings = config(tmp_path, precision=precision, **CASES[name])
    plain = train(settings, data=data, progress=False).metrics("epoch")
    compiled = train(replace(settings, compile=True), data=data, progress=False).metrics("epoch")
    assert plain[-1]["loss"] < 0.95 * plain[0]["loss"]
    for want, got in zip(plain, compiled, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=0.05)
        assert got["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=0.3)


def test_runs_side_by_side_get_the_numbers_they_get_alone(tmp_path: Path, data: Data) -> None:
    settings = [
        config(tmp_path, seed=0),
        config(tmp_path, seed=1, **CASES["dropout"]),
        config(tmp_path, seed=2, **CASES["noisy"]),
        config(tmp_path, seed=3, **CASES["lmd"]),
    ]
    together = train_many(settings, data=data, side_by_side=3, progress=False)
    for each, run in zip(settings, together, strict=True):
        assert_close(train(each, data=data, progress=False), run)


def test_garbage_of_another_run_does_not_end_a_capture(tmp_path: Path, data: Data) -> None:
    """A captured step that is freed while another is captured ends that with a CUDA error."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(3, device="cuda").add_(1)
    ring: list[Any] = [graph]
    ring.append(ring)
    gc.freeze()  # it is found by a whole collection only, as what outlives a run is
    gc.unfreeze()
    del graph, ring
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        run = train(config(tmp_path, graph="on"), data=data, progress=False)
    finally:
        gc.set_threshold(*threshold)
    assert len(run.metrics("epoch")) == 3


def test_a_bad_batch_in_a_graph_is_skipped_and_counted(tmp_path: Path, data: Data) -> None:
    assert data.train.pixels is not None
    pixels = data.train.pixels.float() / 255
    pixels[7] = math.nan
    broken = replace(data, train=replace(data.train, pixels=pixels), augment=Augment("none"))
    run = train(config(tmp_path, graph="on"), data=broken, progress=False)
    assert [row["bad_steps"] for row in run.metrics("epoch")] == [1, 1, 1]
    assert run.metrics("bad_steps")[0]["terms"] == {"softmax": 1}
    assert all(tensor.isfinite().all() for tensor in run.model("last").state_dict().values())


def test_a_resumed_graph_run_goes_on_where_it_stopped(tmp_path: Path, data: Data) -> None:
    settings = config(tmp_path, graph="on", **CASES["lmd"])

    def stop(row: dict[str, Any]) -> None:
        if row["epoch"] == 1:
            raise InterruptedError

    with pytest.raises(LargeMarginError, match="continue: largemargin train --resume"):
        train(settings, data=data, progress=False, folder=tmp_path / "cut", on_epoch=stop)
    resumed = train(settings, data=data, progress=False, folder=tmp_path / "cut", resume=True)
    assert_close(train(settings, data=data, progress=False), resumed)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(tmp_path: Path, data: Data, precision: str) -> None:
    settings = config(tmp_path, precision=precision, epochs=6)
    run = train(settings, data=data, progress=False)
    assert run.result["test"]["accuracy"] > 0.8
