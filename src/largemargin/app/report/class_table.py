"""The table of classes: margin, dispersion, accuracy and nearest rival of each."""

from largemargin.app.report.advice import train_counts
from largemargin.app.report.charts import Cell, Table
from largemargin.app.report.number_format import (
    count_cell,
    degrees_cell,
    known,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.app.report.report_models import Subject

SHOWN = 1000
"""Rows of all models together; of more classes those of the smallest margins are shown."""

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
    rivals = subject.rivals
    rows: list[tuple[Cell, ...]] = []
    for label in range(geometry.classes):
        rival = None if rivals is None else rivals.nearest[label]
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
                degrees_cell(None if rivals is None else rivals.angle[label]),
            )
        )
    return rows


def class_table(measured: list[Subject]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    labels: list[int] = []
    cut, most = False, max(100, SHOWN // len(measured))
    for each in measured:
        own = list(enumerate(class_rows(each)))
        if len(own) > most:
            cut = True
            own = sorted(own, key=lambda found: _margin(found[1]))[:most]
        rows += [row for _, row in own]
        labels += [label for label, _ in own]
    words = "Classes; cosine margins. Headings sort, the box searches, a class marks itself in all "
    words += "figures"
    if cut:
        words += f". The {most:,} classes of smallest margin of each model; all are in the download"
    return Table(
        COLUMNS,
        tuple(rows),
        caption=words,
        key="classes",
        numeric=(2, 3, 4, 5, 6, 7, 9),
        searchable=True,
        classes=tuple(labels),
    )


def _margin(row: tuple[Cell, ...]) -> float:
    value = row[5].value
    return float(value) if isinstance(value, float) and known(value) else float("inf")
