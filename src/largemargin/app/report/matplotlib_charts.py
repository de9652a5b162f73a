"""Charts as static pictures for papers, drawn by matplotlib: nothing to download."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from largemargin.app.report.charts import (
    WRITTEN,
    Chart,
    Heat,
    Number,
    Points,
    Series,
    labelled,
    light,
    x_axis,
    y_axis,
)
from largemargin.app.training.files import made_folder
from largemargin.errors import optional_module
from largemargin.measuring.plots import plain_text, scatter_classes, shortened

DPI = 200
CROWDED = 60
"""Letters of all names below an axis from which on they stand on each other."""

LEGEND = 24
"""Classes of a map of samples that are named."""

LINES: dict[str, Any] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (10, 3)),
    "longdashdot": (0, (10, 3, 2, 3)),
}


def write_pictures(charts: Iterable[Chart], folder: str | Path) -> list[Path]:
    """One PNG for each chart, named by its key."""
    figures = optional_module("matplotlib.figure", "static figures need matplotlib", extra="report")
    place = made_folder(Path(folder))
    written = []
    for chart in charts:
        picture = figures.Figure(figsize=(6.0, 4.0), dpi=DPI, layout="constrained")
        draw(chart, picture)
        path = place / f"{chart.key}.png"
        picture.savefig(path)
        written.append(path)
    return written


def draw(chart: Chart, picture: Any) -> None:
    """A chart on a ``matplotlib.figure.Figure``."""
    axes = picture.add_subplot(projection="3d" if chart.solid else None)
    if chart.heat is not None:
        _heat(chart.heat, axes, picture)
    _bars([series for series in chart.series if series.form == "bars"], axes)
    for series in chart.series:
        if series.form in ("line", "points"):
            _curve(chart, series, axes)
    axes.set(xlabel=plain_text(chart.x), ylabel=plain_text(chart.y))
    axes.set_title(plain_text(chart.title), fontsize=10)
    _ticks(chart, axes)
    _lines(chart, axes)
    named = axes.get_legend_handles_labels()[1]
    if len(named) > 1:
        # Points of a map are small.
        ncols, size = (10, 2.5) if chart.equal else (2 if len(named) > 2 else 3, 1)
        picture.legend(loc="outside lower center", ncols=ncols, fontsize=8, markerscale=size)


def _curve(chart: Chart, series: Series, axes: Any) -> None:
    label = "_nolegend_" if series.faint or chart.equal else plain_text(series.name)
    columns = (series.x, series.y, series.z) if chart.solid else (series.x, series.y)
    place = [_numbers(column) for column in columns]
    if series.points is not None:
        _samples(series.points, columns, axes)
    elif chart.equal:
        for x, y, text in zip(*place, series.texts, strict=True):
            axes.text(x, y, plain_text(text), fontsize=8, weight="bold", ha="center", va="center")
    elif series.form == "points":
        axes.scatter(*place, s=14, color=light(series.color), label=label)
        _error_bars(series, axes)
        if chart.solid:
            for *at, text in zip(*place, series.texts, strict=False):
                axes.text(*at, plain_text(text), fontsize=7)
    else:
        axes.plot(*place, label=label, **_line(series))
        _error_bars(series, axes)


def _line(series: Series) -> dict[str, Any]:
    style = {"color": light(series.color), "linestyle": LINES[series.dash]}
    style |= {"linewidth": 0.8, "alpha": 0.45} if series.faint else {"linewidth": 1.6}
    return style | ({"marker": "o", "markersize": 3.5} if series.marked else {})


def _error_bars(series: Series, axes: Any) -> None:
    if series.high:
        x, y = _numbers(series.x), _numbers(series.y)
        style = {"fmt": "none", "ecolor": light(series.color), "capsize": 2}
        axes.errorbar(x, y, yerr=_lengths(series), **style)


def _lengths(series: Series) -> list[list[float]]:
    return [[max(0.0, length or 0.0) for length in side] for side in series.error_lengths]


def _samples(points: Points, columns: Sequence[Sequence[Number]], axes: Any) -> None:
    names = points.classes if len(points.classes) <= LEGEND else ()
    named = {label: plain_text(shortened(name)) for label, name in enumerate(names)}
    scatter_classes(axes, columns, points.labels, named, size=6)


def _bars(bars: Sequence[Series], axes: Any) -> None:
    for place, series in enumerate(bars):
        width = 0.8 / len(bars)
        axes.bar(
            [x - 0.4 + width * (place + 0.5) for x in _numbers(series.x)],
            _numbers(series.y),
            width,
            yerr=_lengths(series) if series.high else None,
            color=light(series.color),
            label=plain_text(series.name),
            capsize=1.5,
        )


def _heat(heat: Heat, axes: Any, picture: Any) -> None:
    values = [_numbers(row) for row in heat.values]
    scale = {"cmap": "Blues" if heat.counts else "viridis", "vmin": heat.low, "vmax": heat.high}
    drawn = axes.imshow(values, interpolation="nearest", **scale)
    picture.colorbar(drawn, ax=axes, label=plain_text(heat.unit))
    for y, row in enumerate(heat.values if heat.counts and len(heat.names) <= WRITTEN else ()):
        for x, value in enumerate(row):
            axes.text(x, y, str(value or ""), ha="center", va="center", fontsize=7)
    _names(axes.xaxis, heat.names)
    _names(axes.yaxis, heat.names)


def _ticks(chart: Chart, axes: Any) -> None:
    """Numbers and names along the axes, as on the page."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    x, y = x_axis(chart), y_axis(chart)
    if "type" in y:
        _logarithmic(axes, y)
    if "range" in y:
        axes.set_ylim(*y["range"])
    if chart.percent_y:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.x in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "range" in x:
        axes.set_xlim(*x["range"])
    if chart.names:
        _names(axes.xaxis, chart.names)


def _lines(chart: Chart, axes: Any) -> None:
    """The grid, and the line at x = 0; a map of samples has neither, nor numbers."""
    if chart.zero:
        axes.axvline(0, color="0.4", linewidth=0.8)
    if chart.equal:
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
    elif chart.heat is None and not chart.solid:
        axes.grid(alpha=0.25)


def _logarithmic(axes: Any, y: dict[str, Any]) -> None:
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    if "tickvals" in y:
        low, high = axes.get_ylim()
        marks = zip(y["tickvals"], y["ticktext"], strict=True)
        kept = [(value, text) for value, text in marks if low <= value <= high]
        axes.set_yticks([value for value, _ in kept], [text for _, text in kept])
        axes.yaxis.set_minor_formatter(NullFormatter())


def _names(axis: Any, names: tuple[str, ...]) -> None:
    places = labelled(names)
    shown = [plain_text(shortened(names[place])) for place in places]
    axis.set_ticks(places, shown, fontsize=7)
    if axis.axis_name == "x" and sum(map(len, shown)) > CROWDED:
        axis.set_tick_params(rotation=60)


def _numbers(values: Iterable[Number]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]
