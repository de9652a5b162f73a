"""Large jobs in little memory: a million features, 50,000 files, 200,000 rows of a table."""

import io
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import children
from faults.children import NEEDS_FORK, ended
from faults.counting import Faults
from PIL import Image
from torch import Tensor, nn

from largemargin.evaluating import predict
from largemargin.integrations.scikit_learn import LargeMarginClassifier
from largemargin.measuring import measure

MIB = 2**20
SLOW = pytest.mark.slow


def with_peak(work: Callable[[int], Any], count: int) -> tuple[Any, int]:
    """What ``work(count)`` gives, and by how many bytes a process grew for it at most.

    In a child, after small ones: here to import what is needed, there to load it.
    """
    work(500)

    def measured() -> tuple[Any, int]:
        work(4000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        value = work(count)
        return value, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    end = ended(measured)
    assert not end.error, end.error
    value, peak = end.value
    return value, peak


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


@NEEDS_FORK
@pytest.mark.parametrize("count", [40_000, pytest.param(1_000_000, marks=SLOW)])
def test_measure_holds_a_batch_and_a_few_numbers_per_sample(
    monkeypatch: pytest.MonkeyPatch, faults: Faults, count: int
) -> None:
    """512 float32 features of a sample are 2 KiB; what is kept of it may take an eighth."""
    monkeypatch.setattr(children, "LONGEST", 900.0)
    dim, classes = 512, 100
    model = nn.Linear(dim, classes, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(classes, dim))

    def work(count: int) -> tuple[int, float]:
        found = measure(model, Features(count, dim, classes))
        return found.samples, found.margins["raw"].overall.mean

    (samples, mean), peak = with_peak(work, count)
    faults.attempt("512-d features measured", count)
    assert samples == count
    assert 0.8 < mean < 1.0
    assert peak < 32 * MIB + count * dim * 4 // 8, f"{peak / MIB:.0f} MiB"


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=SLOW)])
def test_predict_on_many_files_shows_how_far_it_is(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Every file has its row, in the order of names; one that is broken says so."""
    shades = [png_of(shade) for shade in (0, 255)]
    for number in range(count):
        (tmp_path / f"{number:05}.png").write_bytes(shades[number % 2])
    (tmp_path / "00007.png").write_bytes(shades[1][:30])
    found = predict(by_brightness(), [tmp_path], size=(8, 8), channels=1, progress=True)
    faults.attempt("files predicted", count)
    faults.inject("a truncated file among many")
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


@NEEDS_FORK
@pytest.mark.parametrize("count", [4_000, pytest.param(200_000, marks=SLOW)])
def test_a_classifier_fits_a_large_table(
    monkeypatch: pytest.MonkeyPatch, faults: Faults, count: int
) -> None:
    """It may copy the table a few times, but not once per step."""
    monkeypatch.setattr(children, "LONGEST", 900.0)
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 10, count)
    table = draw.standard_normal((count, 100), dtype=np.float32)
    table[np.arange(count), labels] += 4

    def work(count: int) -> float:
        model = LargeMarginClassifier(epochs=2, batch_size=256, random_state=0)
        return float(model.fit(table[:count], labels[:count]).score(table[:2000], labels[:2000]))

    accuracy, peak = with_peak(work, count)
    faults.attempt("rows of a table fitted", count)
    assert accuracy > 0.9
    assert peak < 100 * MIB + 6 * table.nbytes, f"{peak / MIB:.0f} MiB"
