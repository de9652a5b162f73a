"""Features in three dimensions on the unit sphere, with the class vectors."""

import math
import statistics

from largemargin.measuring import Sphere
from largemargin.report.charts import Chart, Points, Series, Table
from largemargin.report.numbers import count_cell, degrees_cell, text_cell
from largemargin.report.observed import drawn_points
from largemargin.report.subjects import Subject


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
        table=_angles(subject, found),
        wide=True,
    )


def _margin(found: Sphere, at: int) -> float:
    """Cosine to the own class vector minus that to the nearest other one."""
    own, rival = math.radians(found.angles[at]), math.radians(found.rival_angles[at])
    return math.cos(own) - math.cos(rival)


def _angles(subject: Subject, found: Sphere) -> Table:
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
