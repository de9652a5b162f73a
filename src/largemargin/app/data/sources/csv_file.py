"""A CSV file with a line per image: its path, its label and, if there is one, its split.

Columns are called by ``image_column`` and ``label_column``; a column ``split`` holds train, val (or
validation, valid) or test. Paths count from the folder of the CSV file.
"""

import csv
import os
from pathlib import Path

from largemargin.app.config import DataConfig
from largemargin.app.data.sources.image_folders import given_file, printable
from largemargin.app.data.sources.source import Source, class_indices, in_files, listed, ordered
from largemargin.errors import LargeMarginError

SPLIT = "split"
VALIDATION = ("val", "valid", "validation")
SPLITS = {"train": "train", **dict.fromkeys(VALIDATION, "validation"), "test": "test"}

Row = tuple[str, str]


def read(config: DataConfig) -> Source:
    path = given_file(config)
    rows = read_rows(path, config)
    if "train" not in rows:
        raise LargeMarginError(f"{config.path} has no training images: no line with split train.")
    classes = ordered({label for _, label in rows["train"]})
    splits = {
        split: in_files(
            [str(path.parent / image) for image, _ in each],
            [printable(image) for image, _ in each],
            class_indices(split, [label for _, label in each], classes),
        )
        for split, each in rows.items()
    }
    return Source(classes, splits, from_files=True)


def read_rows(path: Path, config: DataConfig) -> dict[str, list[Row]]:
    """(image, label) of every line, by split."""
    rows: dict[str, list[Row]] = {}
    try:
        # utf-8-sig: spreadsheets begin their files with a mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [each.strip() for each in reader.fieldnames or ()]
            check_columns(columns, config)
            reader.fieldnames = columns
            for row in reader:
                image = (row[config.image_column] or "").strip()
                label = (row[config.label_column] or "").strip()
                check_row(image, label, path.parent, f"line {reader.line_num} of {config.path}")
                split = split_of(row.get(SPLIT), reader.line_num, config)
                rows.setdefault(split, []).append((image, label))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LargeMarginError(f"{config.path} is no CSV file in UTF-8: {error}.") from None
    if not rows:
        raise LargeMarginError(f"{config.path} has no lines after its header.")
    return rows


def check_columns(columns: list[str], config: DataConfig) -> None:
    for setting in ("image_column", "label_column"):
        wanted = getattr(config, setting)
        if columns.count(wanted) > 1:
            raise LargeMarginError(f"{config.path} has several columns {wanted!r}. Keep one.")
        if wanted not in columns:
            other = any(mark in each for each in columns for mark in ";\t|")
            hint = " Columns must be separated by commas." if other else ""
            if setting == "image_column":
                hint += " A table without images is for LargeMarginClassifier in Python."
            raise LargeMarginError(
                f"{config.path} has no column {wanted!r} but {listed(columns) or 'none at all'}. "
                f"Set {setting} (--data.{setting} NAME); the first line of the file must name the "
                f"columns.{hint}"
            )


def check_row(image: str, label: str, folder: Path, place: str) -> None:
    if not image or not label:
        raise LargeMarginError(f"{place} lacks an image or a label.")
    if os.sep == "/" and "\\" in image and not (folder / image).exists():
        raise LargeMarginError(
            f"{place} has the path {image} of Windows, which is no file here. Write / for every "
            "backslash."
        )


def split_of(given: str | None, line: int, config: DataConfig) -> str:
    name = (given or "train").strip().lower()
    if name not in SPLITS:
        raise LargeMarginError(
            f"line {line} of {config.path} has split {given!r}, but it must be one of "
            f"{', '.join(SPLITS)}."
        )
    return SPLITS[name]
