"""``reproduce``: run what is missing of a paper's table, measure it, hold it against the paper."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from largemargin.data import Data, DataConfig, load_data
from largemargin.errors import LargeMarginError, check_number
from largemargin.recipes.cells import NEUTRAL, Cell, cells_of, run_name, shortened
from largemargin.recipes.claims import Claim, read_claims
from largemargin.recipes.measured import Measurements, measure_run, write_measured
from largemargin.recipes.schema import Recipe, read_recipe
from largemargin.recipes.table import Line, Table
from largemargin.recipes.verdicts import Sample, verdict
from largemargin.training import Interrupted, Run, RunConfig, train, train_many
from largemargin.training.config_file import read_yaml
from largemargin.training.runs import CONFIG, pick_device

Trainer: TypeAlias = Callable[[RunConfig, Path, Data, bool], Run]
"""``(config, folder, data, progress) -> run``: trains, or continues the run in the folder."""

ARRAYS = (".npz", ".safetensors")


def reproduce(
    recipe: str | Path,
    *,
    epochs_fraction: float = 1.0,
    seeds: int | None = None,
    folder: str | Path = "runs/reproduce",
    overrides: Mapping[str, Any] | None = None,
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
    to ``measured/`` beside the recipe, with seeds, settings, seconds, device and commit.

    Args:
        recipe: YAML file, as papers/lmd/table3.yaml.
        epochs_fraction: share of the paper's epochs; below 1 no number counts as reproduced.
        seeds: runs per cell, with seeds 0, 1, ...; default the recipe's.
        folder: of the runs.
        overrides: settings that differ from the paper's, as ``{"batch_size": 512}``.
        paths: where data lies, by name, as ``{"cifar10": "~/cifar"}``; a .npz or .safetensors file
            stands for the data set.
        only: patterns of cells to run, as ``"CIFAR10, 100*"``; default all.
        train_missing: False only measures the runs that are there.
        side_by_side: how many runs share a GPU; each gets the numbers it would get alone.
        progress: show progress bars.
        trainer: instead of :func:`largemargin.training.train`.
    """
    check_number("epochs_fraction", epochs_fraction, above=0, at_most=1)
    path = Path(recipe)
    table = read_recipe(path)
    if seeds is not None:
        check_number("seeds", seeds, at_least=1)
    cells = [
        replace(
            each,
            config=_placed(shortened(each.config, epochs_fraction), paths or {}),
            runs=seeds or each.runs,
        )
        for each in read_cells(path, table, overrides)
    ]
    claims = read_claims(table, path.parent / table.claims, cells)
    chosen = _chosen(cells, only)
    needed = _measurements_of(claims, table)
    session = _Session(table, Path(folder), trainer or _train, train_missing, progress)
    names = {each.name for each in chosen}
    ordered = by_data(cells)
    if side_by_side > 1 and train_missing:
        session.train_together([each for each in ordered if each.name in names], side_by_side)
    # Others last: they may share runs with those that were chosen.
    ordered.sort(key=lambda each: each.name not in names)
    found = {each.name: session.measure(each, needed, each.name in names) for each in ordered}
    protocol = _protocol(epochs_fraction, overrides or {})
    lines = tuple(_line(each, found, protocol == AS_PRINTED, claims) for each in claims)
    write_measured(path, table, protocol, found)
    failures = {name: each.failure for name, each in found.items() if each.failure}
    return Table(table.title, protocol, lines, failures)


AS_PRINTED = "as printed"


def read_cells(path: Path, recipe: Recipe, changes: Mapping[str, Any] | None = None) -> list[Cell]:
    """The cells of the recipe in this file, with the settings of its protocol file."""
    protocol = None if recipe.protocol is None else read_yaml(path.parent / recipe.protocol)
    return cells_of(recipe, protocol=protocol, changes=changes)


def _protocol(fraction: float, overrides: Mapping[str, Any]) -> str:
    changed = {name: value for name, value in overrides.items() if name not in NEUTRAL}
    parts = [] if fraction == 1 else [f"{fraction:g} of the epochs"]
    parts += [f"{name} {value}" for name, value in sorted(changed.items())]
    return ", ".join(parts) or AS_PRINTED


def _placed(config: RunConfig, paths: Mapping[str, str]) -> RunConfig:
    path = paths.get(config.data.name)
    if path is None:
        return config
    # Statistics are then computed from the same images that the data set's own come from.
    name = "arrays" if path.endswith(ARRAYS) else config.data.name
    return replace(config, data=replace(config.data, name=name, path=path))


def by_data(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with the same images one after the other, so that these are read once."""
    seen: list[DataConfig] = []
    for cell in cells:
        if cell.config.data not in seen:
            seen.append(cell.config.data)
    return sorted(cells, key=lambda cell: seen.index(cell.config.data))


def _chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    if not only:
        return list(cells)
    chosen = [each for each in cells if any(fnmatchcase(each.name, one) for one in only)]
    if not chosen:
        listed = "; ".join(each.name for each in cells[:8])
        raise LargeMarginError(
            f"no cell of the table matches {', '.join(only)}. Cells: {listed}"
            + ("; ..." if len(cells) > 8 else ".")
        )
    return chosen


def _measurements_of(claims: Sequence[Claim], recipe: Recipe) -> dict[str, Measurements]:
    """What is to be measured of every cell, by its name."""
    needed: dict[str, Measurements] = {}

    def add(cell: str, metric: str, options: Mapping[str, Any]) -> None:
        needed.setdefault(cell, Measurements()).add(metric, options)

    for claim in claims:
        if claim.cell is None or claim.measure is None:
            continue
        names = [claim.cell.name]
        if claim.measure.against is not None:
            names.append(_other(claim))
        for name in names:
            add(name, claim.measure.metric, claim.measure.options)
    for cell in list(needed):
        for each in recipe.record:
            add(cell, each.metric, each.options)
    return needed


def _other(claim: Claim) -> str:
    """Name of the cell that a difference is taken from."""
    assert claim.cell is not None
    assert claim.measure is not None
    against = {name: str(value) for name, value in (claim.measure.against or {}).items()}
    return replace(claim.cell, key={**claim.cell.key, **against}).name


class _Session:
    """Trains and measures cells; data is loaded once for all that share it."""

    def __init__(
        self, recipe: Recipe, folder: Path, trainer: Trainer, train_missing: bool, progress: bool
    ) -> None:
        self.recipe, self.folder, self.trainer = recipe, folder, trainer
        self.train_missing, self.progress = train_missing, progress
        self.loaded: tuple[DataConfig, Data] | None = None

    def data(self, config: DataConfig) -> Data:
        if self.loaded is None or self.loaded[0] != config:
            self.loaded = None  # two sets need not fit into memory together
            try:
                self.loaded = (config, load_data(config))
            except LargeMarginError as error:
                raise LargeMarginError(
                    f"{error}\nThis table needs: {self.recipe.data_needed.strip()}"
                ) from error
        return self.loaded[1]

    def runs(self, cell: Cell) -> Iterator[tuple[int, RunConfig, Path]]:
        """Seed, settings and folder of every run of a cell."""
        for seed in range(cell.runs):
            config = replace(cell.config, seed=seed)
            name = run_name(config)
            yield seed, replace(config, name=name), self.folder / name

    def train_together(self, cells: Sequence[Cell], side_by_side: int) -> None:
        """Train what nobody has begun, several at a time; the rest is left to :meth:`measure`."""
        for config, group in groupby(cells, key=lambda cell: cell.config.data):
            new = {
                folder: run
                for cell in group
                if cell.train
                for _, run, folder in self.runs(cell)
                if not folder.exists()
            }
            if not new:
                continue
            try:
                train_many(
                    list(new.values()),
                    folders=list(new),
                    data=self.data(config),
                    side_by_side=side_by_side,
                    progress=self.progress,
                )
            except Interrupted:
                raise
            except LargeMarginError:
                continue  # found again, and reported, when they are trained one by one

    def measure(self, cell: Cell, needed: Mapping[str, Measurements], chosen: bool) -> Measurements:
        """Its numbers; without ``chosen`` only of runs that are there."""
        found = needed.get(cell.name, Measurements()).copy()
        load = partial(self.data, cell.config.data)
        if not cell.train:
            return measure_run(found, None, load, self.recipe.split, None, seed=None)
        for seed, config, folder in self.runs(cell):
            finished = Run(folder).finished
            if not finished and not (chosen and self.train_missing):
                continue
            data = None if finished else load()
            try:
                run = Run(folder)
                if data is not None:
                    run = self.trainer(config, folder, data, self.progress)
                device = pick_device(config.device)
                measure_run(found, run, load, self.recipe.split, device, seed=seed)
            except Interrupted:
                raise
            except LargeMarginError as error:
                found.failure = f"seed {seed}: {error}"
                break
        return found


def _train(config: RunConfig, folder: Path, data: Data, progress: bool) -> Run:
    begun = (folder / CONFIG).is_file()
    if folder.exists() and not begun:
        shutil.rmtree(folder)  # stopped before it was a run
    return train(config, folder=folder, resume=begun, data=data, progress=progress)


def _line(
    claim: Claim, found: Mapping[str, Measurements], as_printed: bool, claims: Sequence[Claim]
) -> Line:
    if claim.cell is None or claim.measure is None:
        text = f"left out: {claim.reason}"
        return Line(claim.key, claim.column, "", claim.reported, claim.std, Sample(), None, text)
    cell = found.get(claim.cell.name)
    sample = _sample(claim, found)
    base = _baseline_of(claim, claims)
    return Line(
        key=claim.key,
        column=claim.column,
        unit=claim.measure.unit,
        reported=claim.reported,
        reported_std=claim.std,
        measured=sample,
        draws_std=None if cell is None else cell.draws_std(claim.measure),
        verdict=verdict(
            claim.measure,
            claim.reported,
            sample,
            # What is computed, not trained, knows no epochs.
            as_printed=as_printed or not claim.cell.train,
            baseline=None if base is None else (base.reported, _sample(base, found)),
            failure="" if cell is None or sample.n else cell.failure,
        ),
    )


def _sample(claim: Claim, found: Mapping[str, Measurements]) -> Sample:
    assert claim.cell is not None
    assert claim.measure is not None
    cell = found.get(claim.cell.name)
    values = {} if cell is None else cell.values(claim.measure)
    if claim.measure.against is not None:
        other = found.get(_other(claim))
        theirs = {} if other is None else other.values(claim.measure)
        values = {seed: theirs[seed] - value for seed, value in values.items() if seed in theirs}
    return Sample(tuple(values.values()))


def _baseline_of(claim: Claim, claims: Sequence[Claim]) -> Claim | None:
    """The same number of the cell this one is compared with."""
    if claim.cell is None or claim.cell.baseline is None:
        return None
    wanted = {**claim.key, **claim.cell.baseline}
    same = [each for each in claims if each.key == wanted and each.column == claim.column]
    return same[0] if same else None
