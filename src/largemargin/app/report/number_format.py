"""Numbers as the report writes them; what is not known is a dash."""

import math

from largemargin.app.report.charts import Cell

NOTHING = "–"


def known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}g}"


def percent(value: float | None, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %" if value is not None and known(value) else NOTHING


def degrees(value: float | None) -> str:
    return f"{value:.2f}°" if value is not None and known(value) else NOTHING


def count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def seconds(value: float | None) -> str:
    if value is None or not known(value):
        return NOTHING
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def number_cell(value: float | None, *, strong: bool = False, digits: int = 4) -> Cell:
    return Cell(number(value, digits), _order(value), strong)


def percent_cell(value: float | None, *, strong: bool = False, title: str = "") -> Cell:
    return Cell(percent(value), _order(value), strong, title)


def degrees_cell(value: float | None, *, strong: bool = False, title: str = "") -> Cell:
    return Cell(degrees(value), _order(value), strong, title)


def points_cell(value: float | None) -> Cell:
    """A difference of two shares, in points of a percent."""
    if value is None or not known(value):
        return Cell(NOTHING)
    return Cell(f"{round(100 * value, 2) + 0.0:+.2f}", value)


def interval_cell(low: float | None, high: float | None) -> Cell:
    if low is None or high is None or not (known(low) and known(high)):
        return Cell(NOTHING)
    return Cell(f"{100 * low:+.2f} to {100 * high:+.2f}", low)


def count_cell(value: int | None) -> Cell:
    return Cell(count(value), value)


def text_cell(text: object, *, strong: bool = False) -> Cell:
    return Cell(str(text), str(text), strong)


def _order(value: float | None) -> float | None:
    return value if known(value) else None


def rounded(value: float | int | None, digits: int = 5) -> float | int | None:
    """For figures: a few digits, and nothing where there is no number."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
