"""Section 6: what noise, occlusion and attacks do, and how curved the loss is around samples.

How curved the loss is around samples, and how that goes with robustness.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from largemargin.app.report.charts import Block, Cell, Chart, Heat, Note, Section, Series, Table
from largemargin.app.report.number_format import (
    count_cell,
    known,
    number_cell,
    percent_cell,
    text_cell,
)
from largemargin.app.report.palette import DASHES
from largemargin.app.report.report_models import Subject, Subjects
from largemargin.app.report.verdict import measure_command
from largemargin.measuring.calibration import Calibration
from largemargin.measuring.evaluate import Evaluation
from largemargin.measuring.input_curvature import Curvature, CurvatureRobustness

UNITS = "pixels in [0, 1]"
"""Runs take images of this range: they normalise inside."""

SMALLEST = 1e-12
"""A flat loss has curvature 0, which a logarithmic axis does not show."""


def curvature_blocks(subjects: Subjects) -> list[Block]:
    measured = [each for each in subjects.each if each.geometry and each.geometry.curvature]
    missing = [each for each in subjects.each if each not in measured]
    blocks: list[Block] = []
    if measured:
        blocks += [_boxes(measured), *_flattest(measured), *_groups(measured)]
    for each in missing:
        command = measure_command(each, "--curvature true", "--max_samples 500")
        words = f"{each.title}: the curvature of the loss around samples was not measured."
        blocks.append(Note(words, command))
    return blocks


def _of(subject: Subject) -> Curvature:
    assert subject.geometry is not None
    assert subject.geometry.curvature is not None
    return subject.geometry.curvature


def _boxes(measured: list[Subject]) -> Chart:
    boxes, rows = [], []
    for each in measured:
        c = _of(each)
        five = [max(c.overall.quantiles[q], SMALLEST) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
        boxes.append(Series(each.title, [], five, form="box", color=each.color))
        correlations = (found.correlation for found in c.robustness.values() if found is not None)
        correlation = next((value for value in correlations if known(value)), None)
        values = (number_cell(value) for value in (*five, c.overall.mean))
        count = count_cell(c.samples)
        rows.append((text_cell(each.title), *values, count, number_cell(correlation, digits=3)))
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


def _flattest(measured: list[Subject]) -> list[Chart]:
    curves = [
        _curve(each, at, found, found.shares, found.weak)
        for each in measured
        for at, found in enumerate(_of(each).robustness.values())
    ]
    if not curves:
        return []
    return [
        Chart(
            "curvature-robustness",
            "Noisy accuracy of the flattest samples",
            tuple(curves),
            x="share of samples kept, flattest first",
            y="accuracy under noise",
            percent_y=True,
            alt="Accuracy under noise of the samples of lowest curvature. Falling lines mean that "
            "flat samples are the robust ones.",
        )
    ]


def _groups(measured: list[Subject]) -> list[Chart]:
    curves = []
    for each in measured:
        for at, found in enumerate(_of(each).robustness.values()):
            kept = [k for k, mean in enumerate(found.group_curvature) if known(mean)]
            means = [max(found.group_curvature[k], SMALLEST) for k in kept]
            curves.append(_curve(each, at, found, [k / found.draws for k in kept], means))
    if not any(len(curve.x) > 1 for curve in curves):
        return []
    return [
        Chart(
            "curvature-groups",
            "Curvature against robustness",
            tuple(curves),
            x="share of noisy copies that stay right",
            y="mean curvature",
            log_y=True,
            alt="Mean curvature of samples by how many of their noisy copies are classified right. "
            "Good is low everywhere; lines fall where flat samples are the robust ones.",
        )
    ]


def _curve(
    subject: Subject,
    at: int,
    found: CurvatureRobustness,
    xs: Sequence[float],
    ys: Sequence[float],
) -> Series:
    """A line of one model under one kind of noise."""
    style = f"{found.noise} noise {found.amount:g}"
    return Series(
        f"{subject.name}, {style}",
        xs,
        ys,
        color=subject.color,
        dash=DASHES[at % len(DASHES)],  # type: ignore[arg-type]
        group=subject.title,
        style=style,
    )


def surface_charts(subjects: Subjects) -> list[Chart]:
    """The loss around one sample, of all models in one scale."""
    seen = [
        (each, each.observed, each.observed.surface)
        for each in subjects.each
        if each.observed is not None and each.observed.surface is not None
    ]
    if not seen:
        return []
    highest = max(max(map(max, surface.losses)) for *_, surface in seen)
    return [
        Chart(
            f"surface-{each.name}",
            f"Loss around one sample: {each.title}",
            heat=Heat(
                surface.losses,
                x=surface.across,
                y=surface.along,
                unit="loss",
                low=0.0,
                high=highest,
            ),
            x=f"length across the gradient, {UNITS}",
            y="length along it",
            alt=f"Cross entropy on a square of the input space around "
            f"{observed.ids.get(observed.surface_of or 0, f'sample {observed.surface_of}')}, which "
            "is classified right. Good is a wide dark middle. All models share one scale.",
        )
        for each, observed, surface in seen
    ]


READING = (
    "Accuracy when images are disturbed; bars show the spread of repeated draws, or 95 % intervals "
    "for attacks. Good is a line that stays high to the right, above the baseline's."
)

BIN_SAMPLES = 5
"""Fewer predictions of like confidence say little about their accuracy."""


def robustness_section(subjects: Subjects) -> Section:
    evaluated = [each for each in subjects.each if each.evaluation is not None]
    blocks: list[Block] = []
    if evaluated:
        blocks += [*_noise(evaluated), *_perturbations(evaluated), *_attacks(evaluated)]
        blocks += [*_calibration(evaluated), *_strangers(evaluated), *_retrieval(evaluated)]
    for each in subjects.each:
        if each.evaluation is None:
            words = f"{each.title}: accuracy under noise, perturbations and attacks is not known."
            blocks.append(Note(words, f"largemargin evaluate {each.where}"))
    blocks += [*curvature_blocks(subjects), *surface_charts(subjects)]
    return Section.arranged("robustness", "Robustness", READING, blocks)


def _found(subject: Subject) -> Evaluation:
    assert subject.evaluation is not None
    return subject.evaluation


def gaussian_levels(found: Evaluation) -> list[tuple[float, str]]:
    """(standard deviation, name) of every level of Gaussian noise, weakest first."""
    levels = []
    for name in found.perturbed:
        match = re.fullmatch(r"gaussian ([0-9.e+-]+)(?:/([0-9.]+))?", name)
        if match:
            levels.append((float(match[1]) / float(match[2] or 1), name))
    return sorted(levels)


def _noise(evaluated: list[Subject]) -> list[Block]:
    series = []
    for each in evaluated:
        found = _found(each)
        levels = gaussian_levels(found)
        if not levels:
            continue
        noisy = [found.perturbed[name] for _, name in levels]
        ys = [found.clean.accuracy, *(one.accuracy for one in noisy)]
        spread = [0.0, *(one.std if known(one.std) else 0.0 for one in noisy)]
        series.append(
            Series(
                each.title,
                [0.0, *(sigma for sigma, _ in levels)],
                ys,
                color=each.color,
                low=[y - s for y, s in zip(ys, spread, strict=True)],
                high=[y + s for y, s in zip(ys, spread, strict=True)],
            )
        )
    if not series:
        return []
    return [
        Chart(
            "noise",
            "Accuracy under Gaussian noise",
            tuple(series),
            x="standard deviation, pixels in [0, 1]",
            y="accuracy",
            percent_y=True,
            alt="Accuracy against the strength of Gaussian noise, one line for each model.",
        )
    ]


def _perturbations(evaluated: list[Subject]) -> list[Block]:
    names = list(dict.fromkeys(name for each in evaluated for name in _found(each).perturbed))
    if not names:
        words = "No perturbations were evaluated."
        return [Note(words, f"largemargin evaluate {evaluated[0].where} --perturbations auto")]
    series, rows = [], []
    for each in evaluated:
        found = [_found(each).perturbed.get(name) for name in names]
        ys = [None if one is None else one.accuracy for one in found]
        spread = [0.0 if one is None or not known(one.std) else one.std for one in found]
        series.append(
            Series(
                each.title,
                list(range(len(names))),
                ys,
                form="bars",
                color=each.color,
                low=[None if y is None else y - s for y, s in zip(ys, spread, strict=True)],
                high=[None if y is None else y + s for y, s in zip(ys, spread, strict=True)],
            )
        )
    for at, name in enumerate(names):
        cells = []
        for each in evaluated:
            one = _found(each).perturbed.get(name)
            if one is None:
                cells.append(Cell("–"))
            else:
                spread_text = f" ± {100 * one.std:.2f}" if known(one.std) else ""
                cells.append(Cell(f"{100 * one.accuracy:.2f}{spread_text} %", one.accuracy))
        rows.append((text_cell(names[at].replace("_", " ")), *cells))
    heads = ("perturbation", *(each.title for each in evaluated))
    return [
        Chart(
            "perturbations",
            "Accuracy under each perturbation",
            tuple(series),
            y="accuracy",
            percent_y=True,
            names=tuple(name.replace("_", " ") for name in names),
            alt="Accuracy under each perturbation, a group of bars for each, a bar for each model.",
            table=Table(heads, tuple(rows), key="perturbed", numeric=tuple(range(1, len(heads)))),
            wide=True,
        )
    ]


def _attacks(evaluated: list[Subject]) -> list[Block]:
    if not any(_found(each).attacked for each in evaluated):
        return [Note("No attacks were evaluated.", _attack_command(evaluated[0], "[fgsm,pgd]"))]
    charts: list[Chart] = []
    notes: list[Block] = []
    for norm, words in (("linf", "largest change of a pixel"), ("l2", "Euclidean length")):
        series = []
        for each in evaluated:
            found = _found(each)
            attacks = [one for one in found.attacked if one.norm == norm]
            kinds = list(dict.fromkeys(one.attack.split()[0] for one in attacks))
            for at, kind in enumerate(kinds):
                own = sorted(
                    (one for one in attacks if one.attack.split()[0] == kind),
                    key=lambda one: one.epsilon,
                )
                clean = found.clean.accuracy
                series.append(
                    Series(
                        f"{each.name}, {kind}",
                        [0.0, *(one.epsilon for one in own)],
                        [clean, *(one.accuracy for one in own)],
                        color=each.color,
                        dash=DASHES[at % len(DASHES)],  # type: ignore[arg-type]
                        group=each.title,
                        style=kind,
                        low=[clean, *(one.low for one in own)],
                        high=[clean, *(one.high for one in own)],
                    )
                )
        if series:
            charts.append(
                Chart(
                    f"attacks-{norm}",
                    f"Accuracy under attacks, {norm}",
                    tuple(series),
                    x=f"ε: {words}, pixels in [0, 1]",
                    y="accuracy",
                    percent_y=True,
                    alt=f"Accuracy against the strength of {norm} attacks.",
                )
            )
    strengths = {(one.norm, one.epsilon) for each in evaluated for one in _found(each).attacked}
    norms = {norm for norm, _ in strengths}
    if len(strengths) == len(norms):
        words = "Each kind of attack was tried at one strength; several make a curve."
        notes.append(Note(words, _attack_command(evaluated[0], "[pgd]")))
    rows = []
    for each in evaluated:
        for one in _found(each).attacked:
            rows.append(
                (
                    text_cell(each.title),
                    text_cell(one.attack),
                    percent_cell(one.accuracy),
                    percent_cell(one.low),
                    percent_cell(one.high),
                    Cell(f"{one.samples:,}", one.samples),
                )
            )
    heads = ("model", "attack", "accuracy", "from", "to", "samples")
    return [
        replace(charts[0], table=Table(heads, tuple(rows), key="attacks", numeric=(2, 3, 4, 5))),
        *charts[1:],
        *notes,
    ]


def _attack_command(subject: Subject, attacks: str) -> str:
    return (
        f"largemargin evaluate {subject.where} --attacks '{attacks}' --linf '[0.01,0.02,0.04,0.08]'"
    )


def _calibrations(evaluated: list[Subject]) -> Iterator[tuple[Subject, Calibration, str]]:
    """Of every model as it is, and with its temperature where there is one."""
    for each in evaluated:
        found = _found(each)
        yield each, found.clean.calibration, each.title
        if found.calibrated is not None:
            yield each, found.calibrated, f"{each.title}, temperature {found.temperature:.3g}"


def _calibration(evaluated: list[Subject]) -> list[Block]:
    series = [Series("honest", [0.0, 1.0], [0.0, 1.0], color=None, dash="dash", faint=True)]
    rows, heads = [], ("model", "confidence", "accuracy", "samples")
    for each, found, title in _calibrations(evaluated):
        drawn = [at for at, n in enumerate(found.counts) if n >= BIN_SAMPLES]
        xs, ys = ([column[at] for at in drawn] for column in (found.confidence, found.accuracy))
        dash: Literal["solid", "dot"] = "solid" if title == each.title else "dot"
        series.append(Series(title, xs, ys, color=each.color, dash=dash))
        bins = zip(found.confidence, found.accuracy, found.counts, strict=True)
        rows += [
            (text_cell(title), percent_cell(x), percent_cell(y), count_cell(n))
            for x, y, n in bins
            if n
        ]
    return [
        Chart(
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
    ]


def _strangers(evaluated: list[Subject]) -> list[Block]:
    rows = [
        (
            text_cell(each.title),
            text_cell(name.replace("_", " ")),
            number_cell(area),
            percent_cell(_found(each).strangers.fpr95[name]),  # type: ignore[union-attr]
        )
        for each in evaluated
        if _found(each).strangers is not None
        for name, area in _found(each).strangers.auroc.items()  # type: ignore[union-attr]
    ]
    if not rows:
        words = "Whether other images are told apart was not evaluated."
        return [Note(words, f"largemargin evaluate {evaluated[0].where} --ood FOLDER")]
    heads = ("model", "score", "AUROC", "false positives at 95 %")
    return [Table(heads, tuple(rows), caption="Other images", key="ood", numeric=(2, 3))]


def _retrieval(evaluated: list[Subject]) -> list[Block]:
    rows = []
    for each in evaluated:
        found = _found(each).retrieval
        if found is not None:
            recalls = ", ".join(f"at {k}: {100 * v:.2f} %" for k, v in found.recall.items())
            mean = percent_cell(found.mean_average_precision)
            rows.append((text_cell(each.title), text_cell(recalls), mean))
    if not rows:
        return []
    heads = ("model", "recall", "mean average precision")
    return [Table(heads, tuple(rows), caption="Search by features", key="retrieval", numeric=(2,))]
