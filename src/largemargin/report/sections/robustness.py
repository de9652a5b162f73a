"""Section 6: what noise, occlusion and attacks do, and how curved the loss is around samples."""

import re

from largemargin.evaluating import Evaluation
from largemargin.report.charts import Block, Cell, Chart, Heat, Note, Section, Series, Table
from largemargin.report.numbers import count_cell, known, number_cell, percent_cell, text_cell
from largemargin.report.palette import DASHES
from largemargin.report.subjects import Subject, Subjects
from largemargin.report.verdict import measure_command

READING = (
    "Accuracy when images are disturbed; bars show the spread of repeated draws, or 95 % intervals "
    "for attacks. Good is a line that stays high to the right, above the baseline's."
)


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
    blocks += _curvature(subjects)
    blocks += _surfaces(subjects)
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
        words = "No attacks were evaluated."
        return [Note(words, f"largemargin evaluate {evaluated[0].where} --attacks [pgd]")]
    blocks: list[Block] = []
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
                        low=[clean, *(one.low for one in own)],
                        high=[clean, *(one.high for one in own)],
                    )
                )
        if series:
            blocks.append(
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
    blocks.append(Table(heads, tuple(rows), caption="Attacks", key="attacks", numeric=(2, 3, 4, 5)))
    return blocks


def _calibration(evaluated: list[Subject]) -> list[Block]:
    series = [Series("honest", [0.0, 1.0], [0.0, 1.0], color=None, dash="dash", faint=True)]
    rows, heads = [], ("model", "confidence", "accuracy", "samples")
    for each in evaluated:
        found = _found(each).clean.calibration
        kept = [at for at, n in enumerate(found.counts) if n]
        xs, ys = ([column[at] for at in kept] for column in (found.confidence, found.accuracy))
        series.append(Series(each.title, xs, ys, color=each.color))
        rows += [
            (text_cell(each.title), percent_cell(x), percent_cell(y), count_cell(found.counts[at]))
            for at, x, y in zip(kept, xs, ys, strict=True)
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


def _curvature(subjects: Subjects) -> list[Block]:
    measured = [each for each in subjects.each if each.geometry and each.geometry.curvature]
    if not measured:
        command = measure_command(subjects.each[0], "--curvature true", "--max_samples 500")
        return [Note("The curvature of the loss around samples was not measured.", command)]
    boxes, curves, rows = [], [], []
    heads = ("model", "5 %", "25 %", "median", "75 %", "95 %", "mean", "samples")
    for each in measured:
        assert each.geometry is not None
        assert each.geometry.curvature is not None
        c = each.geometry.curvature
        five = [max(c.overall.quantiles[q], 1e-12) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
        boxes.append(Series(each.title, [], five, form="box", color=each.color))
        values = (number_cell(value) for value in (*five, c.overall.mean))
        rows.append((text_cell(each.title), *values, count_cell(c.samples)))
        for at, (kind, found) in enumerate(c.robustness.items()):
            name = f"{each.name}, {kind} {found.amount:g}"
            dash = DASHES[at % len(DASHES)]
            curves.append(
                Series(name, found.shares, found.weak, color=each.color, dash=dash)  # type: ignore[arg-type]
            )
    blocks: list[Block] = [
        Chart(
            "curvature",
            "Curvature of the loss around samples",
            tuple(boxes),
            y="curvature",
            log_y=True,
            alt="Box for each model: median, quartiles, and whiskers at 5 % and 95 %. Good is low.",
            table=Table(heads, tuple(rows), key="curvatures", numeric=tuple(range(1, 8))),
        )
    ]
    if curves:
        blocks.append(
            Chart(
                "curvature-robustness",
                "Noisy accuracy of the flattest samples",
                tuple(curves),
                x="share of samples kept, flattest first",
                y="accuracy under noise",
                percent_y=True,
                alt="Accuracy under noise of the samples of lowest curvature. Falling lines mean "
                "that flat samples are the robust ones.",
            )
        )
    return blocks


def _surfaces(subjects: Subjects) -> list[Block]:
    seen = [each for each in subjects.each if each.observed and each.observed.surface]
    if not seen:
        return []
    found = [each.observed.surface for each in seen if each.observed]
    highest = max(max(map(max, one.losses)) for one in found if one is not None)
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
            x="across",
            y="along the gradient",
            alt="Cross entropy on a square of the input space around one right sample. Good is a "
            "wide dark middle. All models share one scale.",
        )
        for each, surface in zip(seen, found, strict=True)
        if surface is not None
    ]
