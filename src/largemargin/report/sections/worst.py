"""Section 5: the samples of smallest margin."""

from largemargin.report.charts import Block, Cards, Note, Section
from largemargin.report.numbers import number
from largemargin.report.observed import WORST
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.verdict import measure_command

READING = (
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
    return Section("worst", "Worst samples", READING, tuple(blocks))


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
