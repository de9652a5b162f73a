"""Section 1: what the models are worth, at a glance, and what to try next."""

import shlex
from collections.abc import Callable
from dataclasses import replace

from largemargin.app.report.charts import (
    Block,
    Blocks,
    Cell,
    Note,
    Section,
    Table,
    finite,
    known,
    minus,
    number,
)
from largemargin.app.report.judgements import (
    VALIDATION,
    advise,
    comparable,
    difference,
    judge,
    paired,
)
from largemargin.app.report.report_models import ReportModel, ReportModels, number_at
from largemargin.app.training.comparison_result import Comparison, verdict_text

Show = Callable[..., Cell]

READING = (
    "Green is good, amber needs a closer look, red is weak; the question mark beside a name shows "
    "the rule. Good is a row of greens, and a margin loss at least as accurate as softmax."
)


def verdict_section(models: ReportModels) -> Section:
    blocks: list[Block] = []
    if models.comparison is not None:
        blocks.append(_comparison(models.comparison))
    blocks += [_glance(models), *changes(models), *_other_images(models)]
    cards = [
        {
            "title": model.title,
            "color": model.color,
            "judgements": judge(model, models.baseline),
            "advice": advise(model, models),
            "notes": (*model.notes, *(model.views.notes if model.views else ())),
        }
        for model in models
    ]
    blocks.append(Blocks("verdicts", cards))
    return Section("verdict", "Verdict", READING, tuple(blocks))


def _glance(models: ReportModels) -> Table:
    """The few numbers of every model that stand at the top."""
    ranked = len(models) > 1 and len(_groups(models)) < 2
    columns = [
        _column([number_at(model, path) for model in models], show, better if ranked else 0)
        for _, path, show, better in QUANTITIES
    ]
    rows = tuple(
        (Cell.of(model.title), *cells)
        for model, cells in zip(models, zip(*columns, strict=True), strict=True)
    )
    seed = "" if models.comparison is None else ": the runs of the first seed"
    return Table(
        ("model", *(name for name, *_ in QUANTITIES)),
        rows,
        caption=f"At a glance{seed}" + ("; the best of each column is bold" if ranked else ""),
        key="glance",
        numeric=tuple(range(1, len(QUANTITIES) + 1)),
    )


def _column(values: list[float | None], show: Show, better: int) -> list[Cell]:
    """Cells of one quantity; the best of several is bold where ``better`` is 1 or -1."""
    numbers = [better * value for value in finite(values)]
    best = max(numbers) if better and len(numbers) > 1 else None
    return [
        show(value, strong=value is not None and best is not None and better * value == best)
        for value in values
    ]


QUANTITIES: tuple[tuple[str, str, Show, int], ...] = (
    ("accuracy", "accuracy", Cell.percent, 1),
    ("worst class", "worst_class", Cell.percent, 1),
    ("class margin", "geometry.prototypes.class_margin", Cell.degrees, 1),
    ("mean cosine margin", "geometry.margins.cosine.overall.mean", Cell.number, 1),
    ("perturbed accuracy", "perturbed_accuracy", Cell.percent, 1),
    ("strongest attack", "attacked_accuracy", Cell.percent, 1),
    ("calibration error", "calibration.expected_error", Cell.percent, -1),
)
"""Name, path in the model, how it is written, and whether more (1) or less (-1) is better."""


CHOSEN = (
    "They also chose the epoch of each model, so its accuracy on them is too high, and which model "
    "is more accurate they cannot say: put images that training has not seen into test/. "
)


def changes(models: ReportModels) -> list[Block]:
    """Every model against the baseline; nothing where there is none, or more than one seed."""
    base = models.baseline
    if base is None or models.comparison is not None:
        return []
    others = [model for model in models if comparable(model, base) and known(model.accuracy)]
    if not others:
        return []
    chosen = base.judged_on == VALIDATION
    names = (name for name, *_ in QUANTITIES[1:])
    heads = ("model", "accuracy", "95 % interval", "verdict", *names)
    return [
        Table(
            heads,
            tuple(_changed(model, base) for model in others),
            caption=f"Differences from {base.title}, shares in percentage points; less calibration "
            "error is better, more of everything else",
            key="changes",
            numeric=(1, 2, *range(4, len(heads))),
        ),
        Note(
            f"The interval is of the accuracy on {base.samples or 0:,} {base.judged_on}; other "
            f"columns have none. {_method(others, base)} {CHOSEN if chosen else ''}Each model is "
            "one training run, and another seed changes all its numbers: only several seeds show "
            "whether a method is better.",
            f"largemargin compare --methods {_methods(others)} --seeds 5",
        ),
    ]


def _methods(others: list[ReportModel]) -> str:
    """What to compare softmax with, which is always among them."""
    names = dict.fromkeys(model.config.objective.name for model in others if model.config)
    names.pop("cross_entropy", None)
    return shlex.quote(",".join(names)) if names else "NAME"


def _method(others: list[ReportModel], base: ReportModel) -> str:
    """How the intervals were made, in a sentence for readers who know one or the other."""
    alone = [model.title for model in others if paired(model, base) is None]
    by_image = "compares the models image by image (Newcombe 1998, for paired data)"
    if not alone:
        return f"It {by_image}."
    apart = (
        "treats the images of the two models as independent samples (Newcombe 1998) and is "
        "therefore too wide: which images are right was not recorded for both; largemargin "
        "evaluate records it."
    )
    if len(alone) == len(others):
        return f"It {apart}"
    return f"It {by_image}, but for {', '.join(alone)} it {apart}"


def _changed(model: ReportModel, base: ReportModel) -> tuple[Cell, ...]:
    low, high = difference(model, base)
    clear = known(low) and not low <= 0 <= high
    more = "higher on them" if base.judged_on == VALIDATION else "more accurate"
    less = "lower on them" if base.judged_on == VALIDATION else "less accurate"
    says = (more if low > 0 else less) if clear else "no clear difference"
    cells = []
    for _, path, show, _ in QUANTITIES[1:]:
        change = minus(number_at(model, path), number_at(base, path))
        cell = Cell.points(change) if show == Cell.percent else show(change)
        if change is not None and change > 0 and show != Cell.percent:
            cell = replace(cell, text=f"+{cell.text}")
        cells.append(cell)
    return (
        Cell.of(model.title),
        Cell.points(minus(model.accuracy, base.accuracy)),
        Cell.interval(low, high),
        Cell.of(says if known(low) else "not known", strong=clear),
        *cells,
    )


def _comparison(comparison: Comparison) -> Table:
    rows = []
    for result in comparison.methods:
        spread = "" if not known(result.std) else f" ± {100 * result.std:.2f}"
        test = result.test
        rows.append(
            (
                Cell.of(result.method),
                Cell(f"{100 * result.mean:.2f}{spread} %", result.mean),
                Cell.points(None if test is None else test.difference),
                Cell.interval(*((None, None) if test is None else (test.low, test.high))),
                Cell(number(result.corrected, 3), result.corrected),
                Cell.of(verdict_text(result)),
                Cell.degrees(result.class_margin),
                Cell(str(result.trials), result.trials),
            )
        )
    seeds = len(comparison.seeds)
    return Table(
        (
            *("method", f"{comparison.split} accuracy", "difference", "95 % interval", "p (Holm)"),
            *("verdict", "class margin", "trials"),
        ),
        tuple(rows),
        caption=f"Comparison over {seeds} seed{'s' if seeds > 1 else ''} on {comparison.images:,} "
        f"{comparison.split} images, against softmax by a paired t-test, in points; everything "
        "below shows the first seed",
        key="comparison",
        numeric=(1, 2, 3, 4, 6, 7),
    )


def _groups(models: ReportModels) -> list[list[ReportModel]]:
    """Models by the images they were tested on; of a geometry alone they are not known."""
    found: dict[str, list[ReportModel]] = {}
    for model in models:
        if model.tested_on is not None:
            found.setdefault(model.data_key, []).append(model)
    return list(found.values())


def _other_images(models: ReportModels) -> list[Note]:
    """A sentence where differences of the models may be differences of their images."""
    groups = _groups(models)
    names = "; ".join(", ".join(model.title for model in group) for group in groups)
    words = (
        f"Not all models were tested on the same images ({names}): differences between these "
        "groups may come from the images and not from the models. Only models of the baseline's "
        "images are compared with it."
    )
    return [Note(words)] if len(groups) > 1 else []
