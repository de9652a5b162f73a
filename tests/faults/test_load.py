"""Large jobs: a million features, 50,000 files, 200,000 rows of a table, a thousand classes."""

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app.report.reading import Page
from faults.counting import Faults, watched
from held_bytes import held
from PIL import Image
from torch import Tensor, nn

from largemargin.app.data import DataConfig
from largemargin.app.models import ModelConfig
from largemargin.app.predict import predict
from largemargin.app.report.page import report
from largemargin.app.report.sections.margins import SHOWN
from largemargin.app.training import ObjectiveConfig, RunConfig, train
from largemargin.integrations.scikit_learn import LargeMarginClassifier
from largemargin.measuring import EvaluationConfig, evaluate, measure

MIB = 2**20
SLOW = pytest.mark.slow


class Features:
    """Batches of features made when they are asked for: around one of the axes for each class."""

    def __init__(self, count: int, dim: int, classes: int, size: int = 1024) -> None:
        self.count, self.dim, self.classes, self.size = count, dim, classes, size

    def __len__(self) -> int:
        return math.ceil(self.count / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        for start in range(0, self.count, self.size):
            rows = min(self.size, self.count - start)
            labels = torch.randint(self.classes, (rows,), generator=draw)
            features = 0.05 * torch.randn(rows, self.dim, generator=draw)
            features[torch.arange(rows), labels] += 1
            yield features, labels


@pytest.mark.parametrize("count", [40_000, pytest.param(1_000_000, marks=SLOW)])
def test_measure_holds_a_batch_and_a_few_numbers_per_sample(faults: Faults, count: int) -> None:
    """512 float32 features of a sample are 2 KiB; what is kept of it may take an eighth.

    The rest is for a batch and for the 4950 pairs of 100 classes, 19 MiB in double precision.
    """
    dim, classes = 512, 100
    model = nn.Linear(dim, classes, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(classes, dim))
    with watched() as took:
        found = measure(model, Features(count, dim, classes))
    faults.attempt("512-d features measured", count)
    faults.measure(f"measure: {count:,} features of 512 numbers, {classes} classes", took)
    assert found.samples == count
    assert 0.8 < found.margins["raw"].overall.mean < 1.0
    few, many = 4_000, min(count, 100_000)
    small, large = (
        held(lambda n=n: measure(model, Features(n, dim, classes))) for n in (few, many)
    )
    assert large - small < (many - few) * dim * 4 // 8, f"{(large - small) / MIB:.0f} MiB"
    assert small < 96 * MIB + few * dim * 4, f"{small / MIB:.0f} MiB"


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=SLOW)])
def test_predict_on_many_files_shows_how_far_it_is(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Every file has its row, in the order of names; one that is broken says so."""
    shades = [png_of(shade) for shade in (0, 255)]
    for number in range(count):
        (tmp_path / f"{number:05}.png").write_bytes(shades[number % 2])
    (tmp_path / "00007.png").write_bytes(shades[1][:30])
    with watched() as took:
        found = predict(by_brightness(), [tmp_path], size=(8, 8), channels=1, progress=True)
    faults.attempt("files predicted", count)
    faults.inject("a truncated file among many")
    faults.measure(f"predict: {count:,} files", took)
    assert len(found) == count
    assert found.failed == 1
    rows = list(found)
    assert [Path(row.image).name for row in rows] == [f"{number:05}.png" for number in range(count)]
    wrong = [n for n, row in enumerate(rows) if row.label != str(n % 2)]
    assert wrong == [7]
    shown = capsys.readouterr().err
    assert "predict:" in shown
    assert f"0/{math.ceil(count / 64)}" in shown


def png_of(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), shade).save(file, "png")
    return file.getvalue()


def by_brightness() -> nn.Module:
    """Class 1 for bright images."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 64))
        model[1].bias.copy_(torch.tensor([32.0, -32.0]))
    return model


@pytest.mark.parametrize("count", [4_000, pytest.param(200_000, marks=SLOW)])
def test_a_classifier_fits_a_large_table(faults: Faults, count: int) -> None:
    """It may copy the table a few times, but not once per step."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 10, count)
    table = draw.standard_normal((count, 100), dtype=np.float32)
    table[np.arange(count), labels] += 4

    def fitted(rows: int) -> LargeMarginClassifier:
        model = LargeMarginClassifier(epochs=2, batch_size=256, random_state=0)
        return model.fit(table[:rows], labels[:rows])

    with watched() as took:
        model = fitted(count)
    faults.attempt("rows of a table fitted", count)
    faults.measure(f"LargeMarginClassifier.fit: {count:,} rows of 100 numbers, 2 epochs", took)
    assert model.score(table[:2000], labels[:2000]) > 0.9
    rows = min(count, 40_000)
    bytes_held = held(lambda: fitted(rows))
    assert bytes_held < 8 * MIB + 6 * table[:rows].nbytes, f"{bytes_held / MIB:.0f} MiB"


@pytest.mark.slow
def test_a_report_of_a_run_with_a_thousand_classes(tmp_path: Path, faults: Faults) -> None:
    """From its images to its page, with confusions, noise and attacks; the page stays readable."""
    classes = 1000
    run = train(
        RunConfig(
            data=DataConfig("arrays", str(many_classes(tmp_path / "many.npz", classes))),
            model=ModelConfig("mlp"),
            objective=ObjectiveConfig("cosface"),
            epochs=2,
            batch_size=128,
            device="cpu",
        ),
        folder=tmp_path / "run",
        progress=False,
    )
    data = run.data()
    assert data.test is not None
    config = EvaluationConfig(draws=1, attack_samples=50)
    found = evaluate(
        run.model(), data.test, class_names=data.classes, config=config, progress=False
    )
    found.save(run.folder / "evaluation.json")
    with watched() as took:
        path = report(run, tmp_path / "report.html")
    faults.attempt("classes in a report", classes)
    faults.measure(f"report: a run with {classes:,} classes", took)
    assert path.stat().st_size < 15 * MIB
    page = Page(path)
    assert len(page.tables["table-classes"]) == 1 + SHOWN
    assert 0.2 < run.result["test"]["accuracy"] < 1, "nothing is confused"


def many_classes(path: Path, classes: int) -> Path:
    """Images of 8 x 8 pixels around one of their own for every class."""
    draw = np.random.default_rng(0)
    usual = draw.integers(0, 256, (classes, 8, 8))
    arrays: dict[str, Any] = {"classes": np.array([f"class {n}" for n in range(classes)])}
    for split, each in {"train": 6, "validation": 2, "test": 3}.items():
        labels = np.repeat(np.arange(classes), each)
        images = usual[labels] + draw.normal(0, 60, (len(labels), 8, 8))
        arrays |= {f"{split}_images": np.clip(images, 0, 255).astype(np.uint8)}
        arrays |= {f"{split}_labels": labels}
    np.savez(path, **arrays)
    return path
