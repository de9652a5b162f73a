"""Sketches beside a recipe: which are wanted of which cell, and those that were taken."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from largemargin.app.training.files import write_text
from largemargin_papers.recipes.cells import Cell, chosen_of
from largemargin_papers.recipes.figure_data import Drawn, check_kind, settled
from largemargin_papers.recipes.metrics import label
from largemargin_papers.recipes.schema import Recipe, Sketch
from largemargin_papers.record_lines import read_records

NEEDED = ("protocol", "cell", "seed", "label", "sketch")


def label_of(sketch: Sketch) -> str:
    """``sketch planes parts=['train', 'test']``."""
    return label(f"sketch {sketch.kind}", sketch.options)


def sketches_for(
    recipe: Recipe, cells: Sequence[Cell]
) -> dict[tuple[str, int], dict[str, tuple[str, Mapping[str, Any]]]]:
    """Kind and options by label, of every run that something is drawn of: its cell and seed."""
    wanted: dict[tuple[str, int], dict[str, tuple[str, Mapping[str, Any]]]] = {}
    for sketch in recipe.sketches:
        check_kind(sketch.kind)
        for cell in chosen_of(cells, sketch.only):
            for seed in cell.seeds if sketch.every_seed else cell.seeds[:1]:
                place = wanted.setdefault((cell.name, seed), {})
                place[label_of(sketch)] = (sketch.kind, sketch.options)
    return wanted


def sketch_file(recipe_path: Path) -> Path:
    return recipe_path.parent / "measured" / f"{recipe_path.stem}.sketches.jsonl"


def read_sketches(recipe_path: Path) -> list[dict[str, Any]]:
    """One entry for every sketch: protocol, cell, seed, label, sketch."""
    return read_records([sketch_file(recipe_path)], NEEDED)


def take_sketches(
    recipe_path: Path,
    recipe: Recipe,
    protocol: str,
    cell: str,
    seed: int | None,
    given: Mapping[str, Drawn],
) -> list[str]:
    """Keep those that the recipe draws, embedded in the plane; returns the labels kept."""
    labels = [label_of(each) for each in recipe.sketches]
    kept = {name: settled(each) for name, each in given.items() if name in labels}
    if not kept:
        return []
    entries = {
        tuple(str(each[name]) for name in NEEDED[:-1]): each for each in read_sketches(recipe_path)
    }
    for name, sketch in kept.items():
        entry = dict(zip(NEEDED, (protocol, cell, seed, name, sketch), strict=True))
        entries[protocol, cell, str(seed), name] = entry
    path = sketch_file(recipe_path)
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(each, ensure_ascii=False, allow_nan=False) for each in entries.values()]
    write_text(path, "\n".join(lines) + "\n")
    return sorted(kept)
