"""Measured numbers of a cell, kept in the folders of its runs and beside the recipe."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from largemargin.app.config import RunConfig
from largemargin.app.data.load import Data
from largemargin.app.training.files import read_json, write_json
from largemargin.app.training.processes import commit
from largemargin.app.training.runs import ENVIRONMENT, Run
from largemargin.errors import LargeMarginError
from largemargin_papers.recipes.cells import settings_of
from largemargin_papers.recipes.figure_data import FAILED, sketched
from largemargin_papers.recipes.figure_store import take_sketches
from largemargin_papers.recipes.metrics import LATER, Number, Subject, label, measured
from largemargin_papers.recipes.records import finite
from largemargin_papers.recipes.schema import Measure, Recipe

KEPT = "reproduce.json"
"""In the folder of a run: its numbers, so that they are measured once."""

SKETCHED = "sketches.json"
"""Likewise, what figures are drawn from."""

Wanted = dict[str, tuple[str, Mapping[str, Any]]]
"""Metric and options by label."""


class Measurements:
    """The metrics of one cell and their values by seed."""

    def __init__(self) -> None:
        self.wanted: Wanted = {}
        self.found: dict[str, dict[int | None, Number]] = {}
        self.runs: list[dict[str, Any]] = []
        self.failures: dict[int | None, str] = {}

    def add(self, metric: str, options: Mapping[str, Any]) -> None:
        self.wanted[label(metric, options)] = (metric, options)

    def copy(self) -> "Measurements":
        new = Measurements()
        new.wanted = dict(self.wanted)
        return new

    @property
    def failure(self) -> str:
        return "; ".join(
            f"seed {seed}: {why}" if seed is not None else why
            for seed, why in self.failures.items()
        )

    def take(self, run: Mapping[str, Any]) -> None:
        """A run as it is written: its numbers and where they come from."""
        seed = run["seed"]
        self.runs = sorted(
            [*(each for each in self.runs if each["seed"] != seed), dict(run)],
            key=lambda each: -1 if each["seed"] is None else each["seed"],
        )
        self.failures.pop(seed, None)
        if run.get("failure"):
            self.failures[seed] = run["failure"]
        for name, (value, std) in run["numbers"].items():
            number = Number(math.nan if value is None else value, std)
            self.found.setdefault(name, {})[seed] = number

    def values(self, measure: Measure) -> dict[int | None, float]:
        """By seed; the seed of what is not trained is None."""
        found = self.found.get(label(measure.metric, measure.options), {})
        return {seed: number.value for seed, number in sorted(found.items(), key=str)}

    def draws_std(self, measure: Measure) -> float | None:
        found = self.found.get(label(measure.metric, measure.options), {})
        return next((number.std for number in found.values()), None)


def measure_run(
    run: Run,
    wanted: Wanted,
    load: Callable[[], Data],
    split: str,
    device: torch.device,
    sketches: Wanted | None = None,
) -> dict[str, list[float | None]]:
    """What is wanted of a run, as value and deviation over draws; known numbers are not repeated.

    Args:
        run: finished.
        wanted: metrics by label.
        load: gives the data of the run.
        split: images that are evaluated.
        device: to evaluate on.
        sketches: for figures, by label; :func:`about` finds them in the folder of the run.
    """
    file = run.folder / KEPT
    kept: dict[str, Any] = read_json(file) if file.is_file() else {}
    subject = Subject(run, load, split, device)
    found = {}
    for name in now(wanted):
        metric, options = wanted[name]
        entry = f"{split}: {name}"
        if entry not in kept:
            kept[entry] = list(measured(subject, metric, options))
            write_json(file, finite(kept))
        found[name] = kept[entry]
    drawn = sketches_of(run)
    for name, (kind, options) in (sketches or {}).items():
        if name not in drawn:
            drawn[name] = finite(_sketch(subject, kind, options))
            write_json(run.folder / SKETCHED, drawn)
    return found


def _sketch(subject: Subject, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A model that cannot be drawn, as one with infinite features, still has its numbers."""
    try:
        return sketched(subject, kind, options)
    except LargeMarginError as error:
        return {"kind": kind, FAILED: str(error)}


def now(wanted: Wanted) -> dict[str, None]:
    """Labels of what is measured on the model; the rest follows from sketches."""
    return dict.fromkeys(name for name, (metric, _) in wanted.items() if metric not in LATER)


def sketches_of(run: Run) -> dict[str, Any]:
    """What was kept of a run for figures, by label."""
    file = run.folder / SKETCHED
    return dict(read_json(file)) if file.is_file() else {}


def computed(wanted: Wanted) -> dict[str, Any]:
    """The numbers of a cell that trains nothing, as those of a run."""
    numbers = {
        name: list(measured(None, metric, options)) for name, (metric, options) in wanted.items()
    }
    versions = {"torch": str(torch.__version__), "commit": commit()}
    return {"seed": None, "status": "finished", "numbers": numbers, **versions}


def about(run: Run, config: RunConfig, numbers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A finished run as it is written: its numbers and where they come from.

    Args:
        run: finished.
        config: its settings, wherever its images lie.
        numbers: from :func:`measure_run`.
        more: further facts, or better ones than the run's folder has.
    """
    file = run.folder / ENVIRONMENT
    environment: dict[str, Any] = read_json(file) if file.is_file() else {}
    return {
        "seed": config.seed,
        "run": run.folder.name,
        "status": "finished",
        "numbers": dict(numbers),
        "seconds": run.result.get("seconds"),
        "images_per_s": run.result.get("images_per_s"),
        "epochs": run.result.get("epochs"),
        "device": environment.get("device"),
        "commit": environment.get("commit"),
        "torch": environment.get("torch"),
        **{name: value for name, value in more.items() if value is not None},
        **curves_of(run),
        **({"sketches": drawn} if (drawn := sketches_of(run)) else {}),
        "settings": settings_of(config),
    }


CURVES = ("softmax_bias", "class_margin_degrees", "mean_cosine_margin")


def curves_of(run: Run) -> dict[str, Any]:
    """What the run measured of its geometry after every epoch, if it did (LMS Figure 3)."""
    rows = [row["geometry"] for row in run.metrics("epoch") if row.get("geometry")]
    if not rows:
        return {}
    curves = {name: [_rounded(row.get(name)) for row in rows] for name in CURVES}
    return {"curves": {"of": rows[0]["split"], "samples": rows[0]["samples"], **curves}}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def measured_file(recipe_path: Path) -> Path:
    return recipe_path.parent / "measured" / f"{recipe_path.stem}.json"


def read_measured(recipe_path: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Runs by protocol and cell, as ``measured/<table>.json`` has them; nothing without it."""
    path = measured_file(recipe_path)
    if not path.is_file():
        return {}
    try:
        protocols = read_json(path)["protocols"]
        return {
            protocol: {name: cell["runs"] for name, cell in cells.items()}
            for protocol, cells in protocols.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise LargeMarginError(f"{path} is damaged ({error!r}). Move it away.") from error


def write_measured(
    recipe_path: Path,
    recipe: Recipe,
    protocol: str,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    reported: Mapping[str, Mapping[str, float | None]],
) -> Path:
    """Put runs into ``measured/<table>.json`` beside the recipe, by protocol and cell.

    What was measured before stays: runs with other seeds, and numbers of the same run that were
    not measured this time. Sketches go to a file of their own, and their labels stay with the run.
    """
    path = measured_file(recipe_path)
    before = read_measured(recipe_path)
    cells = before.get(protocol, {})
    for name, new in runs.items():
        merged = {each["seed"]: each for each in cells.get(name, [])}
        for each in new:
            known = merged.get(each["seed"], {})
            same = known.get("run") == each.get("run")
            numbers = {**(known.get("numbers", {}) if same else {}), **each["numbers"]}
            run = {**each, "numbers": numbers}
            drawn = each.get("sketches", ())
            if isinstance(drawn, Mapping):
                drawn = take_sketches(recipe_path, recipe, protocol, name, each["seed"], drawn)
            if labels := {*drawn, *(known.get("sketches", ()) if same else ())}:
                run["sketches"] = sorted(labels)
            else:
                run.pop("sketches", None)
            merged[each["seed"]] = run
        if merged:
            cells[name] = [merged[seed] for seed in sorted(merged, key=str)]
    if not cells:
        return path
    path.parent.mkdir(exist_ok=True)
    protocols = {
        which: {
            name: {"reported": dict(reported.get(name, {})), "runs": each}
            for name, each in found.items()
        }
        for which, found in {**before, protocol: cells}.items()
    }
    write_json(path, finite({"title": recipe.title, "protocols": protocols}))
    return path
