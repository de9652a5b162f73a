"""Charts as static pictures for papers, drawn by matplotlib: nothing to download."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from largemargin.app.report.charts import FEW, Chart, Heat, Series, x_axis, y_axis
from largemargin.app.report.palette import LIGHT, MARKERS, light
from largemargin.errors import LargeMarginError, MissingPackage

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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage(
            "static figures need matplotlib. Install it: pip install 'largemargin[report]'"
        ) from error
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LargeMarginError(f"cannot make the folder {place}: {error.strerror}.") from error
    written = []
    for chart in charts:
        picture = Figure(figsize=(6.0, 4.0), dpi=DPI, layout="constrained")
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
    elif any(series.form == "bars" for series in chart.series):
        _bars(chart, axes)
    elif any(series.form == "box" for series in chart.series):
        _boxes(chart, axes)
    for series in chart.series:
        if series.form in ("line", "points", "steps"):
            _curve(chart, series, axes)
    # Dollar signs would start mathematics.
    axes.set_title(_text(chart.title), fontsize=10)
    axes.set_xlabel(_text(chart.x))
    axes.set_ylabel(_text(chart.y))
    _numbers(chart, axes)
    if chart.equal:
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
    elif chart.heat is None and not chart.solid:
        axes.grid(alpha=0.25)
    if chart.names:
        _names(axes.xaxis, chart.names)
    if chart.zero:
        axes.axvline(0, color="0.4", linewidth=0.8)
    named = axes.get_legend_handles_labels()[1]
    if len(named) > 1:
        ncols = 10 if chart.equal else 2 if len(named) > 2 else 3
        size = 2.5 if chart.equal else 1  # points of a map are small
        picture.legend(loc="outside lower center", ncols=ncols, fontsize=8, markerscale=size)


def _numbers(chart: Chart, axes: Any) -> None:
    """Numbers along the axes, as on the page."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

    found = y_axis(chart)
    if "type" in found:
        axes.set_yscale("log")
    if "tickvals" in found:
        low, high = axes.get_ylim()
        kept = [at for at, mark in enumerate(found["tickvals"]) if low <= mark <= high]
        axes.set_yticks(
            [found["tickvals"][at] for at in kept], [found["ticktext"][at] for at in kept]
        )
        axes.yaxis.set_minor_formatter(NullFormatter())
    if "range" in found:
        axes.set_ylim(*found["range"])
    if chart.percent_y:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.x in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if "range" in (along := x_axis(chart)):
            axes.set_xlim(*along["range"])


def _text(text: str) -> str:
    return str(text).replace("$", r"\$")


def _short(name: str) -> str:
    return _text(name if len(name) <= 18 else f"{name[:17]}…")


def _names(axis: Any, names: tuple[str, ...]) -> None:
    step = max(1, -(-len(names) // 40))
    at = range(0, len(names), step)
    shown = [_short(names[i]) for i in at]
    axis.set_ticks(list(at), shown, fontsize=7)
    if axis.axis_name == "x" and sum(map(len, shown)) > CROWDED:
        axis.set_tick_params(rotation=60)


def _finite(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _curve(chart: Chart, series: Series, axes: Any) -> None:
    x, y, color = _finite(series.x), _finite(series.y), light(series.color)
    label = "_nolegend_" if series.faint or chart.equal else _text(series.name)
    if series.points is not None:
        _samples(chart, series, axes)
    elif series.form == "points":
        place = (x, y, _finite(series.z)) if chart.solid else (x, y)
        axes.scatter(*place, s=14, color=color, label=label)
        _error_bars(series, axes)
        for at, text in enumerate(series.texts if chart.solid else ()):
            axes.text(*(each[at] for each in place), _text(text), fontsize=7)
    elif series.form == "steps":
        axes.step(x, y, where="mid", color=color, label=label)
        axes.fill_between(x, y, step="mid", color=color, alpha=0.12)
    else:
        style = {"linestyle": LINES[series.dash], "linewidth": 0.8 if series.faint else 1.6}
        if len(x) <= FEW and not series.faint and not chart.solid:
            style |= {"marker": "o", "markersize": 3.5}
        place = (x, y, _finite(series.z)) if chart.solid else (x, y)
        axes.plot(*place, color=color, alpha=0.45 if series.faint else 1, label=label, **style)
        _error_bars(series, axes)


def _error_bars(series: Series, axes: Any) -> None:
    if series.high:
        y, low, high = _finite(series.y), _finite(series.low), _finite(series.high)
        down = [max(0.0, a - b) for a, b in zip(y, low, strict=True)]
        up = [max(0.0, b - a) for a, b in zip(y, high, strict=True)]
        style = {"fmt": "none", "ecolor": light(series.color), "capsize": 2}
        axes.errorbar(_finite(series.x), y, yerr=(down, up), **style)


def _samples(chart: Chart, series: Series, axes: Any) -> None:
    assert series.points is not None
    labels, names = series.points.labels, series.points.classes
    for label in sorted(set(labels)):
        own = [at for at, each in enumerate(labels) if each == label]
        columns = (series.x, series.y, series.z) if chart.solid else (series.x, series.y)
        axes.scatter(
            *([column[at] for at in own] for column in columns),
            s=6,
            linewidths=0,
            color=LIGHT[label % len(LIGHT)],
            marker=MARKERS[label // len(LIGHT) % len(MARKERS)],
            label=_short(names[label]) if len(names) <= LEGEND and label < len(names) else None,
        )


def _bars(chart: Chart, axes: Any) -> None:
    bars = [series for series in chart.series if series.form == "bars"]
    width = 0.8 / len(bars)
    for at, series in enumerate(bars):
        y = _finite(series.y)
        x = [each - 0.4 + width * (at + 0.5) for each in _finite(series.x)]
        error = None
        if series.high:
            ends = zip(y, _finite(series.low), _finite(series.high), strict=True)
            spans = [(max(0.0, b - a), max(0.0, c - b)) for b, a, c in ends]
            error = ([down for down, _ in spans], [up for _, up in spans])
        color = light(series.color)
        axes.bar(x, y, width, yerr=error, color=color, label=_text(series.name), capsize=1.5)


def _boxes(chart: Chart, axes: Any) -> None:
    names = ("whislo", "q1", "med", "q3", "whishi")
    stats = [
        dict(zip(names, _finite(series.y), strict=True)) | {"label": _text(series.name)}
        for series in chart.series
    ]
    drawn = axes.bxp(stats, showfliers=False, patch_artist=True, medianprops={"color": "black"})
    for series, box in zip(chart.series, drawn["boxes"], strict=True):
        box.set_facecolor((*_rgb(light(series.color)), 0.35))


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _heat(heat: Heat, axes: Any, picture: Any) -> None:
    values = [_finite(row) for row in heat.values]
    extent = None
    if not heat.rows:
        extent = (heat.x[0], heat.x[-1], heat.y[0], heat.y[-1])
    drawn = axes.imshow(
        values,
        cmap="viridis",
        vmin=heat.low,
        vmax=heat.high,
        extent=extent,
        origin="upper" if heat.rows else "lower",
        interpolation="nearest" if heat.rows else "bilinear",
    )
    picture.colorbar(drawn, ax=axes, label=_text(heat.unit))
    if heat.rows:
        _names(axes.xaxis, heat.columns)
        _names(axes.yaxis, heat.rows)
