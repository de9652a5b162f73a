"""What a section is made of: charts, tables and sentences, before they become a page or a picture.

A chart is data in words of its own, so that one description gives both the interactive figure of
the page and the static picture for a paper. Colours and axes are the same in both. Numbers are
written in one way everywhere; what is not known is a dash.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, get_args

from largemargin.measuring.plots import COLORS, NEUTRAL

Number = float | int | None
Form = Literal["line", "points", "bars"]
Dash = Literal["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is shown, and what it is sorted by."""

    text: str
    value: float | str | None = None
    strong: bool = False
    title: str = ""
    level: str = ""
    """Green, amber or red, where it is judged."""
    detail: str = ""
    """Small print below."""
    swatch: str = ""
    """The variable of a colour that stands before the text."""

    @classmethod
    def of(cls, text: object, *, strong: bool = False) -> "Cell":
        return cls(str(text), str(text), strong)

    @classmethod
    def number(cls, value: float | None, *, strong: bool = False, digits: int = 4) -> "Cell":
        return cls(number(value, digits), value if known(value) else None, strong)

    @classmethod
    def percent(cls, value: float | None, *, strong: bool = False) -> "Cell":
        return cls(percent(value), value if known(value) else None, strong)

    @classmethod
    def degrees(cls, value: float | None, *, strong: bool = False) -> "Cell":
        return cls(degrees(value), value if known(value) else None, strong)

    @classmethod
    def count(cls, value: int | None) -> "Cell":
        return cls(NOTHING if value is None else f"{value:,}", value)

    @classmethod
    def points(cls, value: float | None) -> "Cell":
        """A difference of two shares, in points of a percent."""
        return cls(f"{round(100 * value, 2) + 0.0:+.2f}", value) if known(value) else cls(NOTHING)

    @classmethod
    def interval(cls, low: float | None, high: float | None) -> "Cell":
        if known(low) and known(high):
            return cls(f"{100 * low:+.2f} to {100 * high:+.2f}", low)
        return cls(NOTHING)


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    key: str = ""
    numeric: tuple[int, ...] = ()
    """Columns of numbers, set to the right."""
    searchable: bool = False
    """With a search box, and headings that sort."""
    classes: tuple[int, ...] = ()
    """The class each row is about, for choosing classes in the table; empty for other tables."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """By column, how its cells are judged; folded below."""
    kind: str = "table"

    def class_of(self, row: int) -> int | None:
        return self.classes[row] if self.classes else None


@dataclass(frozen=True)
class Points:
    """What belongs to each point of a scatter of samples: shown when one looks at it."""

    index: tuple[int, ...]
    labels: tuple[int, ...]
    predicted: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()
    data: str = ""
    """Which data the indices are of: thumbnails are kept by it."""
    margin: str = "logit margin"
    """What the margins are called."""
    classes: tuple[str, ...] = ()
    """Names of the classes, for a legend."""


@dataclass(frozen=True)
class Series:
    """One curve, set of points, or set of bars."""

    name: str
    x: Sequence[Number]
    y: Sequence[Number]
    z: Sequence[Number] = ()
    form: Form = "line"
    color: int | None = 0
    """Place in the palette; None is the neutral colour of the baseline."""
    dash: Dash = "solid"
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    """Ends of the error bars, absolute."""
    faint: bool = False
    points: Points | None = None
    """For samples: colours and symbols then follow their classes."""
    texts: Sequence[str] = ()
    """Words at each point of the series."""
    classes: Sequence[int] = ()
    """The class each point stands for: it is marked where that class is chosen."""
    group: str = ""
    """What the legend names: series of one group come and go together. Default the name."""
    style: str = ""
    """What the kind of line stands for, shown once in the legend."""

    @property
    def family(self) -> str:
        return self.group or self.name

    @property
    def marked(self) -> bool:
        """Whether a line has so few points that they are marked: one alone would not be seen."""
        return self.form == "line" and 0 < len(self.x) <= FEW and not self.faint

    @property
    def error_lengths(self) -> tuple[list[Number], list[Number]]:
        """Of the error bars, down and up."""
        down = [minus(y, low) for y, low in zip(self.y, self.low, strict=True)]
        return down, [minus(high, y) for y, high in zip(self.y, self.high, strict=True)]


@dataclass(frozen=True)
class Heat:
    """A square matrix as colours."""

    values: tuple[tuple[Number, ...], ...]
    names: tuple[str, ...]
    """Of the classes, which are its rows and its columns."""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    classes: tuple[int, ...] = ()
    """The class of each row and column, framed where it is chosen."""
    counts: bool = False
    """With its numbers written into the cells, where they are not 0."""


@dataclass(frozen=True)
class ClassMarks:
    """One number for each class of a model, marked on the x axis where a class is chosen."""

    name: str
    color: int | None
    x: Sequence[Number]


@dataclass(frozen=True)
class Chart:
    """A figure with its words. ``alt`` says in a sentence what is drawn."""

    key: str
    title: str
    series: tuple[Series, ...] = ()
    x: str = ""
    y: str = ""
    heat: Heat | None = None
    log_y: bool = False
    percent_y: bool = False
    names: tuple[str, ...] = ()
    """Words at x = 0, 1, 2, ... instead of numbers."""
    solid: bool = False
    """In three dimensions."""
    equal: bool = False
    """Both axes in one scale, without numbers: a map of samples."""
    zero: bool = False
    """With a line at x = 0."""
    marks: tuple[ClassMarks, ...] = ()
    alt: str = ""
    note: str = ""
    table: Table | None = None
    wide: bool = False

    @property
    def kind(self) -> str:
        """Maps are square and small: those of all models stand in one row."""
        return "map" if self.equal or self.heat is not None else "chart"

    @property
    def legend(self) -> list[tuple[int, Series]]:
        """The first series of every group, with its place."""
        first: dict[str, tuple[int, Series]] = {}
        for place, series in enumerate(self.series):
            if not series.faint:
                first.setdefault(series.family, (place, series))
        return [] if self.solid or self.equal else list(first.values())

    @property
    def styles(self) -> dict[str, str]:
        """Kinds of lines by what they stand for; none where all lines are of one kind."""
        styles: dict[str, str] = {
            series.style: series.dash for series in self.series if series.style and not series.faint
        }
        return styles if len(styles) > 1 else {}


@dataclass(frozen=True)
class Note:
    """A sentence; with a command that produces what is missing here."""

    text: str
    command: str = ""
    kind: str = "note"


@dataclass(frozen=True)
class Cards:
    """Samples as small cards with a picture."""

    title: str
    cards: tuple[dict[str, Any], ...]
    kind: str = "cards"


@dataclass(frozen=True)
class Blocks:
    """Anything else; the template knows how to show ``kind``."""

    kind: str
    content: Any = None


Block = Chart | Table | Note | Cards | Blocks


@dataclass(frozen=True)
class Section:
    """A section of the report, with one sentence that says how to read it.

    ``more`` is folded, below the words ``folded``.
    """

    key: str
    title: str
    reading: str
    blocks: Sequence[Block] = ()
    more: Sequence[Block] = ()
    folded: str = "More"

    @property
    def charts(self) -> tuple[Chart, ...]:
        return tuple(block for block in (*self.blocks, *self.more) if isinstance(block, Chart))


def arranged(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Small figures first, then maps, wide figures, tables, and sentences: no holes in the page.

    Figures and tables with nothing in them are left out.
    """
    return tuple(sorted(filter(_has_content, blocks), key=_rank))


def _has_content(block: Block) -> bool:
    if isinstance(block, Chart):
        return bool(block.series or block.heat)
    return not isinstance(block, Table) or bool(block.rows)


def _rank(block: Block) -> int:
    ranks = {"chooser": 0, "chart": 1, "map": 2, "table": 4, "note": 5}
    return 3 if isinstance(block, Chart) and block.wide else ranks.get(block.kind, 4)


# The colours and symbols of every plot (``measuring/plots.py``), as they are on dark paper and in
# plotly.
DARK = (
    *("#4fb0eb", "#f5793a", "#2fc79a", "#e58fc2"),
    *("#e6c229", "#a59bf5", "#9adcf7", "#d2a679"),
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "triangle-down")
NEUTRAL_DARK = "#aab3bf"

DASHES: tuple[Dash, ...] = get_args(Dash)
"""Kinds of lines, in the order in which charts use them."""

SCALE = "Viridis"
"""Of heat maps: even in lightness, so it also works in grey."""

COUNTS = ((0, "rgba(43, 134, 181, 0.1)"), (1, "rgb(43, 134, 181)"))
"""Of counts, which are mostly 0: from the colour of the paper on."""

WRITTEN = 16
"""Classes of a matrix up to which counts are written into it."""


def light(place: int | None) -> str:
    """A place in the palette as a colour on white paper."""
    return NEUTRAL if place is None else COLORS[place % len(COLORS)]


def swatch(place: int | None) -> str:
    """A place in the palette as a variable of the page."""
    return "--neutral" if place is None else f"--c{place % len(COLORS)}"


FEW = 16
"""Points of a line that are marked."""

NARROW = 1000.0
"""Largest over smallest number up to which powers of ten alone would be too few marks."""


def y_axis(chart: Chart) -> dict[str, Any]:
    """What plotly should know about the y axis beside its title."""
    lines = {series.form for series in chart.series} <= {"line", "points"}
    heights = (itertools.chain(each.y, each.low, each.high) for each in chart.series)
    values = finite(itertools.chain.from_iterable(heights))
    if chart.log_y and (powers := _powers([y for y in values if y > 0])):
        return powers
    axis: dict[str, Any] = {}
    spread = max(values) - min(values) if values else math.inf
    if chart.percent_y:
        axis["tickformat"] = ".1%" if spread < 0.05 else ".0%"
    if spread == 0 and lines and not chart.equal:
        axis["range"] = _around(values[0], share=chart.percent_y)
    return axis


def _around(value: float, *, share: bool) -> list[float]:
    """A range around one number, in which shares stay shares."""
    if share:
        return [max(-0.005, value - 0.05), min(1.005, value + 0.05)]
    step = 0.1 * abs(value) or 1.0
    return [value - step, value + step]


def x_axis(chart: Chart) -> dict[str, Any]:
    """The same of the x axis, for epochs and steps: whole numbers."""
    values = finite(x for series in chart.series for x in series.x)
    counts = chart.x in ("epoch", "step") and chart.heat is None and not chart.names
    if not values or not counts or max(values) - min(values) >= 10:
        return {}
    if min(values) == max(values):
        return {"dtick": 1, "range": [values[0] - 0.5, values[0] + 0.5]}
    return {"dtick": 1}


def finite(values: Iterable[Number]) -> list[float]:
    return [float(value) for value in values if known(value)]


def _powers(values: list[float]) -> dict[str, Any]:
    """A logarithmic axis, which needs a power of ten to show."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    if high < 10 * low:
        return {}
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


LABELS = 40
"""Names along an axis; of more, every k-th is written."""


def labelled(names: Sequence[str], most: int = LABELS) -> list[int]:
    """Places along an axis that are named."""
    return list(range(0, len(names), max(1, -(-len(names) // most))))


NOTHING = "–"


def known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}g}"


def percent(value: float | None, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %" if known(value) else NOTHING


def degrees(value: float | None) -> str:
    return f"{value:.2f}°" if known(value) else NOTHING


def seconds(value: float | None) -> str:
    if not known(value):
        return NOTHING
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def minus(own: Number, other: Number) -> Number:
    return None if own is None or other is None else own - other


def rounded(value: float | int | None, digits: int = 5) -> float | int | None:
    """For figures: a few digits, and nothing where there is no number."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
