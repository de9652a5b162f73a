"""Section 2: how training went."""

from collections.abc import Callable
from typing import Any

from largemargin.app.report.charts import Block, Chart, Note, Section, Series, Table
from largemargin.app.report.number_format import (
    count_cell,
    number_cell,
    percent_cell,
    seconds,
    text_cell,
)
from largemargin.app.report.palette import DASHES
from largemargin.app.report.report_models import Subject, Subjects

READING = (
    "Losses of different objectives have different scales: compare their shape, and compare models "
    "by accuracy. Good curves fall smoothly and end flat, with validation close to training."
)
GRADIENT_POINTS = 400
"""Of a curve over steps; more are thinned."""

GEOMETRY = {
    "class_margin_degrees": ("Class margin", "degrees", "Good rises to the ceiling."),
    "mean_cosine_margin": (
        *("Sample margin", "cosine margin"),
        "Mean of the samples, and the smallest one. Good rises above 0.",
    ),
    "largest_dispersion": (
        *("Largest dispersion of a class", "distance of features"),
        "Good falls while margins stay wide. It grows with the features: compare shapes.",
    ),
    "magnitude_ratio": ("Norm ratio of class vectors", "longest / shortest", "Good stays near 1."),
    "softmax_bias": (
        *("Implicit bias of softmax", "margin in logits"),
        "0 where one rival counts, log(C − 1) where all are alike.",
    ),
}
"""What a row of metrics.jsonl may hold under "geometry": title, axis, and what is good."""

Read = Callable[[dict[str, Any]], float | None]


def training_section(subjects: Subjects) -> Section:
    trained = [each for each in subjects.each if each.epochs()]
    if not trained:
        note = Note(
            "No training was recorded: geometries alone have no curves.", "largemargin train"
        )
        return Section("training", "Training", READING, (note,))
    blocks: list[Block] = [_losses(trained)]
    accuracies = _accuracies(trained)
    if accuracies.series:
        blocks.append(accuracies)
    else:
        held_out = "No images were held out for validation, so there is no accuracy over epochs."
        blocks.append(Note(held_out, "largemargin train --data.validation 0.1"))
    terms = _by_term("terms", "Loss terms", "loss", trained, _term_points)
    if terms is not None:
        blocks.append(terms)
    gradients = _by_term(
        "gradients", "Gradient norm of each term", "norm", trained, _gradient_points
    )
    if gradients is not None:
        blocks.append(gradients)
    else:
        blocks.append(
            Note(
                "Gradient norms of the loss terms were not recorded.",
                "largemargin train --gradients_every 50",
            )
        )
    blocks.append(_rates(trained))
    blocks += _geometry(trained)
    blocks.append(_last(trained))
    return Section.arranged("training", "Training", READING, blocks)


def _curve(subject: Subject, read: Read, style: str = "", dash: Any = "solid") -> Series | None:
    rows = [(row["epoch"] + 1, read(row)) for row in subject.epochs()]
    if all(y is None for _, y in rows):
        return None
    return Series(
        ", ".join(filter(None, (subject.title, style))),
        [x for x, _ in rows],
        [y for _, y in rows],
        color=subject.color,
        dash=dash,
        group=subject.title,
        style=style,
    )


def _validation(key: str) -> Read:
    return lambda row: (row.get("validation") or {}).get(key)


def _kept(series: list[Series | None]) -> tuple[Series, ...]:
    return tuple(each for each in series if each is not None)


def _losses(trained: list[Subject]) -> Chart:
    series: list[Series | None] = []
    for each in trained:
        series.append(_curve(each, lambda row: row.get("loss"), "training"))
        series.append(_curve(each, _validation("loss"), "validation cross entropy", "dot"))
    return Chart(
        "loss",
        "Loss",
        _kept(series),
        x="epoch",
        y="loss",
        log_y=all(y is None or y > 0 for s in _kept(series) for y in s.y),
        alt="Training loss and validation cross entropy over epochs, one line for each model.",
    )


def _accuracies(trained: list[Subject]) -> Chart:
    series = [_curve(each, _validation("accuracy")) for each in trained]
    return Chart(
        "validation",
        "Validation accuracy",
        _kept(series),
        x="epoch",
        y="accuracy",
        percent_y=True,
        alt="Accuracy on the validation images over epochs, one line for each model.",
    )


def _rates(trained: list[Subject]) -> Chart:
    series = [_curve(each, lambda row: row.get("lr")) for each in trained]
    return Chart(
        "rate",
        "Learning rate",
        _kept(series),
        x="epoch",
        y="learning rate",
        alt="Learning rate at the end of each epoch.",
    )


Points = Callable[[Subject], dict[str, tuple[list[float], list[float | None]]]]


def _term_points(subject: Subject) -> dict[str, tuple[list[float], list[float | None]]]:
    found: dict[str, tuple[list[float], list[float | None]]] = {}
    for row in subject.epochs():
        for name, value in (row.get("terms") or {}).items():
            xs, ys = found.setdefault(str(name), ([], []))
            xs.append(row["epoch"] + 1)
            ys.append(value)
    return found if len(found) > 1 else {}


def _gradient_points(subject: Subject) -> dict[str, tuple[list[float], list[float | None]]]:
    found: dict[str, tuple[list[float], list[float | None]]] = {}
    rows = [row for row in subject.rows if row.get("kind") == "gradients"]
    stride = -(-len(rows) // GRADIENT_POINTS) or 1
    for row in rows[::stride]:
        for name, value in row.get("norms", {}).items():
            xs, ys = found.setdefault(str(name), ([], []))
            xs.append(row["step"])
            ys.append(value)
    return found


def _by_term(key: str, title: str, y: str, trained: list[Subject], points: Points) -> Chart | None:
    series: list[Series] = []
    kinds: list[str] = []
    for each in trained:
        for name, (xs, ys) in points(each).items():
            if name not in kinds:
                kinds.append(name)
            dash: Any = DASHES[kinds.index(name) % len(DASHES)]
            series.append(
                Series(
                    f"{each.name}: {name}",
                    xs,
                    ys,
                    color=each.color,
                    dash=dash,
                    group=each.title,
                    style=name,
                )
            )
    if not series:
        return None
    values = [value for one in series for value in one.y if value is not None]
    return Chart(
        key,
        title,
        tuple(series),
        x="epoch" if key == "terms" else "step",
        y=y,
        log_y=bool(values) and min(values) > 0 and max(values) > 20 * min(values),
        alt=f"{title} over training, one line for each term of each model.",
        note=f"every k-th row, so that at most {GRADIENT_POINTS} points are drawn"
        if any(len(row.rows) > GRADIENT_POINTS for row in trained) and key == "gradients"
        else "",
    )


def _geometry(trained: list[Subject]) -> list[Block]:
    blocks: list[Block] = []
    note = _measured_on(trained)
    for key, (title, axis, good) in GEOMETRY.items():
        both = key == "mean_cosine_margin"
        curves = [_curve(each, _geometry_of(key), "mean" if both else "") for each in trained]
        if both:
            smallest = _geometry_of("min_cosine_margin")
            curves += [_curve(each, smallest, "smallest", "dot") for each in trained]
        series = _kept(curves)
        if series:
            words = f"{title} after every epoch. {good}"
            chart = Chart(f"epochs-{key}", title, series, x="epoch", y=axis, alt=words, note=note)
            blocks.append(chart)
    if not blocks:
        words = (
            "Geometry over epochs was not recorded: only that at the end is known (see Margins)."
        )
        blocks.append(Note(words, "largemargin train --geometry_samples 500"))
    return blocks


def _geometry_of(key: str) -> Read:
    return lambda row: (row.get("geometry") or {}).get(key)


def _measured_on(trained: list[Subject]) -> str:
    """The images behind the curves, where they are the same for all models."""
    found = {
        (row["geometry"].get("samples"), row["geometry"].get("split"))
        for each in trained
        for row in each.epochs()
        if row.get("geometry")
    }
    if len(found) != 1:
        return ""
    samples, split = found.pop()
    return f"{samples} {'training' if split == 'train' else split} images, always the same"


def _last(trained: list[Subject]) -> Table:
    rows = []
    for each in trained:
        last = each.epochs()[-1]
        best = each.result.get("best_epoch")
        validation = last.get("validation") or {}
        rows.append(
            (
                text_cell(each.title),
                count_cell(last["epoch"] + 1),
                count_cell(None if best is None else best + 1),
                number_cell(last.get("loss")),
                percent_cell(validation.get("accuracy")),
                number_cell(validation.get("loss")),
                number_cell(last.get("gradient_norm")),
                text_cell(seconds(each.result.get("seconds"))),
            )
        )
    return Table(
        (
            *("model", "epochs", "best epoch", "training loss", "validation accuracy"),
            *("validation loss", "gradient norm", "time"),
        ),
        tuple(rows),
        caption="The last epoch",
        key="last-epoch",
        numeric=(1, 2, 3, 4, 5, 6, 7),
    )
