"""What the benchmark recommends for a situation: the short table and the one with all settings.

``python docs/make_decisions.py`` prints both. README.md and the start page of the documentation
show the short one, ``docs/choosing.md`` the other.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "src" / "largemargin" / "app" / "training" / "presets.json"


def recommendations(root: str = "") -> str:
    """Markdown: situation, preset, gain with interval, what a simpler remedy leaves of it, link.

    Args:
        root: what leads from the page to the root of the repository, as ``"../"``.
    """
    measured = read_presets()
    tests = [
        test
        for entry in measured.values()
        for test in (entry["compared"], *entry["others"].values())
    ]
    won = sum(test is not None and test["verdict"] == "winner" for test in tests)
    missing = sum(test is None for test in tests)
    lines = [
        f"A margin method beat the tuned baseline in {won} of {len(tests)} tasks"
        + (f"; {missing} were not measured. " if missing else ". ")
        + "Where none did, the preset is that baseline. Gains are percentage points on test "
        "images, with 95 % intervals over paired seeds; where method and baseline were tuned to "
        "different optimizer settings, the smallest of the gains with and without equal ones.",
        "",
        "| situation | preset | gain over the tuned baseline | gain over a simpler remedy | "
        "measured on |",
        "|---|---|---|---|---|",
    ]
    for name, entry in measured.items():
        cells = [SITUATIONS.get(name, name), f'`lm.preset("{name}")`', *_gains(entry)]
        lines.append("| " + " | ".join([*cells, _measured_on(entry, root)]) + " |")
    others = [
        f"{title}: {_short_gain(test)}"
        for entry in measured.values()
        for title, test in entry["others"].items()
        if test
    ]
    if others:
        lines += ["", f"Other tasks with few labels. {'. '.join(others)}."]
    return "\n".join(lines)


def _gains(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Over the tuned baseline, and over the best method without a margin that was trained too."""
    test = entry["compared"]
    if not test:
        return "not measured yet", "–"
    if test["verdict"] != "winner":
        return _short_gain(test), "–"
    found = json.loads((ROOT / entry["source"]).read_text(encoding="utf-8"))
    return _short_gain(test), _simpler_remedy(found)


def _simpler_remedy(found: Mapping[str, Any]) -> str:
    """The smallest gain of the chosen method over a method without a margin, and its name."""
    beyond = {}
    for pair, gain in found["reported_beside"].items():
        chosen, _, other = pair.partition(" - ")
        if chosen == found["chosen"] and other != found["baseline"]:
            beyond[other.replace("_", " ")] = gain
    for answer in found["asked"].values():
        if answer["method"] != found["chosen"] and "chosen_beyond" in answer:
            beyond[_change(answer)] = answer["chosen_beyond"]
    if not beyond:
        return "–"
    name = min(beyond, key=lambda each: beyond[each]["difference"])
    return f"{_interval(beyond[name])} ({name})"


def _change(answer: Mapping[str, Any]) -> str:
    """What a follow-up run trained that has no margin."""
    change = str(answer["method"]).replace("_", " ")
    if answer["reweight_at"] is not None:
        change = "late class weights"
    elif answer["epochs"] != 1:
        change = "early stopping"
    return f"{change}, same optimizer" if answer["optimizer_of"] else change


def _measured_on(entry: Mapping[str, Any], root: str) -> str:
    if not entry["compared"]:
        return str(entry["situation"])
    return f"[{entry['situation']}]({root}{entry['source']})"


def _short_gain(test: Mapping[str, Any]) -> str:
    if test["verdict"] == "winner":
        return _interval(test)
    return f"**none**: best margin method {_interval(test)}"


def _interval(test: Mapping[str, float]) -> str:
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(
        *(100 * test[key] for key in ("difference", "low", "high"))
    )


def decision_table(measured: Mapping[str, Mapping[str, Any]], *, root: str = "") -> str:
    """Markdown: situation, what to train with, gain with interval, cost; then the caveats.

    Args:
        measured: what ``largemargin/app/training/presets.json`` holds, by preset.
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
            f"{entry['situation']} ([measured]({root}{entry['source']}))"
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
        lines += ["", "Caveats:", "", f"* all: {ALL}"]
        lines += [f"* {SITUATIONS.get(name, name)}: {each}" for name, each in doubts]
    return "\n".join(lines)


ALL = (
    "method and settings were chosen on validation images with correct labels, more images than "
    "some of the training sets have. The method is the best of several, each with as many trials "
    "as softmax."
)

SITUATIONS = {
    "few_labels": "few labels",
    "long_tail": "long tail of rare classes",
    "label_noise": "wrong labels",
    "corruption": "corrupted inputs",
    "embedding": "retrieval by features",
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
    "Cost: time of a training step relative to softmax, each alone on {on}, on a GPU captured in a "
    "CUDA graph; beside it without graphs (eager) and on a CPU, where that was timed. "
    "`python benchmarks/method_cost.py`; differences of a few percent are noise."
)


def _cost(chosen: Mapping[str, Any]) -> str:
    cost = chosen.get("cost")
    if not cost:
        return "not measured"
    beside = (f"{way} x{ratio:.2f}" for way, ratio in cost.get("beside", {}).items())
    return ", ".join([f"x{cost['over_softmax']:.2f}", *beside])


def _devices(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    costs = (entry["recommended"].get("cost") for entry in measured.values())
    return sorted({cost["on"] for cost in costs if cost})


def _gain(test: Mapping[str, Any]) -> str:
    gain = f"{_interval(test)} points"
    if test["verdict"] == "winner":
        p = f"p = {test['corrected']:.2g}"
        if test["difference"] != test["registered"]:
            p = f"registered {100 * test['registered']:+.2f}, {p}"
        return f"{gain}, {p}"
    return f"none shown: best margin method {test['chosen']} {gain}, p = {test['corrected']:.2g}"


def read_presets() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PRESETS.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    print(recommendations(), decision_table(read_presets()), sep="\n\n")
