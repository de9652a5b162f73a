"""Section 1: what the models are worth, at a glance, and what to try next."""

from collections.abc import Callable

from largemargin.report.advice import advise
from largemargin.report.charts import Block, Blocks, Cell, Note, Section, Table
from largemargin.report.numbers import (
    degrees_cell,
    known,
    number,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.verdict import calibration_of, judge, ranked_classes
from largemargin.training.comparison import Comparison
from largemargin.training.comparison_table import told_verdict

READING = (
    "Green is good, amber asks for a look, red is weak; the mark beside a name tells the rule. "
    "Good is a row of greens, and a margin loss that is at least as accurate as softmax."
)


def verdict_section(subjects: Subjects) -> Section:
    blocks: list[Block] = [_glance(subjects), *_other_images(subjects)]
    cards = [
        {
            "title": each.title,
            "color": each.color,
            "judgements": judge(each, subjects.baseline),
            "advice": advise(each, subjects),
            "notes": (*each.notes, *(each.observed.notes if each.observed else ())),
        }
        for each in subjects.each
    ]
    blocks.append(Blocks("verdicts", cards))
    if subjects.comparison is not None:
        blocks.append(_comparison(subjects.comparison))
    return Section("verdict", "Verdict", READING, tuple(blocks))


def _other_images(subjects: Subjects) -> list[Note]:
    """A sentence where differences of the models may be differences of their images."""
    tested = {each.data_key: each for each in subjects.each if each.tested_on is not None}
    if len(tested) < 2:
        return []
    names = " and ".join(each.title for each in list(tested.values())[:2])
    return [
        Note(
            f"{names} were not tested on the same images: differences between them, also those "
            "against the baseline, may come from the images and not from the models."
        )
    ]


def _noisy(subject: Subject) -> float | None:
    found = subject.evaluation
    if found is None or not found.perturbed:
        return None
    return sum(each.accuracy for each in found.perturbed.values()) / len(found.perturbed)


def _attacked(subject: Subject) -> float | None:
    found = subject.evaluation
    if found is None or not found.attacked:
        return None
    return min(each.accuracy for each in found.attacked)


def _worst(subject: Subject) -> float | None:
    ranked = ranked_classes(subject)
    return ranked[0][0] if ranked else None


def _calibration(subject: Subject) -> float | None:
    found = calibration_of(subject)
    return None if found is None else found.expected_error


Read = Callable[[Subject], float | None]
Show = Callable[..., Cell]

QUANTITIES: tuple[tuple[str, Read, Show, int], ...] = (
    ("accuracy", lambda s: s.accuracy, percent_cell, 1),
    ("worst class", _worst, percent_cell, 1),
    (
        "class margin",
        lambda s: None if s.geometry is None else s.geometry.prototypes.class_margin,
        degrees_cell,
        1,
    ),
    (
        "mean cosine margin",
        lambda s: None if s.geometry is None else s.geometry.margins["cosine"].overall.mean,
        number_cell,
        1,
    ),
    ("perturbed accuracy", _noisy, percent_cell, 1),
    ("strongest attack", _attacked, percent_cell, 1),
    ("calibration error", _calibration, percent_cell, -1),
)
"""Name, where it is read, how it is written, and whether more (1) or less (-1) is better."""


def _glance(subjects: Subjects) -> Table:
    columns = []
    for _, read, show, better in QUANTITIES:
        values = [read(each) for each in subjects.each]
        numbers = [better * value for value in values if value is not None and known(value)]
        best = max(numbers) if len(numbers) > 1 else None
        columns.append(
            [
                show(
                    value, strong=value is not None and best is not None and better * value == best
                )
                for value in values
            ]
        )
    rows = tuple(
        (text_cell(each.title), *(column[at] for column in columns))
        for at, each in enumerate(subjects.each)
    )
    return Table(
        ("model", *(name for name, *_ in QUANTITIES)),
        rows,
        caption="At a glance"
        + ("; the best of each column is bold" if len(subjects.each) > 1 else ""),
        key="glance",
        numeric=tuple(range(1, len(QUANTITIES) + 1)),
    )


def _comparison(found: Comparison) -> Table:
    rows = []
    for each in found.methods:
        spread = "" if not known(each.std) else f" ± {100 * each.std:.2f}"
        rows.append(
            (
                text_cell(each.method),
                Cell(f"{100 * each.mean:.2f}{spread} %", each.mean),
                degrees_cell(each.class_margin),
                Cell(str(each.trials), each.trials),
                Cell(number(each.corrected, 3), each.corrected),
                text_cell(told_verdict(each)),
            )
        )
    seeds = len(found.seeds)
    return Table(
        ("method", f"{found.split} accuracy", "class margin", "trials", "p (Holm)", "verdict"),
        tuple(rows),
        caption=f"Comparison over {seeds} seeds on {found.images:,} {found.split} images, against "
        "softmax by a paired t-test; the figures show the first seed",
        key="comparison",
        numeric=(1, 2, 3, 4),
    )
