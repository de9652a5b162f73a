"""Charts as figures of plotly.js, in plain dicts.

Every text is untrusted, and plotly reads texts as a small HTML: :func:`said` takes that from it.
Colours are places in the palette (``c3``, ``neutral``), which the page turns into colours of the
light or the dark theme.
"""

from typing import Any

from largemargin.app.report.charts import FEW, Chart, Heat, Number, Series, x_axis, y_axis
from largemargin.app.report.number_format import rounded
from largemargin.app.report.palette import SCALE

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
            {"name": said(each.name), "color": _color(each.color), "x": _numbers(each.x)}
            for each in chart.marks
        ]
    return made


def _numbers(values: Any) -> list[Number]:
    return [rounded(value) for value in values]


def _color(place: int | None) -> str:
    return "neutral" if place is None else f"c{place % 8}"


def _trace(chart: Chart, series: Series) -> dict[str, Any]:
    made: dict[str, Any] = {"name": said(series.name), "x": _numbers(series.x)}
    made["legendgroup"] = said(series.family)
    if series.form == "box":
        return _box(series)
    made["y"] = _numbers(series.y)
    color = _color(series.color)
    if series.form == "bars":
        made |= {"type": "bar", "marker": {"color": color}}
    else:
        made["type"] = "scatter3d" if chart.solid else "scatter"
        made["mode"] = "markers" if series.form == "points" else "lines"
        if series.form == "line" and 0 < len(series.x) <= FEW and not series.faint:
            made["mode"] = "lines+markers"
        made["line"] = {"color": color, "dash": series.dash, "width": 1 if series.faint else 2}
        if series.form == "steps":
            made["line"]["shape"] = "hvh"
            made["fill"] = "tozeroy"
        made["marker"] = {"color": color, "size": 3 if chart.solid else 6}
    if series.faint:
        made |= {"opacity": 0.45, "showlegend": False, "hoverinfo": "skip"}
    if chart.solid:
        made["z"] = _numbers(series.z)
    if series.high:
        made["error_y"] = _errors(series, color)
    if series.texts:
        made["text"] = [said(text) for text in series.texts]
        if chart.solid:
            made |= {"mode": "markers+text", "textposition": "top center"}
    if series.points is not None:
        p = series.points
        made["meta"] = {
            "labels": list(p.labels),
            "index": list(p.index),
            "predicted": list(p.predicted),
            "margins": _numbers(p.margins),
            "data": p.data,
            "margin": p.margin,
        }
        made["hoverinfo"] = "none"
    elif series.classes:
        made["meta"] = {"classes": list(series.classes)}
        made["hovertemplate"] = f"%{{text}}: %{{y:.4g}}<extra>{_literal(series.name)}</extra>"
    elif "hoverinfo" not in made:
        made["hovertemplate"] = _template(chart, series.name)
    return made


def _template(chart: Chart, name: str) -> str:
    y = "%{y:.2%}" if chart.percent_y else "%{y:.4g}"
    return f"%{{x}}: {y}<extra>{_literal(name)}</extra>"


def _literal(name: str) -> str:
    """The name is data, not a template: what looks like a field must not be filled in."""
    return said(name).replace("{", "&#123;")


def _box(series: Series) -> dict[str, Any]:
    """A box of five numbers: whiskers at the 5 % and 95 % quantiles."""
    low, first, middle, third, high = _numbers(series.y)
    return {
        "type": "box",
        "name": said(series.name),
        "legendgroup": said(series.family),
        "lowerfence": [low],
        "q1": [first],
        "median": [middle],
        "q3": [third],
        "upperfence": [high],
        "x": [said(series.name)],
        "marker": {"color": _color(series.color)},
        "line": {"color": _color(series.color)},
    }


def _errors(series: Series, color: str) -> dict[str, Any]:
    pairs = zip(series.y, series.low, series.high, strict=True)
    up, down = [], []
    for y, low, high in pairs:
        known = y is not None and low is not None and high is not None
        up.append(rounded(high - y) if known else None)  # type: ignore[operator]
        down.append(rounded(y - low) if known else None)  # type: ignore[operator]
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "color": color,
        "thickness": 1,
        "width": 3,
    }


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
    x: dict[str, Any] = {"title": {"text": said(chart.x, 80)}}
    y: dict[str, Any] = {"title": {"text": said(chart.y, 80)}}
    layout: dict[str, Any] = {"xaxis": x, "yaxis": y}
    x |= x_axis(chart)
    y |= y_axis(chart)
    if chart.names:
        # Names that lean to the left end at their place: the last one has room too.
        x |= _places(chart.names) | ({"tickangle": -30} if _long(chart.names) else {})
    if any(series.form == "box" for series in chart.series):
        x["showticklabels"] = False
    if chart.heat is not None and chart.heat.rows:
        x |= _places(chart.heat.columns, MATRIX_NAMES)
        y |= _places(chart.heat.rows, MATRIX_NAMES) | {"autorange": "reversed"}
    if chart.heat is not None:
        y["scaleanchor"], y["constrain"], x["constrain"] = "x", "domain", "domain"
        x["showgrid"] = y["showgrid"] = False
    if chart.equal:
        for axis in (x, y):
            axis |= {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False}
        y |= {"scaleanchor": "x"}
    if chart.zero:
        x["zeroline"] = True
    if any(series.form == "bars" for series in chart.series):
        layout |= {"barmode": "group"}
    if chart.solid:
        layout["scene"] = {"aspectmode": "data"}
    # The page has legends of its own, which wrap and can be reached by keyboard.
    layout["showlegend"] = False
    return layout


def _long(names: tuple[str, ...]) -> bool:
    """Whether names would stand on each other side by side."""
    return sum(min(len(name), 18) + 2 for name in names[:40]) > 110


def _places(names: tuple[str, ...], most: int = 40) -> dict[str, Any]:
    shown = [said(name, 18) for name in names]
    step = max(1, -(-len(shown) // most))
    at = list(range(0, len(shown), step))
    return {"tickvals": at, "ticktext": [shown[i] for i in at], "automargin": True}
