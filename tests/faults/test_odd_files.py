"""Data as strangers have it: every odd file is read properly, or named and never a surprise."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from app.cli.command import SMALL
from app.data.pictures import class_folders, picture
from faults.children import NEEDS_FORK, as_nobody, ended, open_folder
from faults.counting import Faults
from faults.odd_files import READABLE, UNREADABLE, pipe

from largemargin.app.cli import main
from largemargin.app.data import DataConfig, load_data
from largemargin.app.models import ModelConfig, build_model
from largemargin.app.predict import predict
from largemargin.app.training import Run
from largemargin.errors import LargeMarginError

TINY = ("--model", "mlp", "--data.size", "8", "--data.validation", "0.2", "--measure", "false")


def photos(folder: Path) -> Path:
    return class_folders(folder, ("cat", "dog"), 6, height=8, width=8)


def load(folder: Path, name: str = "folder", **settings: Any) -> Any:
    return load_data(DataConfig(name, str(folder), **settings))


def command(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> str:
    """The command in this process, and what it said."""
    assert main([str(word) for word in words]) == status
    return "".join(capsys.readouterr())


@pytest.fixture
def model() -> Any:
    return build_model(ModelConfig("mlp", options={"hidden": (4,)}), 2, size=(8, 8))


@pytest.mark.parametrize("kind", READABLE)
def test_odd_images_are_read(tmp_path: Path, faults: Faults, model: Any, kind: str) -> None:
    name, make = READABLE[kind]
    make(photos(tmp_path) / "cat")
    faults.attempt("an odd image that can be read")
    for resident in ("yes", "no"):
        data = load(tmp_path, size=8, validation=0, resident=resident)
        assert len(data.train) == 13
        for index in range(13):
            assert data.train.image(index).shape == (3, 8, 8)
    (row,) = predict(model, [tmp_path / "cat" / name], size=(8, 8))
    assert row.error is None
    assert row.label is not None


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_images_are_named(tmp_path: Path, faults: Faults, model: Any, kind: str) -> None:
    name, make, reason = UNREADABLE[kind]
    make(photos(tmp_path) / "cat")
    faults.attempt("an image that cannot be read")
    with pytest.raises(LargeMarginError, match="cannot be read") as error:
        load(tmp_path, size=8, validation=0)
    assert name in str(error.value)
    assert reason in str(error.value)
    assert "--data.corrupt skip" in str(error.value)
    with pytest.warns(UserWarning, match="1 unreadable images are left out"):
        data = load(tmp_path, size=8, validation=0, corrupt="skip")
    assert len(data.train) == 12
    assert data.record["skipped"][0]["file"] == f"cat/{name}"
    rows = list(predict(model, [tmp_path / "cat"], size=(8, 8)))
    (failed,) = [row for row in rows if row.error is not None]
    assert failed.image.endswith(name)
    assert reason in (failed.error or "")
    assert len(rows) == 7


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes on this system")
def test_a_pipe_among_the_images_is_not_waited_for(
    tmp_path: Path, faults: Faults, model: Any
) -> None:
    waiting = pipe(photos(tmp_path) / "cat")
    faults.attempt("an image that is a pipe")
    data = load(tmp_path, size=8, validation=0)
    assert len(data.train) == 12
    assert data.record["other_files"] == 1
    (row,) = predict(model, [waiting], size=(8, 8))
    assert "no file but a folder, a pipe or a device" in (row.error or "")
    with (tmp_path / "list.csv").open("w") as file:
        file.write("image,label\ncat/000.png,cat\ndog/000.png,dog\ncat/pipe.png,cat\n")
    with pytest.raises(LargeMarginError, match="a pipe or a device"):
        load(tmp_path / "list.csv", "csv")


def test_links_in_circles_are_followed_once(tmp_path: Path, faults: Faults) -> None:
    root = photos(tmp_path / "photos")
    for name in "stuvwxyz":  # each leads to all: 8! ways through them
        (root / "cat" / name).mkdir()
    for name in "stuvwxyz":
        for other in "stuvwxyz":
            (root / "cat" / name / f"to_{other}").symlink_to(root / "cat" / other)
    (root / "cat" / "self").symlink_to(root / "cat" / "self")
    (root / "dog" / "back").symlink_to(root / "dog")
    picture(root / "cat" / "z" / "deep.png", 77, 8, 8)
    faults.attempt("links between folders in circles", 66)
    data = load(root, validation=0)  # in hours, where all the ways are gone
    assert data.record["counts"]["train"] == {"cat": 7, "dog": 6}


@NEEDS_FORK
def test_folders_that_may_not_be_read(tmp_path: Path, faults: Faults) -> None:
    root = photos(open_folder(tmp_path / "photos"))
    (root / "dog").chmod(0)
    end = ended(as_nobody(lambda: load(root)))
    faults.inject("a folder without permission to read")
    (root / "dog").chmod(0o755)
    assert end.kind == "LargeMarginError", end.error
    assert f"the folder {root / 'dog'} cannot be read: Permission denied" in end.error
    (root / "cat" / "000.png").chmod(0)
    end = ended(as_nobody(lambda: load(root)))
    assert "cat/000.png (Permission denied)" in end.error


def test_images_in_two_parts_are_found_and_reported(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path / "train")
    class_folders(tmp_path / "test", ("cat", "dog"), 2, first=5000, height=8, width=8)
    copied = (tmp_path / "train" / "dog" / "003.png").read_bytes()
    (tmp_path / "test" / "cat" / "same.png").write_bytes(copied)
    faults.attempt("an image in train and test")
    with pytest.warns(UserWarning, match="some images are in two parts of the data"):
        command(
            capsys, "train", "--data", tmp_path, *TINY, *SMALL, "--out", tmp_path / "r", status=0
        )
    (run,) = (tmp_path / "r").iterdir()
    found = Run.open(run).facts["record"]["duplicates"]["train and test"]
    assert found["pairs"] == [["train/dog/003.png", "test/cat/same.png"]]


LISTS = {
    "no such column": (
        "picture,label\ncat/000.png,cat\n",
        "has no column 'image' but picture.*A table without images is for LargeMarginClassifier",
    ),
    "no label column": ("image\ncat/000.png\n", "has no column 'label'"),
    "no header": ("cat/000.png,cat\n", "has no column 'image'"),
    "empty file": ("", "none at all"),
    "header alone": ("image,label\n", "has no lines after its header"),
    "a cell missing": ("image,label\ncat/000.png\n", "line 2 .* lacks an image or a label"),
    "unknown split": ("image,label,split\ncat/000.png,cat,tset\n", "has split 'tset'"),
    "a label that is not trained": (
        "image,label,split\ncat/000.png,cat,train\ndog/000.png,dog,train\ncat/001.png,cow,test\n",
        "the test images have classes that no training image has: cow",
    ),
    "one class": ("image,label\ncat/000.png,cat\n", "at least 2 classes are needed"),
    "no such image": ("image,label\nx.png,cat\ndog/000.png,dog\n", "x.png .No such file"),
    "a name too long": (f"image,label\n{'x' * 5000},cat\ndog/000.png,dog\n", "File name too long"),
    "a null byte": ("image,label\na\0.png,cat\ndog/000.png,dog\n", "null|NUL"),
    "a cell too large": (f"image,label\n{'x' * 140_000},cat\n", "field larger than field limit"),
    "no UTF-8": (b"image,label\n\xff\xfe.png,cat\n", "is no CSV file in UTF-8"),
    "an archive": (b"PK\x03\x04" + bytes(range(256)), "is no CSV file|has no column"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_images_that_are_wrong(tmp_path: Path, faults: Faults, kind: str) -> None:
    photos(tmp_path)
    content, message = LISTS[kind]
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "list.csv").write_bytes(raw)
    faults.attempt("a CSV file that is wrong")
    with pytest.raises(LargeMarginError, match=message):
        load(tmp_path / "list.csv", "csv")


def test_classes_that_are_wrong(tmp_path: Path, faults: Faults) -> None:
    photos(tmp_path / "a")
    (tmp_path / "a" / "cow").mkdir()
    with pytest.raises(LargeMarginError, match=r"cow holds no .* --data\.classes '\[cat,dog\]'"):
        load(tmp_path / "a")
    assert load(tmp_path / "a", classes=("cat", "dog")).classes == ("cat", "dog")
    with pytest.raises(LargeMarginError, match="cow holds no image files"):
        load(tmp_path / "a", classes=("cat", "cow"))
    (tmp_path / "a" / "cow").rmdir()
    with pytest.raises(LargeMarginError, match=r"classes holds 'cta'.* Did you mean cat\?"):
        load(tmp_path / "a", classes=("cta", "dog"))
    faults.attempt("a class without images, or unknown", 2)


def test_all_of_it_through_the_command(
    tmp_path: Path, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos(tmp_path / "photos")
    for _, make in READABLE.values():
        make(root / "dog")
    for _, make, _ in UNREADABLE.values():
        make(root / "cat")
    common = ("--data", root, *TINY, *SMALL, "--out", tmp_path / "runs")
    said = command(capsys, "train", *common, status=2)
    assert said.startswith("error: ")
    assert "cannot be read" in said
    assert not list(tmp_path.glob("runs/*"))  # nothing is left of a run that never began
    with pytest.warns(UserWarning, match="unreadable images are left out"):
        command(capsys, "train", *common, "--data.corrupt", "skip", status=0)
    (run,) = (tmp_path / "runs").iterdir()
    out = tmp_path / "answers.csv"
    as_trained = ("--threshold", "none", "--temperature", "none")
    said = command(capsys, "predict", run, root, *as_trained, "--out", out, status=0)
    assert f"{len(UNREADABLE)} could not be read" in said
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 + len(READABLE) + len(UNREADABLE)
    assert sum(bool(row["error"]) for row in rows) == len(UNREADABLE)
    for row in rows:
        for cell in row.values():
            assert not cell.startswith(("=", "+", "@", "\t", "\r", "\n"))
    with pytest.warns(UserWarning, match="unreadable images are left out"):  # to find a threshold
        command(capsys, "predict", run, root, "--out", tmp_path / "answers.json", status=0)
    assert len(json.loads((tmp_path / "answers.json").read_text())["rows"]) == len(rows)
    faults.attempt("an odd image through the command", len(READABLE) + len(UNREADABLE))
