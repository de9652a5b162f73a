"""Data that is not what a run began with is refused: its images would get wrong labels."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from app.data.pictures import class_folders, picture
from app.report.reading import Page
from measuring.small_runs import CLASSES, NONE

from largemargin.app.cli import main
from largemargin.app.report.page import report
from largemargin.app.training import Run, train
from largemargin.app.training.runs import _called, _splits
from largemargin.errors import LargeMarginError


def without_a_class(photos: Path) -> None:
    shutil.rmtree(photos / "ant")


def with_more_files(photos: Path) -> None:
    for number in range(6):
        picture(photos / "ant" / f"new{number}.png", 9000 + number)


def with_another_class(photos: Path) -> None:
    class_folders(photos, ("dog",), 12, first=7000)


CHANGES = (
    (without_a_class, "it has no class ant any more"),
    (with_more_files, "validation has other images"),
    (with_another_class, "it has class dog, which the run does not know"),
)


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_data_that_changed_is_refused(
    change: object, message: str, of_photos: Run, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert of_photos.data().classes == CLASSES
    assert callable(change)
    change(photos)
    with pytest.raises(LargeMarginError, match=message):
        of_photos.data()
    run = str(of_photos.folder)
    for command in (["evaluate", run, *NONE], ["measure", run]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"the data is not what {run} began with: " in said
        assert message in said
        assert "--data" in said
    # Predictions need no data: what is fitted to it is left out.
    assert main(["predict", run, str(photos / "bee")]) == 0
    said = capsys.readouterr().err
    assert "Nothing is flagged: " in said
    assert message in said
    kept = {path.name.partition("-")[0] for path in of_photos.folder.glob("*.json")}
    assert not kept & {"evaluation.json", "threshold", "temperature"}


@pytest.mark.parametrize("change", [without_a_class, with_another_class])
def test_a_report_without_the_data_says_so(
    change: object, of_photos: Run, photos: Path, tmp_path: Path
) -> None:
    assert callable(change)
    change(photos)
    page = Page(report(of_photos, tmp_path / "report.html", features="pca"))
    assert "Samples were not placed in the plane: the model or its images" in page.text
    assert "the data is not what" in page.text


def test_data_that_was_moved(
    of_photos: Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, moved = of_photos.folder, tmp_path / "elsewhere"
    shutil.move(photos, moved)
    (run / "result.json").unlink()
    for command in (["train", "--resume", str(run)], ["evaluate", str(run), *NONE]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"the data of {run} is not at {photos}. If it was moved, write its new place" in said
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace(str(photos), str(moved)))
    assert main(["train", "--resume", str(run)]) == 0
    assert main(["evaluate", str(run), *NONE]) == 0


def test_a_resumed_run_says_what_changed(of_photos: Run, photos: Path) -> None:
    (of_photos.folder / "result.json").unlink()
    with_more_files(photos)
    with pytest.raises(LargeMarginError, match=r"train has other images \(.* instead of .*new run"):
        train(of_photos.config, folder=of_photos.folder, resume=True, progress=False)


def test_of_many_classes_the_first_are_named() -> None:
    assert _called(["ant"]) == "class ant"
    assert _called([*"abcde"]) == "classes a, b, c, d, e"
    assert _called([*"abcdefg"]) == "classes a, b, c, d, e and 2 more"


def test_every_split_that_changed_is_named() -> None:
    names = ("same", "train", "validation", "test", "query")
    before = {
        "digests": dict.fromkeys(names, "a"),
        "contents": dict.fromkeys(names, "x"),
        "images": dict.fromkeys(names, 1500),
    }
    assert _splits(before, before) == ""
    now = {
        "digests": {"same": "a", "train": "b", "validation": "b", "query": "a"},
        "contents": {"same": "x", "train": "y", "validation": "y", "query": "y"},
        "images": {"same": 1500, "train": 1500, "validation": 1499, "query": 1500},
    }
    assert _splits(before, now) == (
        "train has other images or labels, validation has other images (1,499 instead of 1,500), "
        "there are no test images, query has images of the same names with other contents now"
    )


def test_moved_data_is_the_same(of_photos: Run, photos: Path, tmp_path: Path) -> None:
    photos.rename(tmp_path / "moved")
    moved = of_photos.data(replace(of_photos.config.data, path=str(tmp_path / "moved")))
    assert moved.classes == CLASSES
