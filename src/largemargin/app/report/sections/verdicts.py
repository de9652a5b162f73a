"""What the models are worth, at a glance, and what to try next."""

import shlex
from collections.abc import Callable
from dataclasses import replace

from largemargin.app.report.charts import (
    NOTHING,
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
    swatch,
)
from largemargin.app.report.judgements import (
    VALIDATION,
    Judgement,
    advise,
    comparable,
    difference,
    judge,
    paired,
)
from largemargin.app.report.report_models import (
    ReportModel,
    ReportModels,
    number_at,
    settings_of,
)
from largemargin.app.training.comparison_result import Comparison, verdict_text

Show = Callable[..., Cell]

READING = (
    "A green disc is good, an amber triangle needs a closer look, a red square is weak. "
    "Good is a row of greens, and a margin loss at least as accurate as softmax."
)


def verdict_section(models: ReportModels) -> Section:
    judged = {
        model.name: {each.name: each for each in judge(model, models.baseline)} for model in models
    }
    blocks: list[Block] = []
    if models.comparison is not None:
        blocks.append(_comparison(models.comparison))
    blocks += [glance(models, judged), *compared(models), *_other_images(models)]
    blocks += [*_settings(models), *_missing(models, judged), Blocks("advice", _advice(models))]
    for model in models:
        notes = (*model.notes, *(model.views.notes if model.views else ()))
        blocks += [Note(f"{model.title}: {note}") for note in notes]
    return Section("verdict", "Verdict", READING, tuple(blocks))


Judged = dict[str, dict[str, Judgement]]
"""By the name of the model, and of what is judged."""


def glance(models: ReportModels, judged: Judged) -> Table:
    """The few numbers of every model, how good they are, and the accuracy against the baseline."""
    ranked = len(models) > 1 and len(_groups(models)) < 2
    columns = {"model": list(map(_name, models))}
    for name, path, show, better, rule in QUANTITIES:
        values = [number_at(model, path) for model in models]
        cells = _column(values, show, better if ranked else 0)
        told = (judged[model.name].get(rule) for model in models)
        columns[name] = list(map(_judged, cells, told))
        if name == "accuracy":
            columns |= _against_baseline(models)
    seed = "" if models.comparison is None else ": the runs of the first seed"
    first = judged[models[0].name]
    return Table(
        tuple(columns),
        tuple(zip(*columns.values(), strict=True)),
        caption=f"At a glance{seed}; below the accuracy its 95 % interval"
        + (", the best of each column bold" if ranked else ""),
        key="glance",
        numeric=tuple(range(1, len(columns))),
        rules={name: first[rule].rule for name, *_, rule in QUANTITIES if rule},
    )


def _name(model: ReportModel) -> Cell:
    about = "" if model.config is None else model.config.objective.name
    return replace(Cell.of(model.title), detail=about, swatch=swatch(model.color))


def _against_baseline(models: ReportModels) -> dict[str, list[Cell]]:
    """The column of differences; none where nothing is compared."""
    base, others = models.baseline, _others(models)
    if base is None or not others:
        return {}
    return {
        "against baseline": [
            against(model, base) if model in others else Cell(NOTHING) for model in models
        ]
    }


def _judged(cell: Cell, judgement: Judgement | None) -> Cell:
    if judgement is None or judgement.level == "unknown":
        return cell
    return replace(cell, level=judgement.level, detail=judgement.detail, title=judgement.word)


def _column(values: list[float | None], show: Show, better: int) -> list[Cell]:
    """Cells of one quantity; the best of several is bold where ``better`` is 1 or -1."""
    numbers = [better * value for value in finite(values)]
    best = max(numbers) if better and len(numbers) > 1 else None
    return [
        show(value, strong=value is not None and best is not None and better * value == best)
        for value in values
    ]


QUANTITIES: tuple[tuple[str, str, Show, int, str], ...] = (
    ("accuracy", "accuracy", Cell.percent, 1, "Accuracy"),
    ("worst class", "worst_class", Cell.percent, 1, "Worst classes"),
    ("class margin", "geometry.prototypes.class_margin", Cell.degrees, 1, "Class margin"),
    ("mean cosine margin", "geometry.margins.cosine.overall.mean", Cell.number, 1, ""),
    ("perturbed accuracy", "perturbed_accuracy", Cell.percent, 1, "Robustness"),
    ("strongest attack", "attacked_accuracy", Cell.percent, 1, ""),
    ("calibration error", "calibration.expected_error", Cell.percent, -1, "Calibration"),
)
"""Name, path in the model, how it is written, whether more (1) or less (-1) is better, and how it
is judged."""


CHOSEN = (
    "They also chose the epoch of each model, so its accuracy on them is too high, and which model "
    "is more accurate they cannot say: put images that training has not seen into test/. "
)


def _others(models: ReportModels) -> list[ReportModel]:
    """What is compared with the baseline; nothing where several seeds are."""
    base = models.baseline
    if base is None or models.comparison is not None:
        return []
    return [model for model in models if comparable(model, base) and known(model.accuracy)]


def against(model: ReportModel, base: ReportModel) -> Cell:
    """The difference in points, its interval, and what it says."""
    low, high = difference(model, base)
    clear = known(low) and not low <= 0 <= high
    chosen = base.judged_on == VALIDATION
    more, less = ("higher", "lower") if chosen else ("more accurate", "less accurate")
    says = (more if low > 0 else less) if clear else "no clear difference"
    detail = f"{Cell.interval(low, high).text}, {says}" if known(low) else "interval not known"
    change = Cell.points(minus(model.accuracy, base.accuracy))
    return replace(change, strong=clear, detail=detail)


def compared(models: ReportModels) -> list[Note]:
    """What the differences are of, and what they cannot say."""
    base, others = models.baseline, _others(models)
    if base is None or not others:
        return []
    return [
        Note(
            "The 95 % interval against the baseline, in points, is of the accuracy on "
            f"{base.samples or 0:,} {base.judged_on}. {_intervals(others, base)} "
            f"{CHOSEN if base.judged_on == VALIDATION else ''}Each model is one training run: only "
            "several seeds show whether a method is better.",
            f"largemargin compare --methods {_methods(others)} --seeds 5",
        ),
    ]


def _settings(models: ReportModels) -> list[Block]:
    """In what the runs differ, beginning with what is no part of the loss."""
    runs = [model for model in models if model.run is not None]
    rows = settings_of(runs)[0] if runs else []
    if not rows:
        return []
    rows.sort(key=lambda row: _is_of_the_loss(row[0]))
    unequal = ", ".join(row[0] for row in rows if not _is_of_the_loss(row[0]))
    words = f": the models differ in more than the objective ({unequal})" if unequal else ""
    return [
        Table(
            ("setting", *(model.title for model in runs)),
            tuple(tuple(map(Cell.of, row)) for row in rows),
            caption=f"Unequal settings{words}",
            key="unequal",
        )
    ]


def _is_of_the_loss(setting: str) -> bool:
    """Softmax could have class weights and label smoothing, too."""
    return setting.startswith("objective.") and not setting.endswith(
        ("class_weights", "label_smoothing")
    )


def _missing(models: ReportModels, judged: Judged) -> list[Note]:
    """What could not be judged, with the command that measures it."""
    found: dict[str, list[str]] = {}
    for model in models:
        for each in judged[model.name].values():
            if each.command:
                found.setdefault(each.command, []).append(f"{each.name.lower()} of {model.title}")
    return [Note(f"Not measured: {', '.join(names)}.", run) for run, names in found.items()]


def _advice(models: ReportModels) -> list[dict[str, object]]:
    """What to try next, once for all models it is meant for, with what was seen of each."""
    found: dict[str, tuple[dict[str, list[str]], list[str]]] = {}
    for model in models:
        for each in advise(model, models):
            seen, options = found.setdefault(each.attempt, ({}, []))
            seen.setdefault(each.seen, []).append(model.title)
            options += [each.option] * (each.option not in ("", *options))
    alone = len(models) == 1
    return [
        {
            "seen": [("" if alone else ", ".join(names), text) for text, names in seen.items()],
            "attempt": attempt,
            "options": options,
        }
        for attempt, (seen, options) in found.items()
    ]


def _methods(others: list[ReportModel]) -> str:
    """What to compare softmax with, which is always among them."""
    names = dict.fromkeys(model.config.objective.name for model in others if model.config)
    names.pop("cross_entropy", None)
    return shlex.quote(",".join(names)) if names else "NAME"


def _intervals(others: list[ReportModel], base: ReportModel) -> str:
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
