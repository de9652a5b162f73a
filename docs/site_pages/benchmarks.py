"""The rows behind the page of benchmarks: every file of ``benchmarks/results`` as a table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from site_pages.results import PML_JUMPS, jumps

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

ABOUT = {
    "cpu_heads": "Classification heads on a CPU, forward and backward, compared with "
    "pytorch-metric-learning (PML). Providers are interleaved in one run; values and gradients are "
    "compared before timing.",
    "import_time": "What `import largemargin` adds to a process.",
    "measure": "Measuring, compared with an evaluation pass and with the usual loops.",
    "training_speed_cpu": "The training engine, compared with a hand-written loop, on a CPU.",
    "training_speed_cuda": "The same on a GPU: ResNet-18 for 32 × 32 images, bfloat16.",
    "input_curvature_cpu": "Input-loss curvature next to forward and backward passes, on a CPU.",
    "input_curvature_cuda": "The same on a GPU, 10,000 images.",
    "loss_defaults": "Accuracies of small networks with the settings of face recognition and with "
    "scales that follow the number of classes, a number for each seed.",
    "discriminative_stability": "What makes the published discriminative loss diverge, on digits: "
    "see [the discriminative loss at ordinary learning rates](how-to/discriminative.md).",
    "discriminative_stability_cifar10": "The same on CIFAR-10.",
}
WITHOUT_GRADIENT = ("ddf15adff292+",)
"""Commits whose compiled losses had no gradient through their logits, on a GPU with torch 2.11."""
ON_ZEROS = (
    "The compiled rows were measured when compiled losses had no gradient through their logits on "
    "this device (fixed since). The same work was done, but on zeros: they are to be measured "
    "again."
)
META = (
    *("date", "commit", "command", "cpu", "cpu_count", "load_1min_at_start", "threads", "python"),
    *("versions", "benchmark", "device", "torch", "gpu", "cuda"),
)
MOST = 40
"""Rows that are shown at once; longer tables open on a click."""


def all_rows() -> str:
    """Markdown: a section for every file."""
    lines = []
    for file in sorted(RESULTS.glob("*.json"), key=_order):
        lines += _section(file)
    return "\n".join(lines) + "\n"


def _order(file: Path) -> tuple[int, str]:
    names = list(ABOUT)
    return (names.index(file.stem) if file.stem in names else -1, file.stem)


def _section(file: Path) -> list[str]:
    found = json.loads(file.read_text(encoding="utf-8"))
    about = found if isinstance(found, dict) else {}
    rows: list[dict[str, Any]] = about.get("rows", []) if about else found
    lines = [f"## {file.stem.replace('_', ' ')}", ""]
    if file.stem in ABOUT:
        lines += [ABOUT[file.stem], ""]
    lines += [_provenance({**(rows[0] if rows else {}), **about}, file), ""]
    lines += [line for text in caveats(file.stem, about, rows) for line in (f"**{text}**", "")]
    rest = {
        name: value
        for name, value in about.items()
        if name not in (*META, "rows") and not isinstance(value, (dict, list))
    }
    if rest:
        lines += [", ".join(f"{_words(name)} {_value(value)}" for name, value in rest.items()), ""]
    for part in _alike(rows):
        table = _table(part)
        if len(part) > MOST:
            lines += [f'??? quote "{len(part)} rows"', "", *(f"    {line}" for line in table), ""]
        else:
            lines += [*table, ""]
    return lines


def caveats(name: str, about: Mapping[str, Any], rows: Sequence[dict[str, Any]] = ()) -> list[str]:
    """What a reader of a file's numbers has to know."""
    if name == "cpu_heads":
        classes = dict.fromkeys(row["shape"]["C"] for row in rows if jumps(row))
        return [f"With {each:,} classes {PML_JUMPS}" for each in classes]
    if name == "training_speed_cuda" and about.get("commit") in WITHOUT_GRADIENT:
        return [ON_ZEROS]
    return []


def _alike(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows in groups with the same columns, in their order."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(name for name in row if name not in META), []).append(row)
    return list(groups.values())


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = [
        name
        for name in rows[0]
        if name not in META and any(row[name] not in (None, "") for row in rows)
    ]
    lines = [f"| {' | '.join(_words(name) for name in names)} |", "|---" * len(names) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(_value(row[name]) for name in names)} |")
    return lines


def _provenance(row: dict[str, Any], file: Path) -> str:
    parts = []
    if row.get("command"):
        parts.append(f"`{row['command']}`")
    machine = row.get("device") or row.get("gpu") or row.get("cpu")
    if machine:
        parts.append(str(machine))
    if row.get("threads"):
        parts.append(f"{row['threads']} threads")
    version = row.get("torch") or (row.get("versions") or {}).get("torch")
    if version:
        parts.append(f"torch {version}")
    if row.get("commit"):
        parts.append(f"commit `{row['commit']}`")
    if row.get("date"):
        parts.append(str(row["date"])[:10])
    return "; ".join([*parts, f"file `benchmarks/results/{file.name}`"]) + "."


def _words(name: str) -> str:
    return name.replace("_", " ").replace("|", r"\|")


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}\u00a0{_value(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    return str(value).replace("|", r"\|")
