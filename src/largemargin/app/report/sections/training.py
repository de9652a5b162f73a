"""Section 2: how training went."""

from collections.abc import Callable
from typing import Any

from largemargin.app.report.charts import DASHES, Block, Chart, Dash, Note, Section, Series, Table
from largemargin.app.report.number_format import (
    count_cell,
    number_cell,
    percent_cell,
    seconds,
    text_cell,
)
from largemargin.app.report.report_models import ReportModel, ReportModels

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
Values = dict[str, tuple[list[float], list[float | None]]]
"""Places and numbers of each term of an objective."""


def training_section(models: ReportModels) -> Section:
    trained = [model for model in models if model.epochs()]
    if not trained:
        words = "No training was recorded: geometries alone have no curves."
        return Section("training", "Training", READING, (Note(words, "largemargin train"),))
    blocks: list[Block] = [
        _losses(trained),
        _accuracies(trained),
        *_terms(trained),
        _gradients(trained),
        _rates(trained),
        *_geometry(trained),
        _last_epoch(trained),
    ]
    return Section.arranged("training", "Training", READING, blocks)


def _curve(model: ReportModel, read: Read, style: str = "", dash: Dash = "solid") -> list[Series]:
    """A number over the epochs; nothing where it was not recorded."""
    rows = [(row["epoch"] + 1, read(row)) for row in model.epochs()]
    if all(y is None for _, y in rows):
        return []
    return [
        Series(
            ", ".join(filter(None, (model.title, style))),
            [x for x, _ in rows],
            [y for _, y in rows],
            color=model.color,
            dash=dash,
            group=model.title,
            style=style,
        )
    ]


def _validation(key: str) -> Read:
    return lambda row: (row.get("validation") or {}).get(key)


def _losses(trained: list[ReportModel]) -> Chart:
    series: list[Series] = []
    for model in trained:
        series += _curve(model, lambda row: row.get("loss"), "training")
        series += _curve(model, _validation("loss"), "validation cross entropy", "dot")
    return Chart(
        "loss",
        "Loss",
        tuple(series),
        x="epoch",
        y="loss",
        log_y=all(y is None or y > 0 for curve in series for y in curve.y),
        alt="Training loss and validation cross entropy over epochs, one line for each model.",
    )


def _accuracies(trained: list[ReportModel]) -> Block:
    series = [curve for model in trained for curve in _curve(model, _validation("accuracy"))]
    if not series:
        words = "No images were held out for validation, so there is no accuracy over epochs."
        return Note(words, "largemargin train --data.validation 0.1")
    return Chart(
        "validation",
        "Validation accuracy",
        tuple(series),
        x="epoch",
        y="accuracy",
        percent_y=True,
        alt="Accuracy on the validation images over epochs, one line for each model.",
    )


def _terms(trained: list[ReportModel]) -> list[Chart]:
    """Of objectives of several terms."""
    series = _by_term([(model, _term_values(model)) for model in trained])
    if not series:
        return []
    return [_term_chart("terms", "Loss terms", "epoch", "loss", series)]


def _term_values(model: ReportModel) -> Values:
    rows = [(row["epoch"] + 1, row.get("terms") or {}) for row in model.epochs()]
    values = _collected(rows)
    return values if len(values) > 1 else {}


def _gradients(trained: list[ReportModel]) -> Block:
    rows = [
        (model, [row for row in model.metrics if row.get("kind") == "gradients"])
        for model in trained
    ]
    series = _by_term([(model, _gradient_norms(norms)) for model, norms in rows])
    if not series:
        words = "Gradient norms of the loss terms were not recorded."
        return Note(words, "largemargin train --gradients_every 50")
    thinned = any(len(norms) > GRADIENT_POINTS for _, norms in rows)
    note = f"every k-th row, so that at most {GRADIENT_POINTS} points are drawn" if thinned else ""
    return _term_chart("gradients", "Gradient norm of each term", "step", "norm", series, note)


def _gradient_norms(rows: list[dict[str, Any]]) -> Values:
    stride = -(-len(rows) // GRADIENT_POINTS) or 1
    return _collected([(row["step"], row.get("norms", {})) for row in rows[::stride]])


def _collected(rows: list[tuple[float, dict[str, float | None]]]) -> Values:
    """Places and numbers of each term."""
    values: Values = {}
    for x, numbers in rows:
        for name, y in numbers.items():
            xs, ys = values.setdefault(str(name), ([], []))
            xs.append(x)
            ys.append(y)
    return values


def _by_term(values: list[tuple[ReportModel, Values]]) -> list[Series]:
    """A line for each term of each model; a term has one kind of line in all models."""
    terms = list(dict.fromkeys(name for _, found in values for name in found))
    return [
        Series(
            f"{model.name}: {name}",
            xs,
            ys,
            color=model.color,
            dash=DASHES[terms.index(name) % len(DASHES)],
            group=model.title,
            style=name,
        )
        for model, found in values
        for name, (xs, ys) in found.items()
    ]


def _term_chart(
    key: str, title: str, x: str, y: str, series: list[Series], note: str = ""
) -> Chart:
    values = [value for curve in series for value in curve.y if value is not None]
    return Chart(
        key,
        title,
        tuple(series),
        x=x,
        y=y,
        log_y=bool(values) and min(values) > 0 and max(values) > 20 * min(values),
        alt=f"{title} over training, one line for each term of each model.",
        note=note,
    )


def _rates(trained: list[ReportModel]) -> Chart:
    series = [curve for model in trained for curve in _curve(model, lambda row: row.get("lr"))]
    return Chart(
        "rate",
        "Learning rate",
        tuple(series),
        x="epoch",
        y="learning rate",
        alt="Learning rate at the end of each epoch.",
    )


def _geometry(trained: list[ReportModel]) -> list[Block]:
    blocks: list[Block] = []
    note = _measured_on(trained)
    for key, (title, axis, good) in GEOMETRY.items():
        both = key == "mean_cosine_margin"
        series: list[Series] = []
        for model in trained:
            series += _curve(model, _epoch_geometry(key), "mean" if both else "")
        for model in trained if both else ():
            series += _curve(model, _epoch_geometry("min_cosine_margin"), "smallest", "dot")
        if series:
            words = f"{title} after every epoch. {good}"
            chart = Chart(
                f"epochs-{key}", title, tuple(series), x="epoch", y=axis, alt=words, note=note
            )
            blocks.append(chart)
    if not blocks:
        words = "Geometry over epochs was not recorded; see Margins for that of the trained model."
        blocks.append(Note(words, "largemargin train --geometry_samples 500"))
    return blocks


def _epoch_geometry(key: str) -> Read:
    return lambda row: (row.get("geometry") or {}).get(key)


def _measured_on(trained: list[ReportModel]) -> str:
    """The images behind the curves, where they are the same for all models."""
    data = {
        (row["geometry"].get("samples"), row["geometry"].get("split"))
        for model in trained
        for row in model.epochs()
        if row.get("geometry")
    }
    if len(data) != 1:
        return ""
    samples, split = data.pop()
    return f"{samples} {'training' if split == 'train' else split} images, always the same"


def _last_epoch(trained: list[ReportModel]) -> Table:
    rows = []
    for model in trained:
        last = model.epochs()[-1]
        best = model.result.get("best_epoch")
        validation = last.get("validation") or {}
        rows.append(
            (
                text_cell(model.title),
                count_cell(last["epoch"] + 1),
                count_cell(None if best is None else best + 1),
                number_cell(last.get("loss")),
                percent_cell(validation.get("accuracy")),
                number_cell(validation.get("loss")),
                number_cell(last.get("gradient_norm")),
                text_cell(seconds(model.result.get("seconds"))),
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
