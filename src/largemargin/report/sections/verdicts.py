"""Section 1: what the models are worth, at a glance, and what to try next."""

from largemargin.report.advice import advise
from largemargin.report.charts import Block, Blocks, Cell, Note, Section, Table
from largemargin.report.numbers import (
    degrees_cell,
    interval_cell,
    known,
    number,
    points_cell,
    text_cell,
)
from largemargin.report.sections.quantities import QUANTITIES, changes
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.verdict import judge
from largemargin.training.comparison import Comparison
from largemargin.training.comparison_table import told_verdict

READING = (
    "Green is good, amber asks for a look, red is weak; the mark beside a name tells the rule. "
    "Good is a row of greens, and a margin loss that is at least as accurate as softmax."
)


def verdict_section(subjects: Subjects) -> Section:
    blocks: list[Block] = []
    if subjects.comparison is not None:
        blocks.append(_comparison(subjects.comparison))
    blocks += [_glance(subjects), *changes(subjects), *_other_images(subjects)]
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
    return Section("verdict", "Verdict", READING, tuple(blocks))


def _groups(subjects: Subjects) -> list[list[Subject]]:
    """Models by the images they were tested on; of a geometry alone they are not known."""
    found: dict[str, list[Subject]] = {}
    for each in subjects.each:
        if each.tested_on is not None:
            found.setdefault(each.data_key, []).append(each)
    return list(found.values())


def _other_images(subjects: Subjects) -> list[Note]:
    """A sentence where differences of the models may be differences of their images."""
    groups = _groups(subjects)
    if len(groups) < 2:
        return []
    names = "; ".join(", ".join(each.title for each in group) for group in groups)
    return [
        Note(
            f"Not all models were tested on the same images ({names}): differences between these "
            "groups may come from the images and not from the models. Only models of the "
            "baseline's images are held against it."
        )
    ]


def _glance(subjects: Subjects) -> Table:
    columns = []
    ranked = len(subjects.each) > 1 and len(_groups(subjects)) < 2
    for _, read, show, better in QUANTITIES:
        values = [read(each) for each in subjects.each]
        numbers = [better * value for value in values if value is not None and known(value)]
        best = max(numbers) if ranked and len(numbers) > 1 else None
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
    seed = "" if subjects.comparison is None else ": the runs of the first seed"
    return Table(
        ("model", *(name for name, *_ in QUANTITIES)),
        rows,
        caption=f"At a glance{seed}" + ("; the best of each column is bold" if ranked else ""),
        key="glance",
        numeric=tuple(range(1, len(QUANTITIES) + 1)),
    )


def _comparison(found: Comparison) -> Table:
    rows = []
    for each in found.methods:
        spread = "" if not known(each.std) else f" ± {100 * each.std:.2f}"
        test = each.test
        rows.append(
            (
                text_cell(each.method),
                Cell(f"{100 * each.mean:.2f}{spread} %", each.mean),
                points_cell(None if test is None else test.difference),
                interval_cell(*((None, None) if test is None else (test.low, test.high))),
                Cell(number(each.corrected, 3), each.corrected),
                text_cell(told_verdict(each)),
                degrees_cell(each.class_margin),
                Cell(str(each.trials), each.trials),
            )
        )
    seeds = len(found.seeds)
    return Table(
        (
            *("method", f"{found.split} accuracy", "difference", "95 % interval", "p (Holm)"),
            *("verdict", "class margin", "trials"),
        ),
        tuple(rows),
        caption=f"Comparison over {seeds} seed{'s' if seeds > 1 else ''} on {found.images:,} "
        f"{found.split} images, against softmax by a paired t-test, in points; everything below "
        "shows the first seed",
        key="comparison",
        numeric=(1, 2, 3, 4, 6, 7),
    )
