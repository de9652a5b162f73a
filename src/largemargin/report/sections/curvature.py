"""How curved the loss is around samples, and how that goes with robustness."""

from collections.abc import Sequence

from largemargin.measuring.curvature import Curvature
from largemargin.measuring.noise import CurvatureRobustness
from largemargin.report.charts import Block, Chart, Heat, Note, Series, Table
from largemargin.report.numbers import count_cell, known, number_cell, text_cell
from largemargin.report.palette import DASHES
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.verdict import measure_command

UNITS = "pixels in [0, 1]"
"""Runs take images of this range: they normalise inside."""

SMALLEST = 1e-12
"""A flat loss has curvature 0, which a logarithmic axis does not show."""


def curvature_blocks(subjects: Subjects) -> list[Block]:
    measured = [each for each in subjects.each if each.geometry and each.geometry.curvature]
    missing = [each for each in subjects.each if each not in measured]
    blocks: list[Block] = []
    if measured:
        blocks += [_boxes(measured), *_flattest(measured), *_groups(measured)]
    for each in missing:
        command = measure_command(each, "--curvature true", "--max_samples 500")
        words = f"{each.title}: the curvature of the loss around samples was not measured."
        blocks.append(Note(words, command))
    return blocks


def _of(subject: Subject) -> Curvature:
    assert subject.geometry is not None
    assert subject.geometry.curvature is not None
    return subject.geometry.curvature


def _boxes(measured: list[Subject]) -> Chart:
    boxes, rows = [], []
    for each in measured:
        c = _of(each)
        five = [max(c.overall.quantiles[q], SMALLEST) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
        boxes.append(Series(each.title, [], five, form="box", color=each.color))
        correlations = (found.correlation for found in c.robustness.values() if found is not None)
        correlation = next((value for value in correlations if known(value)), None)
        values = (number_cell(value) for value in (*five, c.overall.mean))
        count = count_cell(c.samples)
        rows.append((text_cell(each.title), *values, count, number_cell(correlation, digits=3)))
    heads = (
        *("model", "5 %", "25 %", "median", "75 %", "95 %", "mean", "samples"),
        "correlation with robustness",
    )
    return Chart(
        "curvature",
        "Curvature of the loss around samples",
        tuple(boxes),
        y="curvature",
        log_y=True,
        alt="Box for each model: median, quartiles, and whiskers at 5 % and 95 %. Good is low.",
        table=Table(heads, tuple(rows), key="curvatures", numeric=tuple(range(1, 9))),
    )


def _flattest(measured: list[Subject]) -> list[Chart]:
    curves = [
        _curve(each, at, found, found.shares, found.weak)
        for each in measured
        for at, found in enumerate(_of(each).robustness.values())
    ]
    if not curves:
        return []
    return [
        Chart(
            "curvature-robustness",
            "Noisy accuracy of the flattest samples",
            tuple(curves),
            x="share of samples kept, flattest first",
            y="accuracy under noise",
            percent_y=True,
            alt="Accuracy under noise of the samples of lowest curvature. Falling lines mean that "
            "flat samples are the robust ones.",
        )
    ]


def _groups(measured: list[Subject]) -> list[Chart]:
    curves = []
    for each in measured:
        for at, found in enumerate(_of(each).robustness.values()):
            kept = [k for k, mean in enumerate(found.group_curvature) if known(mean)]
            means = [max(found.group_curvature[k], SMALLEST) for k in kept]
            curves.append(_curve(each, at, found, [k / found.draws for k in kept], means))
    if not any(len(curve.x) > 1 for curve in curves):
        return []
    return [
        Chart(
            "curvature-groups",
            "Curvature against robustness",
            tuple(curves),
            x="share of noisy copies that stay right",
            y="mean curvature",
            log_y=True,
            alt="Mean curvature of samples by how many of their noisy copies are classified right. "
            "Good is low everywhere; lines fall where flat samples are the robust ones.",
        )
    ]


def _curve(
    subject: Subject,
    at: int,
    found: CurvatureRobustness,
    xs: Sequence[float],
    ys: Sequence[float],
) -> Series:
    """A line of one model under one kind of noise."""
    style = f"{found.noise} noise {found.amount:g}"
    return Series(
        f"{subject.name}, {style}",
        xs,
        ys,
        color=subject.color,
        dash=DASHES[at % len(DASHES)],  # type: ignore[arg-type]
        group=subject.title,
        style=style,
    )


def surface_charts(subjects: Subjects) -> list[Chart]:
    """The loss around one sample, of all models in one scale."""
    seen = [
        (each, each.observed, each.observed.surface)
        for each in subjects.each
        if each.observed is not None and each.observed.surface is not None
    ]
    if not seen:
        return []
    highest = max(max(map(max, surface.losses)) for *_, surface in seen)
    return [
        Chart(
            f"surface-{each.name}",
            f"Loss around one sample: {each.title}",
            heat=Heat(
                surface.losses,
                x=surface.across,
                y=surface.along,
                unit="loss",
                low=0.0,
                high=highest,
            ),
            x=f"length across the gradient, {UNITS}",
            y="length along it",
            alt=f"Cross entropy on a square of the input space around "
            f"{observed.ids.get(observed.surface_of or 0, f'sample {observed.surface_of}')}, which "
            "is classified right. Good is a wide dark middle. All models share one scale.",
        )
        for each, observed, surface in seen
    ]
