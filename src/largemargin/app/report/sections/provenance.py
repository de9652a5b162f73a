"""Section 8: where everything comes from, and the data to take away."""

import json
import shlex
from typing import Any

from largemargin.app.report.charts import Block, Blocks, Cell, Note, Section, Table
from largemargin.app.report.downloads import downloads
from largemargin.app.report.number_format import number, seconds, text_cell
from largemargin.app.report.report_models import Subject, Subjects

READING = (
    "Everything needed to make these numbers again. Settings in which the models differ are bold "
    "and come first; good is a comparison where only the objective and its settings are."
)
IGNORED = ("name", "out")
"""Settings that are no part of the method."""


def provenance_section(subjects: Subjects) -> Section:
    blocks: list[Block] = []
    runs = [each for each in subjects.each if each.run is not None]
    if runs:
        blocks += [_origin(runs), _settings(runs)]
    else:
        words = "A geometry alone does not say which model it is of: give the report a run."
        for each in subjects.each:
            if each.geometry is not None and each.geometry.data is not None:
                words += f" {each.title} was measured on {each.geometry.data}."
        blocks.append(Note(words, "largemargin report RUN"))
    blocks.append(Blocks("downloads", downloads(subjects)))
    return Section("provenance", "Provenance", READING, tuple(blocks))


def _facts(subject: Subject) -> dict[str, str]:
    e, d = subject.environment, subject.data
    record = d.get("record", {})
    packages = ", ".join(f"{name} {version}" for name, version in e.get("packages", {}).items())
    images = ", ".join(f"{split} {n}" for split, n in record.get("images", {}).items())
    modifiers = "; ".join(_modifier(each) for each in record.get("modifiers", ()))
    speed = subject.result.get("images_per_s")
    return {
        "run": subject.where,
        "command": shlex.join(str(word) for word in e.get("command", ())),
        "seed": str(subject.settings.get("seed", "")),
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
        "training time": seconds(subject.result.get("seconds")),
        "images per second": "" if speed is None else number(speed),
        "evaluation time": ""
        if subject.evaluation is None
        else seconds(subject.evaluation.seconds),
    }


def _modifier(record: dict[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in record.items() if key != "name")
    return f"{record.get('name')} ({rest})" if rest else str(record.get("name"))


def _origin(runs: list[Subject]) -> Table:
    facts = [_facts(each) for each in runs]
    rows = tuple(
        (text_cell(name), *(text_cell(each[name] or "–") for each in facts)) for name in facts[0]
    )
    return Table(("", *(each.title for each in runs)), rows, caption="Origin", key="origin")


def flat(value: Any, before: str = "") -> dict[str, str]:
    """Settings by their path: ``optimizer.lr``."""
    if isinstance(value, dict) and value:
        return {
            key: text
            for name, each in value.items()
            for key, text in flat(each, f"{before}{name}.").items()
        }
    shown = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return {before.rstrip("."): shown}


def _settings(runs: list[Subject]) -> Table:
    found = [flat(each.settings) for each in runs]
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = []
    for name in names:
        values = [each.get(name, "–") for each in found]
        differs = len(set(values)) > 1 and name not in IGNORED
        cells = (Cell(value, value, differs) for value in values)
        rows.append((text_cell(name, strong=differs), *cells))
    rows.sort(key=lambda row: not row[0].strong)
    return Table(
        ("setting", *(each.title for each in runs)),
        tuple(rows),
        caption="Settings",
        key="settings",
        searchable=True,
    )
