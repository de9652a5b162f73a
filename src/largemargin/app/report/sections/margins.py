"""Section 3: how far samples and classes are from being mistaken, and the geometry behind it."""

import itertools
import math
import statistics
from collections.abc import Callable

from largemargin.app.report.charts import (
    Block,
    Cell,
    Chart,
    ClassMarks,
    Dash,
    Heat,
    Note,
    Points,
    Section,
    Series,
    Table,
)
from largemargin.app.report.class_table import class_table
from largemargin.app.report.judgements import class_margin_share
from largemargin.app.report.number_format import (
    count_cell,
    degrees_cell,
    known,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.app.report.report_models import Measured, ReportModel, ReportModels
from largemargin.app.report.sample_views import Rivals, drawn_points
from largemargin.app.report.target_curve import target_curve
from largemargin.measuring.compare_geometry import relative_margin
from largemargin.measuring.distributions import Distribution
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.layer_geometry import LayerGeometry
from largemargin.measuring.sphere import Sphere

READING = (
    "A margin is how far a sample is from being mistaken, negative where it is. Good is a curve "
    "that lies to the right of the baseline's and is narrow, with little left of 0."
)


def margins_section(models: ReportModels) -> Section:
    measured = models.measured
    if not measured:
        note = Note("No geometry was measured.", models[0].measure_command())
        return Section("margins", "Margins", READING, (note,))
    blocks: list[Block] = [
        *(_density(measured, kind) for kind in KINDS),
        _cumulative(measured),
        _class_margins(measured),
        *_angles(models),
        *_target_curves(models),
        *_class_angles(models),
        *(_sphere(model, sphere) for model, g in measured if (sphere := g.sphere) is not None),
        *geometry_blocks(measured),
        class_table(measured),
    ]
    blocks += [
        Note(f"{model.title}: no geometry was measured.", model.measure_command())
        for model in models
        if model.geometry is None
    ]
    return Section.arranged("margins", "Margins", READING, blocks)


KINDS = {
    "cosine": ("Cosine margin of samples", "cosine to the own class − largest other"),
    "distance": ("Distance of samples to the boundary", "signed distance in feature space"),
}
IN_SPREADS = "signed distance / spread of a class"
"""Distances grow with the features: those of several models compare in units of their spread."""


def _density(measured: list[Measured], kind: str) -> Chart:
    """Histograms and densities of the margins of all samples, one for each model."""
    title, axis = KINDS[kind]
    units = _units(measured, kind)
    scaled = any(unit != 1 for unit in units)
    series, marks = [], []
    for (model, geometry), unit in zip(measured, units, strict=True):
        margins = geometry.margins[kind]
        series += histogram(margins.overall, model.title, model.color, unit)
        means = [mean / unit for mean in margins.classes.mean]
        marks.append(ClassMarks(model.title, model.color, means))
    return Chart(
        f"margins-{kind}",
        title,
        tuple(series),
        x=IN_SPREADS if scaled else axis,
        y="density",
        zero=True,
        alt=f"Histogram and density of the {kind} margins of samples, one curve for each model.",
        table=_quantiles(measured, kind, units),
        note="histograms of 50 bins (steps) under kernel densities (lines), of all samples; a "
        "chosen class is marked by its mean"
        + ("; the spread is the standard deviation within classes" if scaled else ""),
        marks=tuple(marks),
    )


def _units(measured: list[Measured], kind: str) -> list[float]:
    """What each model's margins are divided by: 1, or its standard deviation within classes."""
    spreads = [math.sqrt(geometry.variance.within) for _, geometry in measured]
    usable = all(0 < spread < math.inf for spread in spreads)
    return spreads if kind == "distance" and len(measured) > 1 and usable else [1.0] * len(measured)


def histogram(
    values: Distribution, name: str, color: int | None, unit: float = 1.0
) -> list[Series]:
    """A density over its histogram, both of area 1, of values divided by ``unit``."""
    series = []
    if values.counts and values.count:
        edges = [edge / unit for edge in values.edges]
        widths = [b - a for a, b in itertools.pairwise(edges)]
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        heights = [n / values.count / w for n, w in zip(values.counts, widths, strict=True)]
        faint = bool(values.density)
        series.append(Series(name, middles, heights, form="steps", color=color, faint=faint))
    if values.density:
        xs = [x / unit for x in values.density_at]
        series.append(Series(name, xs, [y * unit for y in values.density], color=color))
    return series


def _quantiles(measured: list[Measured], kind: str, units: list[float]) -> Table:
    rows = []
    for (model, geometry), unit in zip(measured, units, strict=True):
        d = geometry.margins[kind].overall
        values = (
            *(d.mean / unit, d.std / unit, d.ratio, d.minimum / unit),
            *(d.quantiles[0.05] / unit, d.median / unit, d.maximum / unit),
        )
        rows.append((text_cell(model.title), *(number_cell(value) for value in values)))
    heads = ("model", "mean", "std", "mean / std", "minimum", "5 %", "median", "maximum")
    return Table(heads, tuple(rows), key=f"quantiles-{kind}", numeric=tuple(range(1, 8)))


LIMITS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Cosine margins at which the cumulative curve is written out."""


def _cumulative(measured: list[Measured]) -> Chart:
    series, rows = [], []
    for model, geometry in measured:
        margins = geometry.margins["cosine"].overall
        total = list(itertools.accumulate(margins.counts, initial=0))
        shares = [n / max(1, margins.count) for n in total]
        series.append(Series(model.title, margins.edges, shares, color=model.color))
        below = [_share_below(margins, limit) for limit in LIMITS]
        rows.append((text_cell(model.title), *(percent_cell(share) for share in below)))
    heads = ("model", *(f"below {limit:g}" for limit in LIMITS))
    return Chart(
        "cumulative",
        "Share of samples below a cosine margin",
        tuple(series),
        x="cosine margin",
        y="share of samples",
        percent_y=True,
        zero=True,
        alt="Cumulative curve of cosine margins; the height at 0 is the share on the wrong side.",
        table=Table(heads, tuple(rows), key="below", numeric=tuple(range(1, len(heads)))),
        note="from histograms of 50 bins",
    )


def _share_below(values: Distribution, limit: float) -> float:
    """Share of samples below a number, with bins taken as even inside."""
    if not values.count:
        return math.nan
    bins = zip(itertools.pairwise(values.edges), values.counts, strict=True)
    inside = (n * min(1.0, max(0.0, (limit - a) / ((b - a) or 1.0))) for (a, b), n in bins)
    return sum(inside) / values.count


DRAWN = 100
"""Of more classes than this, those of the smallest margins are drawn."""
WIDTH = 0.6
"""Of the room of one class that the points of all models share."""


def _class_margins(measured: list[Measured]) -> Chart:
    """Mean margin of every class with its 5 % quantile; classes as the first model numbers them."""
    first = measured[0][0]
    same = [(model, geometry) for model, geometry in measured if model.classes == first.classes]
    labels = _weakest([geometry for _, geometry in same])
    series = []
    for place, (model, geometry) in enumerate(same):
        margins = geometry.margins["cosine"].classes
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
        alt="Mean cosine margin of the samples of every class, the line reaching down to their 5 % "
        "quantile. Good is high and even, with no line that crosses 0.",
        note=note,
        wide=True,
    )


def _weakest(geometries: list[Geometry]) -> tuple[int, ...]:
    """The classes to draw, in their order."""

    def margin(label: int) -> float:
        values = [geometry.margins["cosine"].classes.mean[label] for geometry in geometries]
        return min((value for value in values if known(value)), default=float("inf"))

    labels = sorted(range(geometries[0].classes), key=margin)
    return tuple(sorted(labels[:DRAWN]))


def _angles(models: ReportModels) -> list[Block]:
    """Angles of features to the vectors of their class and of its nearest rival."""
    series: list[Series] = []
    rows = []
    for model, _ in models.measured:
        own = None if model.views is None else model.views.own_angle
        rival = None if model.views is None else model.views.rival_angle
        if own is None or rival is None:
            continue
        series += _angle_density(model, own, "own class", "solid")
        series += _angle_density(model, rival, "nearest rival", "dot")
        values = (own.mean, own.std, own.median, rival.mean, rival.std, rival.median)
        rows.append((text_cell(model.title), *(number_cell(value) for value in values)))
    if not rows:
        return [
            Note(
                "Angles between features and class vectors need the model and its images.",
                f"largemargin report {models.measured[0][0].shell_path}",
            )
        ]
    heads = ("model", "own: mean", "std", "median", "rival: mean", "std", "median")
    return [
        Chart(
            "theta",
            "Angle θ of features to class vectors",
            tuple(series),
            x="degrees",
            y="density",
            alt="Densities of the angle to the own class and to the nearest rival. Good is a "
            "wide gap between the two.",
            table=Table(heads, tuple(rows), key="angles", numeric=tuple(range(1, 7))),
            note="at most 10,000 samples",
        )
    ]


def _angle_density(
    model: ReportModel, angles: Distribution, style: str, dash: Dash
) -> list[Series]:
    if not angles.density:
        return []
    return [
        Series(
            f"{model.title}, {style}",
            angles.density_at,
            angles.density,
            color=model.color,
            dash=dash,
            group=model.title,
            style=style,
        )
    ]


def _target_curves(models: ReportModels) -> list[Chart]:
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
    if not series:
        return []
    degrees = [float(angle) for angle in range(0, 181, 2)]
    cosines = [math.cos(math.radians(angle)) for angle in degrees]
    series.insert(0, Series("no margin: cos θ", degrees, cosines, color=None, dash="dash"))
    return [
        Chart(
            "psi",
            "Target logit ψ(θ) of the loss",
            tuple(series),
            x="θ, degrees",
            y="ψ(θ)",
            alt="What the loss makes of the cosine to the own class. The further below cos θ, the "
            "larger the margin it asks for.",
            note=f"no such curve: {', '.join(without)}" if without else "",
        )
    ]


def _class_angles(models: ReportModels) -> list[Chart]:
    """Angles between class vectors: one map for each model, all in one scale."""
    pairs = [(model, rivals) for model, _ in models.measured if (rivals := model.rivals)]
    angles = [
        angle
        for _, rivals in pairs
        for i, row in enumerate(rivals.matrix)
        for j, angle in enumerate(row)
        if i != j
    ]
    low, high = (min(angles), max(angles)) if angles else (0.0, 180.0)
    return [_class_angle_map(model, rivals, low, high) for model, rivals in pairs]


def _class_angle_map(model: ReportModel, rivals: Rivals, low: float, high: float) -> Chart:
    shown, count = rivals.classes, len(rivals.nearest)
    names = tuple(model.class_name(label) for label in shown)
    values = tuple(
        tuple(None if i == j else angle for j, angle in enumerate(row))
        for i, row in enumerate(rivals.matrix)
    )
    few = len(shown) < count
    return Chart(
        f"angles-{model.name}",
        f"Angles between class vectors: {model.title}",
        heat=Heat(values, names, names, unit="degrees", low=low, high=high, classes=shown),
        alt="Angle of every pair of class vectors; all models share one scale. Good is one even "
        "colour, without dark cells.",
        note=f"the {len(shown)} of {count:,} classes with the closest rivals" if few else "",
    )


def _sphere(model: ReportModel, sphere: Sphere) -> Chart:
    """Features in three dimensions on the unit sphere, with the class vectors."""
    drawn = drawn_points(sphere)
    xs, ys, zs = ([sphere.points[at][axis] for at in drawn] for axis in range(3))
    samples = _sphere_samples(model, sphere, drawn)
    x, y, z = ([1.08 * vector[axis] for vector in sphere.prototypes] for axis in range(3))
    names = tuple(model.class_name(label) for label in range(len(sphere.prototypes)))
    some = len(drawn) < len(sphere.points)
    return Chart(
        f"sphere-{model.name}",
        f"On the sphere: {model.title}",
        (
            Series("features", xs, ys, zs, form="points", points=samples),
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


def _sphere_samples(model: ReportModel, sphere: Sphere, drawn: range) -> Points:
    return Points(
        tuple(sphere.index[at] for at in drawn),
        tuple(sphere.labels[at] for at in drawn),
        tuple(sphere.predicted[at] for at in drawn),
        tuple(_sphere_margin(sphere, at) for at in drawn),
        model.data_key,
        "cosine margin",
    )


def _sphere_margin(sphere: Sphere, at: int) -> float:
    """Cosine to the own class vector minus that to the nearest other one."""
    own, rival = math.radians(sphere.angles[at]), math.radians(sphere.rival_angles[at])
    return math.cos(own) - math.cos(rival)


def _sphere_angles(model: ReportModel, sphere: Sphere) -> Table:
    rows = []
    for label in range(len(sphere.prototypes)):
        own = [at for at, other in enumerate(sphere.labels) if other == label]
        means = (
            statistics.fmean(column[at] for at in own) if own else None
            for column in (sphere.angles, sphere.rival_angles)
        )
        cells = (degrees_cell(mean) for mean in means)
        rows.append((text_cell(model.class_name(label)), count_cell(len(own)), *cells))
    return Table(
        ("class", "points", "mean angle to its vector", "to the nearest other"),
        tuple(rows),
        key=f"sphere-{model.name}",
        numeric=(1, 2, 3),
    )


def _great_circles() -> list[Series]:
    """Three of them, to see the sphere."""
    steps = [math.radians(6 * at) for at in range(61)]
    cosines, sines, zeros = [math.cos(a) for a in steps], [math.sin(a) for a in steps], [0.0] * 61
    return [
        Series("sphere", *axes, color=None, faint=True)
        for axes in ((cosines, sines, zeros), (cosines, zeros, sines), (zeros, cosines, sines))
    ]


def geometry_blocks(measured: list[Measured]) -> list[Block]:
    """A table of all models, curves over layers, and what could not be measured."""
    notes = [
        Note(f"{model.title}: {'; '.join(geometry.notes)}.")
        for model, geometry in measured
        if geometry.notes
    ]
    return [_geometry_table(measured), *_layers(measured), *notes]


Read = Callable[[Geometry], float | None]
Show = Callable[[float | None], Cell]

MORE = "more"
ROWS: tuple[tuple[str, str, Read, Show], ...] = (
    ("class margin / largest known to be possible", "100 %", class_margin_share, percent_cell),
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
        *("errors detected by the logit margin, AUROC", "to 1; 0.5 is chance"),
        *(lambda g: g.errors.auroc.get("lead_raw"), number_cell),
    ),
    (
        *("out-of-distribution images detected by the logit margin, AUROC", "to 1; 0.5 is chance"),
        *(lambda g: g.ood and g.ood.auroc.get("lead_raw"), number_cell),
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


def _geometry_table(measured: list[Measured]) -> Table:
    rows = []
    for name, good, read, show in (*ROWS, *_layer_rows(measured)):
        values = [read(geometry) for _, geometry in measured]
        if any(value is not None for value in values):
            rows.append((text_cell(name), *(show(value) for value in values), text_cell(good)))
    return Table(
        ("quantity", *(model.title for model, _ in measured), "good is"),
        tuple(rows),
        caption="Geometry in numbers: cosines and ratios, which do not grow with the features",
        key="geometry",
        numeric=tuple(range(1, 1 + len(measured))),
    )


def _layer_rows(measured: list[Measured]) -> list[tuple[str, str, Read, Show]]:
    """Linearised margins at layers, which differ from run to run."""

    def reader(layer: str) -> Read:
        def read(geometry: Geometry) -> float | None:
            margins = (geometry.layer_margins or {}).get(layer)
            return None if margins is None else margins.overall.ratio

        return read

    layers = dict.fromkeys(
        name for _, geometry in measured for name in geometry.layer_margins or ()
    )
    return [
        (f"linearised margin at {layer}, mean / std", MORE, reader(layer), number_cell)
        for layer in layers
    ]


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


def _layers(measured: list[Measured]) -> list[Chart]:
    """Of the models whose layers are those of the first one that has some."""
    layered = [(model, geometry.layers) for model, geometry in measured if geometry.layers]
    if not layered:
        return []
    names = tuple(layer.name for layer in layered[0][1])
    same = [pair for pair in layered if tuple(layer.name for layer in pair[1]) == names]
    charts = [
        Chart(
            f"layers-{key}",
            title,
            tuple(_layer_curve(model, list(map(read, layers))) for model, layers in same),
            x="layer, from the input to the head",
            y=axis,
            names=names,
            percent_y=key == "accuracy",
            alt=f"{title} of every layer that was measured. Good rises towards the head.",
        )
        for key, title, axis, read in LAYER_CHARTS
    ]
    return [
        chart for chart in charts if any(y is not None for line in chart.series for y in line.y)
    ]


def _layer_curve(model: ReportModel, values: list[float]) -> Series:
    ys = [value if known(value) else None for value in values]
    return Series(model.title, list(range(len(ys))), ys, color=model.color)
