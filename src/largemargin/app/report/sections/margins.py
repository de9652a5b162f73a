"""Section 3: how far samples and classes are from being mistaken.

Margins of the classes, one beside the other.

Features in three dimensions on the unit sphere, with the class vectors.
"""

import itertools
import math
import statistics

from largemargin.app.report.advice import train_counts
from largemargin.app.report.charts import (
    Block,
    Chart,
    ClassMarks,
    Heat,
    Note,
    Points,
    Section,
    Series,
    Table,
)
from largemargin.app.report.class_rivals import Rivals
from largemargin.app.report.class_table import class_table
from largemargin.app.report.number_format import (
    count_cell,
    degrees_cell,
    known,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.sample_views import drawn_points
from largemargin.app.report.sections.geometry import geometry_blocks
from largemargin.app.report.target_curve import target_curve
from largemargin.app.report.verdict import measure_command
from largemargin.measuring.distributions import Distribution
from largemargin.measuring.sphere import Sphere

DRAWN = 100
"""More classes than this: those of the smallest margins are drawn."""

WIDTH = 0.6
"""Of the room of one class that the points of all models share."""


def class_margins_chart(measured: list[Subject]) -> Chart:
    """Mean margin of every class with its 5 % quantile; classes as the first model numbers them."""
    first = measured[0]
    same = [each for each in measured if each.classes == first.classes]
    labels = _weakest(same)
    series = []
    for at, each in enumerate(same):
        assert each.geometry is not None
        found = each.geometry.margins["cosine"].classes
        shift = WIDTH * ((at + 0.5) / len(same) - 0.5)
        mean = [found.mean[label] for label in labels]
        series.append(
            Series(
                each.title,
                [place + shift for place in range(len(labels))],
                mean,
                form="points",
                color=each.color,
                low=[found.q05[label] for label in labels],
                high=mean,
                texts=tuple(each.class_name(label) for label in labels),
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


def _weakest(subjects: list[Subject]) -> tuple[int, ...]:
    """The classes to draw, in their order."""

    def margin(label: int) -> float:
        values = [
            each.geometry.margins["cosine"].classes.mean[label]
            for each in subjects
            if each.geometry is not None
        ]
        return min((value for value in values if known(value)), default=float("inf"))

    labels = range(subjects[0].geometry.classes if subjects[0].geometry else 0)
    return tuple(sorted(sorted(labels, key=margin)[:DRAWN]))


def sphere_chart(subject: Subject) -> Chart:
    assert subject.geometry is not None
    found = subject.geometry.sphere
    assert found is not None
    kept = drawn_points(found)
    xs, ys, zs = (tuple(found.points[at][axis] for at in kept) for axis in range(3))
    samples = Series(
        "features",
        xs,
        ys,
        zs,
        form="points",
        points=Points(
            tuple(found.index[at] for at in kept),
            tuple(found.labels[at] for at in kept),
            tuple(found.predicted[at] for at in kept),
            tuple(_margin(found, at) for at in kept),
            subject.data_key,
            "cosine margin",
        ),
    )
    a, b, c = (tuple(1.08 * point[axis] for point in found.prototypes) for axis in range(3))
    vectors = Series(
        "class vectors",
        a,
        b,
        c,
        form="points",
        color=None,
        texts=tuple(subject.class_name(at) for at in range(len(found.prototypes))),
    )
    words = (
        f"{len(kept):,} of {len(found.points):,} points" if len(kept) < len(found.points) else ""
    )
    return Chart(
        f"sphere-{subject.name}",
        f"On the sphere: {subject.title}",
        (samples, vectors, *_circles()),
        solid=True,
        alt="Features and class vectors as points on the unit sphere. Good is one tight cluster "
        "around each class vector.",
        note=words,
        table=_sphere_angles(subject, found),
        wide=True,
    )


def _margin(found: Sphere, at: int) -> float:
    """Cosine to the own class vector minus that to the nearest other one."""
    own, rival = math.radians(found.angles[at]), math.radians(found.rival_angles[at])
    return math.cos(own) - math.cos(rival)


def _sphere_angles(subject: Subject, found: Sphere) -> Table:
    rows = []
    for label in range(len(found.prototypes)):
        own = [at for at, each in enumerate(found.labels) if each == label]
        means = (
            statistics.fmean(column[at] for at in own) if own else None
            for column in (found.angles, found.rival_angles)
        )
        cells = (degrees_cell(mean) for mean in means)
        rows.append((text_cell(subject.class_name(label)), count_cell(len(own)), *cells))
    return Table(
        ("class", "points", "mean angle to its vector", "to the nearest other"),
        tuple(rows),
        key=f"sphere-{subject.name}",
        numeric=(1, 2, 3),
    )


def _circles() -> list[Series]:
    """Three great circles, to see the sphere."""
    steps = [math.radians(6 * at) for at in range(61)]
    cosines, sines, zeros = [math.cos(a) for a in steps], [math.sin(a) for a in steps], [0.0] * 61
    return [
        Series("sphere", *axes, color=None, faint=True)
        for axes in ((cosines, sines, zeros), (cosines, zeros, sines), (zeros, cosines, sines))
    ]


READING = (
    "A margin is how far a sample is from being mistaken, negative where it is. Good is a curve "
    "that lies to the right of the baseline's and is narrow, with little left of 0."
)
LIMITS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Cosine margins at which the cumulative curve is written out."""

KINDS = {
    "cosine": ("Cosine margin of samples", "cosine to the own class − largest other"),
    "distance": ("Distance of samples to the boundary", "signed distance in feature space"),
}
IN_SPREADS = "signed distance / spread of a class"
"""Distances grow with the features: those of several models compare in units of their spread."""


def margins_section(subjects: Subjects) -> Section:
    measured = [each for each in subjects.each if each.geometry is not None]
    if not measured:
        note = Note("No geometry was measured.", measure_command(subjects.each[0]))
        return Section("margins", "Margins", READING, (note,))
    blocks: list[Block] = []
    for kind, (title, axis) in KINDS.items():
        blocks.append(_density(measured, kind, title, axis))
    blocks.append(_cumulative(measured))
    blocks.append(class_margins_chart(measured))
    blocks += _angles(measured)
    blocks += _curves(measured)
    blocks += _heats(measured)
    blocks += [sphere_chart(each) for each in measured if each.geometry and each.geometry.sphere]
    blocks += [*geometry_blocks(measured), class_table(measured)]
    missing = [each for each in subjects.each if each.geometry is None]
    blocks += [
        Note(f"{each.title}: no geometry was measured.", measure_command(each)) for each in missing
    ]
    return Section.arranged("margins", "Margins", READING, blocks)


def _distribution(subject: Subject, kind: str) -> Distribution:
    assert subject.geometry is not None
    return subject.geometry.margins[kind].overall


def _units(measured: list[Subject], kind: str) -> list[float]:
    """What each model's margins are divided by: 1, or its standard deviation within classes."""
    spreads = [math.sqrt(each.geometry.variance.within) for each in measured if each.geometry]
    if kind != "distance" or len(measured) < 2 or not all(map(_positive, spreads)):
        return [1.0] * len(measured)
    return spreads


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _density(measured: list[Subject], kind: str, title: str, axis: str) -> Chart:
    series = []
    units = _units(measured, kind)
    scaled = any(unit != 1 for unit in units)
    for each, unit in zip(measured, units, strict=True):
        found = _distribution(each, kind)
        series += histogram(found, each.title, each.color, unit)
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
        marks=tuple(
            ClassMarks(
                each.title,
                each.color,
                [mean / unit for mean in each.geometry.margins[kind].classes.mean],
            )
            for each, unit in zip(measured, units, strict=True)
            if each.geometry is not None
        ),
    )


def histogram(found: Distribution, name: str, color: int | None, unit: float = 1.0) -> list[Series]:
    """A density over its histogram, both of area 1, of values divided by ``unit``."""
    series = []
    if found.counts and found.count:
        edges = [edge / unit for edge in found.edges]
        widths = [b - a for a, b in itertools.pairwise(edges)]
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        heights = [n / found.count / w for n, w in zip(found.counts, widths, strict=True)]
        faint = bool(found.density)
        series.append(Series(name, middles, heights, form="steps", color=color, faint=faint))
    if found.density:
        xs = [x / unit for x in found.density_at]
        series.append(Series(name, xs, [y * unit for y in found.density], color=color))
    return series


def _quantiles(measured: list[Subject], kind: str, units: list[float]) -> Table:
    rows = []
    for each, unit in zip(measured, units, strict=True):
        d = _distribution(each, kind)
        values = (
            *(d.mean / unit, d.std / unit, d.ratio, d.minimum / unit),
            *(d.quantiles[0.05] / unit, d.median / unit, d.maximum / unit),
        )
        rows.append((text_cell(each.title), *(number_cell(value) for value in values)))
    heads = ("model", "mean", "std", "mean / std", "minimum", "5 %", "median", "maximum")
    return Table(heads, tuple(rows), key=f"quantiles-{kind}", numeric=tuple(range(1, 8)))


def _cumulative(measured: list[Subject]) -> Chart:
    series, rows = [], []
    for each in measured:
        found = _distribution(each, "cosine")
        total = list(itertools.accumulate(found.counts, initial=0))
        shares = [n / max(1, found.count) for n in total]
        series.append(Series(each.title, found.edges, shares, color=each.color))
        below = [_share_below(found, limit) for limit in LIMITS]
        rows.append((text_cell(each.title), *(percent_cell(share) for share in below)))
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


def _share_below(found: Distribution, limit: float) -> float:
    """Share of samples below a number, bins taken as even inside."""
    if not found.count:
        return math.nan
    bins = zip(itertools.pairwise(found.edges), found.counts, strict=True)
    inside = (n * min(1.0, max(0.0, (limit - a) / ((b - a) or 1.0))) for (a, b), n in bins)
    return sum(inside) / found.count


def _angles(measured: list[Subject]) -> list[Block]:
    looked = [each for each in measured if each.observed and each.observed.own_angle]
    if not looked:
        return [
            Note(
                "Angles between features and class vectors need the model and its images.",
                f"largemargin report {measured[0].where}",
            )
        ]
    series, rows = [], []
    for each in looked:
        assert each.observed is not None
        own, rival = each.observed.own_angle, each.observed.rival_angle
        assert own is not None
        assert rival is not None
        for found, words, dash in ((own, "own class", "solid"), (rival, "nearest rival", "dot")):
            if found.density:
                series.append(
                    Series(
                        f"{each.title}, {words}",
                        found.density_at,
                        found.density,
                        color=each.color,
                        dash=dash,  # type: ignore[arg-type]
                        group=each.title,
                        style=words,
                    )
                )
        values = (own.mean, own.std, own.median, rival.mean, rival.std, rival.median)
        rows.append((text_cell(each.title), *(number_cell(value) for value in values)))
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


def _curves(measured: list[Subject]) -> list[Block]:
    series, without = [], []
    for each in measured:
        if each.config is None:
            continue
        found = target_curve(each.config, train_counts(each))
        if found is None:
            without.append(each.title)
        else:
            name = ", ".join(filter(None, (each.title, found.about)))
            series.append(Series(name, found.degrees, found.psi, color=each.color))
    if not series:
        return []
    degrees = [float(angle) for angle in range(0, 181, 2)]
    plain = [math.cos(math.radians(angle)) for angle in degrees]
    series.insert(0, Series("no margin: cos θ", degrees, plain, color=None, dash="dash"))
    left_out = f"no such curve: {', '.join(without)}" if without else ""
    return [
        Chart(
            "psi",
            "Target logit ψ(θ) of the loss",
            tuple(series),
            x="θ, degrees",
            y="ψ(θ)",
            alt="What the loss makes of the cosine to the own class. The further below cos θ, the "
            "larger the margin it asks for.",
            note=left_out,
        )
    ]


def _heats(measured: list[Subject]) -> list[Chart]:
    """One map for each model, all in one scale."""
    found = [(each, each.rivals) for each in measured]
    known = [(each, rivals) for each, rivals in found if rivals is not None]
    angles = [
        angle
        for _, rivals in known
        for at, row in enumerate(rivals.matrix)
        for other, angle in enumerate(row)
        if other != at
    ]
    low, high = (min(angles), max(angles)) if angles else (0.0, 180.0)
    return [_heat(each, rivals, low, high) for each, rivals in known]


def _heat(subject: Subject, rivals: Rivals, low: float, high: float) -> Chart:
    shown, count = rivals.classes, len(rivals.nearest)
    names = tuple(subject.class_name(at) for at in shown)
    values = tuple(
        tuple(None if i == j else angle for j, angle in enumerate(row))
        for i, row in enumerate(rivals.matrix)
    )
    few = len(shown) < count
    return Chart(
        f"angles-{subject.name}",
        f"Angles between class vectors: {subject.title}",
        heat=Heat(values, names, names, unit="degrees", low=low, high=high, classes=shown),
        alt="Angle of every pair of class vectors; all models share one scale. Good is one even "
        "colour, without dark cells.",
        note=f"the {len(shown)} of {count:,} classes with the closest rivals" if few else "",
    )
