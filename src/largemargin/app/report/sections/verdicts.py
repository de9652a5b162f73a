"""Section 1: what the models are worth, at a glance, and what to try next.

The few numbers of a model that stand at the top, and what a method changed about them.
"""

import shlex
from collections.abc import Callable

from largemargin.app.report.advice import advise
from largemargin.app.report.charts import Block, Blocks, Cell, Note, Section, Table
from largemargin.app.report.number_format import (
    degrees_cell,
    interval_cell,
    known,
    number,
    number_cell,
    percent_cell,
    points_cell,
    text_cell,
)
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.verdict import (
    calibration_of,
    comparable,
    difference,
    judge,
    paired,
    ranked_classes,
)
from largemargin.app.training.comparison import Comparison, told_verdict


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


def changes(subjects: Subjects) -> list[Block]:
    """Every model against the baseline; nothing where there is none, or more than one seed."""
    base = subjects.baseline
    if base is None or subjects.comparison is not None:
        return []
    others = [each for each in subjects.each if comparable(each, base) and known(each.accuracy)]
    if not others:
        return []
    heads = (
        *("model", "accuracy", "95 % interval", "says"),
        *(name for name, *_ in QUANTITIES[1:]),
    )
    return [
        Table(
            heads,
            tuple(_changed(each, base) for each in others),
            caption=f"What changed against {base.title}, shares in points; less calibration error "
            "is better, more of everything else",
            key="changes",
            numeric=(1, 2, *range(4, len(heads))),
        ),
        Note(
            f"The interval is about accuracy on {base.samples or 0:,} test images; other columns "
            f"have none. {_method(others, base)} Each model is one training run, and another seed "
            "moves every number of it: whether a method is better than luck takes several.",
            f"largemargin compare --methods {_methods(others)} --seeds 5",
        ),
    ]


def _method(others: list[Subject], base: Subject) -> str:
    """How the intervals were made, in a sentence for readers who know one or the other."""
    alone = [each.title for each in others if paired(each, base) is None]
    by_image = "compares the models image by image (Newcombe 1998, for paired data)"
    if not alone:
        return f"It {by_image}."
    apart = (
        "takes the images as drawn for each model by itself (Newcombe 1998) and is rather too "
        "wide: which images are right was not kept for both; largemargin evaluate keeps it."
    )
    if len(alone) == len(others):
        return f"It {apart}"
    return f"It {by_image}, but for {', '.join(alone)} it {apart}"


def _changed(subject: Subject, base: Subject) -> tuple[Cell, ...]:
    low, high = difference(subject, base)
    clear = known(low) and not low <= 0 <= high
    says = ("more accurate" if low > 0 else "less accurate") if clear else "no clear difference"
    return (
        text_cell(subject.title),
        points_cell(_minus(subject.accuracy, base.accuracy)),
        interval_cell(low, high),
        text_cell(says if known(low) else "not known", strong=clear),
        *(_by(show, _minus(read(subject), read(base))) for _, read, show, _ in QUANTITIES[1:]),
    )


def _minus(own: float | None, base: float | None) -> float | None:
    return None if own is None or base is None else own - base


def _by(show: Show, change: float | None) -> Cell:
    if show is percent_cell:
        return points_cell(change)
    made: Cell = show(change)
    return Cell(f"+{made.text}", made.value) if change is not None and change > 0 else made


def _methods(others: list[Subject]) -> str:
    """What to compare softmax with, which is always among them."""
    names = dict.fromkeys(each.config.objective.name for each in others if each.config)
    names.pop("cross_entropy", None)
    return shlex.quote(",".join(names)) if names else "NAME"


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
