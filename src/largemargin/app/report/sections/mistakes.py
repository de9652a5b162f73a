"""Which classes are taken for which, and the hardest samples with their neighbours."""

from collections.abc import Sequence
from typing import Any

from largemargin.app.report.charts import (
    Block,
    Cards,
    Cell,
    Chart,
    Heat,
    Section,
    Table,
    degrees,
    number,
)
from largemargin.app.report.report_models import ReportModel, ReportModels, unknown
from largemargin.app.report.sample_views import WORST, SampleViews
from largemargin.measuring.geometry_result import WorstSample

READING = (
    "Which classes are taken for which, and the samples of smallest logit margin, negative where "
    "mistaken, with the closest other images by the angle between features. Wrong labels show up "
    "here first: samples among neighbours of another class."
)
CELLS = 32
"""Classes of a map that can still be read."""
WRITTEN = 12
"""Classes up to which the table is the whole matrix."""
PAIRS = 10
"""Confusions that are listed where it is not."""


def mistakes_section(models: ReportModels) -> Section:
    blocks: list[Block] = [*_confusions(models)]
    without = [model for model in models if not model.confusion]
    words = "it is not known which classes are taken for which."
    blocks += unknown(without, words, lambda model: model.evaluate_command)
    blocks += [
        Cards(f"Hardest samples: {model.title}", _cards(model, geometry.worst[:WORST]))
        for model, geometry in models.measured
        if geometry.worst
    ]
    without = [model for model in models if not (model.geometry and model.geometry.worst)]
    blocks += unknown(without, "no samples were listed.", ReportModel.measure_command)
    return Section("mistakes", "Mistakes", READING, tuple(blocks))


Confusion = tuple[tuple[int, ...], ...]


def _confusions(models: ReportModels) -> list[Chart]:
    """Mistakes by label and prediction: one map for each model, all in one scale."""
    found = [(model, model.confusion) for model in models if model.confusion]
    highest = max((n for _, counts in found for *_, n in wrong_pairs(counts)[:1]), default=1)
    return [_map(model, counts, highest) for model, counts in found]


def wrong_pairs(counts: Confusion) -> list[tuple[int, int, int]]:
    """(label, prediction, samples) of every confusion, most frequent first."""
    pairs = [
        (label, guess, n)
        for label, row in enumerate(counts)
        for guess, n in enumerate(row)
        if n and label != guess
    ]
    return sorted(pairs, key=lambda pair: -pair[2])


def _map(model: ReportModel, counts: Confusion, highest: int) -> Chart:
    pairs, classes = wrong_pairs(counts), range(len(counts))
    mistaken = dict.fromkeys(classes, 0)
    for label, guess, n in pairs:
        mistaken[label] += n
        mistaken[guess] += n
    shown = tuple(sorted(sorted(classes, key=lambda label: -mistaken[label])[:CELLS]))
    names = tuple(model.class_name(label) for label in shown)
    # The right ones would outshine the rest.
    values = tuple(tuple(None if a == b else counts[a][b] for b in shown) for a in shown)
    wrong, every = sum(n for *_, n in pairs), sum(map(sum, counts))
    return Chart(
        f"confusion-{model.name}",
        f"{model.title}: {wrong:,} of {every:,} wrong",
        heat=Heat(values, names, low=0, high=highest, classes=shown, counts=True),
        x="predicted",
        y="label",
        alt="Mistaken samples by label and prediction; one scale for all models.",
        note=f"the {len(shown)} most mistaken of {len(counts):,} classes"
        if len(shown) < len(counts)
        else "",
        table=_matrix(model, counts) if len(counts) <= WRITTEN else _most(model, pairs),
    )


def _matrix(model: ReportModel, counts: Confusion) -> Table:
    names = [model.class_name(label) for label in range(len(counts))]
    rows = tuple(
        (Cell.of(name), *map(Cell.count, row)) for name, row in zip(names, counts, strict=True)
    )
    heads = ("label \\ predicted", *names)
    return Table(heads, rows, key=f"confusion-{model.name}", numeric=tuple(range(1, len(heads))))


def _most(model: ReportModel, pairs: list[tuple[int, int, int]]) -> Table:
    rows = tuple(
        (Cell.of(model.class_name(label)), Cell.of(model.class_name(guess)), Cell.count(n))
        for label, guess, n in pairs[:PAIRS]
    )
    heads = ("label", "predicted", "samples")
    return Table(heads, rows, key=f"confusion-{model.name}", numeric=(2,))


def _cards(model: ReportModel, worst: Sequence[WorstSample]) -> tuple[dict[str, Any], ...]:
    views = model.views or SampleViews()
    return tuple(
        {
            "id": views.sample_id(sample.index),
            "picture": views.worst_pictures.get(sample.index, ""),
            "label": model.class_name(sample.label),
            # Where it is right, its closest rival says more than what is predicted.
            "what": "predicted" if (wrong := sample.predicted != sample.label) else "rival",
            "other": model.class_name(sample.predicted if wrong else sample.rival),
            "wrong": wrong,
            "margin": number(sample.raw, 3),
            "title": f"cosine margin {number(sample.cosine, 3)}, "
            f"distance {number(sample.distance, 3)}",
            "class": sample.label,
            "near": [
                {
                    "picture": views.near_pictures.get(near.index, ""),
                    "label": model.class_name(near.label),
                    "other": near.label != sample.label,
                    "title": f"{views.sample_id(near.index)}, {degrees(near.angle)}",
                }
                for near in views.neighbours.get(sample.index, ())
            ],
        }
        for sample in worst
    )
