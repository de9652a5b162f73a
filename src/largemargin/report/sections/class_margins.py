"""Margins of the classes, one beside the other."""

from largemargin.report.charts import Chart, Series
from largemargin.report.numbers import known
from largemargin.report.subjects import Subject

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
