"""The geometry of every model in numbers that compare, and layer by layer where it was measured."""

import math
from collections.abc import Callable

from largemargin.app.report.charts import Block, Cell, Chart, Note, Series, Table
from largemargin.app.report.number_format import known, number_cell, percent_cell, text_cell
from largemargin.app.report.report_models import Subject
from largemargin.measuring.compare_geometry import relative_margin
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.layer_geometry import LayerGeometry

Read = Callable[[Geometry], float | None]
Show = Callable[[float | None], Cell]

MORE, LESS = "more", "less"


def _class_margin(g: Geometry) -> float:
    best = g.prototypes.reachable if known(g.prototypes.reachable) else g.prototypes.ceiling
    return g.prototypes.class_margin / best if best > 0 else math.nan


ROWS: tuple[tuple[str, str, Read, Show], ...] = (
    ("class margin / widest that is known to be possible", "100 %", _class_margin, percent_cell),
    (
        *("longest / shortest class vector", "near 1"),
        *(lambda g: g.prototypes.magnitude_ratio, number_cell),
    ),
    (
        *("cosine margin of samples, mean / std", MORE),
        *(lambda g: g.margins["cosine"].overall.ratio, number_cell),
    ),
    ("distance to the boundary / spread of a class", MORE, relative_margin, number_cell),
    ("variance between / within classes", MORE, lambda g: g.variance.ratio, number_cell),
    (
        *("largest dispersion / separation of classes", "below 1"),
        *(lambda g: g.compactness and g.compactness.ideal_ratio, number_cell),
    ),
    (
        *("neural collapse, NC1: variability within classes", "to 0"),
        *(lambda g: g.collapse and g.collapse.variability, number_cell),
    ),
    (
        *("NC2: class means from a simplex, in cosines", "to 0"),
        *(lambda g: g.collapse and g.collapse.simplex_gap, number_cell),
    ),
    (
        *("NC3: class vectors from class means", "to 0"),
        *(lambda g: g.collapse and g.collapse.duality, number_cell),
    ),
    (
        *("NC4: predictions other than the nearest class mean", "to 0"),
        *(lambda g: g.collapse and g.collapse.nearest_center, percent_cell),
    ),
    (
        *("errors told by the logit margin, AUROC", "to 1; 0.5 tells nothing"),
        *(lambda g: g.errors.auroc.get("lead_raw"), number_cell),
    ),
    (
        *("other images told by the logit margin, AUROC", "to 1; 0.5 tells nothing"),
        *(lambda g: g.strangers and g.strangers.auroc.get("lead_raw"), number_cell),
    ),
    (
        *("linearised margin at the input, mean", MORE),
        *(lambda g: g.input_margins and g.input_margins.overall.mean, number_cell),
    ),
    (
        *("linearised margin at the input, mean / std", MORE),
        *(lambda g: g.input_margins and g.input_margins.overall.ratio, number_cell),
    ),
)
"""Name, what is good, where it is read, and how it is written. Nothing here grows with features."""


def geometry_blocks(measured: list[Subject]) -> list[Block]:
    """A table of all models, curves over layers, and what could not be measured."""
    return [_table(measured), *_layers(measured), *_notes(measured)]


def _geometry(subject: Subject) -> Geometry:
    assert subject.geometry is not None
    return subject.geometry


def _table(measured: list[Subject]) -> Table:
    rows = []
    for name, good, read, show in (*ROWS, *_layer_rows(measured)):
        values = [read(_geometry(each)) for each in measured]
        if any(value is not None for value in values):
            rows.append((text_cell(name), *(show(value) for value in values), text_cell(good)))
    return Table(
        ("quantity", *(each.title for each in measured), "good is"),
        tuple(rows),
        caption="Geometry in numbers: cosines and ratios, which do not grow with the features",
        key="geometry",
        numeric=tuple(range(1, 1 + len(measured))),
    )


def _layer_rows(measured: list[Subject]) -> list[tuple[str, str, Read, Show]]:
    """Linearised margins at layers, which differ from run to run."""
    names = dict.fromkeys(name for each in measured for name in _geometry(each).layer_margins or {})

    def reader(name: str) -> Read:
        def read(g: Geometry) -> float | None:
            found = (g.layer_margins or {}).get(name)
            return None if found is None else found.overall.ratio

        return read

    return [
        (f"linearised margin at {name}, mean / std", MORE, reader(name), number_cell)
        for name in names
    ]


def _layers(measured: list[Subject]) -> list[Chart]:
    """Of the models whose layers are those of the first one that has some."""
    having = [each for each in measured if _geometry(each).layers]
    if not having:
        return []
    names = _named(having[0])
    same = [each for each in having if _named(each) == names]
    charts = []
    for key, title, axis, read in LAYER_CHARTS:
        series = tuple(
            Series(
                each.title,
                list(range(len(names))),
                [value if known(value) else None for value in map(read, found)],
                color=each.color,
            )
            for each in same
            if (found := _geometry(each).layers)
        )
        if any(y is not None for one in series for y in one.y):
            charts.append(
                Chart(
                    f"layers-{key}",
                    title,
                    series,
                    x="layer, from the input to the head",
                    y=axis,
                    names=names,
                    percent_y=key == "accuracy",
                    alt=f"{title} of every layer that was measured. Good rises towards the head.",
                )
            )
    return charts


LAYER_CHARTS: tuple[tuple[str, str, str, Callable[[LayerGeometry], float]], ...] = (
    (
        *("accuracy", "Accuracy of the nearest class mean", "accuracy, sample left out"),
        lambda layer: layer.left_out_accuracy,
    ),
    (
        *("variance", "Variance between / within classes, by layer", "between / within"),
        lambda layer: layer.variance.ratio,
    ),
)


def _named(subject: Subject) -> tuple[str, ...]:
    return tuple(layer.name for layer in _geometry(subject).layers or ())


def _notes(measured: list[Subject]) -> list[Note]:
    return [
        Note(f"{each.title}: {'; '.join(_geometry(each).notes)}.")
        for each in measured
        if _geometry(each).notes
    ]
