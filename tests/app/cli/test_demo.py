"""The demo a newcomer runs first: every loss learns, the table is complete, runs repeat."""

import math
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="the command is built with jsonargparse")
pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn")

import torch
from app.cli.command import largemargin, runs_in

from largemargin.app.cli import command as cli
from largemargin.app.cli import demo
from largemargin.app.data import load_data
from largemargin.app.training import Run
from largemargin.app.training.objective import parse_objective

TITLES = ["softmax", "softmax + LMD", "LM-Softmax", "Kobayashi"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[demo.Row], Path]:
    folder = tmp_path_factory.mktemp("demo")
    base = demo.base_config(epochs=demo.QUICK_EPOCHS, batch_size=64, seed=0)
    with demo.one_thread():
        return demo.compare_losses(base, folder, load_data(base.data)), folder


def test_every_method_learns(quick: tuple[list[demo.Row], Path]) -> None:
    rows, _ = quick
    assert [row.title for row in rows] == TITLES
    for row in rows:
        assert row.accuracy > 0.9, row.title
        assert 0.5 < row.noisy < row.accuracy
        assert row.seconds > 0


def test_measurements_are_possible(quick: tuple[list[demo.Row], Path]) -> None:
    rows, _ = quick
    for row in rows:
        assert row.ceiling == pytest.approx(math.degrees(math.acos(-1 / 9)))
        assert 0 < row.class_margin <= row.ceiling + 1e-3
        assert -2 <= row.min_margin <= row.mean_margin <= 2
        assert row.relative_dispersion > 0
        assert row.dispersion > 0


def test_lm_softmax_opens_the_widest_class_margin(quick: tuple[list[demo.Row], Path]) -> None:
    rows, _ = quick
    assert max(rows, key=lambda row: row.class_margin).title == "LM-Softmax"


def test_methods_differ_in_the_loss_and_its_rate_alone(
    quick: tuple[list[demo.Row], Path],
) -> None:
    from dataclasses import replace

    rows, _ = quick
    configs = [Run.open(row.folder).config for row in rows]
    for method, config in zip(demo.METHODS, configs, strict=True):
        assert parse_objective(config.objective)[-1].name in method.objective
        assert method.rate in demo.RATES
        same = replace(config.optimizer, lr=configs[0].optimizer.lr)
        alike = replace(config, name="", objective=configs[0].objective, optimizer=same)
        assert alike == replace(configs[0], name="")


def test_same_seed_same_numbers(quick: tuple[list[demo.Row], Path], tmp_path: Path) -> None:
    from largemargin.app.training import train

    rows, _ = quick
    torch.rand(3)  # what the global generator did before must not matter
    method = demo.METHODS[1]
    config = Run.open(rows[1].folder).config
    with demo.one_thread():
        done = train(config, folder=tmp_path / "again", progress=False)
        again = demo.measured(method, done, load_data(config.data))
    kept = [each for each in demo.Row.__dataclass_fields__ if each not in ("seconds", "folder")]
    assert [getattr(again, name) for name in kept] == [getattr(rows[1], name) for name in kept]


def test_the_command_prints_the_table_and_where_the_runs_are(tmp_path: Path) -> None:
    out = largemargin("demo", "--epochs", "1", "--batch_size", "256", folder=tmp_path).stdout
    for text in (*TITLES, "noisy", "class margin", "96.4°", "relative dispersion", "one seed"):
        assert text in out
    lines = [line for line in out.splitlines() if line.startswith(tuple(TITLES)) and "°" in line]
    assert len(lines) == len(TITLES)
    (folder,) = runs_in(tmp_path, "demo")
    for name in ("cross_entropy", "cross_entropy-discriminative", "lm_softmax", "kobayashi"):
        assert Run.open(folder / name).finished
        assert f"runs/{folder.name}/{name}" in out
    assert "largemargin measure runs/" in out
    assert max(map(len, out.splitlines())) <= 110


def test_tuning_never_looks_at_test_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from largemargin.app.training import engine

    seen = []
    original = engine.train

    def watched(config: object, **options: object) -> object:
        seen.append(options["data"])
        return original(config, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "train", watched)
    monkeypatch.setattr(demo, "RATES", (0.1,))
    monkeypatch.setattr(demo, "TUNING_SEEDS", (0,))
    monkeypatch.setattr(demo, "METHODS", demo.METHODS[:1])
    assert cli.main(["demo", "--tune", "--epochs", "1", "--batch_size", "256"]) == 0
    assert [data.test for data in seen] == [None]  # type: ignore[attr-defined]
    assert "softmax        rate 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--epochs", "0"], ["--batch_size", "1"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *words]) == 2
    assert "at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "epochs"),
    [([], 20), (["--quick"], 6), (["--epochs", "2"], 2), (["--quick", "--epochs", "2"], 2)],
)
def test_epochs_that_are_given_are_run(
    words: list[str], epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(demo, "tune_rates", lambda base: asked.append(base.epochs))
    assert cli.main(["demo", "--tune", *words]) == 0
    assert asked == [epochs]
