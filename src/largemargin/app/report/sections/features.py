"""Sections 4 and 5: samples in the plane, as the network sees them; those of smallest margin."""

from typing import TypeAlias

from largemargin.app.report.charts import (
    Block,
    Blocks,
    Cards,
    Cell,
    Chart,
    Note,
    Points,
    Section,
    Series,
    Table,
    number,
)
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.report.sample_views import METHODS, WORST, SampleViews
from largemargin.measuring.embed import Embeddings

READING = (
    "Every point is a sample, coloured by its class; hover over one to see it. Good is one tight "
    "group for each class, also under noise. Distances between groups of t-SNE mean little."
)

Embedded: TypeAlias = tuple[ReportModel, Embeddings]


def features_section(models: ReportModels) -> Section:
    embedded = [
        (model, model.views.embeddings)
        for model in models
        if model.views is not None and model.views.embeddings is not None
    ]
    if not embedded:
        return Section("features", "Features", READING, (_missing(models),))
    blocks: list[Block] = [
        Blocks("chooser", models.classes),
        *(chart for model, embeddings in embedded for chart in _charts(model, embeddings)),
        _table(embedded),
        Note(f"How: {'; '.join(embedded[0][1].assumed)}."),
    ]
    return Section.arranged("features", "Features", READING, blocks)


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


def _charts(model: ReportModel, embeddings: Embeddings) -> list[Chart]:
    """One map for every layer, of clean and of noisy samples."""
    charts = []
    method = METHODS[embeddings.method]
    for layer in embeddings.layers:
        name = layer.layer if len(embeddings.layers) > 1 else ""
        for condition, places in layer.points.items():
            words = condition if condition == "clean" else f"{condition} ({embeddings.noise})"
            samples = Points(
                embeddings.index,
                embeddings.labels,
                embeddings.predictions.get(condition, ()),
                embeddings.margins.get(condition, ()),
                model.data_key,
                classes=model.classes,
            )
            xs, ys = [x for x, _ in places], [y for _, y in places]
            charts.append(
                Chart(
                    f"features-{model.name}-{layer.layer}-{condition}",
                    ", ".join(filter(None, (model.title, name, words))),
                    (Series(model.title, xs, ys, form="points", points=samples),),
                    equal=True,
                    alt=f"{embeddings.samples:,} samples at layer {layer.layer} in the plane by "
                    f"{method}, {words}.",
                )
            )
    return charts


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


WORST_READING = (
    "The samples closest to being mistaken, or mistaken most clearly (negative logit margin). "
    "Good is a list of images that people would argue about too; wrong labels show up here first."
)


def worst_section(models: ReportModels) -> Section:
    blocks: list[Block] = []
    for model in models:
        if model.geometry is None or not model.geometry.worst:
            blocks.append(Note(f"{model.title}: no samples were listed.", model.measure_command()))
        else:
            views = model.views or SampleViews()
            cards = tuple(
                {
                    "id": views.sample_id(sample.index),
                    "picture": views.worst_pictures.get(sample.index, ""),
                    "label": model.class_name(sample.label),
                    "predicted": model.class_name(sample.predicted),
                    "rival": model.class_name(sample.rival),
                    "wrong": sample.predicted != sample.label,
                    "margin": number(sample.raw, 3),
                    "title": f"cosine margin {number(sample.cosine, 3)}, "
                    f"distance {number(sample.distance, 3)}",
                    "class": sample.label,
                }
                for sample in model.geometry.worst[:WORST]
            )
            blocks.append(Cards(model.title, cards))
    return Section("worst", "Worst samples", WORST_READING, tuple(blocks))
