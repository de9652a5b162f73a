"""The data of the report as CSV and JSON files inside the page."""

import base64
import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from largemargin.app.report.class_table import COLUMNS, class_rows
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.verdict import judge
from largemargin.measuring.predictions import harmless
from largemargin.measuring.records import plain

MATRIX_CLASSES = 64
"""Of more classes, the matrices of angles and distances are left out of the JSON."""


@dataclass(frozen=True)
class Download:
    """A file inside the page."""

    name: str
    what: str
    address: str
    size: str


def downloads(subjects: Subjects) -> tuple[Download, ...]:
    """Classes and training curves as CSV, everything measured as JSON."""
    made = [_file("summary.json", "verdicts and results of all models", _summary(subjects))]
    measured = [each for each in subjects.each if each.geometry is not None]
    if measured:
        text = as_csv(*_classes(measured))
        made.insert(0, _file("classes.csv", "every class of every model", text))
    trained = [each for each in subjects.each if each.epochs()]
    if trained:
        text = as_csv(*_epochs(trained))
        made.insert(1, _file("training.csv", "every epoch of every model", text))
    return tuple(made)


def as_csv(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV in which no text is a formula of a spreadsheet."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_harmless(head) for head in heads])
    for row in rows:
        writer.writerow([_harmless(cell) for cell in row])
    return file.getvalue()


def _harmless(cell: Any) -> Any:
    if isinstance(cell, str):
        return harmless(cell)
    return "" if cell is None else cell


def _file(name: str, what: str, text: str) -> Download:
    # Half a surrogate pair, as names of files may have, is no UTF-8.
    raw = text.encode(errors="replace")
    kind = "text/csv" if name.endswith(".csv") else "application/json"
    encoded = base64.b64encode(raw).decode()
    size = f"{len(raw) / 1000:.0f} kB" if len(raw) >= 1000 else f"{len(raw)} bytes"
    return Download(name, what, f"data:{kind};base64,{encoded}", size)


def _classes(measured: list[Subject]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    rows = [
        [cell.value if cell.value is not None else "" for cell in row]
        for each in measured
        for row in class_rows(each)
    ]
    return COLUMNS, list(rows)


def _epochs(trained: list[Subject]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    flat = [{"model": each.title, **_numbers(row)} for each in trained for row in each.epochs()]
    heads = list(dict.fromkeys(key for row in flat for key in row))
    return heads, [[row.get(key) for key in heads] for row in flat]


def _numbers(value: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, dict):
            found |= _numbers(each, f"{before}{name}.")
        elif name != "kind":
            found[before + name] = each
    return found


def _summary(subjects: Subjects) -> str:
    models = []
    for each in subjects.each:
        geometry = None if each.geometry is None else each.geometry.to_dict()
        if geometry is not None and geometry["classes"] > MATRIX_CLASSES:
            geometry["prototypes"]["angles"] = geometry["centers"]["distances"] = None
        models.append(
            {
                "name": each.name,
                "baseline": each.baseline,
                "classes": list(each.classes),
                "verdicts": plain(list(judge(each, subjects.baseline))),
                "settings": plain(each.settings),
                "result": plain(each.result),
                "evaluation": None if each.evaluation is None else each.evaluation.to_dict(),
                "geometry": geometry,
                "environment": plain(each.environment),
            }
        )
    return json.dumps({"models": models}, ensure_ascii=False, allow_nan=False)
