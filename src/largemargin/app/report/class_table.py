"""The table of classes: margin, dispersion, accuracy and nearest rival of each."""

from largemargin.app.report.charts import Cell, Table
from largemargin.app.report.number_format import (
    NOTHING,
    count_cell,
    degrees_cell,
    known,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.app.report.report_models import Measured, ReportModel
from largemargin.measuring.geometry_result import Geometry

SHOWN = 1000
"""Rows of all models together; of more classes those of the smallest margins are shown."""

COLUMNS = (
    *("model", "class", "samples", "trained on", "accuracy", "mean margin", "5 % margin"),
    *("dispersion", "nearest rival", "angle to it"),
)


def class_rows(model: ReportModel, geometry: Geometry) -> list[tuple[Cell, ...]]:
    """One row for each class."""
    margins, compact = geometry.margins["cosine"].classes, geometry.compactness
    accuracy, trained, rivals = model.class_accuracy, model.train_counts, model.rivals
    rows: list[tuple[Cell, ...]] = []
    for label in range(geometry.classes):
        rows.append(
            (
                text_cell(model.title),
                text_cell(model.class_name(label)),
                count_cell(margins.counts[label]),
                count_cell(trained[label] if trained else None),
                percent_cell(accuracy[label] if label < len(accuracy) else None),
                number_cell(margins.mean[label]),
                number_cell(margins.q05[label]),
                number_cell(None if compact is None else compact.dispersion[label]),
                text_cell(NOTHING if rivals is None else model.class_name(rivals.nearest[label])),
                degrees_cell(None if rivals is None else rivals.angle[label]),
            )
        )
    return rows


def class_table(measured: list[Measured]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    labels: list[int] = []
    cut, most = False, max(100, SHOWN // len(measured))
    for model, geometry in measured:
        numbered = list(enumerate(class_rows(model, geometry)))
        if len(numbered) > most:
            cut = True
            numbered = sorted(numbered, key=lambda pair: _margin(pair[1]))[:most]
        rows += [row for _, row in numbered]
        labels += [label for label, _ in numbered]
    caption = "Classes, with cosine margins: click a heading to sort, a class to mark it everywhere"
    if cut:
        caption += f". The {most:,} classes of smallest margin of each model; the download has all"
    return Table(
        COLUMNS,
        tuple(rows),
        caption=caption,
        key="classes",
        numeric=(2, 3, 4, 5, 6, 7, 9),
        searchable=True,
        classes=tuple(labels),
    )


def _margin(row: tuple[Cell, ...]) -> float:
    value = row[5].value
    return float(value) if isinstance(value, float) and known(value) else float("inf")
