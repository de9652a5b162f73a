"""From the command that measures a part to the figure that shows it."""

import shlex
import shutil
from pathlib import Path

import pytest
from app.report.made import trained
from app.report.reading import Page

from largemargin.app.cli import measure
from largemargin.app.cli.parser import CommandParser
from largemargin.app.models import ModelConfig
from largemargin.app.report.page import report
from largemargin.app.training import Run
from largemargin.errors import LargeMarginError


def run(*words: str) -> None:
    parser = CommandParser(prog="largemargin measure")
    measure.arguments(parser)
    assert measure.run(parser.instantiate(parser.parse_args([*words, "--device", "cpu"]))) == 0


def test_curvature_and_bounds_reach_the_report(softmax: Run, tmp_path: Path) -> None:
    place = Path(shutil.copytree(softmax.folder, tmp_path / "run"))
    few = ("--num_directions", "2", "--draws", "4", "--max_samples", "24", "--noise", "0.3")
    asked = ("--curvature", "true", "--bounds", "true", "--sigma", "0.05", *few)
    run(str(place), *asked, "--out", str(place / "geometry.json"))
    found = Run(place).geometry()
    assert found is not None
    assert found.curvature is not None
    settings = found.curvature.settings
    assert (settings.num_directions, settings.draws, settings.sigma) == (2, 4, 0.05)
    assert settings.noise == {"gaussian": 0.3, "uniform": 0.3}
    assert found.curvature.samples == 24
    page = Page(report([place, softmax], tmp_path / "report.html", features="none"))
    _, row = page.tables["table-curvatures"]
    assert float(row[3]) == pytest.approx(found.curvature.overall.median, rel=1e-3)
    assert "ROB Theorem 6.1" in page.text
    assert found.bounds is not None
    for informative, name in ((True, "table-theory"), (False, "table-theory-rest")):
        rows = {row[1] for row in page.tables.get(name, ())}
        assert {b.name for b in found.bounds if b.informative == informative} <= rows
    # The other model says how to get there.
    assert f"largemargin measure {shlex.quote(str(softmax.folder))} --curvature true" in page.text


def test_three_features_make_a_sphere(tmp_path: Path) -> None:
    model = ModelConfig("mlp", feature_dim=3)
    place = trained(tmp_path / "run", "cosface", model=model).folder
    run(str(place), "--sphere", "true", "--out", str(place / "geometry.json"))
    page = Page(report(place, tmp_path / "report.html", features="pca", max_samples=20))
    (sphere,) = [v for k, v in page.payload["charts"].items() if k.startswith("sphere")]
    points = sphere["data"][0]
    assert len(points["meta"]["margins"]) == len(points["x"]) == 540
    assert points["meta"]["margin"] == "cosine margin"
    found = Run(place).geometry()
    assert found is not None
    mean = sum(points["meta"]["margins"]) / 540
    assert mean == pytest.approx(found.margins["cosine"].overall.mean, abs=1e-3)
    (table,) = [rows for key, rows in page.tables.items() if key.startswith("table-sphere")]
    assert len(table) == 11


def test_a_sphere_needs_three_features(softmax: Run) -> None:
    with pytest.raises(LargeMarginError, match="3 dimensions"):
        run(str(softmax.folder), "--sphere", "true")


def test_sigma_needs_curvature(softmax: Run) -> None:
    with pytest.raises(LargeMarginError, match="--curvature true"):
        run(str(softmax.folder), "--sigma", "0.1")
