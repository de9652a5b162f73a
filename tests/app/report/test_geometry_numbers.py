"""The geometry of several models in one table, in units that compare."""

from pathlib import Path

import pytest
import torch
from app.report.made import geometry
from app.report.reading import Page

import largemargin as lm
from largemargin.app.report.page import report
from largemargin.app.report.report_models import ReportModel
from largemargin.app.report.sections.margins import geometry_blocks


def arrays(scale: float = 1.0) -> lm.Geometry:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 4, generator=generator)
    labels = torch.arange(90) % 3
    features = weight[labels] + 0.4 * torch.randn(90, 4, generator=generator)
    return lm.measure_arrays(scale * features, labels, weight, pairwise=True)


def test_collapse_and_rejection_are_on_the_page(tmp_path: Path) -> None:
    found = arrays()
    page = Page(report({"one": found}, tmp_path / "report.html"))
    rows = {row[0]: row[1] for row in page.tables["table-geometry"][1:]}
    assert found.collapse is not None
    assert found.compactness is not None
    for words, value in (
        ("NC1", found.collapse.variability),
        ("NC2", found.collapse.simplex_gap),
        ("NC3", found.collapse.duality),
        ("variance between", found.variance.ratio),
        ("largest dispersion", found.compactness.ideal_ratio),
        ("errors detected", found.errors.auroc["lead_raw"]),
    ):
        (text,) = [text for name, text in rows.items() if words in name]
        assert float(text) == pytest.approx(value, rel=1e-3)
    assert not any("linearised" in name for name in rows)  # was not measured


def test_features_twice_as_long_are_not_twice_as_good(tmp_path: Path) -> None:
    """T_alpha of LMD Proposition 4.4 doubles every distance and changes no prediction."""
    page = Page(report({"short": arrays(), "long": arrays(2.0)}, tmp_path / "report.html"))
    for row in page.tables["table-geometry"][1:]:
        assert row[1] == row[2], row
    quantiles = page.tables["table-quantiles-distance"]
    assert quantiles[1][1:] == quantiles[2][1:]
    chart = page.payload["charts"]["margins-distance"]
    assert "spread of a class" in chart["layout"]["xaxis"]["title"]["text"]
    short, long = chart["data"]
    assert short["x"] == pytest.approx(long["x"], rel=1e-3)
    assert short["y"] == pytest.approx(long["y"], rel=1e-3)
    marks = [each["x"] for each in chart["marks"]]
    assert marks[0] == pytest.approx(marks[1], rel=1e-3)


def test_one_model_has_distances_as_they_are(tmp_path: Path) -> None:
    found = arrays()
    page = Page(report({"one": found}, tmp_path / "report.html"))
    _, _, mean, *_ = page.tables["table-quantiles-distance"][1]
    assert float(mean) == pytest.approx(found.margins["distance"].overall.mean, rel=1e-3)


def test_classes_without_spread_have_distances_as_they_are(tmp_path: Path) -> None:
    labels = torch.arange(6) % 2
    points = lm.measure_arrays(torch.eye(2)[labels], labels, torch.eye(2))
    page = Page(report({"points": points, "cloud": geometry()}, tmp_path / "report.html"))
    title = page.payload["charts"]["margins-distance"]["layout"]["xaxis"]["title"]["text"]
    assert title == "signed distance in feature space"


def test_layers_and_notes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
    loader = [(torch.randn(40, 4), torch.arange(40) % 4)]
    found = lm.measure(model, loader, layers=["0", "1"], pairwise=True)
    page = Page(report({"deep": found}, tmp_path / "report.html"))
    chart = page.payload["charts"]["layers-accuracy"]
    assert found.layers is not None
    (trace,) = chart["data"]
    assert trace["y"] == pytest.approx([layer.left_out_accuracy for layer in found.layers])
    assert chart["layout"]["xaxis"]["ticktext"] == ["0", "1"]
    assert "deep: no samples of class 4" in page.text


def test_models_of_other_layers_are_not_drawn_together() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    loader = [(torch.randn(30, 4), torch.arange(30) % 3)]
    one, other = (lm.measure(model, loader, layers=[name]) for name in ("0", "1"))
    measured = [
        (ReportModel(name, geometry, ("a", "b", "c")), geometry)
        for name, geometry in (("one", one), ("again", one), ("other", other))
    ]
    blocks = geometry_blocks(measured)
    (chart,) = [block for block in blocks if block.kind == "chart"]
    assert [series.name for series in chart.series] == ["one", "again"]  # type: ignore[union-attr]
