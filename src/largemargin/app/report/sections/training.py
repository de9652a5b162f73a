"""How training went."""

from typing import Any

from largemargin.app.report.charts import (
    DASHES,
    Block,
    Cell,
    Chart,
    Dash,
    Note,
    Section,
    Series,
    Table,
    arranged,
    seconds,
)
from largemargin.app.report.report_models import ReportModel, ReportModels, number_at

READING = (
    "Losses of different objectives have different scales: compare their shape. Good curves fall "
    "smoothly and end flat."
)
GRADIENT_POINTS = 400
"""Of a curve over steps; more are thinned."""

Values = dict[str, tuple[list[float], list[float | None]]]
"""Places and numbers of each term of an objective."""


def training_section(models: ReportModels) -> Section:
    trained = [model for model in models if model.epochs()]
    if not trained:
        words = "No training was recorded: geometries alone have no curves."
        return Section("training", "Training", READING, (Note(words, "largemargin train"),))
    blocks: list[Block] = [_losses(trained), _accuracies(trained), _class_margin(trained)]
    more = [_terms(trained), _gradients(trained), _sample_margin(trained), _last_epoch(trained)]
    folded = "Terms, gradients, sample margins, the last epoch"
    return Section("training", "Training", READING, arranged(blocks), arranged(more), folded)


def _curves(
    trained: list[ReportModel], path: str, style: str = "", dash: Dash = "solid"
) -> list[Series]:
    """A number over the epochs, by its path in a row, of every model that recorded it."""
    curves = []
    for model in trained:
        rows = model.epochs()
        ys = [number_at(row, path) for row in rows]
        if any(y is not None for y in ys):
            curves.append(model.line([row["epoch"] + 1 for row in rows], ys, style, dash))
    return curves


def _over_epochs(
    key: str, title: str, y: str, series: list[Series], alt: str, **settings: Any
) -> Chart:
    return Chart(key, title, tuple(series), x="epoch", y=y, alt=alt, **settings)


def _losses(trained: list[ReportModel]) -> Chart:
    series: list[Series] = []
    for model in trained:
        series += _curves([model], "loss", "training")
        series += _curves([model], "validation.loss", "validation cross entropy", "dot")
    alt = "Training loss, and where images were held out, validation cross entropy."
    positive = all(y is None or y > 0 for curve in series for y in curve.y)
    return _over_epochs("loss", "Loss", "loss", series, alt, log_y=positive)


def _accuracies(trained: list[ReportModel]) -> Block:
    series = _curves(trained, "validation.accuracy")
    if not series:
        words = "No images were held out for validation, so there is no accuracy over epochs."
        return Note(words, "largemargin train --data.validation 0.1")
    alt = "Accuracy on the validation images."
    title = "Validation accuracy"
    return _over_epochs("validation", title, "accuracy", series, alt, percent_y=True)


def _terms(trained: list[ReportModel]) -> Chart:
    """Of objectives of several terms."""
    found = [
        (model, _collected([(row["epoch"] + 1, row.get("terms") or {}) for row in model.epochs()]))
        for model in trained
    ]
    series = _by_term([(model, values) for model, values in found if len(values) > 1])
    return _term_chart("terms", "Loss terms", "epoch", "loss", series)


def _gradients(trained: list[ReportModel]) -> Block:
    values, note = [], ""
    for model in trained:
        rows = [row for row in model.metrics if row.get("kind") == "gradients"]
        stride = -(-len(rows) // GRADIENT_POINTS) or 1
        if stride > 1:
            note = f"every k-th row, so that at most {GRADIENT_POINTS} points are drawn"
        norms = [(row["step"], row.get("norms", {})) for row in rows[::stride]]
        values.append((model, _collected(norms)))
    series = _by_term(values)
    if not series:
        words = "Gradient norms of the loss terms were not recorded."
        return Note(words, "largemargin train --gradients_every 50")
    return _term_chart("gradients", "Gradient norm of each term", "step", "norm", series, note)


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
        model.line(
            xs, ys, term, DASHES[terms.index(term) % len(DASHES)], name=f"{model.name}: {term}"
        )
        for model, found in values
        for term, (xs, ys) in found.items()
    ]


def _term_chart(
    key: str, title: str, x: str, y: str, series: list[Series], note: str = ""
) -> Chart:
    values = [value for curve in series for value in curve.y if value is not None]
    positive = bool(values) and min(values) > 0
    return Chart(
        key,
        title,
        tuple(series),
        x=x,
        y=y,
        log_y=positive and max(values) > 20 * min(values),
        alt=f"{title} over training, one line for each term of each model.",
        note=note,
    )


def _class_margin(trained: list[ReportModel]) -> Block:
    series = _curves(trained, "geometry.class_margin_degrees")
    if not series:
        words = "Geometry over epochs was not recorded; see Margins for that of the trained model."
        return Note(words, "largemargin train --geometry_samples 500")
    alt = "Smallest angle between class vectors after every epoch. Good rises to the ceiling."
    key, note = "epochs-class-margin", _measured_on(trained)
    return _over_epochs(key, "Class margin", "degrees", series, alt, note=note)


def _sample_margin(trained: list[ReportModel]) -> Chart:
    series = _curves(trained, "geometry.mean_cosine_margin", "mean")
    series += _curves(trained, "geometry.min_cosine_margin", "smallest", "dot")
    alt = "Mean of the samples, and the smallest one. Good rises above 0."
    key, note = "epochs-sample-margin", _measured_on(trained)
    return _over_epochs(key, "Sample margin", "cosine margin", series, alt, note=note)


def _measured_on(trained: list[ReportModel]) -> str:
    """The images behind the curves, where they are the same for all models."""
    found = [row["geometry"] for model in trained for row in model.epochs() if row.get("geometry")]
    images = {(each.get("samples"), each.get("split")) for each in found}
    if len(images) != 1:
        return ""
    ((samples, split),) = images
    return f"{samples} {'training' if split == 'train' else split} images, always the same"


def _last_epoch(trained: list[ReportModel]) -> Table:
    rows = []
    for model in trained:
        last = model.epochs()[-1]
        best = model.result.get("best_epoch")
        validation = last.get("validation") or {}
        rows.append(
            (
                Cell.of(model.title),
                Cell.count(last["epoch"] + 1),
                Cell.count(None if best is None else best + 1),
                Cell.number(last.get("loss")),
                Cell.percent(validation.get("accuracy")),
                Cell.number(validation.get("loss")),
                Cell.number(last.get("gradient_norm")),
                Cell.of(seconds(model.result.get("seconds"))),
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
