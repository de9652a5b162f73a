"""``report``: read the models, look at their samples, build the sections, write the page.

The page is one HTML file with everything in it. Jinja2 escapes every text. Scripts are allowed by
their hash alone and nothing may be fetched (a Content-Security-Policy says so to the browser), so
that a class name that looks like HTML can do no harm even if it got through. Figures are written as
tables too, for readers without JavaScript or without eyes for curves.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from largemargin.app.report.charts import (
    DARK,
    NEUTRAL_DARK,
    SYMBOLS,
    Block,
    Cell,
    Chart,
    Heat,
    Number,
    Section,
    Series,
    Table,
)
from largemargin.app.report.matplotlib_charts import write_pictures
from largemargin.app.report.plotly_charts import figure
from largemargin.app.report.report_models import ReportModels, ReportSources, read_models
from largemargin.app.report.sample_views import ViewOptions, view_samples
from largemargin.app.report.sections import all_sections
from largemargin.app.training.files import damage_named, without_nan, write_text
from largemargin.errors import LargeMarginError, optional_module
from largemargin.measuring.plots import COLORS, NEUTRAL
from largemargin.version import __version__


def report(
    source: ReportSources,
    path: str | Path = "report.html",
    *,
    features: str = "tsne",
    layers: tuple[str, ...] = ("penultimate",),
    max_samples: int = 500,
    noise: float = 0.06,
    device: str = "cpu",
    title: str | None = None,
    png: str | Path | None = None,
) -> Path:
    """Write a self-contained HTML report and return its path.

    Args:
        source: a :class:`~largemargin.Geometry`, a run or its folder, the folder of a comparison, a
            ``geometry.json``, several of them in a list, or in a dict by the name to show.
        path: the file to write.
        features: how samples of runs are placed in the plane: "tsne" (default), "pca" (faster), or
            "none", which leaves models and images alone.
        layers: names of modules to show there; default "penultimate", what enters the head.
        max_samples: how many samples to place, default 500, the same number of each class.
        noise: standard deviation of the noise of the noisy picture, in units of [0, 1] pixels; 0
            leaves it out.
        device: where the passes through models run.
        title: of the page; default the names of the models.
        png: folder for static pictures of all figures (needs matplotlib).

    Example:
        >>> import largemargin as lm
        >>> features, weight = torch.randn(60, 4), torch.randn(3, 4)
        >>> geometry = lm.measure_arrays(features, torch.arange(60) % 3, weight)
        >>> report(geometry, tmp_path / "report.html").name
        'report.html'
    """
    options = ViewOptions(features, tuple(layers), max_samples, noise, device)
    options.check()
    target = Path(path)
    if target.is_dir():
        raise LargeMarginError(f"{target} is a folder. Name a file: {target / 'report.html'}.")
    with damage_named("a file of what is reported"):
        models = read_models(source)
    models = _with_views(models, options)
    with damage_named("a file of what is reported"):
        sections = all_sections(models)
        text = render(models, sections, title or models.title).encode(errors="replace").decode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
    except OSError as error:
        raise LargeMarginError(f"cannot write {target}: {error.strerror}.") from error
    if png is not None:
        charts = [chart for section in sections for chart in section.charts]
        write_pictures([replace(chart, key=slug(chart.key)) for chart in charts], png)
    return target


def _with_views(models: ReportModels, options: ViewOptions) -> ReportModels:
    """The models with views of their samples: the one place where a report runs models."""
    if options.features == "none":
        return models
    viewed = (
        replace(model, views=view_samples(model.run, model.geometry, options))
        if model.run is not None
        else model
        for model in models
    )
    return replace(models, models=tuple(viewed))


TEMPLATES = Path(__file__).with_name("templates")


def _palette(colors: Sequence[str]) -> str:
    return "".join(f"--c{at}:{color};" for at, color in enumerate(colors))


THEMES = {
    "light": "--paper:#ffffff;--page:#f5f6f8;--ink:#1b1f24;--soft:#57606a;--line:#d8dde3;"
    "--accent:#0b5fa5;--shade:#eef1f4;--green:#1a7f37;--amber:#8a5a00;--red:#b42318;"
    f"--mark:#d6006c;--neutral:{NEUTRAL};{_palette(COLORS)}",
    "dark": "--paper:#171b21;--page:#0e1116;--ink:#e6e9ed;--soft:#9fa9b5;--line:#303843;"
    "--accent:#6cb6ff;--shade:#20262e;--green:#57c779;--amber:#e3b341;--red:#ff8a7d;"
    f"--mark:#ff7ac0;--neutral:{NEUTRAL_DARK};{_palette(DARK)}",
}
"""Variables of the page by theme."""


def render(models: ReportModels, sections: Sequence[Section], title: str) -> str:
    """The whole page as text."""
    jinja2 = optional_module("jinja2", "a report needs jinja2", extra="report")
    offline = optional_module("plotly.offline", "a report needs plotly", extra="report")
    from markupsafe import Markup  # which jinja2 brings

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["slug"] = slug
    environment.globals["several"] = len(models.models) > 1
    sections = [with_numbers(section) for section in sections]
    plotly, script = _inline(offline.get_plotlyjs()), _inline(_read("script.js"))
    style = _read("style.css")
    for theme, colors in THEMES.items():
        style = style.replace(f"/*{theme}*/", f"color-scheme: {theme}; {colors}")
    page: str = environment.get_template("page.html").render(
        title=title,
        version=__version__,
        sections=sections,
        models=models,
        style=Markup(style),
        plotly=Markup(plotly),
        script=Markup(script),
        policy=_policy(plotly, script),
        payload=_payload(models, sections),
        symbols="●■◆▲✚✖★▼",
    )
    return page


def slug(text: str) -> str:
    """A name as an id of the page: letters, digits and dashes, different for different names."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:6]
    return plain if plain == text else f"{plain[:40]}-{digest}"


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    """A script that cannot end its own element."""
    return re.sub(r"</(script)", r"<\\/\1", script, flags=re.IGNORECASE)


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
        for each in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _payload(models: ReportModels, sections: Sequence[Section]) -> dict[str, Any]:
    """What the script draws from. Written by ``tojson``, which escapes < > & and quotes."""
    pictures: dict[str, dict[str, str]] = {}
    names: dict[str, dict[str, str]] = {}
    classes: dict[str, list[str]] = {}
    for model in models:
        key = model.data_key
        classes.setdefault(key, list(model.classes))
        if model.views is not None:
            for kept, own in ((pictures, model.views.pictures), (names, model.views.ids)):
                kept[key] = {str(at): text for at, text in own.items()} | kept.get(key, {})
    return {
        "charts": {slug(c.key): without_nan(figure(c)) for part in sections for c in part.charts},
        "pictures": pictures,
        "names": names,
        "classes": classes,
        "symbols": list(SYMBOLS),
        # A class of one model is another's only where all have the same.
        "linked": bool(models.classes),
    }


ROWS = 16
"""Of a table of a curve; of more points every k-th is written."""

MATRIX = 12
"""Classes of a matrix that is written out whole."""


def with_numbers(section: Section) -> Section:
    """The section with a table for every figure that has numbers to read."""

    def tabled(blocks: Sequence[Block]) -> list[Block]:
        return [
            replace(block, table=block.table or numbers(block))
            if isinstance(block, Chart)
            else block
            for block in blocks
        ]

    return replace(section, blocks=tabled(section.blocks), more=tabled(section.more))


def numbers(chart: Chart) -> Table | None:
    """A chart as a table; None where places of points say nothing as numbers."""
    if chart.heat is not None:
        return _matrix(chart, chart.heat)
    curves = [series for series in chart.series if not series.faint]
    if chart.equal or chart.solid or not curves:
        return None
    columns = [_by_place(chart, series) for series in curves]
    places = thinned(sorted(set().union(*columns)), ROWS)
    heads = (chart.x, *(series.name for series in curves))
    rows = tuple(_row(chart, place, [column.get(place) for column in columns]) for place in places)
    return Table(heads, rows, key=f"numbers-{chart.key}", numeric=tuple(range(1, len(heads))))


def _row(chart: Chart, place: float, values: Sequence[Number]) -> tuple[Cell, ...]:
    first = Cell.of(chart.names[int(place)]) if chart.names else Cell.number(place)
    return first, *map(Cell.percent if chart.percent_y else Cell.number, values)


def _by_place(chart: Chart, series: Series) -> dict[float, Number]:
    # Points beside a name stand a little to its left or right.
    digits = 0 if chart.names else 6
    pairs = zip(series.x, series.y, strict=True)
    return {round(x, digits): y for x, y in pairs if x is not None}


Item = TypeVar("Item")


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` of them, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _matrix(chart: Chart, heat: Heat) -> Table | None:
    if len(heat.names) > MATRIX:
        return None
    rows = zip(heat.names, heat.values, strict=True)
    cells = tuple((Cell.of(name), *map(Cell.number, values)) for name, values in rows)
    heads = ("", *heat.names)
    return Table(heads, cells, key=f"numbers-{chart.key}", numeric=tuple(range(1, len(heads))))
