"""Charts as figures of plotly.js, in plain dicts.

Every text is untrusted, and plotly reads texts as a subset of HTML: :func:`said` escapes it.
Colours are places in the palette (``c3``, ``neutral``), which the page turns into colours of the
light or the dark theme.
"""

from typing import Any

from largemargin.app.report.charts import (
    FEW,
    SCALE,
    Chart,
    Heat,
    Number,
    Series,
    x_axis,
    y_axis,
)
from largemargin.app.report.number_format import rounded

LONGEST = 40
"""Letters of a name in a figure."""

MATRIX_NAMES = 16
"""Beside a matrix, which is small: of more classes every k-th is named."""


def said(text: str, longest: int = LONGEST) -> str:
    """A text that plotly shows as it is: no tags, no entities, no line breaks."""
    text = " ".join(str(text).split())
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
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
    if series.form == "box":
        return named | _box(series)
    trace = named | {"x": _numbers(series.x), "y": _numbers(series.y)}
    if chart.solid:
        trace["z"] = _numbers(series.z)
    if series.form == "bars":
        trace |= {"type": "bar", "marker": {"color": _color(series.color)}}
    else:
        trace |= _scatter(chart, series)
    if series.high:
        trace["error_y"] = _errors(series)
    if series.texts:
        trace["text"] = [said(text) for text in series.texts]
    if series.faint:
        trace |= {"opacity": 0.45, "showlegend": False}
    return trace | _hover(chart, series)


def _box(series: Series) -> dict[str, Any]:
    """A box of five numbers: whiskers at the 5 % and 95 % quantiles."""
    names = ("lowerfence", "q1", "median", "q3", "upperfence")
    return {
        "type": "box",
        **{name: [value] for name, value in zip(names, _numbers(series.y), strict=True)},
        "x": [said(series.name)],
        "marker": {"color": _color(series.color)},
        "line": {"color": _color(series.color)},
    }


def _scatter(chart: Chart, series: Series) -> dict[str, Any]:
    """How a line, steps or points are drawn."""
    color = _color(series.color)
    line = {"color": color, "dash": series.dash, "width": 1 if series.faint else 2}
    marked = series.form == "line" and 0 < len(series.x) <= FEW and not series.faint
    mode = "markers" if series.form == "points" else "lines+markers" if marked else "lines"
    made: dict[str, Any] = {
        "type": "scatter3d" if chart.solid else "scatter",
        "mode": mode,
        "line": line,
        "marker": {"color": color, "size": 3 if chart.solid else 6},
    }
    if chart.solid and series.texts:
        made |= {"mode": "markers+text", "textposition": "top center"}
    if series.form == "steps":
        made |= {"line": line | {"shape": "hvh"}, "fill": "tozeroy"}
    return made


def _errors(series: Series) -> dict[str, Any]:
    up, down = [], []
    for y, low, high in zip(series.y, series.low, series.high, strict=True):
        known = y is not None and low is not None and high is not None
        up.append(rounded(high - y) if known else None)  # type: ignore[operator]
        down.append(rounded(y - low) if known else None)  # type: ignore[operator]
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "color": _color(series.color),
        "thickness": 1,
        "width": 3,
    }


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
    extra = f"<extra>{_literal(series.name)}</extra>"
    if series.classes:
        template = f"%{{text}}: %{{y:.4g}}{extra}"
        return {"meta": {"classes": list(series.classes)}, "hovertemplate": template}
    if series.faint:
        return {"hoverinfo": "skip"}
    y = "%{y:.2%}" if chart.percent_y else "%{y:.4g}"
    return {"hovertemplate": f"%{{x}}: {y}{extra}"}


def _literal(name: str) -> str:
    """The name is data, not a template: what looks like a field must not be filled in."""
    return said(name).replace("{", "&#123;")


def _heat(heat: Heat) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "heatmap",
        "z": [[rounded(value, 4) for value in row] for row in heat.values],
        "colorscale": SCALE,
        "colorbar": {"title": {"text": said(heat.unit)}, "thickness": 12, "len": 0.9},
        "zmin": rounded(heat.low),
        "zmax": rounded(heat.high),
        "hoverongaps": False,
    }
    if heat.rows:
        # Places, not names: two classes of one name stay two.
        made |= {"x": list(range(len(heat.columns))), "y": list(range(len(heat.rows)))}
        cells = [[f"{said(a)} · {said(b)}" for b in heat.columns] for a in heat.rows]
        if heat.classes:
            made["meta"] = {"framed": list(heat.classes)}
        if len(heat.rows) <= 32:
            made |= {"text": cells, "hovertemplate": "%{text}: %{z:.4g}<extra></extra>"}
    else:
        made |= {"x": _numbers(heat.x), "y": _numbers(heat.y), "zsmooth": "best"}
    return made


def _layout(chart: Chart) -> dict[str, Any]:
    x: dict[str, Any] = {"title": {"text": said(chart.x, 80)}} | x_axis(chart)
    y: dict[str, Any] = {"title": {"text": said(chart.y, 80)}} | y_axis(chart)
    # The page has legends of its own, which wrap and can be reached by keyboard.
    layout: dict[str, Any] = {"xaxis": x, "yaxis": y, "showlegend": False}
    forms = {series.form for series in chart.series}
    if chart.names:
        # Names that lean to the left end at their place: the last one has room too.
        x |= _places(chart.names) | ({"tickangle": -30} if _long(chart.names) else {})
    if "box" in forms:
        x["showticklabels"] = False
    if "bars" in forms:
        layout["barmode"] = "group"
    if chart.zero:
        x["zeroline"] = True
    if chart.heat is not None:
        _lay_out_heat(chart.heat, x, y)
    if chart.equal:
        for axis in (x, y):
            axis |= {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False}
        y["scaleanchor"] = "x"
    if chart.solid:
        layout["scene"] = {"aspectmode": "data"}
    return layout


def _lay_out_heat(heat: Heat, x: dict[str, Any], y: dict[str, Any]) -> None:
    if heat.rows:
        x |= _places(heat.columns, MATRIX_NAMES)
        y |= _places(heat.rows, MATRIX_NAMES) | {"autorange": "reversed"}
    y["scaleanchor"] = "x"
    x["constrain"] = y["constrain"] = "domain"
    x["showgrid"] = y["showgrid"] = False


def _long(names: tuple[str, ...]) -> bool:
    """Whether names would stand on each other side by side."""
    return sum(min(len(name), 18) + 2 for name in names[:40]) > 110


def _places(names: tuple[str, ...], most: int = 40) -> dict[str, Any]:
    shown = [said(name, 18) for name in names]
    step = max(1, -(-len(shown) // most))
    at = list(range(0, len(shown), step))
    return {"tickvals": at, "ticktext": [shown[i] for i in at], "automargin": True}


def _numbers(values: Any) -> list[Number]:
    return [rounded(value) for value in values]


def _color(place: int | None) -> str:
    return "neutral" if place is None else f"c{place % 8}"
