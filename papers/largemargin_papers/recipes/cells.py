"""A recipe written out: every run of the table with its settings and its place in the table."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from largemargin.app.config import RunConfig
from largemargin.app.training.config_file import from_dict, settings_from, to_dict
from largemargin.errors import LargeMarginError
from largemargin_papers.recipes.schema import Axis, Measure, Recipe, Row

Key = Mapping[str, str]

NEUTRAL = (
    "name",
    "out",
    "device",
    "trackers",
    "compile",
    "graph",
    "checkpoint_every",
    "gradients_every",
    "geometry_samples",
    "max_bad_steps",
    "data.path",
    "data.download",
    "data.workers",
    "data.resident",
    "data.corrupt",
)
"""Settings that say where and how fast a run is made, not what it computes."""

LATER: Mapping[str, Any] = {
    "noise.joined": False,
    "noise.crop": "same",
    "data.validation_from": "train",
    "objective.settings.eps": 1e-6,
}
"""Settings younger than the first measured runs, and the value that is what those runs did."""


@dataclass(frozen=True)
class Cell:
    """The runs of one place in the table, which differ by their seed alone.

    Args:
        key: columns of the claims that name it.
        config: of its runs.
        measures: by column of the claims.
        baseline: key of the cell it is compared with, if any.
        train: False where nothing is trained.
        runs: how many, with different seeds.
        seeds: of its runs, where they are chosen.
    """

    key: Key
    config: RunConfig
    measures: Mapping[str, Measure]
    baseline: Key | None = None
    train: bool = True
    runs: int = 1
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(value or "-" for value in self.key.values())


def cells_of(
    recipe: Recipe,
    *,
    protocol: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """All cells, in the order of the recipe.

    Args:
        recipe: of the table.
        protocol: what its ``protocol`` file holds.
        changes: made to the settings of every cell, after all others.
    """
    cells = []
    for rows in product(*(_entries(axis) for axis in recipe.grid)):
        key = {column: value for row in rows for column, value in texts(row.key).items()}
        if any(matches(texts(part), key) for part in recipe.without):
            continue
        settings: dict[str, Any] = {}
        adjusted = (row.set for row in recipe.adjust if matches(texts(row.key), key))
        parts = (protocol, recipe.base, *(row.set for row in rows), *adjusted, changes)
        for part in parts:
            merge(settings, nested(part or {}))
        cells.append(
            Cell(
                key=key,
                config=_config(settings, key),
                measures=_measures(recipe, rows),
                baseline=_baseline(recipe, rows, key),
                train=all(row.train for row in rows),
                runs=next((row.runs for row in rows if row.runs is not None), recipe.runs),
            )
        )
    _check(cells)
    return cells


def _entries(axis: Axis) -> Iterator[Row]:
    if axis.rows:
        yield from axis.rows
    for value, settings in axis.values.items():
        yield Row({str(axis.column): value}, dict(settings or {}))


def texts(key: Mapping[str, Any]) -> dict[str, str]:
    """Keys are compared as the text that stands in the claims; nothing is the empty text."""
    return {str(column): "" if value is None else str(value) for column, value in key.items()}


def matches(part: Key, key: Key) -> bool:
    return all(key.get(column) == value for column, value in part.items())


def _config(settings: Mapping[str, Any], key: Key) -> RunConfig:
    try:
        return from_dict(settings)
    except LargeMarginError as error:
        raise LargeMarginError(f"the settings of {dict(key)} are wrong: {error}") from error


def _measures(recipe: Recipe, rows: tuple[Row, ...]) -> dict[str, Measure]:
    chosen = dict(recipe.measures)
    for row in rows:
        chosen.update(row.measures)
    return {
        column: settings_from(each, Measure, f"measures.{column}")
        for column, each in chosen.items()
    }


def _baseline(recipe: Recipe, rows: tuple[Row, ...], key: Key) -> Key | None:
    part = recipe.baseline
    for row in rows:
        part = part if row.baseline is None else row.baseline
    if part is None:
        return None
    other = {**key, **texts(part)}
    return None if other == key else other


def _check(cells: list[Cell]) -> None:
    keys = [tuple(cell.key.items()) for cell in cells]
    for cell in cells:
        if keys.count(tuple(cell.key.items())) > 1:
            raise LargeMarginError(f"the grid has {dict(cell.key)} twice.")
        if cell.baseline is not None and tuple(cell.baseline.items()) not in keys:
            raise LargeMarginError(
                f"the baseline {dict(cell.baseline)} of {dict(cell.key)} is not in the grid."
            )


def chosen_of(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Cells by patterns of their names (``CIFAR10, *, 20``) or columns (``train_percent=20``)."""
    if not only:
        return list(cells)
    chosen = [each for each in cells if any(_fits(each, one) for one in only)]
    if not chosen:
        listed = "; ".join(each.name for each in cells[:8])
        columns = ", ".join(dict.fromkeys(column for each in cells for column in each.key))
        raise LargeMarginError(
            f"no cell of the table matches {', '.join(only)}. Columns: {columns}. Cells: {listed}"
            + ("; ..." if len(cells) > 8 else ".")
        )
    return chosen


def _fits(cell: Cell, pattern: str) -> bool:
    parts = [part.partition("=") for part in pattern.split(",")]
    if all(name.strip() in cell.key and equals for name, equals, _ in parts):
        return all(fnmatchcase(cell.key[name.strip()], value.strip()) for name, _, value in parts)
    return fnmatchcase(cell.name, pattern)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"data.size": 3}`` as ``{"data": {"size": 3}}``; groups inside stay as they are.

    >>> nested({"data.size": 3, "data.name": "mnist"})
    {'data': {'size': 3, 'name': 'mnist'}}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, last = str(name).split(".")
        place = found
        for group in groups:
            place = place.setdefault(group, {})
        merge(place, {last: nested(value) if isinstance(value, Mapping) else value})
    return found


def merge(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put ``more`` into ``settings``, group by group.

    An objective's name begins a new objective; options are those of the network that was named.
    """
    for name, value in more.items():
        if isinstance(value, Mapping) and "name" in value:
            if name == "objective":
                settings[name] = {}
            elif name == "model" and settings.get(name, {}).get("name") != value["name"]:
                settings.get(name, {}).pop("options", None)
        if isinstance(value, Mapping) and isinstance(settings.get(name), dict):
            merge(settings[name], value)
        else:
            settings[name] = dict(value) if isinstance(value, Mapping) else value


def shortened(config: RunConfig, fraction: float) -> RunConfig:
    """The same run with this share of its epochs, its milestones and warm-up moved along."""
    if fraction == 1:
        return config
    optimizer = config.optimizer
    milestones = sorted({max(1, round(each * fraction)) for each in optimizer.milestones})
    return replace(
        config,
        epochs=max(1, round(config.epochs * fraction)),
        optimizer=replace(
            optimizer,
            milestones=tuple(milestones),
            warmup_epochs=optimizer.warmup_epochs * fraction,
        ),
    )


def settings_of(config: RunConfig) -> dict[str, Any]:
    """All that decides the result of a run; where and how fast it was made is left out."""
    settings = to_dict(config)
    for name in NEUTRAL:
        place, last = _place(settings, name)
        place.pop(last)
    return settings


def _place(settings: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The group in which a dotted name stands, and the last part of the name."""
    *groups, last = name.split(".")
    for group in groups:
        settings = settings[group]
    return settings, last


def run_name(config: RunConfig) -> str:
    """Name of the folder of a run: network, data and a hash of all that decides its result."""
    settings = settings_of(config)
    for name, before in LATER.items():  # or a new setting would give every old run a new name
        place, last = _place(settings, name)
        if last in place and place[last] == before:
            place.pop(last)
    text = json.dumps(settings, sort_keys=True)
    model = config.model.name.replace("/", "-")
    return f"{model}-{config.data.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
