"""Measured numbers of a cell, kept in the folders of its runs and beside the recipe."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from largemargin.data import Data
from largemargin.errors import LargeMarginError
from largemargin.recipes.metrics import Number, Subject, measured
from largemargin.recipes.schema import Measure, Recipe
from largemargin.training import Run, to_dict
from largemargin.training.files import read_json, write_json
from largemargin.training.runs import ENVIRONMENT

KEPT = "reproduce.json"
"""In the folder of a run: its numbers, so that they are measured once."""


class Measurements:
    """The metrics of one cell and their values by seed."""

    def __init__(self) -> None:
        self.wanted: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self.found: dict[str, dict[int | None, Number]] = {}
        self.runs: list[dict[str, Any]] = []
        self.failure = ""

    def add(self, metric: str, options: Mapping[str, Any]) -> None:
        self.wanted[label(metric, options)] = (metric, options)

    def copy(self) -> "Measurements":
        new = Measurements()
        new.wanted = dict(self.wanted)
        return new

    def values(self, measure: Measure) -> dict[int | None, float]:
        """By seed; the seed of what is not trained is None."""
        found = self.found.get(label(measure.metric, measure.options), {})
        return {seed: number.value for seed, number in found.items()}

    def draws_std(self, measure: Measure) -> float | None:
        found = self.found.get(label(measure.metric, measure.options), {})
        return next((number.std for number in found.values()), None)


def label(metric: str, options: Mapping[str, Any]) -> str:
    """``noisy_accuracy sigma=8/255``."""
    return " ".join([metric, *(f"{name}={value}" for name, value in sorted(options.items()))])


def measure_run(
    into: Measurements,
    run: Run | None,
    load: Callable[[], Data],
    split: str,
    device: torch.device | None,
    *,
    seed: int | None,
) -> Measurements:
    """Measure what is wanted of a run and not yet known of it; ``load`` gives its data."""
    if run is None or device is None:
        for name, (metric, options) in into.wanted.items():
            into.found.setdefault(name, {})[seed] = measured(None, metric, options)
        return into
    file = run.folder / KEPT
    kept: dict[str, Any] = read_json(file) if file.is_file() else {}
    subject = Subject(run, load, split, device)
    for name, (metric, options) in into.wanted.items():
        entry = f"{split}: {name}"
        if entry not in kept:
            kept[entry] = list(measured(subject, metric, options))
            write_json(file, kept)
        into.found.setdefault(name, {})[seed] = Number(*kept[entry])
    into.runs.append(_about(run, seed))
    return into


def _about(run: Run, seed: int | None) -> dict[str, Any]:
    """Where the numbers of a run come from."""
    file = run.folder / ENVIRONMENT
    environment: dict[str, Any] = read_json(file) if file.is_file() else {}
    return {
        "seed": seed,
        "run": run.folder.name,
        "seconds": run.result.get("seconds"),
        "epochs": run.result.get("epochs"),
        "device": environment.get("device"),
        "commit": environment.get("commit"),
        "torch": environment.get("torch"),
        "settings": to_dict(run.config),
    }


def write_measured(
    recipe_path: Path, recipe: Recipe, protocol: str, found: Mapping[str, Measurements]
) -> Path:
    """Put the numbers into ``measured/<table>.json`` beside the recipe, by protocol and cell.

    Cells measured before and not this time stay; so do other protocols.
    """
    path = recipe_path.parent / "measured" / f"{recipe_path.stem}.json"
    before = _read(path)
    cells = before.get("protocols", {}).get(protocol, {})
    for name, each in found.items():
        if not each.found and not each.failure:
            continue
        cells[name] = {
            "numbers": {
                metric: {
                    "values": [number.value for number in numbers.values()],
                    "draws_std": [number.std for number in numbers.values()],
                }
                for metric, numbers in each.found.items()
            },
            "runs": each.runs,
            **({"failure": each.failure} if each.failure else {}),
        }
    if not cells:
        return path
    path.parent.mkdir(exist_ok=True)
    protocols = {**before.get("protocols", {}), protocol: cells}
    write_json(path, {"title": recipe.title, "protocols": protocols})
    return path


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LargeMarginError(f"{path} is damaged ({error}). Move it away.") from error
    return found
