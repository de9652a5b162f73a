"""What the results in the repository say about one loss."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import largemargin as lm
from site_pages import reproductions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NOT_MEASURED = "not measured here"

PML_JUMPS = (
    "PML's time jumps between two levels from run to run, the lower one close to ours, for a "
    "reason we have not found."
)
"""Of heads with many classes on a CPU."""
MANY = 10_000
"""Classes from which on it was seen."""

AT_RATES = (
    "- Short runs on digits and CIFAR-10 with learning rates from 0.001 to 0.1, next to softmax: "
    "[measured](../how-to/discriminative.md#measured)."
)
BESIDE = {"discriminative": [AT_RATES], "stable_discriminative": [AT_RATES]}
"""Results beside the papers' tables."""


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """Rows of a file of ``benchmarks/results``; none where it does not exist."""
    file = RESULTS / f"{name}.json"
    if not file.is_file():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    return found["rows"] if isinstance(found, dict) else found


def of_loss(name: str) -> str:
    """The papers' tables that train with a loss, and whether they were measured."""
    found = [table for table in reproductions.tables() if name in table.losses]
    lines = list(BESIDE.get(name, ()))
    if not found and not lines:
        return f"No table of the five papers trains with it: {NOT_MEASURED}."
    for table in found:
        link = f"[{table.recipe.title}](../{table.page}#{table.anchor})"
        lines.append(f"- {link}: {reproductions.state(table)}.")
    return "\n".join(lines)


def jumps(row: dict[str, Any]) -> bool:
    """Whether a row of the CPU benchmark has its ratio to a time that jumps."""
    return row["baseline"].startswith("PML") and row["shape"]["C"] >= MANY


def cost_of_loss(name: str) -> str:
    """Rows of the CPU benchmark that time this loss."""
    called = lm.LOSSES[name].__name__.lower()
    found = [
        row
        for row in rows("cpu_heads")
        if row["provider"].lower().split(",")[0].split()[0] == called
    ]
    if not found:
        return f"Time relative to other heads: {NOT_MEASURED}."
    lines = [
        "| N, C, D | variant | time | against | ratio | kept for backward, in N × C floats |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        shape = row["shape"]
        lines.append(
            f"| {shape['N']}, {shape['C']}, {shape['D']} | {row['provider']} | "
            f"{row['median_ms']:.3g} ms | {row['baseline']} | {row['ratio']:.2f} | "
            f"{row['saved_n_x_c_units']:g} |"
        )
    if any(jumps(row) for row in found):
        lines += ["", PML_JUMPS]
    first = found[0]
    lines += [
        "",
        f"Forward and backward, medians, {first['threads']} threads of an {first['cpu']}, torch "
        f"{first['versions']['torch']}; [all rows](../benchmarks.md).",
    ]
    return "\n".join(lines)
