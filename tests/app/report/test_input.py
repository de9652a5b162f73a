"""What the report is asked for wrongly, and what is broken in a run's folder."""

import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from app.report.made import geometry
from app.report.reading import Page

import largemargin as lm
from largemargin.app.cli.parser import CommandParser
from largemargin.app.cli.report import arguments, run
from largemargin.app.report.page import report
from largemargin.app.training import Run
from largemargin.app.training.comparison import Comparison, MethodResult
from largemargin.app.training.comparison_result import PairedTest
from largemargin.errors import LargeMarginError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "at least one run"),
        (3, "int was given"),
        ([3], "int was given among them"),
        ("nowhere", "there is no nowhere"),
    ],
)
def test_wrong_subjects(given: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(LargeMarginError, match=words):
        report(given, tmp_path / "report.html")  # type: ignore[arg-type]


def test_a_report_is_no_run(tmp_path: Path) -> None:
    """As where a pattern of a shell names it among the folders it is of."""
    page = tmp_path / "report.html"
    page.write_text("<html>")
    with pytest.raises(LargeMarginError, match=r"is a web page, .* \S+/\*/ with a slash"):
        report([page], tmp_path / "other.html")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(LargeMarginError, match=r"is no run: it has no config\.yaml"):
        report(tmp_path, tmp_path / "report.html")


def test_a_target_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LargeMarginError, match=r"is a folder\. Name a file"):
        report(geometry(), tmp_path)


@pytest.mark.parametrize("features", ["umap", "TSNE"])
def test_an_unknown_way_to_place_samples(features: str, tmp_path: Path) -> None:
    with pytest.raises(LargeMarginError, match="features"):
        report(geometry(), tmp_path / "report.html", features=features)


@pytest.fixture
def copy(softmax: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(softmax.folder, tmp_path / "run"))


def test_a_broken_evaluation_is_a_note(copy: Path, tmp_path: Path) -> None:
    (copy / "evaluation.json").write_text("{}")
    page = Page(report(copy, tmp_path / "report.html", features="none"))
    assert "is not a Evaluation written by save()" in page.text
    assert f"largemargin evaluate {shlex.quote(str(copy))}" in page.text


def test_missing_files_are_named(copy: Path, tmp_path: Path) -> None:
    for name in ("evaluation.json", "geometry.json", "result.json", "environment.json"):
        (copy / name).unlink()
    page = Page(report(copy, tmp_path / "report.html", features="none"))
    assert "training is not finished" in page.text
    run = shlex.quote(str(copy))
    assert f"largemargin measure {run} --out {run}/geometry.json" in page.text


def test_metrics_cut_short_by_a_crash(copy: Path, tmp_path: Path) -> None:
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epo')
    page = Page(report(copy, tmp_path / "report.html", features="none"))
    assert "metrics.jsonl cannot be read to its end" in page.text
    assert page.payload["charts"]["loss"]["data"][0]["x"] == [1]


def test_data_that_is_gone_is_a_note(copy: Path, tmp_path: Path) -> None:
    config = (copy / "config.yaml").read_text()
    missing = tmp_path / "gone"
    text = config.replace("name: digits\n  path: null", f"name: folder\n  path: {missing}")
    assert text != config
    (copy / "config.yaml").write_text(text)
    page = Page(report(copy, tmp_path / "report.html", features="pca"))
    assert "the model or its images could not be loaded" in page.text
    assert "Samples were not placed in the plane: the model or its images" in page.text


def test_a_geometry_of_other_samples_has_no_pictures(copy: Path, tmp_path: Path) -> None:
    record = json.loads((copy / "geometry.json").read_text())
    record["samples"] = 10
    (copy / "geometry.json").write_text(json.dumps(record))
    page = Page(report(copy, tmp_path / "report.html", features="pca", max_samples=20))
    assert "worst samples are shown without pictures" in page.text


def test_a_comparison_is_its_runs(softmax: Run, cosface: Run, tmp_path: Path) -> None:
    place = tmp_path / "comparison"
    for name, each in (("softmax-seed0", softmax), ("cosface-seed0", cosface)):
        shutil.copytree(each.folder, place / "runs" / name)
    blank = MethodResult("", (), (0.9,), 0.9, math.nan, 1.0, 0, 0.0, 80.0, None, None, "baseline")
    methods = (
        replace(blank, method="softmax", folders=("moved/runs/softmax-seed0",)),
        replace(
            blank,
            method="CosFace <wide>",
            folders=("moved/runs/cosface-seed0",),
            test=PairedTest(5, 0.015, 0.004, 0.026, 0.03, None),
            corrected=0.03,
            verdict="better",
        ),
    )
    Comparison("test", 540, (0,), methods).save(place / "compare.json")
    page = Page(report(place, tmp_path / "report.html", features="none"))
    rows = page.tables["table-comparison"]
    assert rows[1][:2] == ["softmax", "90.00 %"]
    assert rows[2][0] == "CosFace <wide>"
    assert rows[2][2:] == ["+1.50", "+0.40 to +2.60", "0.03", "better", "80.00°", "0"]
    assert rows[1][2:4] == ["–", "–"]
    unclear = replace(methods[1], test=PairedTest(5, 0.01, -0.01, 0.03, 0.4, None), verdict="noise")
    Comparison("test", 540, (0,), (methods[0], unclear)).save(place / "compare.json")
    read = Page(report(place, tmp_path / "unclear.html", features="none"))
    assert read.tables["table-comparison"][2][5] == "no clear difference"
    # What several seeds say comes before what the first one says.
    assert next(iter(page.tables)) == "table-comparison"
    assert "against baseline" not in page.tables["table-glance"][0]
    assert [row[0] for row in page.tables["table-glance"][1:]] == [
        "softmax (baseline) cross_entropy",
        "CosFace <wide> cosface",
    ]


def test_report_is_a_function_of_the_package(tmp_path: Path) -> None:
    path = lm.report(geometry(), tmp_path / "report.html")
    assert path.is_file()


def parsed(*words: str) -> object:
    parser = CommandParser(prog="largemargin report")
    arguments(parser)
    return parser.instantiate(parser.parse_args(list(words)))


def test_the_command(softmax: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    assert run(parsed(str(softmax.folder), "-o", str(out), "--features", "none")) == 0
    assert f"written to {out}" in capsys.readouterr().out
    assert out.stat().st_size < 15e6


@pytest.mark.slow
def test_the_command_with_pictures(
    softmax: Run, cosface: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "out.html", tmp_path / "figures"
    words = (str(softmax.folder), str(cosface.folder), "-o", str(out), "--png", str(figures))
    assert run(parsed(*words, "--features", "pca", "--max_samples", "40")) == 0
    made = {path.stem for path in figures.glob("*.png")}
    drawn = set(Page(out).payload["charts"])
    assert made == drawn
    assert f"figures in {figures} ({len(drawn)} PNG files)" in capsys.readouterr().out


def test_the_command_without_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed()
    assert "runs" in capsys.readouterr().err


def test_the_command_knows_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("run", "--features", "umap")
    assert "umap" in capsys.readouterr().err
