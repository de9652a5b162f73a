"""A run that diverged: the page still opens, draws what there is, and says what happened."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from app.report.reading import Page

from largemargin.app.report.page import report
from largemargin.app.training import Run
from largemargin.app.training.files import without_nan


@pytest.fixture
def diverged(softmax: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run whose weights are NaN, whose epochs have no loss, and which did not end."""
    folder = Path(shutil.copytree(softmax.folder, tmp_path / "run"))
    for name in ("geometry.json", "evaluation.json", "result.json"):
        (folder / name).unlink()
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "epoch":
            row |= {"loss": None, "bad_steps": 3, "step": 5}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    broken = softmax.model()
    with torch.no_grad():
        # The largest of NaNs is the first: samples of class 0 are "right".
        for each in broken.parameters():
            each.fill_(math.nan)
    monkeypatch.setattr(Run, "model", lambda _: broken)
    return folder


def test_a_diverged_run_has_a_page(diverged: Path, tmp_path: Path) -> None:
    page = Page(report(diverged, tmp_path / "report.html", features="pca", max_samples=40))
    assert page.payload["charts"]  # strict JSON, which a browser can read
    assert "features were not placed in the plane" in page.text
    assert "3 of 5 training steps were skipped" in page.text
    assert "--optimizer.lr 0.005" in page.text


def test_what_a_browser_reads_is_strict() -> None:
    found = {"zmax": math.nan, "data": [{"y": (1.0, -math.inf)}], "words": "nan", "n": 2}
    assert without_nan(found) == {
        "zmax": None,
        "data": [{"y": [1.0, None]}],
        "words": "nan",
        "n": 2,
    }
