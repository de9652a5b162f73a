"""``reproduce``: run what is missing of a paper's table, measure it, hold it against the paper."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from largemargin.app.config import DataConfig, RunConfig
from largemargin.app.data.load import Data
from largemargin.app.training.config_file import read_yaml
from largemargin.app.training.engine import Interrupted, train
from largemargin.app.training.parallel_runs import TrainingJob, iter_finished
from largemargin.app.training.processes import pick_device
from largemargin.app.training.runs import CONFIG, Run
from largemargin.errors import LargeMarginError, check_number
from largemargin_papers.recipes.cells import Cell, cells_of, chosen_of, run_name, shortened
from largemargin_papers.recipes.claims import read_claims
from largemargin_papers.recipes.figure_data import settled_run
from largemargin_papers.recipes.figure_store import sketches_for
from largemargin_papers.recipes.images import Images
from largemargin_papers.recipes.measured import (
    Measurements,
    Wanted,
    about,
    computed,
    measure_run,
    read_measured,
    write_measured,
)
from largemargin_papers.recipes.schema import Recipe, read_recipe
from largemargin_papers.recipes.table import Table
from largemargin_papers.recipes.table_rows import (
    measurements_of,
    protocol_of,
    reported_by_cell,
    table_of,
)

Trainer: TypeAlias = Callable[[RunConfig, Path, Data, bool], Run]
"""``(config, folder, data, progress) -> run``: trains, or continues the run in the folder."""


def reproduce(
    recipe: str | Path,
    *,
    epochs_fraction: float = 1.0,
    seeds: int | Sequence[int] | None = None,
    folder: str | Path = "runs/reproduce",
    overrides: Mapping[str, Any] | None = None,
    reading: str = "",
    paths: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    train_missing: bool = True,
    side_by_side: int = 1,
    progress: bool = True,
    trainer: Trainer | None = None,
) -> Table:
    """Reproduce a table of a paper.

    Runs are made once: their folders are named by a hash of their settings, so a second call, and
    another table that needs the same run, find them; an interrupted run is continued. Numbers go
    to ``measured/`` beside the recipe, with seeds, settings, seconds, device and commit; what lies
    there already is not run again.

    Args:
        recipe: YAML file, as papers/lmd/table3.yaml.
        epochs_fraction: share of the paper's epochs; below 1 no number counts as reproduced.
        seeds: runs per cell, with seeds 0, 1, ..., or the seeds; default the recipe's number.
        folder: of the runs.
        overrides: settings that differ from the paper's, as ``{"batch_size": 512}``.
        reading: of the table, as "authors' code", where its recipe has others than the printed one.
        paths: where data lies, by name, as ``{"cifar10": "~/cifar"}``; a .npz or .safetensors file
            stands for the data set.
        only: cells to run, as ``"CIFAR10, 100*"`` or ``"train_percent=20"``; default all.
        train_missing: False only shows what was measured.
        side_by_side: how many runs share a GPU; each gets the numbers it would get alone.
        progress: show progress bars.
        trainer: instead of :func:`largemargin.app.training.train`.
    """
    path = Path(recipe)
    table = read_recipe(path, reading)
    cells = prepared(path, table, epochs_fraction, seeds, overrides)
    claims = read_claims(table, path.parent / table.claims, cells)
    names = {each.name for each in chosen_of(cells, only)}
    needed = measurements_of(claims, table)
    protocol = protocol_of(epochs_fraction, overrides or {}, reading)
    session = _Session(
        table,
        Path(folder),
        Images(paths),
        sketches=sketches_for(table, cells),
        known=read_measured(path).get(protocol, {}),
        trainer=trainer or _train,
        train_missing=train_missing,
        progress=progress,
    )
    ordered = by_data(cells)
    if side_by_side > 1 and train_missing:
        session.train_together([each for each in ordered if each.name in names], side_by_side)
    # Others last: they may share runs with those that were chosen.
    ordered.sort(key=lambda each: each.name not in names)
    found = {each.name: session.measure(each, needed, each.name in names) for each in ordered}
    runs = {name: each.runs for name, each in found.items() if each.runs}
    write_measured(path, table, protocol, runs, reported_by_cell(claims))
    return table_of(table, protocol, claims, found)


def prepared(
    path: Path,
    recipe: Recipe,
    epochs_fraction: float = 1.0,
    seeds: int | Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """The cells of a recipe with the runs that are asked for."""
    check_number("epochs_fraction", epochs_fraction, above=0, at_most=1)
    if isinstance(seeds, int):
        check_number("seeds", seeds, at_least=1)
        seeds = range(seeds)
    given = None if seeds is None else tuple(seeds)
    for seed in given or ():
        check_number("every seed", seed, at_least=0)
    return [
        replace(
            each,
            config=shortened(each.config, epochs_fraction),
            seeds=tuple(range(each.runs)) if given is None else given,
        )
        for each in read_cells(path, recipe, overrides)
    ]


def read_cells(path: Path, recipe: Recipe, changes: Mapping[str, Any] | None = None) -> list[Cell]:
    """The cells of the recipe in this file, with the settings of its protocol file."""
    protocol = None if recipe.protocol is None else read_yaml(path.parent / recipe.protocol)
    return cells_of(recipe, protocol=protocol, changes=changes)


def runs_of(cell: Cell, folder: Path) -> Iterator[tuple[int, RunConfig, Path]]:
    """Seed, settings and folder of every run of a cell."""
    for seed in cell.seeds:
        config = replace(cell.config, seed=seed)
        name = run_name(config)
        yield seed, replace(config, name=name), folder / name


def by_data(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with the same images one after the other, so that these are read once."""
    seen: list[DataConfig] = []
    for cell in cells:
        if cell.config.data not in seen:
            seen.append(cell.config.data)
    return sorted(cells, key=lambda cell: seen.index(cell.config.data))


class _Session:
    """Trains and measures cells; data is loaded once for all that share it."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        images: Images,
        *,
        sketches: Mapping[tuple[str, int], Wanted],
        known: Mapping[str, Sequence[Mapping[str, Any]]],
        trainer: Trainer,
        train_missing: bool,
        progress: bool,
    ) -> None:
        self.recipe, self.folder, self.images, self.known = recipe, folder, images, known
        self.sketches = sketches
        self.trainer, self.train_missing, self.progress = trainer, train_missing, progress

    def data(self, config: DataConfig) -> Data:
        return self.images.data(config, self.recipe.data_needed)

    def train_together(self, cells: Sequence[Cell], side_by_side: int) -> None:
        """Train what nobody has begun, several at a time; the rest is left to :meth:`measure`."""
        new = {
            folder: config
            for cell in cells
            if cell.train
            for seed, config, folder in runs_of(cell, self.folder)
            if not folder.exists() and self._stored(cell, seed, config.name) is None
        }
        jobs = [
            TrainingJob(self.images.placed(config), folder, data=partial(self.data, config.data))
            for folder, config in new.items()
        ]
        for outcome in iter_finished(jobs, side_by_side=side_by_side, progress=self.progress):
            # Others are found again, and reported, when they are trained one by one.
            if outcome.error is not None and not isinstance(outcome.error, LargeMarginError):
                raise outcome.error

    def _stored(self, cell: Cell, seed: int, name: str) -> Mapping[str, Any] | None:
        """What ``measured/`` has of a run."""
        same = (each for each in self.known.get(cell.name, ()) if each["seed"] == seed)
        return next((each for each in same if each.get("run") == name), None)

    def measure(self, cell: Cell, needed: Mapping[str, Measurements], chosen: bool) -> Measurements:
        """Its numbers; without ``chosen`` only of runs that are there."""
        found = needed.get(cell.name, Measurements()).copy()
        if not cell.train or not self.train_missing:
            for each in self.known.get(cell.name, ()):
                found.take(each)
        may_run = chosen and self.train_missing
        if cell.train:
            self._measure_runs(cell, found, may_run)
        elif may_run and not found.found.keys() >= found.wanted.keys():
            found.take(computed(found.wanted))
        return found

    def _measure_runs(self, cell: Cell, found: Measurements, may_run: bool) -> None:
        """Add the numbers of every run of a cell, up to one that fails."""
        for seed, config, folder in runs_of(cell, self.folder):
            known = self._stored(cell, seed, config.name)
            drawn = self.sketches.get((cell.name, seed), {})
            if known is not None and _has(known, found.wanted, drawn):
                found.take(known)
                continue
            if not Run(folder).finished:
                if not may_run:
                    continue
                self.data(config.data)  # without it nothing of the table can be run
            try:
                found.take(self._run(config, folder, found, drawn))
            except Interrupted:
                raise
            except LargeMarginError as error:
                found.failures[seed] = str(error)
                break

    def _run(
        self, config: RunConfig, folder: Path, found: Measurements, drawn: Wanted
    ) -> dict[str, Any]:
        load = partial(self.data, config.data)
        run = Run(folder)
        if not run.finished:
            run = self.trainer(self.images.placed(config), folder, load(), self.progress)
        device = pick_device(config.device)
        numbers = measure_run(run, found.wanted, load, self.recipe.split, device, drawn)
        return settled_run(about(run, config, numbers))


def _has(run: Mapping[str, Any], wanted: Wanted, drawn: Wanted) -> bool:
    """Whether all that is wanted of a run was measured."""
    return run["numbers"].keys() >= wanted.keys() and {*run.get("sketches", ())} >= drawn.keys()


def _train(config: RunConfig, folder: Path, data: Data, progress: bool) -> Run:
    begun = (folder / CONFIG).is_file()
    if folder.exists() and not begun:
        shutil.rmtree(folder)  # stopped before it was a run
    return train(config, folder=folder, resume=begun, data=data, progress=progress)
