"""The decision table from the measured files of the benchmark: docs and README include it.

python docs/make_decisions.py        prints it
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "src" / "largemargin" / "training" / "presets.json"


def decision_table(measured: Mapping[str, Mapping[str, Any]], *, root: str = "") -> str:
    """Markdown: situation, what to train with, gain with interval, cost; what speaks against it.

    Args:
        measured: what ``largemargin/training/presets.json`` holds, by preset.
        root: what leads from the page to the root of the repository, as ``"../"``.
    """
    lines = [
        "| you have | preset | train with | gain over a tuned baseline | cost | measured on |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in measured.items():
        chosen, test = entry["recommended"], entry["compared"]
        cells = [
            SITUATIONS.get(name, name.replace("_", " ")),
            _call(name, chosen),
            f"`{chosen['objective']}`" + _settings(chosen),
            _gain(test) if test else "not measured yet",
            _cost(chosen),
            f"{entry['situation']} ([file]({root}{entry['source']}))"
            if test
            else entry["situation"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
        for title, other in entry["others"].items():
            if other:
                here = f"{SITUATIONS.get(name, name)}, another task"
                cells = [here, "–", f"`{other['objective']}`", _gain(other)]
                lines.append("| " + " | ".join([*cells, _cost(other), title]) + " |")
    if devices := _devices(measured):
        lines += ["", COST.format(on=", ".join(devices))]
    doubts = [(name, each) for name, entry in measured.items() for each in entry["doubts"]]
    if doubts:
        lines += ["", "Before you believe a gain:", "", f"* all: {ALL}"]
        lines += [f"* {SITUATIONS.get(name, name)}: {each}" for name, each in doubts]
    return "\n".join(lines)


ALL = (
    "method and settings were chosen on validation images with right labels, more than some of the "
    "training sets have. The method is the best of several, each with as many trials as softmax."
)

SITUATIONS = {
    "few_labels": "few labels",
    "long_tail": "a long tail of rare classes",
    "label_noise": "wrong labels",
    "corruption": "corrupted inputs",
    "embedding": "a search by features",
}


def _call(name: str, chosen: Mapping[str, Any]) -> str:
    """How to get it, and what ``attach`` needs beside it."""
    counts = ", class_counts=..." if "ldam" in chosen["objective"] else ""
    steps = ", `attach(..., total_steps=...)`" if chosen.get("reweight_at") else ""
    return f'`lm.preset("{name}"{counts})`{steps}'


def _settings(chosen: Mapping[str, Any]) -> str:
    numbers = []
    for name, value in chosen["settings"].items():
        grouped = value.items() if isinstance(value, dict) else [(name, value)]
        numbers += [f"{key} {each:g}" for key, each in grouped if isinstance(each, int | float)]
    noise = chosen.get("noise")
    if noise:
        numbers.append(f"{noise['use'].replace('_', ' ')} images, noise {noise['level']:g}")
    if chosen.get("reweight_at"):
        late = 100 * (1 - chosen["reweight_at"])
        numbers.append(f"balanced class weights in the last {late:.0f} % of the steps")
    return f" ({', '.join(numbers)})" if numbers else ""


COST = (
    "Cost: a training step over one of softmax, each alone on {on}, "
    "`python benchmarks/method_cost.py`; a few percent are noise there."
)


def _cost(chosen: Mapping[str, Any]) -> str:
    """Of a training step over one of softmax."""
    cost = chosen.get("cost")
    return f"x{cost['over_softmax']:.2f}" if cost else "not measured"


def _devices(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    costs = (entry["recommended"].get("cost") for entry in measured.values())
    return sorted({cost["on"] for cost in costs if cost})


def _gain(test: Mapping[str, Any]) -> str:
    low, high = 100 * test["low"], 100 * test["high"]
    gain = f"{100 * test['difference']:+.2f} [{low:+.2f}, {high:+.2f}] points"
    if test["verdict"] == "winner":
        return f"{gain}, p = {test['corrected']:.2g}"
    return f"none shown: best margin method {test['chosen']} {gain}, p = {test['corrected']:.2g}"


def read_presets() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PRESETS.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    print(decision_table(read_presets()))
