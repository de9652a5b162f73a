"""Section 6: accuracy under noise, occlusion and attacks, and how curved the loss is."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from largemargin.app.report.charts import (
    DASHES,
    NOTHING,
    Block,
    Cell,
    Chart,
    Dash,
    Heat,
    Note,
    Section,
    Series,
    Table,
    known,
)
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.measuring.calibration import Calibration
from largemargin.measuring.evaluate import Evaluation
from largemargin.measuring.input_curvature import Curvature, CurvatureRobustness
from largemargin.measuring.robust_accuracy import PerturbedAccuracy

READING = (
    "Accuracy on disturbed images; bars show the spread of repeated draws, or 95 % intervals for "
    "attacks. Good is a line that stays high to the right, above the baseline's."
)

Evaluated: TypeAlias = tuple[ReportModel, Evaluation]


def robustness_section(models: ReportModels) -> Section:
    evaluated = [(model, model.evaluation) for model in models if model.evaluation is not None]
    blocks: list[Block] = []
    if evaluated:
        blocks += [_noise(evaluated), _perturbations(evaluated), *_attacks(evaluated)]
        blocks += [_calibration(evaluated), _ood(evaluated), _retrieval(evaluated)]
    for model in models:
        if model.evaluation is None:
            words = f"{model.title}: accuracy under noise, perturbations and attacks is not known."
            blocks.append(Note(words, model.evaluate_command))
    blocks += [*_curvature(models), *_surfaces(models)]
    return Section.arranged("robustness", "Robustness", READING, blocks)


def _noise(evaluated: list[Evaluated]) -> Chart:
    series = []
    for model, evaluation in evaluated:
        levels = gaussian_levels(evaluation)
        if levels:
            noisy = [evaluation.perturbed[name] for _, name in levels]
            ys = [evaluation.clean.accuracy, *(result.accuracy for result in noisy)]
            spread = [0.0, *map(_spread, noisy)]
            low = [y - s for y, s in zip(ys, spread, strict=True)]
            high = [y + s for y, s in zip(ys, spread, strict=True)]
            xs = [0.0, *(sigma for sigma, _ in levels)]
            series.append(model.line(xs, ys, low=low, high=high))
    return Chart(
        "noise",
        "Accuracy under Gaussian noise",
        tuple(series),
        x="standard deviation, pixels in [0, 1]",
        y="accuracy",
        percent_y=True,
        alt="Accuracy against the strength of Gaussian noise, one line for each model.",
    )


def gaussian_levels(evaluation: Evaluation) -> list[tuple[float, str]]:
    """(standard deviation, name) of every level of Gaussian noise, weakest first."""
    levels = []
    for name in evaluation.perturbed:
        match = re.fullmatch(r"gaussian ([0-9.e+-]+)(?:/([0-9.]+))?", name)
        if match:
            levels.append((float(match[1]) / float(match[2] or 1), name))
    return sorted(levels)


def _spread(result: PerturbedAccuracy) -> float:
    return result.std if known(result.std) else 0.0


def _perturbations(evaluated: list[Evaluated]) -> Block:
    """Bars of every perturbation, and the same as a table."""
    names = list(
        dict.fromkeys(name for _, evaluation in evaluated for name in evaluation.perturbed)
    )
    if not names:
        command = f"{evaluated[0][0].evaluate_command} --perturbations auto"
        return Note("No perturbations were evaluated.", command)
    shown = tuple(name.replace("_", " ") for name in names)
    rows = tuple(
        (Cell.of(words), *(_accuracy_cell(each.perturbed.get(name)) for _, each in evaluated))
        for name, words in zip(names, shown, strict=True)
    )
    heads = ("perturbation", *(model.title for model, _ in evaluated))
    return Chart(
        "perturbations",
        "Accuracy under each perturbation",
        tuple(_bars(model, evaluation, names) for model, evaluation in evaluated),
        y="accuracy",
        percent_y=True,
        names=shown,
        alt="Accuracy under each perturbation, a group of bars for each, a bar for each model.",
        table=Table(heads, rows, key="perturbed", numeric=tuple(range(1, len(heads)))),
        wide=True,
    )


def _bars(model: ReportModel, evaluation: Evaluation, names: list[str]) -> Series:
    own = [name for name in names if name in evaluation.perturbed]
    xs, results = [names.index(name) for name in own], [evaluation.perturbed[name] for name in own]
    ys, spread = [result.accuracy for result in results], list(map(_spread, results))
    low = [y - s for y, s in zip(ys, spread, strict=True)]
    high = [y + s for y, s in zip(ys, spread, strict=True)]
    return model.line(xs, ys, form="bars", low=low, high=high)


def _accuracy_cell(result: PerturbedAccuracy | None) -> Cell:
    if result is None:
        return Cell(NOTHING)
    spread = f" ± {100 * result.std:.2f}" if known(result.std) else ""
    return Cell(f"{100 * result.accuracy:.2f}{spread} %", result.accuracy)


NORMS = {"linf": "largest change of a pixel", "l2": "Euclidean length"}


def _attacks(evaluated: list[Evaluated]) -> list[Block]:
    """Accuracy by the strength of attacks, one chart for each norm."""
    first = evaluated[0][0]
    if not any(evaluation.attacked for _, evaluation in evaluated):
        return [Note("No attacks were evaluated.", _attack_command(first, "[fgsm,pgd]"))]
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
    strengths = {(one.norm, one.epsilon) for _, found in evaluated for one in found.attacked}
    blocks: list[Block] = [replace(charts[0], table=_attack_table(evaluated)), *charts[1:]]
    if len(strengths) == len({norm for norm, _ in strengths}):
        words = "Attacks were evaluated at one strength each; several make a curve."
        blocks.append(Note(words, _attack_command(first, "[pgd]")))
    return blocks


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


def _attack_command(model: ReportModel, attacks: str) -> str:
    return f"{model.evaluate_command} --attacks '{attacks}' --linf '[0.01,0.02,0.04,0.08]'"


BIN_SAMPLES = 5
"""Accuracy of fewer predictions of similar confidence says little."""


def _calibration(evaluated: list[Evaluated]) -> Chart:
    series = [Series("calibrated", [0.0, 1.0], [0.0, 1.0], color=None, dash="dash", faint=True)]
    rows = []
    found: list[tuple[ReportModel, Calibration, str]] = []
    for model, evaluation in evaluated:
        found.append((model, evaluation.clean.calibration, model.title))
        if evaluation.calibrated is not None:
            title = f"{model.title}, temperature {evaluation.temperature:.3g}"
            found.append((model, evaluation.calibrated, title))
    for model, fit, title in found:
        bins = list(zip(fit.confidence, fit.accuracy, fit.counts, strict=True))
        drawn = [(x, y) for x, y, count in bins if count >= BIN_SAMPLES]
        xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
        dash: Dash = "solid" if title == model.title else "dot"
        series.append(Series(title, xs, ys, color=model.color, dash=dash))
        rows += [
            (Cell.of(title), Cell.percent(x), Cell.percent(y), Cell.count(count))
            for x, y, count in bins
            if count
        ]
    heads = ("model", "confidence", "accuracy", "samples")
    return Chart(
        "calibration",
        "Confidence against accuracy",
        tuple(series),
        x="confidence",
        y="accuracy",
        percent_y=True,
        alt="Accuracy of predictions by their confidence. Good lies on the diagonal; below it "
        "the model is overconfident.",
        table=Table(heads, tuple(rows), key="bins", numeric=(1, 2, 3)),
        note=f"bins of fewer than {BIN_SAMPLES} samples are in the numbers only",
    )


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


SMALLEST = 1e-12
"""A flat loss has curvature 0, which a logarithmic axis does not show."""

Curved: TypeAlias = tuple[ReportModel, Curvature]


def _curvature(models: ReportModels) -> list[Block]:
    """How curved the loss is around samples, and how that goes with robustness."""
    curved = [(model, g.curvature) for model, g in models.measured if g.curvature is not None]
    blocks: list[Block] = []
    if curved:
        blocks += [_boxes(curved), _flattest(curved), _groups(curved)]
    for model in models:
        if model.geometry is None or model.geometry.curvature is None:
            words = f"{model.title}: the curvature of the loss around samples was not measured."
            command = model.measure_command("--curvature true", "--max_samples 500")
            blocks.append(Note(words, command))
    return blocks


def _boxes(curved: list[Curved]) -> Chart:
    boxes, rows = [], []
    for model, curvature in curved:
        overall = curvature.overall
        five = [max(overall.quantiles[q], SMALLEST) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
        boxes.append(Series(model.title, [], five, form="box", color=model.color))
        correlations = (found.correlation for found in curvature.robustness.values())
        correlation = next((value for value in correlations if known(value)), None)
        rows.append(
            (
                Cell.of(model.title),
                *(Cell.number(value) for value in (*five, overall.mean)),
                Cell.count(curvature.samples),
                Cell.number(correlation, digits=3),
            )
        )
    heads = (
        *("model", "5 %", "25 %", "median", "75 %", "95 %", "mean", "samples"),
        "correlation with robustness",
    )
    return Chart(
        "curvature",
        "Curvature of the loss around samples",
        tuple(boxes),
        y="curvature",
        log_y=True,
        alt="Box for each model: median, quartiles, and whiskers at 5 % and 95 %. Good is low.",
        table=Table(heads, tuple(rows), key="curvatures", numeric=tuple(range(1, 9))),
    )


def _flattest(curved: list[Curved]) -> Chart:
    curves = [
        _curve(model, place, found, found.shares, found.weak)
        for model, curvature in curved
        for place, found in enumerate(curvature.robustness.values())
    ]
    return Chart(
        "curvature-robustness",
        "Noisy accuracy of the flattest samples",
        tuple(curves),
        x="share of samples kept, flattest first",
        y="accuracy under noise",
        percent_y=True,
        alt="Accuracy under noise of the samples of lowest curvature. Falling lines mean that "
        "flat samples are the robust ones.",
    )


def _groups(curved: list[Curved]) -> Chart:
    curves = []
    for model, curvature in curved:
        for place, found in enumerate(curvature.robustness.values()):
            groups = [
                (right / found.draws, max(mean, SMALLEST))
                for right, mean in enumerate(found.group_curvature)
                if known(mean)
            ]
            shares, means = [share for share, _ in groups], [mean for _, mean in groups]
            curves.append(_curve(model, place, found, shares, means))
    several = any(len(curve.x) > 1 for curve in curves)
    return Chart(
        "curvature-groups",
        "Curvature against robustness",
        tuple(curves) if several else (),
        x="share of noisy copies classified correctly",
        y="mean curvature",
        log_y=True,
        alt="Mean curvature of samples by how many of their noisy copies are classified "
        "correctly. Good is low everywhere; lines fall where flat samples are the robust ones.",
    )


def _curve(
    model: ReportModel,
    place: int,
    found: CurvatureRobustness,
    xs: Sequence[float],
    ys: Sequence[float],
) -> Series:
    """A line of one model under one kind of noise."""
    style = f"{found.noise} noise {found.amount:g}"
    name = f"{model.name}, {style}"
    return model.line(xs, ys, style, DASHES[place % len(DASHES)], name=name)


def _surfaces(models: ReportModels) -> list[Chart]:
    """The loss around one sample, of all models in one scale."""
    viewed = [
        (model, model.views, model.views.surface)
        for model in models
        if model.views is not None and model.views.surface is not None
    ]
    highest = max((max(map(max, surface.losses)) for *_, surface in viewed), default=0.0)
    return [
        Chart(
            f"surface-{model.name}",
            f"Loss around one sample: {model.title}",
            heat=Heat(
                surface.losses,
                x=surface.across,
                y=surface.along,
                unit="loss",
                low=0.0,
                high=highest,
            ),
            # Runs take images of this range: they normalise inside.
            x="length across the gradient, pixels in [0, 1]",
            y="length along it",
            alt="Cross entropy on a square of the input space around "
            f"{views.sample_id(views.surface_sample or 0)}, which is classified correctly. Good "
            "is a wide dark middle. All models share one scale.",
        )
        for model, views, surface in viewed
    ]
