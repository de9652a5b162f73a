"""Features in three dimensions on the unit sphere, with the class vectors."""

import math

from largemargin.report.charts import Chart, Points, Series
from largemargin.report.subjects import Subject

DRAWN = 1500
"""Points of one sphere; more would only hide each other."""


def sphere_chart(subject: Subject) -> Chart:
    assert subject.geometry is not None
    found = subject.geometry.sphere
    assert found is not None
    stride = -(-len(found.points) // DRAWN) or 1
    kept = range(0, len(found.points), stride)
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
            (),
            subject.data_key,
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
    words = f"every {stride}th of {len(found.points):,} points" if stride > 1 else ""
    return Chart(
        f"sphere-{subject.name}",
        f"On the sphere: {subject.title}",
        (samples, vectors, *_circles()),
        solid=True,
        alt="Features and class vectors as points on the unit sphere. Good is one tight cluster "
        "around each class vector.",
        note=words,
        wide=True,
    )


def _circles() -> list[Series]:
    """Three great circles, to see the sphere."""
    steps = [math.radians(6 * at) for at in range(61)]
    cosines, sines, zeros = [math.cos(a) for a in steps], [math.sin(a) for a in steps], [0.0] * 61
    return [
        Series("sphere", *axes, color=None, faint=True)
        for axes in ((cosines, sines, zeros), (cosines, zeros, sines), (zeros, cosines, sines))
    ]
