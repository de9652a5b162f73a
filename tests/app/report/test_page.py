"""What stands in the page: every section, and the numbers of the files it is made from."""

import base64
import dataclasses
import json
import math
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from app.report.made import geometry
from app.report.reading import Page

import largemargin as lm
from largemargin.app.report.page import report, slug
from largemargin.app.report.sample_views import WORST, rivals_in, rivals_of
from largemargin.app.training import Run

SECTIONS = (
    *("verdict", "mistakes", "margins", "features"),
    *("robustness", "training", "theory", "provenance"),
)
SMOOTHING = "objective.label_smoothing"


@pytest.fixture(scope="module")
def page(softmax: Run, cosface: Run, tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("report") / "report.html"
    return Page(report([softmax, cosface], path, features="pca", max_samples=40))


def test_all_sections_say_how_to_read_them(page: Page) -> None:
    ids = [a["id"] for a in page.named("section")]
    assert ids == list(SECTIONS)
    links = [a["href"] for a in page.named("a") if a.get("href", "").startswith("#")]
    assert {f"#{name}" for name in SECTIONS} <= set(links)
    assert sum(a.get("class") == "reading" for a in page.named("p")) == len(SECTIONS)


def test_ids_are_used_once(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_figure_has_data_and_words(page: Page) -> None:
    boxes = [a for a in page.named("div") if a.get("class", "").startswith("plot")]
    assert {a["id"] for a in boxes} == set(page.payload["charts"])
    assert all(a["aria-label"] for a in boxes)
    assert len(boxes) >= 20


def test_numbers_are_those_of_the_files(page: Page, softmax: Run, cosface: Run) -> None:
    glance = {row[0]: row for row in page.tables["table-glance"]}
    heads = glance["model"]
    for name, run in (
        ("cross_entropy (baseline) cross_entropy", softmax),
        ("cosface cosface", cosface),
    ):
        found = json.loads((run.folder / "evaluation.json").read_text())
        measured = json.loads((run.folder / "geometry.json").read_text())
        row = dict(zip(heads, glance[name], strict=True))
        for column, words in (
            ("accuracy", f"{100 * found['clean']['accuracy']:.2f} %"),
            ("class margin", f"{measured['prototypes']['class_margin']:.2f}°"),
            ("calibration error", f"{100 * found['clean']['ece']:.2f} %"),
        ):
            assert row[column].startswith(f"{words} ")


def test_classes_have_their_numbers(page: Page, cosface: Run) -> None:
    rows = [row for row in page.tables["table-classes"] if row[0] == "cosface"]
    measured = cosface.geometry()
    assert measured is not None
    assert len(rows) == 10
    angles = measured.prototypes.angles
    assert angles is not None
    for label, row in enumerate(rows):
        assert row[1] == str(label)
        assert row[2] == str(measured.margins["cosine"].classes.counts[label])
        rival = min((a, at) for at, a in enumerate(angles[label]) if at != label)
        assert row[8:] == [str(rival[1]), f"{rival[0]:.2f}°"]


def test_the_download_is_the_geometry(page: Page, softmax: Run) -> None:
    links = {a["download"]: a["href"] for a in page.named("a") if "download" in a}
    found = json.loads(base64.b64decode(links["summary.json"].partition(",")[2]))
    assert found["models"][0]["geometry"] == json.loads(
        (softmax.folder / "geometry.json").read_text()
    )
    assert found["models"][0]["baseline"] is True


def test_what_is_missing_names_its_command(page: Page, softmax: Run) -> None:
    folder = shlex.quote(str(softmax.folder))
    assert f"largemargin measure {folder} --bounds true" in page.text
    assert f"largemargin measure {folder} --curvature true" in page.text
    assert f"largemargin evaluate {folder} --ood FOLDER" in page.text


def test_a_figure_of_one_of_several_models_says_of_which(
    softmax: Run, cosface: Run, tmp_path: Path
) -> None:
    bare = shutil.copytree(cosface.folder, tmp_path / "bare")
    (bare / "evaluation.json").unlink()
    for runs, expected in (([softmax, Run.open(bare)], 1), ([softmax], 0)):
        path = report(runs, tmp_path / "report.html", features="none")
        _, _, rest = path.read_text(encoding="utf-8").partition("Accuracy under Gaussian noise<")
        assert rest.partition('id="noise"')[0].count("</i>cross_entropy") == expected


def test_samples_in_the_plane_have_pictures(page: Page) -> None:
    (pictures,) = page.payload["pictures"].values()
    assert len(pictures) == 40
    chart = next(v for k, v in page.payload["charts"].items() if k.startswith("features"))
    trace, names = chart["data"]
    assert names["text"] == [str(label) for label in range(10)]
    assert {str(index) for index in trace["meta"]["index"]} == set(pictures)
    assert len(trace["x"]) == len(trace["meta"]["labels"]) == 40


def test_geometry_over_epochs_is_that_of_the_rows(page: Page, softmax: Run, cosface: Run) -> None:
    charts = page.payload["charts"]
    for key, name in (
        ("class_margin_degrees", "epochs-class-margin"),
        ("mean_cosine_margin", "epochs-sample-margin"),
    ):
        for trace, run in zip(charts[slug(name)]["data"], (softmax, cosface), strict=False):
            found = [row["geometry"][key] for row in run.metrics("epoch")]
            assert trace["y"] == pytest.approx(found, rel=1e-4)
    assert len(charts[slug("epochs-sample-margin")]["data"]) == 4
    assert "126 validation images, always the same" in page.text


def test_every_term_has_its_gradient_norm(page: Page, cosface: Run) -> None:
    traces = {trace["name"]: trace for trace in page.payload["charts"]["gradients"]["data"]}
    assert set(traces) == {"cross_entropy: softmax", "cosface: cosface"}
    rows = cosface.metrics("gradients")
    assert traces["cosface: cosface"]["x"] == [row["step"] for row in rows]
    norms = [row["norms"]["cosface"] for row in rows]
    assert traces["cosface: cosface"]["y"] == pytest.approx(norms, rel=1e-4)


def test_every_figure_of_numbers_has_a_table(page: Page) -> None:
    without = [
        a for name, a in page.elements if name == "figure" and "bare" in a.get("class", "").split()
    ]
    maps = [key for key in page.payload["charts"] if key.startswith("features")]
    assert len(without) == len(maps) == 4


def test_rows_of_classes_know_their_class(page: Page) -> None:
    rows = [a["data-class"] for name, a in page.elements if name == "tr" and "data-class" in a]
    assert rows == [str(label) for label in range(10)] * 2
    heat = next(v for k, v in page.payload["charts"].items() if k.startswith("angles"))
    assert heat["data"][0]["meta"]["framed"] == list(range(10))
    assert page.payload["linked"] is True


def test_classes_of_different_data_are_not_linked(tmp_path: Path) -> None:
    given = {"a": geometry(classes=3), "b": geometry(classes=4)}
    assert Page(report(given, tmp_path / "report.html")).payload["linked"] is False


def test_settings_that_differ_stand_at_the_verdict(page: Page) -> None:
    (head, *rows) = page.tables["table-unequal"]
    assert head == ["setting", "cross_entropy (baseline)", "cosface"]
    assert rows == [["objective.name", "cross_entropy", "cosface"]]
    assert "differ in more than the objective" not in page.text
    equal = dict(row for row in page.tables["table-settings"][1:])
    assert equal["optimizer.lr"] == "0.05"
    assert "objective.name" not in equal


@pytest.mark.parametrize(
    ("line", "instead", "row"),
    [
        ("  lr: 0.05\n", "  lr: 0.5\n", ["optimizer.lr", "0.05", "0.5"]),
        ("objective:\n", "objective:\n  label_smoothing: 0.1\n", [SMOOTHING, "–", "0.1"]),
    ],
)
def test_a_setting_of_its_own_is_no_fair_comparison(
    softmax: Run, tmp_path: Path, line: str, instead: str, row: list[str]
) -> None:
    """Also one of the objective that softmax could have, too."""
    other = Path(shutil.copytree(softmax.folder, tmp_path / "other"))
    config = (other / "config.yaml").read_text()
    assert line in config
    (other / "config.yaml").write_text(config.replace(line, instead))
    page = Page(report([softmax, other], tmp_path / "report.html", features="none"))
    assert row in page.tables["table-unequal"]
    assert f"the models differ in more than the objective ({row[0]})" in page.text


def test_a_geometry_alone_is_enough(tmp_path: Path) -> None:
    page = Page(report(geometry(), tmp_path / "report.html"))
    assert [a["id"] for a in page.named("section")] == list(SECTIONS)
    assert "largemargin train" in page.text
    assert "give the report a run" in page.text


def test_a_geometry_says_which_images_it_is_of(tmp_path: Path) -> None:
    given = dataclasses.replace(geometry(), data="flowers <b>, test images")
    page = Page(report({"mine": given}, tmp_path / "report.html"))
    assert "mine was measured on flowers <b>, test images." in page.text


def test_geometries_by_name_and_on_the_sphere(tmp_path: Path) -> None:
    given = {"first": geometry(0, 3), "second": geometry(1, 3)}
    page = Page(report(given, tmp_path / "report.html"))
    assert [row[0] for row in page.tables["table-glance"]] == ["model", "first", "second"]
    spheres = [v for k, v in page.payload["charts"].items() if k.startswith("sphere")]
    assert len(spheres) == 2
    points = spheres[0]["data"][0]
    lengths = [math.hypot(*p) for p in zip(points["x"], points["y"], points["z"], strict=True)]
    assert lengths == pytest.approx([1.0] * 60, abs=1e-3)


def test_a_saved_geometry_and_equal_names(tmp_path: Path) -> None:
    geometry().save(tmp_path / "geometry.json")
    page = Page(report([tmp_path / "geometry.json"] * 2, tmp_path / "report.html"))
    assert [row[0] for row in page.tables["table-glance"][1:]] == ["geometry", "geometry #2"]


def test_nan_does_not_break_the_page(tmp_path: Path) -> None:
    record = geometry().to_dict()
    record["margins"]["cosine"]["overall"] |= {"mean": "NaN", "density": [], "density_at": []}
    record["prototypes"] |= {"class_margin": "NaN", "reachable": "NaN"}
    record["calibration"]["expected_error"] = "NaN"
    page = Page(report(lm.Geometry.from_dict(record), tmp_path / "report.html"))
    assert page.payload["charts"]
    glance = dict(zip(*page.tables["table-glance"], strict=True))
    assert glance["class margin"] == glance["calibration error"] == "–"


def test_one_class_more_than_colours_gets_a_symbol(tmp_path: Path) -> None:
    page = Page(report(geometry(classes=12, samples=120), tmp_path / "report.html"))
    assert len(page.payload["symbols"]) == 8
    assert len(page.tables["table-classes"]) == 13


def test_many_classes_are_cut_and_said(tmp_path: Path) -> None:
    many = geometry(classes=600, samples=1200, dim=8)
    page = Page(report({"a": many, "b": many}, tmp_path / "report.html"))
    assert len(page.tables["table-classes"]) == 1001
    assert "The 500 classes of smallest margin" in page.text
    links = {a["download"]: a["href"] for a in page.named("a") if "download" in a}
    text = base64.b64decode(links["classes.csv"].partition(",")[2]).decode()
    assert len(text.splitlines()) == 1201


def test_rivals_of_vectors_are_those_of_their_angles() -> None:
    weight = torch.randn(70, 5, generator=torch.Generator().manual_seed(0))
    found = rivals_of(weight)
    angles = torch.rad2deg(lm.geometry.angle_matrix(weight)).tolist()
    expected = rivals_in(angles)
    assert found.nearest == expected.nearest
    assert found.angle == pytest.approx(expected.angle, abs=1e-3)
    assert found.classes == expected.classes
    assert len(found.classes) == 64
    for mine, theirs in zip(found.matrix, expected.matrix, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def test_worst_samples_name_label_prediction_and_rival(page: Page, softmax: Run) -> None:
    found = softmax.geometry()
    assert found is not None
    for each in found.worst[:WORST]:
        wrong = each.predicted != each.label
        other = f"predicted {each.predicted}" if wrong else f"rival {each.rival}"
        assert f"test/{each.index} label {each.label} {other} margin" in page.text
