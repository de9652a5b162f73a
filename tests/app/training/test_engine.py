"""The engine: what a run leaves behind, and that resuming, repeating and averaging are exact."""

import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from largemargin.app.data import Data, DataConfig, load_data
from largemargin.app.models import ModelConfig
from largemargin.app.training import (
    Interrupted,
    NoiseConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Run,
    RunConfig,
    read_config,
    train,
    train_many,
)
from largemargin.app.training.engine import _explanation
from largemargin.app.training.files import remove_drafts
from largemargin.app.training.step import Step
from largemargin.dropin import MarginWarning
from largemargin.errors import LargeMarginError
from largemargin.measuring.accuracy import Correct

MLP = ModelConfig("mlp")
TIMES = {"seconds", "images_per_s"}


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(DataConfig(fraction=0.3))


def config(out: Path, **changes: Any) -> RunConfig:
    """Two epochs of a small fully connected network on a third of the digits."""
    settings = {"model": MLP, "epochs": 2, "batch_size": 32, "gradients_every": 4, **changes}
    return RunConfig(out=str(out), data=DataConfig(fraction=0.3), **settings)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def weights(run: Run, which: str = "last") -> dict[str, torch.Tensor]:
    return run.model(which).state_dict()


def assert_same(one: Run, other: Run) -> None:
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name
    assert timeless(one.metrics()) == timeless(other.metrics())
    assert timeless([one.result]) == timeless([other.result])


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path, data: Data) -> None:
    began = time.perf_counter()
    run = train(config(tmp_path, epochs=3), data=data, progress=False)
    took = time.perf_counter() - began
    assert {path.name for path in run.folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "data.json",
        "environment.json",
        "geometry.json",
        "lock",
        "metrics.jsonl",
        "result.json",
    }
    assert run.config == config(tmp_path, epochs=3) == read_config(run.folder / "config.yaml")
    assert run.classes == data.classes
    epochs = run.metrics("epoch")
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert min(row["seconds"] for row in epochs) > 0
    assert sum(row["seconds"] for row in epochs) <= took
    assert epochs[0]["lr"] > epochs[1]["lr"] > epochs[2]["lr"]
    assert run.metrics("gradients")[0]["norms"]["softmax"] > 0
    result = run.result
    assert result["validation"] == epochs[result["best_epoch"]]["validation"]
    geometry = run.geometry()
    assert geometry is not None
    assert result["geometry"]["class_margin_degrees"] == geometry.prototypes.class_margin
    # Images per epoch are counted as they were used.
    assert epochs[0]["images"] == len(data.train)


def test_the_saved_models_are_the_one_that_was_tested(tmp_path: Path, data: Data) -> None:
    """That is the averaged one; of a single epoch the last is the best."""
    settings = config(tmp_path, epochs=1, ema=0.9, gradients_every=0, measure=False)
    run = train(settings, data=data, progress=False)
    assert data.test is not None
    assert data.test.pixels is not None
    images = data.test.pixels.float() / (255 if data.test.pixels.dtype == torch.uint8 else 1)
    for which in ("best", "last"):
        model = run.model(which)
        assert not model.training
        right = model(images).argmax(1) == data.test.labels
        assert right.double().mean().item() == pytest.approx(run.result["test"]["accuracy"])
        assert torch.equal(Correct.from_dict(run.result["correct"]).right(), right)


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path, data: Data) -> None:
    dropout = ModelConfig("mnist_cnn", dropout=0.5)
    first, again, other = (
        train(config(tmp_path, seed=seed, epochs=1, model=dropout), data=data, progress=False)
        for seed in (0, 0, 1)
    )
    assert_same(first, again)
    name = next(iter(weights(first)))
    changed = [not torch.equal(weights(first)[n], weights(other)[n]) for n in weights(first)]
    assert any(changed), name


OBJECTIVES = {
    "softmax": ObjectiveConfig(),
    "lmd": ObjectiveConfig("discriminative", {"margin": 3.0}),
    "cosface": ObjectiveConfig("cosface + 0.5*sample_margin", {"cosface": {"margin": 0.1}}),
    "preset": ObjectiveConfig("lsoftmax", schedule="preset"),
    "mixture": ObjectiveConfig("center"),
}


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_equals_one_that_was_never_interrupted(
    tmp_path: Path, data: Data, name: str
) -> None:
    settings = config(
        tmp_path,
        epochs=3,
        objective=OBJECTIVES[name],
        ema=0.9 if name == "cosface" else None,
        optimizer=OptimizerConfig("adamw" if name == "lmd" else "sgd", lr=0.01, warmup_epochs=0.5),
    )
    whole = train(settings, data=data, progress=False, folder=tmp_path / "whole")

    def stop(row: dict[str, Any]) -> None:
        if row["epoch"] == 1:
            raise Stop

    with pytest.raises(Stop):
        train(settings, data=data, progress=False, folder=tmp_path / "cut", on_epoch=stop)
    assert not Run.open(tmp_path / "cut").finished
    # A crash may leave half a row and half a checkpoint.
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "gradients", "epoch": 2, "step": 99}\n{"kind": "epo')
    (tmp_path / "cut" / "checkpoints" / ".draft-0123abcd-epoch-0003").mkdir()
    # What was evaluated in between is of another model than the one to come.
    (tmp_path / "cut" / "evaluation.json").write_text("{}")
    resumed = train(settings, data=data, progress=False, folder=tmp_path / "cut", resume=True)
    assert_same(whole, resumed)
    assert not list((tmp_path / "cut" / "checkpoints").glob(".draft*"))
    assert [path.name for path in resumed.folder.glob("evaluation*")] == [
        "evaluation-before-resume.json"
    ]


def test_resuming_a_finished_run_returns_it(tmp_path: Path, data: Data) -> None:
    run = train(config(tmp_path, epochs=1), data=data, progress=False)
    before = (run.folder / "result.json").stat().st_mtime_ns
    (run.folder / "evaluation.json").write_text("{}")
    again = train(config(tmp_path, epochs=1), folder=run.folder, resume=True, progress=False)
    assert again.result == run.result
    assert (run.folder / "result.json").stat().st_mtime_ns == before
    assert (run.folder / "evaluation.json").is_file()


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "20260101-120000-run").mkdir()
    with pytest.raises(LargeMarginError, match="Pass a folder that `largemargin train` made"):
        Run.open(tmp_path)
    (tmp_path / "20260101-120000-run" / "config.yaml").touch()
    with pytest.raises(LargeMarginError, match=r"one of those in it, as .*20260101-120000-run\.$"):
        Run.open(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_the_command_to_continue(
    tmp_path: Path, data: Data, number: signal.Signals
) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["epoch"] == 0:
            signal.raise_signal(number)

    settings, before = config(tmp_path, epochs=3), signal.getsignal(number)
    with pytest.raises(Interrupted, match="largemargin train --resume"):
        train(settings, data=data, progress=False, folder=tmp_path / "a", on_epoch=interrupt)
    assert signal.getsignal(number) is before
    resumed = train(settings, data=data, progress=False, folder=tmp_path / "a", resume=True)
    assert_same(train(settings, data=data, progress=False, folder=tmp_path / "b"), resumed)


@pytest.mark.parametrize(
    ("noise", "objective"),
    [
        (NoiseConfig("noisy", level=0.1), ObjectiveConfig()),
        (NoiseConfig("clean_and_noisy", kind="uniform", level=0.1), ObjectiveConfig("lm_softmax")),
        (NoiseConfig("pair", level=0.1, clip=True), ObjectiveConfig("stability")),
        (NoiseConfig("pair", level=0.1), ObjectiveConfig("robust_discriminative", {"margin": 3.0})),
        (NoiseConfig("clean_and_noisy", joined=True), ObjectiveConfig("discriminative")),
        (NoiseConfig("pair", joined=True), ObjectiveConfig("robust_discriminative")),
        (NoiseConfig("pair", crop="own"), ObjectiveConfig("robust_discriminative")),
    ],
    ids=["noisy", "clean_and_noisy", "stability", "robust", "joined", "joined pair", "crops"],
)
def test_robust_training_learns(
    tmp_path: Path, data: Data, noise: NoiseConfig, objective: ObjectiveConfig
) -> None:
    settings = config(tmp_path, epochs=4, noise=noise, objective=objective)
    run = train(settings, data=data, progress=False)
    assert run.result["test"]["accuracy"] > 0.6


def test_noise_needs_an_objective_that_fits(tmp_path: Path, data: Data) -> None:
    for noise, name in (("pair", "cosface"), ("none", "stability"), ("noisy", "stability")):
        settings = config(tmp_path, noise=NoiseConfig(noise), objective=ObjectiveConfig(name))  # type: ignore[arg-type]
        with pytest.raises(LargeMarginError, match=r"noise\.use is " + noise):
            train(settings, data=data, progress=False)


def test_noise_in_levels_of_255_is_refused(tmp_path: Path, data: Data) -> None:
    settings = config(tmp_path, noise=NoiseConfig("noisy", level=16))
    with pytest.raises(LargeMarginError, match=r"noise\.level must be .* 16 was given\. Pixels"):
        train(settings, data=data, progress=False)


@pytest.mark.parametrize(("name", "value"), [("joined", True), ("crop", "own")])
def test_some_noise_needs_two_kinds_of_images(
    tmp_path: Path, data: Data, name: str, value: Any
) -> None:
    settings = config(tmp_path, noise=NoiseConfig("noisy", **{name: value}))
    message = rf"noise\.{name} .* noise\.use is noisy, which has no two kinds .* Leave {name} out"
    with pytest.raises(LargeMarginError, match=message):
        train(settings, data=data, progress=False)


def test_patience_ends_a_run_that_does_not_improve(tmp_path: Path, data: Data) -> None:
    frozen = OptimizerConfig(lr=1e-30, weight_decay=0.0)
    settings = config(tmp_path, epochs=9, patience=2, optimizer=frozen)
    run = train(settings, data=data, progress=False)
    assert run.result["epochs"] == 3
    assert run.result["best_epoch"] == 0


def test_a_run_that_is_not_finite_stops_and_keeps_its_last_good_checkpoint(
    tmp_path: Path, data: Data
) -> None:
    wild = OptimizerConfig(lr=1e30, clip_norm=None, schedule="constant")
    settings = config(tmp_path, optimizer=wild, max_bad_steps=3, epochs=4)
    with pytest.raises(
        LargeMarginError, match=r"steps in a row were not finite .*Lower optimizer\.lr"
    ):
        train(settings, data=data, progress=False, folder=tmp_path / "wild")
    bad = Run(tmp_path / "wild").metrics("bad_steps")
    assert bad
    assert bad[0]["skipped"] > 3


def test_a_bad_batch_is_skipped_and_counted(tmp_path: Path, data: Data) -> None:
    assert data.train.pixels is not None
    pixels = data.train.pixels.float().clone()
    pixels[7] = math.nan
    broken = replace(data, train=replace(data.train, pixels=pixels))
    run = train(config(tmp_path, model=ModelConfig("small_cnn")), data=broken, progress=False)
    assert [row["bad_steps"] for row in run.metrics("epoch")] == [1, 1]
    assert run.metrics("bad_steps")[0]["terms"] == {"softmax": 1}
    # Batch normalisation saw it, but its statistics were put back.
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, data: Data) -> None:
    def second(row: dict[str, Any]) -> None:
        train(config(tmp_path), data=data, progress=False, folder=tmp_path / "a", resume=True)

    with pytest.raises(LargeMarginError, match="another process is training"):
        train(config(tmp_path), data=data, progress=False, folder=tmp_path / "a", on_epoch=second)
    with pytest.raises(LargeMarginError, match="exists already and is not empty"):
        train(config(tmp_path), data=data, progress=False, folder=tmp_path / "a")


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path, data: Data) -> None:
    run = train(config(tmp_path, epochs=1), data=data, progress=False)
    file = next(run.folder.glob("checkpoints/best-*/model/model.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\0\1\2\3")
    with pytest.raises(LargeMarginError, match=r"damaged: model/model\.safetensors is not what"):
        run.model()
    file.unlink()
    with pytest.raises(LargeMarginError, match="missing"):
        run.model()


def test_a_bar_is_shown_unless_it_is_not_wanted(
    tmp_path: Path, data: Data, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(tmp_path, epochs=1), data=data, progress=False)
    assert "".join(capsys.readouterr()) == ""
    train(config(tmp_path, epochs=1), data=data)
    assert "step" in "".join(capsys.readouterr())


def test_drafts_that_cannot_be_deleted_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / ".draft-0123abcd-epoch-0009"
    (draft / "inner").mkdir(parents=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", refuse)
        remove_drafts(tmp_path)
    assert draft.exists()
    remove_drafts(tmp_path)
    assert not draft.exists()


@pytest.mark.parametrize(("processes", "about_another"), [(1, False), (2, True)])
def test_other_processes_are_blamed_only_where_there_are_some(
    processes: int, about_another: bool
) -> None:
    said = _explanation(RuntimeError("Connection closed by peer"), processes, 60)
    assert (said is not None) == about_another


def test_many_runs_equal_single_ones(tmp_path: Path, data: Data) -> None:
    settings = [config(tmp_path, seed=seed, name=f"seed{seed}") for seed in (0, 1)]
    together = train_many(settings, data=data, progress=False)
    for each, run in zip(settings, together, strict=True):
        assert_same(train(each, data=data, progress=False), run)


def test_averaged_weights_are_the_ones_evaluated(tmp_path: Path, data: Data) -> None:
    plain = train(config(tmp_path, epochs=1), data=data, progress=False)
    averaged = train(config(tmp_path, epochs=1, ema=0.0), data=data, progress=False)
    # A decay of 0 follows the model at once.
    assert_same_weights = weights(plain)
    for name, tensor in weights(averaged).items():
        torch.testing.assert_close(tensor, assert_same_weights[name])
    slow = train(config(tmp_path, epochs=1, ema=0.999), data=data, progress=False)
    assert slow.result["test"]["accuracy"] < plain.result["test"]["accuracy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be"),
        ({"patience": 0}, "patience must be"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda"),
        ({"graph": "on"}, "graph is on, but there is no CUDA device"),
        ({"objective": ObjectiveConfig("cosfac")}, "Closest: cosface"),
        ({"objective": ObjectiveConfig("cosface", {"margn": 1})}, "has no argument 'margn'"),
        ({"optimizer": OptimizerConfig(schedule="steps")}, "milestones is empty"),
        ({"trackers": ("nonsense",)}, "accelerate refuses the trackers"),
    ],
)
def test_bad_settings_are_explained(
    tmp_path: Path, data: Data, changes: dict[str, Any], message: str
) -> None:
    if changes.get("graph") and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(LargeMarginError, match=message):
        train(config(tmp_path, **changes), data=data, progress=False)
    assert not list(tmp_path.iterdir())  # nothing is left of a run that never began


def test_a_network_without_gradients_is_told(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_head_alone(self: Step, images: Any, noisy: Any, labels: Any) -> Any:
        return self.criterion.head.weight.square().sum() + 0 * self.model(images).sum(), {}

    monkeypatch.setattr(Step, "plain_losses", of_the_head_alone)
    with pytest.warns(MarginWarning, match="any of the 4 parameters below the head") as told:
        train(config(tmp_path, gradients_every=0), data=data, progress=False)
    assert len(told) == 1
