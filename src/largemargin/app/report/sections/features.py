"""Section 4: samples in the plane, as the network sees them.

Section 5: the samples of smallest margin.
"""

from largemargin.app.report.charts import (
    Block,
    Blocks,
    Cards,
    Chart,
    Note,
    Points,
    Section,
    Series,
    Table,
)
from largemargin.app.report.number_format import number, number_cell, text_cell
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.sample_views import WORST
from largemargin.app.report.verdict import measure_command
from largemargin.measuring.embed import Embeddings

READING = (
    "Every point is a sample, coloured by its class; look at one to see it. Good is one tight "
    "group for each class, also under noise. Distances between groups of t-SNE mean little."
)

METHODS = {"tsne": "t-SNE", "pca": "PCA"}


def features_section(subjects: Subjects) -> Section:
    seen = [each for each in subjects.each if each.observed and each.observed.embeddings]
    if not seen:
        return Section("features", "Features", READING, (_missing(subjects),))
    blocks: list[Block] = [Blocks("chooser", subjects.classes)]
    for each in seen:
        assert each.observed is not None
        assert each.observed.embeddings is not None
        blocks += _charts(each, each.observed.embeddings)
    blocks.append(_table(seen))
    first = seen[0].observed
    assert first is not None
    assert first.embeddings is not None
    blocks.append(Note(f"How: {'; '.join(first.embeddings.assumed)}."))
    return Section.arranged("features", "Features", READING, blocks)


def _missing(subjects: Subjects) -> Note:
    runs = [each for each in subjects.each if each.run is not None]
    reasons = [note for each in runs if each.observed for note in each.observed.notes]
    if not runs:
        words = "A geometry alone has no samples to place in the plane: give the report a run."
    elif reasons:
        words = f"Samples were not placed in the plane: {reasons[0]}"
    else:
        words = "Samples were not placed in the plane: the models were not looked at."
    return Note(words, f"largemargin report {subjects.each[0].where} --features tsne")


def _charts(subject: Subject, found: Embeddings) -> list[Block]:
    charts: list[Block] = []
    for layer in found.layers:
        for condition, points in layer.points.items():
            words = condition if condition == "clean" else f"{condition} ({found.noise})"
            name = layer.layer if len(found.layers) > 1 else ""
            charts.append(
                Chart(
                    f"features-{subject.name}-{layer.layer}-{condition}",
                    ", ".join(filter(None, (subject.title, name, words))),
                    (
                        Series(
                            subject.title,
                            [x for x, _ in points],
                            [y for _, y in points],
                            form="points",
                            points=Points(
                                found.index,
                                found.labels,
                                found.predictions.get(condition, ()),
                                found.margins.get(condition, ()),
                                subject.data_key,
                                classes=subject.classes,
                            ),
                        ),
                    ),
                    equal=True,
                    alt=f"{found.samples:,} samples at layer {layer.layer} in the plane by "
                    f"{METHODS.get(found.method, found.method)}, {words}.",
                )
            )
    return charts


def _table(seen: list[Subject]) -> Table:
    rows = []
    for each in seen:
        assert each.observed is not None
        assert each.observed.embeddings is not None
        for layer in each.observed.embeddings.layers:
            for condition, plane in layer.variance.items():
                rows.append(
                    (
                        text_cell(each.title),
                        text_cell(layer.layer),
                        text_cell(condition),
                        number_cell(layer.feature_variance[condition].ratio),
                        number_cell(plane.ratio),
                    )
                )
    return Table(
        ("model", "layer", "samples", "of the features", "in the plane"),
        tuple(rows),
        caption="Variance between classes / within classes: more is better separated",
        key="variance",
        numeric=(3, 4),
    )


WORST_READING = (
    "The samples closest to being mistaken, or mistaken most clearly (negative margin of logits). "
    "Good is a list of images that people would argue about too; wrong labels show up here first."
)


def worst_section(subjects: Subjects) -> Section:
    blocks: list[Block] = []
    for each in subjects.each:
        if each.geometry is None or not each.geometry.worst:
            words = f"{each.title}: no samples were listed."
            blocks.append(Note(words, measure_command(each)))
        else:
            blocks.append(_cards(each))
    return Section("worst", "Worst samples", WORST_READING, tuple(blocks))


def _cards(subject: Subject) -> Cards:
    assert subject.geometry is not None
    seen = subject.observed
    cards = tuple(
        {
            "id": seen.ids.get(each.index, f"sample {each.index}")
            if seen
            else f"sample {each.index}",
            "picture": seen.worst_pictures.get(each.index, "") if seen else "",
            "label": subject.class_name(each.label),
            "predicted": subject.class_name(each.predicted),
            "rival": subject.class_name(each.rival),
            "wrong": each.predicted != each.label,
            "margin": number(each.raw, 3),
            "title": f"cosine margin {number(each.cosine, 3)}, distance {number(each.distance, 3)}",
            "class": each.label,
        }
        for each in subject.geometry.worst[:WORST]
    )
    return Cards(subject.title, cards)
