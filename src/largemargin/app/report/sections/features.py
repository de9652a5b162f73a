"""Samples in the plane, as the network sees them."""

import itertools
import statistics
from collections.abc import Sequence
from typing import TypeAlias

from largemargin.app.report.charts import (
    Block,
    Blocks,
    Cell,
    Chart,
    Note,
    Points,
    Section,
    Series,
    Table,
    arranged,
)
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.report.sample_views import METHODS
from largemargin.measuring.embed import CLEAN, PENULTIMATE, UNIT, Embeddings, LayerEmbedding
from largemargin.measuring.plots import shortened

READING = (
    "Every point is a sample, coloured by its class, whose name stands at its middle; hover over "
    "one to see it. Good is one tight group for each class. Distances between groups of t-SNE mean "
    "little."
)
NAMED = 32
"""Classes that are named in a map."""

Embedded: TypeAlias = tuple[ReportModel, Embeddings]


def features_section(models: ReportModels) -> Section:
    embedded = [
        (model, model.views.embeddings)
        for model in models
        if model.views is not None and model.views.embeddings is not None
    ]
    if not embedded:
        return Section("features", "Features", READING, (_missing(models),))
    clean: list[Block] = [Blocks("chooser", models.classes)]
    noisy: list[Block] = [_table(embedded), Note(f"How: {'; '.join(embedded[0][1].assumed)}.")]
    for model, embeddings in embedded:
        for layer in embeddings.layers:
            for condition in layer.points:
                chart = _chart(model, embeddings, layer, condition)
                (clean if condition == CLEAN else noisy).append(chart)
    folded = "Under noise, and how the maps were made"
    return Section("features", "Features", READING, arranged(clean), arranged(noisy), folded)


def _missing(models: ReportModels) -> Note:
    runs = [model for model in models if model.run is not None]
    reasons = [note for model in runs if model.views for note in model.views.notes]
    if not runs:
        words = "A geometry alone has no samples to place in the plane: give the report a run."
    elif reasons:
        words = f"Samples were not placed in the plane: {reasons[0]}"
    else:
        words = "Samples were not placed in the plane: this report ran no model."
    return Note(words, f"largemargin report {models[0].shell_path} --features tsne")


def _chart(
    model: ReportModel, embeddings: Embeddings, layer: LayerEmbedding, condition: str
) -> Chart:
    """The map of one layer, of clean or of noisy samples."""
    method, places = METHODS[embeddings.method], layer.points[condition]
    name = layer.layer if len(embeddings.layers) > 1 else ""
    noise = "" if condition == CLEAN else f"noise: {embeddings.noise}"
    unit = f", {UNIT}" if layer.layer == PENULTIMATE and UNIT in embeddings.assumed else ""
    samples = Points(
        embeddings.index,
        embeddings.labels,
        embeddings.predictions.get(condition, ()),
        embeddings.margins.get(condition, ()),
        model.data_key,
        classes=model.classes,
    )
    xs, ys = [x for x, _ in places], [y for _, y in places]
    points = Series(model.title, xs, ys, form="points", points=samples)
    return Chart(
        f"features-{model.name}-{layer.layer}-{condition}",
        ", ".join(filter(None, (model.title, name, noise))),
        (points, *_names(model, embeddings.labels, xs, ys)),
        equal=True,
        alt=f"{embeddings.samples:,} samples at layer {layer.layer} by {method}{unit}.",
    )


def _names(
    model: ReportModel, labels: Sequence[int], xs: list[float], ys: list[float]
) -> list[Series]:
    """Names of the classes, each in the middle of its samples; none of very many."""
    present = sorted(set(labels))
    if len(present) > NAMED:
        return []

    def middles(places: list[float]) -> list[float]:
        own = (itertools.compress(places, (each == c for each in labels)) for c in present)
        return [statistics.median(each) for each in own]

    texts = tuple(shortened(model.class_name(label), 12) for label in present)
    return [Series("classes", middles(xs), middles(ys), form="points", texts=texts)]


def _table(embedded: list[Embedded]) -> Table:
    rows = tuple(
        (
            Cell.of(model.title),
            Cell.of(layer.layer),
            Cell.of(condition),
            Cell.number(layer.feature_variance[condition].ratio),
            Cell.number(plane.ratio),
        )
        for model, embeddings in embedded
        for layer in embeddings.layers
        for condition, plane in layer.variance.items()
    )
    return Table(
        ("model", "layer", "samples", "of the features", "in the plane"),
        rows,
        caption="Variance between classes / within classes: more is better separated",
        key="variance",
        numeric=(3, 4),
    )
