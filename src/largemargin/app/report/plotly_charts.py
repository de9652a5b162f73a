"""Charts as figures of plotly.js, in plain dicts.

Every text is untrusted, and plotly reads texts as a subset of HTML: :func:`said` escapes it.
Colours are places in the palette (``c3``, ``neutral``), which the page turns into colours of the
light or the dark theme.
"""

from collections.abc import Sequence
from typing import Any

from largemargin.app.report.charts import (
    COUNTS,
    LABELS,
    SCALE,
    WRITTEN,
    Chart,
    Heat,
    Number,
    Series,
    labelled,
    rounded,
    x_axis,
    y_axis,
)
from largemargin.measuring.plots import shortened

CROWDED = 110
"""Letters of all names below an axis from which on they stand on each other."""

MATRIX_NAMES = 16
"""Beside a matrix, which is small: of more classes every k-th is named."""


def said(text: str, longest: int = 40) -> str:
    """A text that plotly shows as it is: no tags, no entities, no line breaks."""
    text = shortened(" ".join(str(text).split()), longest)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def figure(chart: Chart) -> dict[str, Any]:
    """``{"data": [...], "layout": {...}}`` of a chart."""
    traces = [_trace(chart, series) for series in chart.series]
    if chart.heat is not None:
        traces.append(_heat(chart.heat))
    made: dict[str, Any] = {"data": traces, "layout": _layout(chart)}
    if chart.marks:
        made["marks"] = [
            {"name": said(marks.name), "color": _color(marks.color), "x": _numbers(marks.x)}
            for marks in chart.marks
        ]
    return made


def _trace(chart: Chart, series: Series) -> dict[str, Any]:
    named: dict[str, Any] = {"name": said(series.name), "legendgroup": said(series.family)}
    color = {"color": _color(series.color)}
    trace = named | {"x": _numbers(series.x), "y": _numbers(series.y)}
    if chart.solid:
        trace["z"] = _numbers(series.z)
    if series.form == "bars":
        trace |= {"type": "bar", "marker": color}
    else:
        trace |= _scatter(chart, series)
    if series.high:
        down, up = map(_numbers, series.error_lengths)
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
        trace["error_y"] |= color | {"thickness": 1, "width": 3}
    if series.texts:
        trace["text"] = [said(text) for text in series.texts]
    if series.faint:
        trace |= {"opacity": 0.45, "showlegend": False}
    return trace | _hover(chart, series)


def _scatter(chart: Chart, series: Series) -> dict[str, Any]:
    """How a line or points are drawn."""
    color = _color(series.color)
    line = {"color": color, "dash": series.dash, "width": 1 if series.faint else 2}
    line_mode = "lines+markers" if series.marked else "lines"
    made: dict[str, Any] = {
        "type": "scatter3d" if chart.solid else "scatter",
        "mode": "markers" if series.form == "points" else line_mode,
        "line": line,
        "marker": {"color": color, "size": 3 if chart.solid else 6},
    }
    if chart.solid and series.texts:
        made |= {"mode": "markers+text", "textposition": "top center"}
    if chart.equal and series.texts:
        made |= {"mode": "text", "textfont": {"size": 14, "weight": 700, "shadow": "auto"}}
    return made


def _hover(chart: Chart, series: Series) -> dict[str, Any]:
    """What is shown at a point; ``meta`` is what the script of the page reads."""
    if series.points is not None:
        points = series.points
        meta = {
            "labels": list(points.labels),
            "index": list(points.index),
            "predicted": list(points.predicted),
            "margins": _numbers(points.margins),
            "data": points.data,
            "margin": points.margin,
        }
        return {"meta": meta, "hoverinfo": "none"}
    # The name is data, not a template: what looks like a field must not be filled in.
    extra = f"<extra>{said(series.name).replace('{', '&#123;')}</extra>"
    if series.classes:
        template = f"%{{text}}: %{{y:.4g}}{extra}"
        return {"meta": {"classes": list(series.classes)}, "hovertemplate": template}
    if series.faint or chart.equal:
        return {"hoverinfo": "skip"}
    y = "%{y:.2%}" if chart.percent_y else "%{y:.4g}"
    return {"hovertemplate": f"%{{x}}: {y}{extra}"}


def _heat(heat: Heat) -> dict[str, Any]:
    # Places, not names: two classes of one name stay two.
    places = list(range(len(heat.names)))
    made: dict[str, Any] = {
        "type": "heatmap",
        "x": places,
        "y": places,
        "z": [_numbers(row, 4) for row in heat.values],
        "colorscale": COUNTS if heat.counts else SCALE,
        "showscale": False,
        "zmin": rounded(heat.low),
        "zmax": rounded(heat.high),
        "hoverongaps": False,
    }
    if heat.classes:
        made["meta"] = {"framed": list(heat.classes)}
    if len(places) <= 32:
        made["customdata"] = [[f"{said(a)} · {said(b)}" for b in heat.names] for a in heat.names]
        made["hovertemplate"] = "%{customdata}: %{z:.4g}<extra></extra>"
    return made | (_written(heat) if heat.counts and len(places) <= WRITTEN else {})


def _written(heat: Heat) -> dict[str, Any]:
    """Numbers in the cells of a matrix, where they are not 0."""
    text = [[str(value or "") for value in row] for row in heat.values]
    look = {"textfont": {"color": "ink"}, "xgap": 1, "ygap": 1}
    return {"text": text, "texttemplate": "%{text}", **look}


def _layout(chart: Chart) -> dict[str, Any]:
    x: dict[str, Any] = {"title": {"text": said(chart.x, 80)}} | x_axis(chart)
    y: dict[str, Any] = {"title": {"text": said(chart.y, 80)}} | y_axis(chart)
    # The page has legends of its own, which wrap and can be reached by keyboard.
    layout: dict[str, Any] = {"showlegend": False}
    forms = {series.form for series in chart.series}
    if chart.names:
        x |= _places(chart.names)
        if len("  ".join(name[:18] for name in chart.names[:LABELS])) + 2 > CROWDED:
            # Names that lean to the left end at their place: the last one has room too.
            x["tickangle"] = -30
    if "bars" in forms:
        layout["barmode"] = "group"
    if chart.zero:
        x["zeroline"] = True
    if chart.heat is not None:
        x |= _places(chart.heat.names, MATRIX_NAMES)
        y |= _places(chart.heat.names, MATRIX_NAMES) | {"autorange": "reversed"}
        square = {"constrain": "domain", "showgrid": False}
        x, y = x | square, y | square | {"scaleanchor": "x"}
    if chart.equal:
        bare = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False}
        x, y = x | bare, y | bare | {"scaleanchor": "x"}
    if chart.solid:
        layout["scene"] = {"aspectmode": "data"}
    return {"xaxis": x, "yaxis": y, **layout}


def _places(names: tuple[str, ...], most: int = LABELS) -> dict[str, Any]:
    at = labelled(names, most)
    return {"tickvals": at, "ticktext": [said(names[i], 18) for i in at], "automargin": True}


def _numbers(values: Sequence[Number], digits: int = 5) -> list[Number]:
    return [rounded(value, digits) for value in values]


def _color(place: int | None) -> str:
    return "neutral" if place is None else f"c{place % 8}"
