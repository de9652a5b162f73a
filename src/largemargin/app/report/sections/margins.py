"""How far samples and classes are from being mistaken, and the geometry behind it."""

import functools
import inspect
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from largemargin.app.config import RunConfig
from largemargin.app.report.charts import (
    Block,
    Cell,
    Chart,
    ClassMarks,
    Heat,
    Note,
    Points,
    Section,
    Series,
    Table,
    arranged,
    finite,
    known,
)
from largemargin.app.report.judgements import class_margin_share
from largemargin.app.report.report_models import (
    CLASS_COLUMNS,
    Measured,
    ReportModel,
    ReportModels,
    class_rows,
    number_at,
    unknown,
)
from largemargin.app.report.sample_views import drawn_points
from largemargin.app.training.objective import parse_objective
from largemargin.integrations.objective_text import build_loss, needs_counts
from largemargin.losses import LOSSES
from largemargin.measuring.distributions import Distribution
from largemargin.measuring.feature_geometry import Sphere
from largemargin.measuring.geometry_result import relative_margin

READING = (
    "A margin is how far a sample is from being mistaken, negative where it is. Good is a curve "
    "that stays low and rises late, to the right of the baseline's."
)


def margins_section(models: ReportModels) -> Section:
    measured = models.measured
    if not measured:
        missing = Note("No geometry was measured.", models[0].measure_command())
        return Section("margins", "Margins", READING, (missing,))
    blocks: list[Block] = [
        *(_cumulative(measured, kind) for kind in KINDS),
        _class_margins(measured),
        _target_curves(models),
        *_class_angles(models),
        *(_sphere(model, sphere) for model, g in measured if (sphere := g.sphere) is not None),
        *geometry_blocks(measured),
    ]
    blocks += unknown(
        [model for model in models if model.geometry is None],
        "no geometry was measured.",
        ReportModel.measure_command,
    )
    more: list[Block] = [class_table(measured), *geometry_notes(measured)]
    return Section("margins", "Margins", READING, arranged(blocks), arranged(more), "Every class")


KINDS = {
    "cosine": ("Cosine margin of samples", "cosine to the own class − largest other"),
    "distance": ("Distance of samples to the boundary", "signed distance in feature space"),
}
IN_SPREADS = "signed distance / spread of a class"
"""Distances grow with the features: those of several models compare in units of their spread."""


def _cumulative(measured: list[Measured], kind: str) -> Chart:
    """Share of all samples below a margin, one curve for each model."""
    title, axis = KINDS[kind]
    units = _units(measured, kind)
    scaled = any(unit != 1 for unit in units)
    series, marks = [], []
    for (model, geometry), unit in zip(measured, units, strict=True):
        margins = geometry.margins[kind]
        series.append(cumulative(margins.overall, model, unit))
        means = [mean / unit for mean in margins.classes.mean]
        marks.append(ClassMarks(model.title, model.color, means))
    return Chart(
        f"margins-{kind}",
        title,
        tuple(series),
        x=IN_SPREADS if scaled else axis,
        y="share of samples below",
        percent_y=True,
        zero=True,
        alt="The height at 0 is the share on the wrong side. A chosen class is marked at its mean.",
        table=_quantiles(measured, kind, units),
        note="the spread is the standard deviation within classes" if scaled else "",
        marks=tuple(marks),
    )


def _units(measured: list[Measured], kind: str) -> list[float]:
    """What each model's margins are divided by: 1, or its standard deviation within classes."""
    spreads = [math.sqrt(geometry.variance.within) for _, geometry in measured]
    usable = all(0 < spread < math.inf for spread in spreads)
    return spreads if kind == "distance" and len(measured) > 1 and usable else [1.0] * len(measured)


def cumulative(values: Distribution, model: ReportModel, unit: float = 1.0) -> Series:
    """From a histogram: the share of the values, divided by ``unit``, below each of its edges."""
    shares = [n / max(1, values.count) for n in itertools.accumulate(values.counts, initial=0)]
    return model.line([edge / unit for edge in values.edges], shares)


def _quantiles(measured: list[Measured], kind: str, units: list[float]) -> Table:
    rows = []
    for (model, geometry), unit in zip(measured, units, strict=True):
        d = geometry.margins[kind].overall
        ends = (value / unit for value in (d.minimum, d.quantiles[0.05], d.median, d.maximum))
        values = (d.mean / unit, d.std / unit, d.ratio, *ends)
        wrong = Cell.percent(d.negative)
        rows.append((Cell.of(model.title), wrong, *map(Cell.number, values)))
    heads = ("model", "below 0", "mean", "std", "mean / std", "minimum", "5 %", "median", "maximum")
    return Table(heads, tuple(rows), key=f"quantiles-{kind}", numeric=tuple(range(1, 9)))


DRAWN = 100
"""Of more classes than this, those of the smallest margins are drawn."""
NARROW = 48
"""Points up to which the figure stands beside others."""
WIDTH = 0.6
"""Of the room of one class that the points of all models share."""


def _class_margins(measured: list[Measured]) -> Chart:
    """Mean margin of every class with its 5 % quantile; classes as the first model numbers them."""
    first = measured[0][0]
    same = [
        (model, geometry.margins["cosine"].classes)
        for model, geometry in measured
        if model.classes == first.classes
    ]

    def smallest(label: int) -> float:
        return min(finite(margins.mean[label] for _, margins in same), default=math.inf)

    labels = sorted(sorted(range(measured[0][1].classes), key=smallest)[:DRAWN])
    series = []
    for place, (model, margins) in enumerate(same):
        shift = WIDTH * ((place + 0.5) / len(same) - 0.5)
        mean = [margins.mean[label] for label in labels]
        series.append(
            Series(
                model.title,
                [at + shift for at in range(len(labels))],
                mean,
                form="points",
                color=model.color,
                low=[margins.q05[label] for label in labels],
                high=mean,
                texts=tuple(model.class_name(label) for label in labels),
                classes=labels,
            )
        )
    count = len(first.classes)
    note = f"the {len(labels)} of {count:,} classes of smallest margin" if count > DRAWN else ""
    return Chart(
        "class-margins",
        "Margins of the classes",
        tuple(series),
        x="class",
        y="cosine margin",
        names=tuple(first.class_name(label) for label in labels),
        alt="Mean of the samples of a class, the line reaching down to their 5 % quantile. Good is "
        "high and even.",
        note=note,
        wide=len(labels) * len(same) > NARROW,
    )


def _target_curves(models: ReportModels) -> Chart:
    series, without = [], []
    for model, _ in models.measured:
        if model.config is None:
            continue
        curve = target_curve(model.config, model.train_counts)
        if curve is None:
            without.append(model.title)
        else:
            name = ", ".join(filter(None, (model.title, curve.about)))
            series.append(Series(name, curve.degrees, curve.psi, color=model.color))
    if series:
        degrees = [float(angle) for angle in range(0, 181, 2)]
        cosines = [math.cos(math.radians(angle)) for angle in degrees]
        series.insert(0, Series("no margin: cos θ", degrees, cosines, color=None, dash="dash"))
    return Chart(
        "psi",
        "Target logit ψ(θ) of the loss",
        tuple(series),
        x="θ, degrees",
        y="ψ(θ)",
        alt="The further below cos θ, the larger the margin the loss asks for.",
        note=f"no such curve: {', '.join(without)}" if without else "",
    )


SCALE = 8.0
"""psi does not depend on it; a small one keeps the inversion exact."""

CLASSES = 3
MOST_CLASSES = 2000


class TargetCurve(NamedTuple):
    """psi at angles from 0 to 180 degrees, for vectors of length 1."""

    degrees: list[float]
    psi: list[float]
    about: str = ""
    """The class it is of, where classes differ."""


def target_curve(
    config: RunConfig, counts: Sequence[int] = (), points: int = 91
) -> TargetCurve | None:
    """The curve of the loss of a run; None where it has none (``Loss.has_target_curve``).

    Read off the loss itself: with rivals at right angles a softmax over cosines is
    log(1 + (C - 1) exp(-s psi)), which is solved for psi. ``counts`` are the training samples of
    each class, on which the margins of LDAM depend: its curve is that of the rarest class.
    """
    terms = parse_objective(config.objective)
    term = next((each for each in terms if LOSSES[each.name].has_target_curve), None)
    if term is None or isinstance(term.settings.get("margin"), str):
        return None
    kind = LOSSES[term.name]
    by_class = needs_counts(kind)
    if by_class and not 2 <= len(counts) <= MOST_CLASSES:
        return None
    sizes = list(counts) if by_class else [1] * CLASSES
    settings, scale = dict(term.settings), 1.0
    if "scale" in inspect.signature(kind).parameters:
        settings["scale"] = scale = SCALE
    classes, rarest = len(sizes), min(range(len(sizes)), key=sizes.__getitem__)
    loss = build_loss(kind, settings, classes, classes + 1, sizes).eval()
    theta = torch.linspace(0, math.pi, points, dtype=torch.float64)
    prototypes = torch.eye(classes, classes + 1, dtype=torch.float64)
    curve = []
    with torch.no_grad():
        for angle in theta:
            feature = torch.zeros(1, classes + 1, dtype=torch.float64)
            feature[0, rarest], feature[0, -1] = torch.cos(angle), torch.sin(angle)
            value = loss(feature, prototypes, torch.tensor([rarest]))
            curve.append(-math.log(math.expm1(float(value)) / (classes - 1)) / scale)
    return TargetCurve(torch.rad2deg(theta).tolist(), curve, "rarest class" if by_class else "")


def _class_angles(models: ReportModels) -> list[Chart]:
    """Angles between class vectors: one map for each model, all in one scale."""
    maps = []
    for model, _ in models.measured:
        if rivals := model.rivals:
            # A class and itself have no angle.
            values = tuple((*row[:i], None, *row[i + 1 :]) for i, row in enumerate(rivals.matrix))
            maps.append((model, rivals, values))
    angles = finite(angle for *_, values in maps for row in values for angle in row)
    low, high = min(angles, default=0.0), max(angles, default=180.0)
    charts = []
    for model, rivals, values in maps:
        shown, count = rivals.classes, len(rivals.nearest)
        names = tuple(model.class_name(label) for label in shown)
        note = f"the {len(shown)} of {count:,} classes with the closest rivals"
        charts.append(
            Chart(
                f"angles-{model.name}",
                f"Angles of class vectors: {model.title}",
                heat=Heat(values, names, "degrees", low, high, shown),
                alt=f"From {low:.0f}° (dark) to {high:.0f}° (bright) in all maps. Good is one even "
                "colour.",
                note=note if len(shown) < count else "",
            )
        )
    return charts


def _sphere(model: ReportModel, sphere: Sphere) -> Chart:
    """Features in three dimensions on the unit sphere, with the class vectors."""
    drawn = drawn_points(sphere)
    xs, ys, zs = ([sphere.points[at][axis] for at in drawn] for axis in range(3))
    x, y, z = ([1.08 * vector[axis] for vector in sphere.prototypes] for axis in range(3))
    names = tuple(model.class_name(label) for label in range(len(sphere.prototypes)))
    some = len(drawn) < len(sphere.points)
    return Chart(
        f"sphere-{model.name}",
        f"On the sphere: {model.title}",
        (
            Series(
                "features", xs, ys, zs, form="points", points=_sphere_samples(model, sphere, drawn)
            ),
            Series("class vectors", x, y, z, form="points", color=None, texts=names),
            *_great_circles(),
        ),
        solid=True,
        alt="Features and class vectors as points on the unit sphere. Good is one tight cluster "
        "around each class vector.",
        note=f"{len(drawn):,} of {len(sphere.points):,} points" if some else "",
        table=_sphere_angles(model, sphere),
        wide=True,
    )


def _great_circles() -> list[Series]:
    """Three of them, to see the sphere."""
    turn = [math.radians(6 * at) for at in range(61)]
    cos, sin, zero = [math.cos(a) for a in turn], [math.sin(a) for a in turn], [0.0] * len(turn)
    axes = ((cos, sin, zero), (cos, zero, sin), (zero, cos, sin))
    return [Series("sphere", *places, color=None, faint=True) for places in axes]


def _sphere_samples(model: ReportModel, sphere: Sphere, drawn: range) -> Points:
    own, rival = (
        [math.cos(math.radians(angle)) for angle in angles]
        for angles in (sphere.angles, sphere.rival_angles)
    )
    return Points(
        tuple(sphere.index[at] for at in drawn),
        tuple(sphere.labels[at] for at in drawn),
        tuple(sphere.predicted[at] for at in drawn),
        tuple(own[at] - rival[at] for at in drawn),
        model.data_key,
        "cosine margin",
    )


def _sphere_angles(model: ReportModel, sphere: Sphere) -> Table:
    rows = []
    for label in range(len(sphere.prototypes)):
        own = [at for at, other in enumerate(sphere.labels) if other == label]
        means = (
            statistics.fmean(column[at] for at in own) if own else None
            for column in (sphere.angles, sphere.rival_angles)
        )
        cells = (Cell.degrees(mean) for mean in means)
        rows.append((Cell.of(model.class_name(label)), Cell.count(len(own)), *cells))
    return Table(
        ("class", "points", "mean angle to its vector", "to the nearest other"),
        tuple(rows),
        key=f"sphere-{model.name}",
        numeric=(1, 2, 3),
    )


SHOWN = 1000
"""Rows of all models together; of more classes those of the smallest margins are shown."""


def class_table(measured: list[Measured]) -> Table:
    numbered: list[tuple[int, tuple[Cell, ...]]] = []
    most = max(100, SHOWN // len(measured))
    caption = "Classes, with cosine margins: click a heading to sort, a class to mark it everywhere"
    if any(geometry.classes > most for _, geometry in measured):
        caption += f". The {most:,} classes of smallest margin of each model; the download has all"
    for model, geometry in measured:
        rows = list(enumerate(class_rows(model, geometry)))
        if len(rows) > most:
            means = geometry.margins["cosine"].classes.mean
            margins = [mean if known(mean) else math.inf for mean in means]
            rows = sorted(rows, key=lambda row: margins[row[0]])[:most]
        numbered += rows
    return Table(
        CLASS_COLUMNS,
        tuple(row for _, row in numbered),
        caption=caption,
        key="classes",
        numeric=(2, 3, 4, 5, 6, 7, 9),
        searchable=True,
        classes=tuple(label for label, _ in numbered),
    )


def geometry_blocks(measured: list[Measured]) -> list[Block]:
    """A table of all models, and curves over layers."""
    return [_geometry_table(measured), *_layers(measured)]


def geometry_notes(measured: list[Measured]) -> list[Note]:
    """What could not be measured, said once for all models it is true of."""
    said: dict[str, list[str]] = {}
    for model, geometry in measured:
        for note in geometry.notes:
            said.setdefault(note, []).append(model.title)
    return [Note(f"{', '.join(titles)}: {note}.") for note, titles in said.items()]


COMPUTED = {"class_margin_share": class_margin_share, "relative_margin": relative_margin}
"""Quantities that are no fields of a geometry."""

SHARES = ("class_margin_share", "collapse.nearest_center")
"""Quantities written in percent."""

QUANTITIES = (
    ("class margin / largest known to be possible", "100 %", "class_margin_share"),
    ("longest / shortest class vector", "near 1", "prototypes.magnitude_ratio"),
    ("cosine margin of samples, mean / std", "more", "margins.cosine.overall.ratio"),
    ("distance to the boundary / spread of a class", "more", "relative_margin"),
    ("variance between / within classes", "more", "variance.ratio"),
    ("largest dispersion / separation of classes", "below 1", "compactness.ideal_ratio"),
    ("neural collapse, NC1: variability within classes", "to 0", "collapse.variability"),
    ("NC2: class means from a simplex, in cosines", "to 0", "collapse.simplex_gap"),
    ("NC3: class vectors from class means", "to 0", "collapse.duality"),
    ("NC4: predictions other than the nearest class mean", "to 0", "collapse.nearest_center"),
    (
        "errors detected by the logit margin, AUROC",
        *("to 1; 0.5 is chance", "errors.auroc.lead_raw"),
    ),
    (
        "out-of-distribution images detected by the logit margin, AUROC",
        *("to 1; 0.5 is chance", "ood.auroc.lead_raw"),
    ),
    ("linearised margin at the input, mean", "more", "input_margins.overall.mean"),
    ("linearised margin at the input, mean / std", "more", "input_margins.overall.ratio"),
)
"""Name, what is good, and the path in a geometry. Nothing here grows with features."""


def _geometry_table(measured: list[Measured]) -> Table:
    geometries = [geometry for _, geometry in measured]
    found = []
    for name, good, path in QUANTITIES:
        read = COMPUTED.get(path, functools.partial(number_at, path=path))
        show = Cell.percent if path in SHARES else Cell.number
        found.append((name, good, show, list(map(read, geometries))))
    margins = [geometry.layer_margins or {} for geometry in geometries]
    for layer in dict.fromkeys(itertools.chain.from_iterable(margins)):
        values = [number_at(each.get(layer), "overall.ratio") for each in margins]
        found.append((f"linearised margin at {layer}, mean / std", "more", Cell.number, values))
    return Table(
        ("quantity", *(model.title for model, _ in measured), "good is"),
        tuple(
            (Cell.of(name), *map(show, values), Cell.of(good))
            for name, good, show, values in found
            if set(values) != {None}
        ),
        caption="Geometry in numbers: cosines and ratios, which do not grow with the features",
        key="geometry",
        numeric=tuple(range(1, 1 + len(measured))),
    )


LAYER_CHARTS = (
    (
        *("accuracy", "Accuracy of the nearest class mean"),
        *("accuracy, sample left out", "left_out_accuracy"),
    ),
    (
        *("variance", "Variance between / within classes, by layer"),
        *("between / within", "variance.ratio"),
    ),
)


def _layers(measured: list[Measured]) -> list[Chart]:
    """Of the models whose layers are those of the first one that has some."""
    layered = [(model, geometry.layers) for model, geometry in measured if geometry.layers]
    if not layered:
        return []
    names = tuple(layer.name for layer in layered[0][1])
    charts = []
    for key, title, axis, path in LAYER_CHARTS:
        curves = [
            model.line(range(len(names)), [number_at(layer, path) for layer in layers])
            for model, layers in layered
            if tuple(layer.name for layer in layers) == names
        ]
        chart = Chart(
            f"layers-{key}",
            title,
            tuple(curve for curve in curves if finite(curve.y)),
            x="layer, from the input to the head",
            y=axis,
            names=names,
            percent_y=key == "accuracy",
            alt=f"{title} of every layer that was measured. Good rises towards the head.",
        )
        if chart.series:
            charts.append(chart)
    return charts
