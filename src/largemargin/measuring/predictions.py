"""Rows of predictions, as CSV and JSON."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from largemargin.measuring.calibrate import Temperature, Threshold
from largemargin.measuring.records import Record, whole_file

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""Beginnings of cells that spreadsheets take for formulas, or skip to find one; some take the wide
forms of East Asian keyboards, too."""


@dataclass(frozen=True)
class Prediction(Record):
    """What a model says about one image."""

    image: str
    """Its file, or its name in the data set."""
    label: str | None
    """Name of the predicted class; None where the image could not be read."""
    probability: float | None
    margin: float | None
    flag: bool | None
    """The margin is below the threshold; None without a threshold."""
    error: str | None = None
    """Why the image could not be read."""


@dataclass(frozen=True)
class Predictions(Record):
    """What :func:`predict` returns."""

    rows: tuple[Prediction, ...]
    margin: str
    """What the margins are: "distance" of the features to the nearest decision boundary, or, for
    heads that decide by angles alone, "cosine" to the predicted class minus the next one."""
    threshold: Threshold | float | None
    """What the flags rest on, as it was calibrated or given; None where nothing is flagged."""
    temperature: Temperature | float | None = None
    """Of the probabilities, as it was fitted or given; None where logits are taken as they are."""
    format: int = 1

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.rows)

    @property
    def failed(self) -> int:
        """Images that could not be read."""
        return sum(row.error is not None for row in self.rows)

    @property
    def flagged(self) -> int:
        """How many images are too close to call."""
        return sum(bool(row.flag) for row in self.rows)

    def save_csv(self, path: str | Path) -> None:
        """Write a CSV file (UTF-8), one row per image, whole or not at all.

        Columns: image, label, probability, margin, margin_kind, flag, error; what is unknown is
        empty. Texts that a spreadsheet would take for a formula, because they begin with ``=``,
        ``+``, ``-``, ``@``, a tab or a line break, get an apostrophe in front; take it away to have
        the file's name back.
        """
        # Names of files need not be UTF-8: what is not is written as \udc.. numbers.
        with whole_file(path, newline="", errors="backslashreplace") as file:
            self.write_csv(file)

    def write_csv(self, file: IO[str]) -> None:
        """The same into an open text file, as ``sys.stdout``."""
        writer = csv.writer(file)  # lines end in \r\n, so that it quotes either in a name
        writer.writerow(("image", "label", "probability", "margin", "margin_kind", "flag", "error"))
        for row in self.rows:
            flag = "" if row.flag is None else str(row.flag).lower()
            kind = "" if row.margin is None else self.margin
            image, label, error = (
                harmless(each or "") for each in (row.image, row.label, row.error)
            )
            writer.writerow((image, label, row.probability, row.margin, kind, flag, error))

    def save_json(self, path: str | Path) -> None:
        """Write the same as JSON; :meth:`load` reads it back."""
        self.save(path)


def harmless(text: str) -> str:
    """A text as a spreadsheet shows it and does not run it."""
    return f"'{text}" if text.startswith(FORMULA) else text


def as_csv(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV in which no text is a formula of a spreadsheet."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in (heads, *rows):
        writer.writerow([harmless(cell) if isinstance(cell, str) else cell for cell in row])
    return file.getvalue()
