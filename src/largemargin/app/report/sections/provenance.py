"""Where everything comes from, and the data as files inside the page."""

import base64
import json
import shlex
from dataclasses import dataclass
from typing import Any

from largemargin.app.report.charts import (
    Block,
    Blocks,
    Cell,
    Note,
    Section,
    Table,
    arranged,
    number,
    seconds,
)
from largemargin.app.report.judgements import judge
from largemargin.app.report.report_models import (
    CLASS_COLUMNS,
    ReportModel,
    ReportModels,
    class_rows,
    settings_of,
    split,
)
from largemargin.app.training.config_file import flat
from largemargin.measuring.predictions import as_csv
from largemargin.measuring.records import plain

READING = (
    "Everything needed to reproduce these numbers, and the numbers as files. Good is a comparison "
    "in which only the objective differs."
)


def provenance_section(models: ReportModels) -> Section:
    blocks: list[Block] = [Blocks("downloads", downloads(models))]
    runs = [model for model in models if model.run is not None]
    more: list[Block] = [_differing(runs), _equal(runs)] if runs else []
    if not runs:
        words = "A geometry alone does not say which model it is of: give the report a run."
        for model in models:
            if model.geometry is not None and model.geometry.data is not None:
                words += f" {model.title} was measured on {model.geometry.data}."
        blocks.append(Note(words, "largemargin report RUN"))
    folded = "Origin and settings of every run"
    return Section("provenance", "Provenance", READING, blocks, arranged(more), folded)


def _facts(model: ReportModel) -> dict[str, str]:
    e, d = model.environment, model.data
    record = d.get("record", {})
    packages = ", ".join(f"{name} {version}" for name, version in e.get("packages", {}).items())
    images = ", ".join(f"{split} {n}" for split, n in record.get("images", {}).items())
    modifiers = "; ".join(_modifier(each) for each in record.get("modifiers", ()))
    speed = model.result.get("images_per_s")
    return {
        "run": model.shell_path,
        "command": shlex.join(str(word) for word in e.get("command", ())),
        "seed": str(model.settings.get("seed", "")),
        "commit": str(e.get("commit") or "not known"),
        "largemargin": str(e.get("largemargin", "")),
        "Python, torch": f"{e.get('python', '')}, {e.get('torch', '')}",
        "packages": packages,
        "device": str(e.get("device", "")),
        "platform": str(e.get("platform", "")),
        "processes, threads": f"{e.get('processes', '')}, {e.get('threads', '')}",
        "data": str(d.get("name", "")),
        "images": images,
        "image size": " × ".join(str(each) for each in d.get("size", ())),
        "modifiers": modifiers or "none",
        "augmentation": str(record.get("augment", "")),
        "skipped files": str(len(record.get("skipped", ()))),
        "licence": str(d.get("licence", "")),
        "training time": seconds(model.result.get("seconds")),
        "images per second": "" if speed is None else number(speed),
        "evaluation time": seconds(model.evaluation.seconds) if model.evaluation else "",
    }


def _modifier(record: dict[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in record.items() if key != "name")
    return f"{record.get('name')} ({rest})" if rest else str(record.get("name"))


def _differing(runs: list[ReportModel]) -> Table:
    rows = split([_facts(model) for model in runs])[0] + settings_of(runs)[0]
    return Table(
        ("", *(model.title for model in runs)),
        tuple(tuple(map(Cell.of, row)) for row in rows),
        caption="In what the runs differ",
        key="origin",
    )


def _equal(runs: list[ReportModel]) -> Table:
    rows = split([_facts(model) for model in runs])[1] + settings_of(runs)[1]
    return Table(
        ("", "all runs" if len(runs) > 1 else runs[0].title),
        tuple(tuple(map(Cell.of, row[:2])) for row in rows),
        caption="What is the same in all runs" if len(runs) > 1 else "The run",
        key="settings",
        searchable=True,
    )


MATRIX_CLASSES = 64
"""Of more classes, the matrices of angles and distances are left out of the JSON."""


@dataclass(frozen=True)
class Download:
    """A file inside the page."""

    name: str
    what: str
    address: str
    size: str


def downloads(models: ReportModels) -> tuple[Download, ...]:
    """Classes and training curves as CSV, everything measured as JSON."""
    made = []
    if models.measured:
        rows = [[c.value for c in row] for pair in models.measured for row in class_rows(*pair)]
        made.append(_file("classes.csv", "every class of every model", as_csv(CLASS_COLUMNS, rows)))
    epochs = [{"model": model.title, **flat(row)} for model in models for row in model.epochs()]
    if epochs:
        made.append(_file("training.csv", "every epoch of every model", _epochs(epochs)))
    made.append(_file("summary.json", "verdicts and results of all models", _summary(models)))
    return tuple(made)


def _epochs(rows: list[dict[str, Any]]) -> str:
    names = [name for row in rows for name, value in row.items() if value != {} and name != "kind"]
    heads = tuple(dict.fromkeys(names))
    return as_csv(heads, [[row.get(name) for name in heads] for row in rows])


def _file(name: str, what: str, text: str) -> Download:
    # Half a surrogate pair, as names of files may have, is no UTF-8.
    raw = text.encode(errors="replace")
    kind = "text/csv" if name.endswith(".csv") else "application/json"
    encoded = base64.b64encode(raw).decode()
    size = f"{len(raw) / 1000:.0f} kB" if len(raw) >= 1000 else f"{len(raw)} bytes"
    return Download(name, what, f"data:{kind};base64,{encoded}", size)


def _summary(models: ReportModels) -> str:
    records = []
    for model in models:
        geometry = None if model.geometry is None else model.geometry.to_dict()
        if geometry is not None and geometry["classes"] > MATRIX_CLASSES:
            geometry["prototypes"]["angles"] = geometry["centers"]["distances"] = None
        records.append(
            {
                "name": model.name,
                "baseline": model.baseline,
                "classes": list(model.classes),
                "verdicts": plain(list(judge(model, models.baseline))),
                "settings": plain(model.settings),
                "result": plain(model.result),
                "evaluation": None if model.evaluation is None else model.evaluation.to_dict(),
                "geometry": geometry,
                "environment": plain(model.environment),
            }
        )
    return json.dumps({"models": records}, ensure_ascii=False, allow_nan=False)
