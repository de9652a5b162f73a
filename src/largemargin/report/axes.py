"""Where the numbers of an axis stand: few, readable, and never none."""

import math
from collections.abc import Iterable
from typing import Any

from largemargin.report.charts import Chart, Number

FEW = 12
"""Points of a line that are marked: one alone would not be seen."""

NARROW = 1000.0
"""Largest over smallest number up to which powers of ten alone would be too few marks."""


def finite(values: Iterable[Number]) -> list[float]:
    return [float(each) for each in values if each is not None and math.isfinite(each)]


def heights(chart: Chart) -> list[float]:
    """Every number along the y axis, ends of error bars too."""
    return finite(
        y
        for series in chart.series
        for column in (series.y, series.low, series.high)
        for y in column
    )


def logarithmic(chart: Chart) -> bool:
    """Whether a logarithmic axis is asked for and has a power of ten to show."""
    found = [y for y in heights(chart) if y > 0]
    return chart.log_y and bool(found) and max(found) >= 10 * min(found)


def y_axis(chart: Chart) -> dict[str, Any]:
    """What plotly should know about the y axis beside its title."""
    found = heights(chart)
    if logarithmic(chart):
        return _powers([y for y in found if y > 0])
    made: dict[str, Any] = {}
    if chart.percent_y:
        close = bool(found) and max(found) - min(found) < 0.05
        made["tickformat"] = ".1%" if close else ".0%"
    drawn = all(series.form in ("line", "points") for series in chart.series)
    if found and drawn and not chart.equal and min(found) == max(found):
        made["range"] = _around(found[0], share=chart.percent_y)
    return made


def x_axis(chart: Chart) -> dict[str, Any]:
    """The same of the x axis."""
    if chart.heat is not None or chart.solid or chart.equal or chart.names:
        return {}
    found = finite(x for series in chart.series for x in series.x)
    made: dict[str, Any] = {}
    if chart.x in ("epoch", "step") and found and max(found) - min(found) < 10:
        made |= {"dtick": 1}
        if min(found) == max(found):
            made["range"] = [found[0] - 0.5, found[0] + 0.5]
    return made


def _around(value: float, *, share: bool) -> list[float]:
    """A range around one number, in which shares stay shares."""
    if share:
        return [max(-0.005, value - 0.05), min(1.005, value + 0.05)]
    step = 0.1 * abs(value) or 1.0
    return [value - step, value + step]


def _powers(values: list[float]) -> dict[str, Any]:
    low, high = min(values), max(values)
    made: dict[str, Any] = {"type": "log"}
    if high < NARROW * low:
        first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
        marks = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
        return made | {"tickvals": marks, "ticktext": [f"{mark:g}" for mark in marks]}
    # Few powers of ten, so that they do not stand on each other.
    return made | {
        "dtick": max(1, math.ceil(math.log10(high / low) / 6)),
        "exponentformat": "power",
    }
