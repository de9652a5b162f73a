"""The reported numbers of a table, and which cell each belongs to."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from largemargin.errors import LargeMarginError
from largemargin_papers.recipes.cells import Cell, Key, matches, texts
from largemargin_papers.recipes.schema import Measure, Recipe

STD = "std"
"""The column with standard deviations, of a table with one column of numbers."""


@dataclass(frozen=True)
class Claim:
    """A reported number.

    Args:
        key: all columns that name it.
        column: of the number.
        reported: the number; None where the table has none.
        std: as reported, if it is.
        cell: whose runs answer it; None where none does.
        measure: how.
        reason: why no run answers it.
    """

    key: Key
    column: str
    reported: float | None
    std: float | None
    cell: Cell | None
    measure: Measure | None
    reason: str = ""


def read_claims(recipe: Recipe, path: Path, cells: Sequence[Cell]) -> list[Claim]:
    """The claims of a CSV file, in its order."""
    rows = _rows(path)
    trained = {column for cell in cells for column in cell.key}
    columns = [column for column in rows[0] if column in recipe.measures]
    known = {*trained, *recipe.evaluate, *recipe.measures, *recipe.beside, STD}
    strange = [column for column in rows[0] if column not in known]
    if strange or not columns:
        raise LargeMarginError(
            f"{path} has columns that the recipe does not speak of ({', '.join(strange)}), or none "
            f"of those that it measures ({', '.join(recipe.measures)})."
        )
    return [
        claim for row in rows for claim in _claims_of(recipe, row, columns, trained, cells, path)
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise LargeMarginError(f"cannot read the claims {path}: {error.strerror}.") from error
    if not rows:
        raise LargeMarginError(f"{path} holds no claims.")
    return rows


def _claims_of(
    recipe: Recipe,
    row: Mapping[str, str],
    columns: Sequence[str],
    trained: set[str],
    cells: Sequence[Cell],
    path: Path,
) -> list[Claim]:
    key = {column: value for column, value in row.items() if column in trained | {*recipe.evaluate}}
    reasons = [each.reason for each in recipe.left_out if matches(texts(each.row), key)]
    reason = reasons[0] if reasons else ""
    mine = [cell for cell in cells if matches(cell.key, key)]
    if len(mine) != (0 if reason else 1):
        raise LargeMarginError(
            f"{path}: the row {dict(key)} must belong to exactly one cell of the recipe, or be "
            f"left out with a reason, but {len(mine)} cells have it"
            + (" although it is left out." if reason else ".")
        )
    cell = mine[0] if mine else None
    return [
        Claim(
            key=key,
            column=column,
            reported=_number(row[column]),
            std=_number(row.get(STD, "")) if len(columns) == 1 else None,
            cell=cell,
            measure=None if cell is None else _measure(recipe, cell.measures[column], key, path),
            reason=reason,
        )
        for column in columns
    ]


def _measure(recipe: Recipe, measure: Measure, key: Key, path: Path) -> Measure:
    """The measure of a column, changed by the columns that are evaluations of one run."""
    for column, values in recipe.evaluate.items():
        changes = {str(name): each for name, each in values.items()}.get(key[column])
        if changes is None:
            raise LargeMarginError(
                f"{path}: the recipe does not say how to evaluate {column} {key[column]!r}."
            )
        measure = replace(measure, **_fields(measure, changes))
    return measure


def _fields(measure: Measure, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the measure by name; other names are options of its metric."""
    names = {"metric", "unit", "better", "tolerance", "against"}
    fields = {name: value for name, value in changes.items() if name in names}
    options = {name: value for name, value in changes.items() if name not in names}
    return {**fields, "options": {**measure.options, **options}}


def _number(text: str | None) -> float | None:
    return float(text) if text else None
