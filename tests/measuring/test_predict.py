"""Predictions of files and folders: rows, unreadable images, CSV and JSON."""

import csv
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.app.predict import image_files, predict
from largemargin.errors import LargeMarginError
from largemargin.measuring.calibrate import threshold_of
from largemargin.measuring.predictions import Prediction, Predictions

SIDE = 4


def by_colour() -> nn.Sequential:
    """Says which of red, green and blue an image is."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))
    nn.init.eye_(model[2].weight)
    return model


def picture(path: Path, colour: tuple[int, int, int], size: int = SIDE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), colour).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture(tmp_path / "in" / "a.png", (255, 0, 0))
    picture(tmp_path / "in" / "deep" / "b.png", (0, 200, 100), 9)
    picture(tmp_path / "in" / "c.png", (90, 100, 110))
    (tmp_path / "in" / "broken.jpg").write_bytes(b"\xff\xd8\xff no image")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    return tmp_path / "in"


@pytest.mark.parametrize("images", [torch.rand(2, 3, 4, 4), [(torch.rand(2, 3, 4, 4), None)]])
def test_tensors_are_no_paths(images: object) -> None:
    with pytest.raises(LargeMarginError, match="paths of image files and folders, but they hold"):
        predict(by_colour(), images)  # type: ignore[arg-type]


def test_files_are_brought_to_224_pixels_unless_told_otherwise(folder: Path) -> None:
    model, seen = by_colour(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    predict(model, [folder / "a.png"])
    predict(model, [folder / "a.png"], size=(6, 5))
    assert seen == [(1, 3, 224, 224), (1, 3, 6, 5)]


def test_files_and_folders(folder: Path) -> None:
    found = predict(
        by_colour(),
        [folder, str(folder / "a.png"), folder / "missing.png"],
        class_names=["red", "green", "blue"],
        threshold=0.2,
        size=(SIDE, SIDE),
        batch_size=2,
    )
    rows = {Path(row.image).name: row for row in found}
    assert [Path(row.image).name for row in found] == [
        "a.png", "broken.jpg", "c.png", "b.png", "a.png", "missing.png",
    ]  # fmt: skip
    assert (rows["a.png"].label, rows["b.png"].label, rows["c.png"].label) == (
        "red",
        "green",
        "blue",
    )
    assert rows["a.png"].margin == pytest.approx(1 / math.sqrt(2))
    assert rows["b.png"].margin == pytest.approx(100 / 255 / math.sqrt(2))
    assert rows["a.png"].probability == pytest.approx(math.e / (math.e + 2))
    assert [rows[name].flag for name in ("a.png", "b.png", "c.png")] == [False, False, True]
    for name in ("broken.jpg", "missing.png"):
        row = rows[name]
        assert (row.label, row.probability, row.margin, row.flag) == (None, None, None, None)
        assert row.error
    assert (len(found), found.failed, found.flagged, found.margin) == (6, 2, 1, "distance")


def test_only_unreadable_images(folder: Path) -> None:
    (row,) = predict(by_colour(), [folder / "broken.jpg"])
    assert "its content is none of JPEG, PNG" in row.error


def test_a_split_is_predicted_as_its_files_are(folder: Path) -> None:
    pixels = torch.stack(
        [
            torch.from_numpy(np.array(Image.open(folder / name))).permute(2, 0, 1)
            for name in ("a.png", "c.png")
        ]
    )
    samples = Samples(torch.tensor([0, 2]), ["x", "y"], pixels)
    one = predict(by_colour(), samples)
    other = predict(by_colour(), [folder / "a.png", folder / "c.png"], size=(SIDE, SIDE))
    assert [row.image for row in one] == ["x", "y"]
    assert [(r.label, r.margin) for r in one] == [(r.label, r.margin) for r in other]


def test_grey_models_see_what_pillow_calls_grey(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", (200, 30, 90))
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2, bias=False))
    model[2].weight.data = torch.tensor([[1.0], [-1.0]])
    (row,) = predict(model, [path], size=(SIDE, SIDE), channels=1)
    grey = np.asarray(Image.open(path).convert("L")).mean() / 255
    assert row.margin == pytest.approx(grey, abs=0.5 / 255)


def test_cosine_heads(folder: Path) -> None:
    model = by_colour()
    lm.attach(model, lm.CosFace(scale=4.0))
    green = folder / "deep" / "b.png"
    found = predict(model, [green], size=(SIDE, SIDE))
    assert found.margin == "cosine"
    assert found.rows[0].margin == pytest.approx((200 - 100) / math.hypot(200, 100))
    distance = threshold_of(torch.arange(5.0), torch.ones(5).bool(), target=0.5)
    with pytest.raises(LargeMarginError, match="threshold is one of distance margins"):
        predict(model, [green], threshold=distance)


def rows_of(texts: list[str]) -> Predictions:
    rows = [Prediction(text, text, 0.5, 1.25, True, text) for text in texts]
    return Predictions(tuple(rows), "distance", None)


def test_csv_is_safe_in_spreadsheets(tmp_path: Path) -> None:
    texts = [
        "=1+1",
        "+1",
        "-1",
        "@A1",
        "\tx",
        "\rx",
        "\n=x",
        "plain",
        'quo"te,comma',
        "a\nb",
        "a=b",
    ]
    path = tmp_path / "new" / "out.csv"
    rows_of(texts).save_csv(path)
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    for text, row in zip(texts, read, strict=True):
        want = text if text in ("plain", 'quo"te,comma', "a\nb", "a=b") else f"'{text}"
        assert (row["image"], row["label"], row["error"]) == (want, want, want)
        # Numbers are none to be afraid of.
        assert (row["probability"], row["margin"], row["flag"]) == ("0.5", "1.25", "true")
        assert row["margin_kind"] == "distance"
    assert list(path.parent.iterdir()) == [path]


def test_csv_and_json_hold_the_same(folder: Path, tmp_path: Path) -> None:
    found = predict(by_colour(), [folder], size=(SIDE, SIDE), threshold=0.2)
    found.save_csv(tmp_path / "out.csv")
    found.save_json(tmp_path / "out.json")
    assert Predictions.load(tmp_path / "out.json") == found
    plain = json.loads((tmp_path / "out.json").read_text())["rows"]
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for one, other in zip(plain, table, strict=True):
        for name in ("image", "label", "error"):
            assert other[name] == (one[name] or "")
        for name in ("probability", "margin"):
            assert (float(other[name]) if other[name] else None) == one[name]
        assert {"true": True, "false": False, "": None}[other["flag"]] == one["flag"]


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        picture(tmp_path / "a.png", (255, 0, 0)).rename(tmp_path / name)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    found = predict(by_colour(), [tmp_path / name], size=(SIDE, SIDE))
    assert found.failed == 0
    found.save_csv(tmp_path / "out.csv")
    assert "\\udce9" in (tmp_path / "out.csv").read_text(encoding="utf-8")
    found.save_json(tmp_path / "out.json")
    assert Predictions.load(tmp_path / "out.json") == found


def test_csv_without_a_file() -> None:
    out = io.StringIO()
    Predictions((Prediction("a", "b", 1.0, 0.0, None),), "cosine", None).write_csv(out)
    assert out.getvalue().splitlines()[1] == "a,b,1.0,0.0,cosine,,"


def test_bad_requests(folder: Path, tmp_path: Path) -> None:
    model = by_colour()
    with pytest.raises(LargeMarginError, match="3 classes, but 2 was given"):
        predict(model, [folder], class_names=["a", "b"])
    with pytest.raises(LargeMarginError, match="no image was given"):
        predict(model, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(LargeMarginError, match="no image files below"):
        image_files([tmp_path / "empty"])
    with pytest.raises(LargeMarginError, match="model takes 4"):
        predict(model, [folder], channels=4)
    with pytest.raises(LargeMarginError, match="batch_size"):
        predict(model, [folder], batch_size=0)
    wrong: Any = 32
    with pytest.raises(LargeMarginError, match=r"size must be \(height, width\), but 32"):
        predict(model, [folder], size=wrong)
    wrong = "0.2 or so"
    with pytest.raises(LargeMarginError, match=r"a number or a Threshold, but '0\.2 or so' was"):
        predict(model, [folder], threshold=wrong)
    assert image_files(str(folder / "a.png")) == [str(folder / "a.png")]


def test_numbers_that_were_given_are_kept(folder: Path, tmp_path: Path) -> None:
    """A file of predictions says what its flags and probabilities rest on."""
    found = predict(by_colour(), [folder], size=(SIDE, SIDE), threshold=0.2, temperature=3)
    assert (found.threshold, found.temperature) == (0.2, 3.0)
    found.save_json(tmp_path / "out.json")
    assert Predictions.load(tmp_path / "out.json") == found
    kept = threshold_of(torch.arange(5.0), torch.ones(5).bool(), target=0.5)
    found = predict(by_colour(), [folder], size=(SIDE, SIDE), threshold=kept)
    assert (found.threshold, found.temperature) == (kept, None)
    found.save_json(tmp_path / "out.json")
    assert Predictions.load(tmp_path / "out.json") == found


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_threshold_is_a_finite_number(folder: Path, wrong: float) -> None:
    with pytest.raises(LargeMarginError, match="threshold must be a finite number"):
        predict(by_colour(), [folder], size=(SIDE, SIDE), threshold=wrong)
