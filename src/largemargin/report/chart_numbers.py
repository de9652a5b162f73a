"""Figures as tables: what a reader without JavaScript, or without eyes for curves, gets of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from largemargin.report.charts import Cell, Chart, Heat, Number, Section, Table
from largemargin.report.numbers import number_cell, percent_cell, text_cell

ROWS = 16
"""Of a table of a curve; of more points every k-th is written."""

MATRIX = 12
"""Classes of a matrix that is written out whole."""

GRID = 5
"""Rows and columns of a surface."""

Item = TypeVar("Item")


def with_numbers(section: Section) -> Section:
    """The section with a table for every figure that has numbers to read."""
    blocks = tuple(
        replace(block, table=numbers(block))
        if isinstance(block, Chart) and block.table is None
        else block
        for block in section.blocks
    )
    return replace(section, blocks=blocks)


def numbers(chart: Chart) -> Table | None:
    """A chart as a table; None where places of points say nothing as numbers."""
    if chart.heat is not None:
        return _matrix(chart, chart.heat)
    named = [each for each in chart.series if not each.faint]
    if chart.equal or chart.solid or not named:
        return None
    columns = [_by_place(chart, each.x, each.y) for each in named]
    places = thinned(sorted({place for column in columns for place in column}), ROWS)
    show = percent_cell if chart.percent_y else number_cell
    rows = [
        (_place(chart, place), *(show(column.get(place)) for column in columns)) for place in places
    ]
    heads = (chart.x or "", *(each.name for each in named))
    return Table(
        heads, tuple(rows), key=f"numbers-{chart.key}", numeric=tuple(range(1, len(heads)))
    )


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _by_place(
    chart: Chart, xs: Sequence[Number], ys: Sequence[Number]
) -> dict[float, float | None]:
    # Points beside a name stand a little to its left or right.
    digits = 0 if chart.names else 6
    return {round(x, digits): y for x, y in zip(xs, ys, strict=True) if x is not None}


def _place(chart: Chart, place: float) -> Cell:
    if chart.names:
        return text_cell(chart.names[int(place)])
    return number_cell(place)


def _matrix(chart: Chart, heat: Heat) -> Table | None:
    if heat.rows and len(heat.rows) > MATRIX:
        return None
    if heat.rows:
        rows, columns = list(range(len(heat.rows))), list(range(len(heat.columns)))
        names, heads = list(heat.rows), ("", *heat.columns)
    else:
        rows, columns = (thinned(range(len(side)), GRID) for side in (heat.y, heat.x))
        names = [f"{heat.y[at]:.3g}" for at in rows]
        heads = (f"{chart.y} \\ {chart.x}", *(f"{heat.x[at]:.3g}" for at in columns))
    cells = tuple(
        (text_cell(name), *(number_cell(heat.values[row][at]) for at in columns))
        for name, row in zip(names, rows, strict=True)
    )
    return Table(heads, cells, key=f"numbers-{chart.key}", numeric=tuple(range(1, len(heads))))
