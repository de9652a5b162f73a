"""The table of classes: margin, dispersion, accuracy and nearest rival of each."""

from largemargin.report.advice import train_counts
from largemargin.report.charts import Cell, Table
from largemargin.report.numbers import (
    count_cell,
    degrees_cell,
    known,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.report.subjects import Subject

SHOWN = 500
"""Rows of each model; of more classes those of the smallest margins are shown."""

COLUMNS = (
    *("model", "class", "samples", "trained on", "accuracy", "mean margin", "5 % margin"),
    *("dispersion", "nearest rival", "angle to it"),
)


def class_rows(subject: Subject) -> list[tuple[Cell, ...]]:
    """One row for each class that has samples."""
    geometry = subject.geometry
    assert geometry is not None
    found = geometry.margins["cosine"].classes
    accuracy, trained = subject.class_accuracy, train_counts(subject)
    rows: list[tuple[Cell, ...]] = []
    for label in range(geometry.classes):
        rival, angle = nearest_rival(subject, label)
        compact = geometry.compactness
        rows.append(
            (
                text_cell(subject.title),
                text_cell(subject.class_name(label)),
                count_cell(found.counts[label]),
                count_cell(trained[label] if trained else None),
                percent_cell(accuracy[label] if label < len(accuracy) else None),
                number_cell(found.mean[label]),
                number_cell(found.q05[label]),
                number_cell(None if compact is None else compact.dispersion[label]),
                text_cell("–" if rival is None else subject.class_name(rival)),
                degrees_cell(angle),
            )
        )
    return rows


def nearest_rival(subject: Subject, label: int) -> tuple[int | None, float | None]:
    """The class whose vector is closest, and the angle; nothing where it was not kept."""
    angles = None if subject.geometry is None else subject.geometry.prototypes.angles
    if angles is None or len(angles) < 2:
        return None, None
    angle, rival = min((a, at) for at, a in enumerate(angles[label]) if at != label)
    return rival, angle


def class_table(measured: list[Subject]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    cut = False
    for each in measured:
        own = class_rows(each)
        if len(own) > SHOWN:
            cut = True
            own = sorted(own, key=_margin)[:SHOWN]
        rows += own
    words = "Classes; cosine margins. Headings sort, the box searches"
    if cut:
        words += f". The {SHOWN} classes of smallest margin of each model; all are in the download"
    return Table(
        COLUMNS,
        tuple(rows),
        caption=words,
        key="classes",
        numeric=(2, 3, 4, 5, 6, 7, 9),
        searchable=True,
    )


def _margin(row: tuple[Cell, ...]) -> float:
    value = row[5].value
    return float(value) if isinstance(value, float) and known(value) else float("inf")
