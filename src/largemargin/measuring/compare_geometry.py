"""Two measurements side by side."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from largemargin.errors import LargeMarginError
from largemargin.measuring.geometry_result import Geometry, number
from largemargin.measuring.records import Record

SHOWN = {
    "accuracy": "accuracy",
    "loss": "loss",
    "prototypes.class_margin": "class margin, degrees",
    "prototypes.symmetry": "distance from the simplex",
    "prototypes.magnitude_ratio": "longest / shortest class vector",
    "margins.raw.overall.mean": "logit margin, mean",
    "margins.cosine.overall.mean": "cosine margin, mean",
    "margins.cosine.overall.ratio": "cosine margin, mean / std",
    "margins.cosine.overall.minimum": "cosine margin, minimum",
    "margins.distance.overall.mean": "distance to the boundary, mean",
    "relative_margin": "  in units of the spread of a class",
    "feature_norm.mean": "feature length, mean",
    "variance.ratio": "variance between / within classes",
    "collapse.variability": "collapse: variability (NC1)",
    "collapse.simplex_gap": "collapse: from simplex (NC2)",
    "collapse.duality": "collapse: from duality (NC3)",
    "compactness.largest_dispersion": "largest dispersion",
    "compactness.separation": "separation of classes",
    "compactness.ideal_ratio": "dispersion / separation",
    "calibration.expected_error": "calibration error",
    "errors.auroc.lead_raw": "errors told by logit margin, AUROC",
    "ood.auroc.lead_raw": "OOD samples told by logit margin, AUROC",
    "input_margins.overall.mean": "linearised margin at the input, mean",
    "input_margins.overall.ratio": "linearised margin at the input, mean / std",
    "curvature.overall.mean": "input curvature, mean",
    "curvature.robustness.gaussian.accuracy": "accuracy under Gaussian noise",
    "curvature.robustness.uniform.accuracy": "accuracy under uniform noise",
}
"""Quantities of the printed table and how they are called there."""

SHOWN_LAYERS = {
    ".left_out_accuracy": "nearest class mean, left out",
    ".margins.distance.overall.ratio": "margin to class means, mean / std",
    ".variance.ratio": "variance between / within",
    ".collapse.variability": "collapse (NC1)",
    ".compactness.ideal_ratio": "dispersion / separation",
}
"""The same of each layer, by the ends of their paths."""


@dataclass(frozen=True)
class Difference(Record):
    """One quantity in two measurements."""

    first: float
    second: float
    change: float
    """second - first; NaN where one of them is NaN."""

    def texts(self) -> tuple[str, str, str]:
        signed = self.change != 0 and not math.isnan(self.change)
        change = f"{self.change:+.4g}" if signed else number(self.change)
        return number(self.first), number(self.second), change


@dataclass(frozen=True)
class GeometryComparison(Record):
    """Two measurements: see :func:`compare_geometry`."""

    names: tuple[str, ...]
    quantities: dict[str, Difference]
    """Every number both have, by its path in the result, as "margins.raw.overall.mean".

    One is added: "relative_margin", the mean distance to the boundary over the standard deviation
    within classes, which scaling the features does not change (NGY-P4.4)."""
    notes: tuple[str, ...]
    """What makes them hard to compare."""

    def __str__(self) -> str:
        found = [(label, self.quantities.get(path)) for path, label in SHOWN.items()]
        lines = [(label, each) for label, each in found if each is not None]
        lines += _layer_lines(self.quantities)
        width = max(len(label) for label, _ in lines)
        columns = [max(len(name), 10) for name in (*self.names, "change")]
        heads = zip((*self.names, "change"), columns, strict=True)
        text = [" " * width + "".join(f"  {name:>{wide}}" for name, wide in heads)]
        for label, each in lines:
            values = zip(each.texts(), columns, strict=True)
            text.append(f"{label:<{width}}" + "".join(f"  {v:>{wide}}" for v, wide in values))
        return "\n".join([*text, *(f"note: {note}" for note in self.notes)])


def compare_geometry(
    a: Geometry, b: Geometry, names: tuple[str, str] = ("a", "b")
) -> GeometryComparison:
    """Two results of :func:`measure` side by side, with the change from ``a`` to ``b``.

    Meant for one set of data and two models, or one model before and after training. What scales
    with the features (logits, distances, dispersions) only compares where features are of one
    size; cosines and ratios always do.

    Example:
        >>> from largemargin.measuring import measure_arrays
        >>> features, labels = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
        >>> short = measure_arrays(features, labels, torch.eye(2))
        >>> long = measure_arrays(2 * features, labels, torch.eye(2))
        >>> compared = compare_geometry(short, long).quantities
        >>> compared["margins.raw.overall.mean"].change
        2.5
        >>> compared["margins.cosine.overall.mean"].change
        0.0
    """
    for name, given in (("a", a), ("b", b)):
        if not isinstance(given, Geometry):
            raise LargeMarginError(
                f"{name} must be a Geometry, the result of measure, but {type(given).__name__} was "
                "given. Read a saved one with Geometry.load(path)."
            )
    if len(names) != 2:
        raise LargeMarginError(f"names must be two, but {names!r} was given.")
    first, second = dict(_numbers(a)), dict(_numbers(b))
    first["relative_margin"], second["relative_margin"] = relative_margin(a), relative_margin(b)
    return GeometryComparison(
        tuple(str(each) for each in names),
        {
            path: Difference(value, second[path], _change(value, second[path]))
            for path, value in first.items()
            if path in second
        },
        tuple(_notes(a, b, names)),
    )


def _numbers(record: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every single number of a record with its path; lists of numbers are left out."""
    for field in dataclasses.fields(record):
        if field.name == "format":
            continue
        value, here = getattr(record, field.name), f"{path}{field.name}"
        if field.name == "layers":
            value = {each.name: each for each in value or ()}
        if field.name == "quantiles":
            yield f"{path}minimum", value[0.0]
            yield f"{path}median", value[0.5]
        elif isinstance(value, dict):
            for key, each in value.items():
                yield from _entry(f"{here}.{key}", each)
        else:
            yield from _entry(here, value)


def _entry(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Record):
        yield from _numbers(value, f"{path}.")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def _layer_lines(quantities: dict[str, Difference]) -> list[tuple[str, Difference]]:
    """Quantities of the printed table of the layers that both have."""
    found = []
    for path, each in quantities.items():
        for end, label in SHOWN_LAYERS.items():
            if path.startswith("layers.") and path.endswith(end):
                name = path.removeprefix("layers.").removesuffix(end)
                found.append((f"{name}: {label}", each))
    return found


def relative_margin(g: Geometry) -> float:
    """Mean distance to the boundary in units of the spread of a class (NGY-P4.4)."""
    spread = math.sqrt(g.variance.within)
    mean = g.margins["distance"].overall.mean
    if spread == 0:
        return math.copysign(math.inf, mean) if mean else math.nan
    return mean / spread


def _change(first: float, second: float) -> float:
    return 0.0 if first == second else second - first


def _layer_names(g: Geometry) -> list[str] | None:
    return [each.name for each in g.layers] if g.layers else None


def _differ(one: object, other: object) -> bool:
    """Whether two things that are known are not the same."""
    return one is not None and other is not None and one != other


def _notes(a: Geometry, b: Geometry, names: tuple[str, str]) -> Iterator[str]:
    for what in ("samples", "classes", "dim"):
        one, other = getattr(a, what), getattr(b, what)
        if one != other:
            called = "dimensions" if what == "dim" else what
            yield f"{names[0]} has {one} {called}, {names[1]} has {other}"
    if _differ(a.data, b.data):
        yield f"they are of different data: {names[0]} of {a.data}, {names[1]} of {b.data}"
    if _differ(a.class_names, b.class_names):
        yield "their classes have different names: differences by class mean nothing"
    one, other = _layer_names(a), _layer_names(b)
    if _differ(one, other):
        yield f"layers differ ({one}; {other}): those of one name are compared"
    if (a.similarity, a.scale) != (b.similarity, b.scale):
        yield (
            f"logits are made differently ({a.similarity}, scale {a.scale:g}; {b.similarity}, "
            f"scale {b.scale:g}): compare cosine margins and ratios"
        )
    for name, each in zip(names, (a, b), strict=True):
        yield from (f"{name}: {note}" for note in each.notes)
