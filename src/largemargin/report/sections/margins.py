"""Section 3: how far samples and classes are from being mistaken."""

import itertools
import math

from largemargin.measuring.distributions import Distribution
from largemargin.report.charts import Block, Chart, Heat, Note, Section, Series, Table
from largemargin.report.class_table import class_table
from largemargin.report.numbers import number_cell, text_cell
from largemargin.report.sections.sphere import sphere_chart
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.target_curve import target_curve
from largemargin.report.verdict import measure_command

READING = (
    "A margin is how far a sample is from being mistaken, negative where it is. Good is a curve "
    "that lies to the right of the baseline's and is narrow, with little left of 0."
)
HEAT_CLASSES = 64
"""More classes than this: the heat map shows those with the closest rivals."""

KINDS = {
    "cosine": ("Cosine margin of samples", "cosine to the own class − largest other"),
    "distance": ("Distance of samples to the boundary", "signed distance in feature space"),
}


def margins_section(subjects: Subjects) -> Section:
    measured = [each for each in subjects.each if each.geometry is not None]
    if not measured:
        note = Note("No geometry was measured.", measure_command(subjects.each[0]))
        return Section("margins", "Margins", READING, (note,))
    blocks: list[Block] = []
    for kind, (title, axis) in KINDS.items():
        blocks.append(_density(measured, kind, title, axis))
    blocks.append(_cumulative(measured))
    blocks += _angles(measured)
    blocks += _curves(measured)
    blocks += _heats([each for each in measured if _has_angles(each)])
    blocks += [sphere_chart(each) for each in measured if each.geometry and each.geometry.sphere]
    blocks.append(class_table(measured))
    missing = [each for each in subjects.each if each.geometry is None]
    blocks += [
        Note(f"{each.title}: no geometry was measured.", measure_command(each)) for each in missing
    ]
    return Section.arranged("margins", "Margins", READING, blocks)


def _distribution(subject: Subject, kind: str) -> Distribution:
    assert subject.geometry is not None
    return subject.geometry.margins[kind].overall


def _density(measured: list[Subject], kind: str, title: str, axis: str) -> Chart:
    series = []
    for each in measured:
        found = _distribution(each, kind)
        series += histogram(found, each.title, each.color)
    return Chart(
        f"margins-{kind}",
        title,
        tuple(series),
        x=axis,
        y="density",
        zero=True,
        alt=f"Histogram and density of the {kind} margins of samples, one curve for each model.",
        table=_quantiles(measured, kind),
        note="histograms of 50 bins (steps) under kernel densities (lines), of all samples",
    )


def histogram(found: Distribution, name: str, color: int | None) -> list[Series]:
    """A density over its histogram, both of area 1."""
    series = []
    if found.counts and found.count:
        widths = [b - a for a, b in itertools.pairwise(found.edges)]
        middles = [(a + b) / 2 for a, b in itertools.pairwise(found.edges)]
        heights = [n / found.count / w for n, w in zip(found.counts, widths, strict=True)]
        faint = bool(found.density)
        series.append(Series(name, middles, heights, form="steps", color=color, faint=faint))
    if found.density:
        series.append(Series(name, found.density_at, found.density, color=color))
    return series


def _quantiles(measured: list[Subject], kind: str) -> Table:
    rows = []
    for each in measured:
        d = _distribution(each, kind)
        values = (d.mean, d.std, d.ratio, d.minimum, d.quantiles[0.05], d.median, d.maximum)
        rows.append((text_cell(each.title), *(number_cell(value) for value in values)))
    heads = ("model", "mean", "std", "mean / std", "minimum", "5 %", "median", "maximum")
    return Table(heads, tuple(rows), key=f"quantiles-{kind}", numeric=tuple(range(1, 8)))


def _cumulative(measured: list[Subject]) -> Chart:
    series = []
    for each in measured:
        found = _distribution(each, "cosine")
        total = list(itertools.accumulate(found.counts, initial=0))
        shares = [n / max(1, found.count) for n in total]
        series.append(Series(each.title, found.edges, shares, color=each.color))
    return Chart(
        "cumulative",
        "Share of samples below a cosine margin",
        tuple(series),
        x="cosine margin",
        y="share of samples",
        percent_y=True,
        zero=True,
        alt="Cumulative curve of cosine margins; the height at 0 is the share on the wrong side.",
    )


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
                name = f"{each.title}, {words}"
                series.append(
                    Series(name, found.density_at, found.density, color=each.color, dash=dash)  # type: ignore[arg-type]
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
    series = []
    for each in measured:
        found = None if each.config is None else target_curve(each.config)
        if found is not None:
            series.append(Series(each.title, *found, color=each.color))
    if not series:
        return []
    degrees = [float(angle) for angle in range(0, 181, 2)]
    plain = [math.cos(math.radians(angle)) for angle in degrees]
    series.insert(0, Series("no margin: cos θ", degrees, plain, color=None, dash="dash"))
    return [
        Chart(
            "psi",
            "Target logit ψ(θ) of the loss",
            tuple(series),
            x="θ, degrees",
            y="ψ(θ)",
            alt="What the loss makes of the cosine to the own class. The further below cos θ, the "
            "larger the margin it asks for.",
        )
    ]


def _has_angles(subject: Subject) -> bool:
    return subject.geometry is not None and subject.geometry.prototypes.angles is not None


def _heats(measured: list[Subject]) -> list[Chart]:
    """One map for each model, all in one scale."""
    found = [
        angle
        for each in measured
        if each.geometry is not None
        for at, row in enumerate(each.geometry.prototypes.angles or ())
        for other, angle in enumerate(row)
        if other != at
    ]
    low, high = (min(found), max(found)) if found else (0.0, 180.0)
    return [_heat(each, low, high) for each in measured]


def _heat(subject: Subject, low: float, high: float) -> Chart:
    assert subject.geometry is not None
    angles = subject.geometry.prototypes.angles
    assert angles is not None
    chosen = list(range(len(angles)))
    note = ""
    if len(angles) > HEAT_CLASSES:
        closest = sorted(chosen, key=lambda at: min(a for j, a in enumerate(angles[at]) if j != at))
        chosen = sorted(closest[:HEAT_CLASSES])
        note = f"the {HEAT_CLASSES} of {len(angles):,} classes with the closest rivals"
    names = tuple(subject.class_name(at) for at in chosen)
    values = tuple(tuple(None if i == j else angles[i][j] for j in chosen) for i in chosen)
    return Chart(
        f"angles-{subject.name}",
        f"Angles between class vectors: {subject.title}",
        heat=Heat(values, names, names, unit="degrees", low=low, high=high),
        alt="Angle of every pair of class vectors; all models share one scale. Good is one even "
        "colour, without dark cells.",
        note=note,
    )
