"""The table that ``reproduce`` prints: what was reported, what was measured, what that means."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from largemargin_papers.recipes.verdicts import Sample

HEADINGS = ("", "", "reported", "measured", "runs", "verdict")


@dataclass(frozen=True)
class Line:
    """One reported number and what became of it.

    Args:
        key: its place in the paper's table.
        column: of the number.
        unit: of both numbers.
        reported: as the paper has it; None where it prints none.
        reported_std: likewise.
        measured: one number per run.
        draws_std: standard deviation over draws of noise, of the first run, where there are any.
        verdict: by the rule of :mod:`largemargin_papers.recipes.verdicts`.
    """

    key: Mapping[str, str]
    column: str
    unit: str
    reported: float | None
    reported_std: float | None
    measured: Sample
    draws_std: float | None
    verdict: str


@dataclass(frozen=True)
class Table:
    """What :func:`largemargin_papers.recipes.reproduce` returns; printed, it is a table of text.

    Args:
        title: of the recipe.
        protocol: "as printed", or how the runs differ from the paper's.
        lines: in the order of the paper's table.
        failures: why runs broke off, by cell.
    """

    title: str
    protocol: str
    lines: tuple[Line, ...]
    failures: Mapping[str, str]

    def __str__(self) -> str:
        rows = [HEADINGS, *(_cells(line) for line in self.lines)]
        parts = [f"{self.title}", f"Protocol: {self.protocol}.", "", *_aligned(rows)]
        counted = summary(self.lines)
        parts += ["", ", ".join(f"{count} {name}" for name, count in counted.items()) + "."]
        parts += [f"{cell} failed: {why}" for cell, why in self.failures.items()]
        return "\n".join(parts)


def summary(lines: Sequence[Line]) -> dict[str, int]:
    """How many lines have each verdict."""
    counted: dict[str, int] = {}
    for line in lines:
        for part in line.verdict.split(": ")[0].split("; "):
            counted[part] = counted.get(part, 0) + 1
    return counted


def _cells(line: Line) -> tuple[str, ...]:
    key = ", ".join(value for value in line.key.values() if value)
    return (
        key,
        line.column,
        text_of(line.reported, line.reported_std, line),
        text_of(_mean(line.measured), spread_of(line), line),
        str(line.measured.n) if line.measured.n else "",
        line.verdict,
    )


def _mean(sample: Sample) -> float | None:
    return sample.mean if sample.n else None


def spread_of(line: Line) -> float | None:
    """Over runs; over draws of noise where there is one run."""
    return line.measured.std if line.measured.n > 1 else line.draws_std


def _places(value: float | None) -> int:
    if value is None:
        return 2
    text = repr(value)
    return max(2, len(text.partition(".")[2])) if "e" not in text else 4


def text_of(value: float | None, std: float | None, line: Line, *, sign: bool = False) -> str:
    """A number of a line with its deviation and unit, with the digits of the reported one.

    A small number beside which nothing is reported is not rounded to 0.
    """
    if value is None:
        return "-"
    places = _places(line.reported)
    digits = f".{places}f"
    if line.reported is None and value != 0 and round(value, places) == 0:
        digits = ".2g"
    text = f"{value:{'+' if sign else ''}{digits}}"
    if std is not None and not math.isnan(std):
        text += f" ± {std:.{places}f}"
    return f"{text} {line.unit}".rstrip()


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(HEADINGS))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
