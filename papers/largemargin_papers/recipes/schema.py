"""A paper's table as a YAML file: which runs make it, what is measured, what was reported."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from largemargin.app.training.config_file import read_yaml, settings_from
from largemargin.errors import LargeMarginError


@dataclass(frozen=True)
class Measure:
    """A column of reported numbers.

    Args:
        metric: what is measured: a name of ``recipes.metrics.METRICS``.
        unit: of the reported numbers.
        better: higher, lower, or neither where the number only describes.
        tolerance: how far from the reported number a measured one may lie to count as reproduced,
            in ``unit``; chosen before anything was measured.
        options: arguments of the metric.
        against: part of a key: the number is that of the run with this key minus that of this one.
    """

    metric: str
    unit: str = "%"
    better: Literal["higher", "lower", "neither"] = "higher"
    tolerance: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)
    against: dict[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """One entry of a part of the grid.

    Args:
        key: columns of the claims and the values that name this entry.
        set: settings of the run that it changes: ``{data.fraction: 0.2}``.
        baseline: part of a key: which run this one is to be better or worse than.
        train: False where nothing is trained.
        runs: number of runs, instead of the table's.
        measures: for this entry instead of the table's, by column of the claims.
    """

    key: dict[str, Any]
    set: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] | None = None
    train: bool = True
    runs: int | None = None
    measures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """A part of the grid: the values of one column, or rows that set several columns at once.

    Args:
        column: of the claims.
        values: settings by value of that column.
        rows: entries, instead of ``column`` and ``values``.
    """

    column: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Sketch:
    """What is kept of a run for a figure, beside its numbers.

    Args:
        kind: a name of ``recipes.sketches.SKETCHES``.
        options: its arguments.
        only: cells, as in ``reproduce``; default all.
        every_seed: of every run of a cell, because numbers follow from it; default of the first.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    every_seed: bool = False


@dataclass(frozen=True)
class LeftOut:
    """Reported numbers that no run of this recipe answers.

    Args:
        row: part of a key.
        reason: why.
    """

    row: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class Variant:
    """The whole table read otherwise, as the authors' published code has it.

    Args:
        differs: from the printed protocol as we read it, in words.
        set: settings of every run.
        adjust: settings of some cells, named by a part of their key; they come last.
        evaluate: as that of the recipe, by column: takes its place.
        record: further measures that are stored but not compared.
    """

    differs: tuple[str, ...]
    set: dict[str, Any] = field(default_factory=dict)
    adjust: tuple[Row, ...] = ()
    evaluate: dict[str, Any] = field(default_factory=dict)
    record: tuple[Measure, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A table of a paper.

    Args:
        title: paper and table.
        claims: file with the reported numbers, beside the recipe.
        base: settings of every run, a part of a ``RunConfig``.
        protocol: file beside the recipe with settings that come before ``base``: those that tables
            of a paper share.
        grid: its parts multiply: every entry of one with every entry of the next.
        measures: what is measured, by column of the claims.
        evaluate: columns of the claims that are evaluations of one run: by column, by value, the
            fields of the measure that it changes.
        beside: columns of the claims that only describe.
        baseline: part of a key: which run the others are to be better or worse than.
        runs: number of runs with different seeds.
        split: images that are evaluated: test or validation.
        record: further measures that are stored but not compared.
        adjust: settings of some cells, named by a part of their key, that come last.
        without: parts of keys that the grid has and the table does not.
        left_out: reported numbers without a run.
        data_needed: what to place where.
        readings: what the paper leaves open and how it was read.
        sketches: what figures are drawn from.
        variants: other readings of the whole table, by name.
    """

    title: str
    claims: str
    grid: tuple[Axis, ...]
    measures: dict[str, Any]
    data_needed: str
    base: dict[str, Any] = field(default_factory=dict)
    protocol: str | None = None
    evaluate: dict[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    baseline: dict[str, Any] | None = None
    runs: int = 1
    split: Literal["test", "validation"] = "test"
    record: tuple[Measure, ...] = ()
    adjust: tuple[Row, ...] = ()
    without: tuple[dict[str, Any], ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    readings: tuple[str, ...] = ()
    sketches: tuple[Sketch, ...] = ()
    variants: dict[str, Any] = field(default_factory=dict)

    def variant(self, name: str) -> Variant:
        if name not in self.variants:
            raise LargeMarginError(
                f"{self.title} has no reading {name!r}. It has "
                f"{', '.join(map(repr, self.variants)) or 'only the printed one'}."
            )
        return settings_from(self.variants[name], Variant, f"variants.{name}")

    def as_read(self, name: str) -> "Recipe":
        """The recipe of another reading; the empty name is the printed one."""
        if not name:
            return self
        other = self.variant(name)
        return replace(
            self,
            adjust=(*self.adjust, Row({}, other.set), *other.adjust),
            evaluate={**self.evaluate, **other.evaluate},
            record=(*self.record, *other.record),
        )

    def reading_of(self, protocol: str) -> str:
        """The reading that a protocol begins with; empty for the printed one."""
        return next((name for name in self.variants if _begins(protocol, name)), "")


def _begins(protocol: str, name: str) -> bool:
    return protocol == name or protocol.startswith(f"{name}, ")


def read_recipe(path: str | Path, reading: str = "") -> Recipe:
    """The recipe in a YAML file, read as ``reading`` says; unknown names are errors."""
    values = read_yaml(path)
    if "grid" not in values and "title" not in values:
        raise LargeMarginError(
            f"{path} is no recipe: it has neither title nor grid. Recipes are the files of papers/ "
            "that are named after a table or figure."
        )
    recipe = settings_from(values, Recipe)
    for axis in recipe.grid:
        if (axis.column is None) == (not axis.rows):
            raise LargeMarginError(
                f"{path}: a part of the grid must have either column and values, or rows."
            )
    for name in recipe.variants:
        recipe.variant(name)
    return recipe.as_read(reading)
