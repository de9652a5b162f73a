"""The few numbers of a model that stand at the top, and what a method changed about them."""

import shlex
from collections.abc import Callable

from largemargin.report.charts import Block, Cell, Note, Table
from largemargin.report.numbers import (
    degrees_cell,
    interval_cell,
    known,
    number_cell,
    percent_cell,
    points_cell,
    text_cell,
)
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.verdict import (
    calibration_of,
    comparable,
    difference,
    paired,
    ranked_classes,
)


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
