"""Accuracy under noise, occlusion and attacks, calibration, and how curved the loss is."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from largemargin.app.report.charts import (
    DASHES,
    NOTHING,
    Block,
    Cell,
    Chart,
    Dash,
    Note,
    Section,
    Series,
    Table,
    arranged,
    known,
)
from largemargin.app.report.report_models import ReportModel, ReportModels, unknown
from largemargin.measuring.accuracy import wilson
from largemargin.measuring.calibration import Calibration
from largemargin.measuring.evaluate import Evaluation
from largemargin.measuring.input_curvature import Curvature
from largemargin.measuring.robust_accuracy import PerturbedAccuracy

READING = (
    "Accuracy on disturbed images; bars show the spread of repeated draws, or 95 % intervals. Good "
    "is a line that stays high to the right; of the reliability diagram, one on the diagonal."
)

Evaluated: TypeAlias = tuple[ReportModel, Evaluation]


def robustness_section(models: ReportModels) -> Section:
    evaluated = [(model, model.evaluation) for model in models if model.evaluation is not None]
    blocks: list[Block] = []
    more: list[Block] = []
    if evaluated:
        blocks += [_noise(evaluated), *_attacks(evaluated), _perturbations(evaluated)]
        more += [_ood(evaluated), _retrieval(evaluated)]
    without = [model for model in models if model.evaluation is None]
    words = "accuracy under noise, perturbations and attacks is not known."
    blocks += unknown(without, words, lambda model: model.evaluate_command)
    blocks.insert(2, _reliability(models))
    more += _curvature(models)
    folded = "Curvature, retrieval, other images"
    return Section("robustness", "Robustness", READING, arranged(blocks), arranged(more), folded)


def _noise(evaluated: list[Evaluated]) -> Chart:
    series = []
    for model, evaluation in evaluated:
        if levels := gaussian_levels(evaluation):
            curve, clean = _with_spread(model, levels, evaluation), evaluation.clean.accuracy
            x, y = (0.0, *curve.x), (clean, *curve.y)
            low, high = (clean, *curve.low), (clean, *curve.high)
            series.append(replace(curve, x=x, y=y, low=low, high=high))
    return Chart(
        "noise",
        "Accuracy under Gaussian noise",
        tuple(series),
        x="standard deviation, pixels in [0, 1]",
        y="accuracy",
        percent_y=True,
        alt="Accuracy against the strength of Gaussian noise.",
    )


def _with_spread(
    model: ReportModel, places: Sequence[tuple[float, str]], evaluation: Evaluation, **settings: Any
) -> Series:
    """Accuracies at places of the x axis, by the name of the perturbation, and their spread."""
    results = [evaluation.perturbed[name] for _, name in places]
    spread = [each.std if known(each.std) else 0.0 for each in results]
    ys = [each.accuracy for each in results]
    low = [y - s for y, s in zip(ys, spread, strict=True)]
    high = [y + s for y, s in zip(ys, spread, strict=True)]
    return model.line([x for x, _ in places], ys, low=low, high=high, **settings)


def gaussian_levels(evaluation: Evaluation) -> list[tuple[float, str]]:
    """(standard deviation, name) of every level of Gaussian noise, weakest first."""
    levels = []
    for name in evaluation.perturbed:
        match = re.fullmatch(r"gaussian ([0-9.e+-]+)(?:/([0-9.]+))?", name)
        if match:
            levels.append((float(match[1]) / float(match[2] or 1), name))
    return sorted(levels)


def _perturbations(evaluated: list[Evaluated]) -> Block:
    """Bars of every perturbation, and the same as a table."""
    every = list(dict.fromkeys(itertools.chain.from_iterable(e.perturbed for _, e in evaluated)))
    if not every:
        command = f"{evaluated[0][0].evaluate_command} --perturbations auto"
        return Note("No perturbations were evaluated.", command)
    # Levels of Gaussian noise have a curve of their own.
    curve = {name for _, evaluation in evaluated for _, name in gaussian_levels(evaluation)}
    names = [name for name in every if name not in curve] or every
    return Chart(
        "perturbations",
        "Accuracy under each perturbation",
        tuple(_bars(model, evaluation, names) for model, evaluation in evaluated),
        y="accuracy",
        percent_y=True,
        names=tuple(name.replace("_", " ") for name in names),
        alt="A group of bars for each perturbation.",
        table=_perturbation_table(evaluated, every),
        wide=True,
    )


def _perturbation_table(evaluated: list[Evaluated], names: list[str]) -> Table:
    rows = tuple(
        (
            Cell.of(name.replace("_", " ")),
            *(_accuracy_cell(each.perturbed.get(name)) for _, each in evaluated),
        )
        for name in names
    )
    heads = ("perturbation", *(model.title for model, _ in evaluated))
    return Table(heads, rows, key="perturbed", numeric=tuple(range(1, len(heads))))


def _bars(model: ReportModel, evaluation: Evaluation, names: list[str]) -> Series:
    places = [(x, name) for x, name in enumerate(names) if name in evaluation.perturbed]
    return _with_spread(model, places, evaluation, form="bars")


def _accuracy_cell(result: PerturbedAccuracy | None) -> Cell:
    if result is None:
        return Cell(NOTHING)
    spread = f" ± {100 * result.std:.2f}" if known(result.std) else ""
    return Cell(f"{100 * result.accuracy:.2f}{spread} %", result.accuracy)


NORMS = {"linf": "largest change of a pixel", "l2": "Euclidean length"}


def _attacks(evaluated: list[Evaluated]) -> list[Block]:
    """Accuracy by the strength of attacks, one chart for each norm."""
    if not any(evaluation.attacked for _, evaluation in evaluated):
        command = f"{evaluated[0][0].evaluate_command} --attacks '[fgsm,pgd]' --linf '[0.02,0.04]'"
        return [Note("No attacks were evaluated.", command)]
    charts = []
    for norm in NORMS:
        curves = [_attack_curves(model, evaluation, norm) for model, evaluation in evaluated]
        chart = Chart(
            f"attacks-{norm}",
            f"Accuracy under attacks, {norm}",
            tuple(itertools.chain.from_iterable(curves)),
            x=f"ε: {NORMS[norm]}, pixels in [0, 1]",
            y="accuracy",
            percent_y=True,
            alt=f"Accuracy against the strength of {norm} attacks.",
        )
        if chart.series:
            charts.append(chart)
    return [replace(charts[0], table=_attack_table(evaluated)), *charts[1:]]


def _attack_curves(model: ReportModel, evaluation: Evaluation, norm: str) -> Iterator[Series]:
    """A line for each kind of attack, from the clean accuracy on."""
    attacks = [attack for attack in evaluation.attacked if attack.norm == norm]
    kinds = list(dict.fromkeys(attack.attack.split()[0] for attack in attacks))
    clean = evaluation.clean.accuracy
    for place, kind in enumerate(kinds):
        own = [attack for attack in attacks if attack.attack.split()[0] == kind]
        own.sort(key=lambda attack: attack.epsilon)
        yield model.line(
            [0.0, *(attack.epsilon for attack in own)],
            [clean, *(attack.accuracy for attack in own)],
            kind,
            DASHES[place % len(DASHES)],
            name=f"{model.name}, {kind}",
            low=[clean, *(attack.low for attack in own)],
            high=[clean, *(attack.high for attack in own)],
        )


def _attack_table(evaluated: list[Evaluated]) -> Table:
    rows = tuple(
        (
            Cell.of(model.title),
            Cell.of(attack.attack),
            Cell.percent(attack.accuracy),
            Cell.percent(attack.low),
            Cell.percent(attack.high),
            Cell.count(attack.samples),
        )
        for model, evaluation in evaluated
        for attack in evaluation.attacked
    )
    heads = ("model", "attack", "accuracy", "from", "to", "samples")
    return Table(heads, rows, key="attacks", numeric=(2, 3, 4, 5))


BIN_SAMPLES = 5
"""Accuracy of fewer predictions of similar confidence says little."""


def _calibrations(models: ReportModels) -> Iterator[tuple[ReportModel, Calibration, str]]:
    for model in models:
        if model.calibration is not None:
            yield model, model.calibration, ""
        if model.evaluation is not None and model.evaluation.calibrated is not None:
            words = f"temperature {model.evaluation.temperature:.3g}"
            yield model, model.evaluation.calibrated, words


def _reliability(models: ReportModels) -> Chart:
    """Accuracy of predictions by their confidence, as they are and with a temperature."""
    found = list(_calibrations(models))
    series = [Series("calibrated", [0.0, 1.0], [0.0, 1.0], color=None, dash="dash", faint=True)]
    rows: list[tuple[Cell, ...]] = []
    for model, fit, words in found:
        name = ", ".join(filter(None, (model.title, words)))
        bins = zip(fit.confidence, fit.accuracy, fit.counts, strict=True)
        filled = [each for each in bins if each[2]]
        series.append(_bin_curve(model, name, filled, "dot" if words else "solid"))
        rows += [
            (Cell.of(name), Cell.percent(x), Cell.percent(y), Cell.count(count))
            for x, y, count in filled
        ]
    heads = ("model", "confidence", "accuracy", "samples")
    return Chart(
        "calibration",
        "Reliability: accuracy by confidence",
        tuple(series) if found else (),
        x="confidence",
        y="accuracy",
        percent_y=True,
        alt="Good lies on the diagonal; below it the model is overconfident.",
        table=Table(heads, tuple(rows), key="bins", numeric=(1, 2, 3)),
        note=f"bins of fewer than {BIN_SAMPLES} samples are in the numbers only"
        + ("; dotted: with a temperature" if any(words for *_, words in found) else ""),
    )


def _bin_curve(
    model: ReportModel, name: str, bins: list[tuple[float, float, int]], dash: Dash
) -> Series:
    """Accuracy by confidence with 95 % intervals, from (confidence, accuracy, samples) of bins."""
    drawn = [each for each in bins if each[2] >= BIN_SAMPLES]
    ends = [wilson(round(share * count), count) for _, share, count in drawn]
    low, high = [low for low, _ in ends], [high for _, high in ends]
    xs, ys = [x for x, _, _ in drawn], [y for _, y, _ in drawn]
    return model.line(xs, ys, dash=dash, name=name, low=low, high=high)


def _ood(evaluated: list[Evaluated]) -> Block:
    """How well scores tell out-of-distribution images from test images."""
    rows = tuple(
        (
            Cell.of(model.title),
            Cell.of(name.replace("_", " ")),
            Cell.number(area),
            Cell.percent(scores.fpr95[name]),
        )
        for model, evaluation in evaluated
        if (scores := evaluation.ood) is not None
        for name, area in scores.auroc.items()
    )
    if not rows:
        command = f"{evaluated[0][0].evaluate_command} --ood FOLDER"
        return Note("Out-of-distribution detection was not evaluated.", command)
    heads = ("model", "score", "AUROC", "false positives at 95 %")
    return Table(heads, rows, caption="Out-of-distribution images", key="ood", numeric=(2, 3))


def _retrieval(evaluated: list[Evaluated]) -> Table:
    rows = []
    for model, evaluation in evaluated:
        if evaluation.retrieval is not None:
            recalls = (f"at {k}: {100 * v:.2f} %" for k, v in evaluation.retrieval.recall.items())
            mean = Cell.percent(evaluation.retrieval.mean_average_precision)
            rows.append((Cell.of(model.title), Cell.of(", ".join(recalls)), mean))
    heads = ("model", "recall", "mean average precision")
    return Table(heads, tuple(rows), caption="Search by features", key="retrieval", numeric=(2,))


Curved: TypeAlias = tuple[ReportModel, Curvature]


def _curvature(models: ReportModels) -> list[Block]:
    """How curved the loss is around samples, and how that goes with robustness."""
    curved = [(model, g.curvature) for model, g in models.measured if g.curvature is not None]
    names = {model.name for model, _ in curved}
    return [
        _curvatures(curved),
        *unknown(
            [model for model in models if model.name not in names],
            "the curvature of the loss around samples was not measured.",
            lambda model: model.measure_command("--curvature true", "--max_samples 500"),
        ),
    ]


def _curvatures(curved: list[Curved]) -> Table:
    rows = []
    for model, curvature in curved:
        overall = curvature.overall
        values = (*(overall.quantiles[q] for q in (0.05, 0.25, 0.5, 0.75, 0.95)), overall.mean)
        correlations = (found.correlation for found in curvature.robustness.values())
        correlation = next((value for value in correlations if known(value)), None)
        last = (Cell.count(curvature.samples), Cell.number(correlation, digits=3))
        rows.append((Cell.of(model.title), *map(Cell.number, values), *last))
    heads = (
        *("model", "5 %", "25 %", "median", "75 %", "95 %", "mean", "samples"),
        "correlation with robustness",
    )
    caption = "Curvature of the loss around samples: less is better"
    return Table(heads, tuple(rows), caption, "curvatures", tuple(range(1, 9)))
