"""``Geometry``: what a measurement found, as data, as JSON and as a table; two of them compared."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from largemargin.errors import LargeMarginError, check_choice
from largemargin.measuring.calibration import Calibration, Rejection
from largemargin.measuring.distributions import Distribution, Margins
from largemargin.measuring.feature_geometry import (
    Centers,
    ClassCompactness,
    Collapse,
    PrototypeGeometry,
    Sphere,
    Variance,
)
from largemargin.measuring.generalization import Bound
from largemargin.measuring.input_curvature import Curvature
from largemargin.measuring.input_margins import LinearizedMargins
from largemargin.measuring.layers import LayerGeometry
from largemargin.measuring.plots import plot_class_margins, plot_margins
from largemargin.measuring.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = 1

MARGINS = {
    "raw": "logit margin: own class − largest other",
    "cosine": "cosine margin: to the own class − to the closest other",
    "distance": "signed distance to the boundary, in units of the features",
}
"""Kinds of sample margins, as axes of plots call them."""

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
class WorstSample(Record):
    """A sample of small margin: where it is in the data, and what it is mistaken for."""

    index: int
    label: int
    predicted: int
    rival: int
    raw: float
    cosine: float
    distance: float


@dataclass(frozen=True)
class Geometry(Record):
    """Everything :func:`measure` found; parts that were not asked for are None."""

    samples: int
    classes: int
    dim: int
    similarity: str
    scale: float
    accuracy: float
    loss: float
    """Mean cross entropy of the head's own logits."""
    feature_norm: Distribution
    margins: dict[str, Margins]
    """"raw" (logits as they are), "cosine", "distance" (signed, to the nearest boundary)."""
    softmax_bias: Distribution
    """Margin the softmax loss asks for by itself (KOB-7)."""
    worst: tuple[WorstSample, ...]
    """Samples of smallest raw margin, smallest first."""
    prototypes: PrototypeGeometry
    centers: Centers
    variance: Variance
    collapse: Collapse | None
    compactness: ClassCompactness | None
    calibration: Calibration
    errors: Rejection
    """How well the lead of the predicted class tells right from wrong predictions."""
    ood: Rejection | None
    """How well it tells this data from that of the ``ood`` loader."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""
    input_margins: LinearizedMargins | None = None
    """Linearised margins in input space (ODN-G)."""
    layer_margins: dict[str, LinearizedMargins] | None = None
    """Linearised margins at layers, by their names (Elsayed et al. 2018)."""
    curvature: Curvature | None = None
    """Of the loss in input space (NGR-21)."""
    bounds: tuple[Bound, ...] | None = None
    """Generalization quantities, each with what it assumes."""
    layers: tuple[LayerGeometry, ...] | None = None
    """The same at layers before the features, where class means stand for class vectors."""
    sphere: Sphere | None = None
    """Features and class vectors as points on a sphere, in three dimensions."""
    data: str | None = None
    """What it was measured on, in the words of who measured; None where nobody said."""
    class_names: tuple[str, ...] | None = None
    """What the classes are called, in the order of the labels; None where nobody said."""
    format: int = FORMAT

    RENAMED: ClassVar[dict[str, str]] = {"strangers": "ood"}

    def __str__(self) -> str:
        return table(self)

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        margin: str = "cosine",
        by: str | None = None,
        label: str | None = None,
    ) -> "Axes":
        """Draw the sample margins: their histogram, the share below 0, minimum and median.

        Needs matplotlib. Several models fit on one axes: ``b.plot(a.plot(label="a"), label="b")``.

        Args:
            ax: matplotlib axes to draw on; default a new figure of pyplot's.
            margin: "cosine" (default: comparable between models), "raw" (logits) or "distance".
            by: "class" for a row with median, 5 % quantile and minimum of each class, the smallest
                on top; of more than 40 classes the 40 of smallest margins. Default None: overall.
            label: name of the model in the legend, or in the title of rows by class.

        Returns:
            The axes.
        """
        check_choice("margin", margin, MARGINS)
        check_choice("by", by, (None, "class"))
        found, words = self.margins[margin], MARGINS[margin]
        if by == "class":
            return plot_class_margins(ax, found.classes, words, label, self.class_names)
        return plot_margins(ax, found.overall, words, label)


def table(geometry: Geometry) -> str:
    """A geometry as text: one quantity a line, margins as a small table, notes at the end."""
    g = geometry
    form = f"{g.similarity} head" + ("" if g.scale == 1 else f", scale {g.scale:g}")
    title = f"{g.samples:,} samples, {g.classes:,} classes, {g.dim:,} dimensions, {form}"
    title += "" if g.data is None else f"\n{g.data}"
    overall, rest = _overall(g), [*_space(g), *_trust(g), *_behind(g)]
    width = max(len(name) for name, _ in (*overall, *rest))
    return "\n".join(
        [
            title,
            *(f"{name:<{width}}  {value}" for name, value in overall),
            *_margin_table(g, width),
            *(f"{name:<{width}}  {value}" for name, value in rest),
            *_layer_table(g, width),
            *(f"note: {n}" for n in g.notes),
        ]
    )


def _overall(g: Geometry) -> list[tuple[str, str]]:
    p = g.prototypes
    return [
        ("accuracy", _percent(g.accuracy)),
        ("loss", number(g.loss)),
        ("class margin", f"{_degrees(p.class_margin)} between {_classes(g, p.closest_classes)}"),
        ("  at most", _degrees(p.ceiling) + _known(p)),
        ("longest / shortest class vector", number(p.magnitude_ratio)),
        ("distance from the simplex", number(p.symmetry)),
    ]


def _classes(g: Geometry, labels: Iterable[int]) -> str:
    """Classes by their names, or else by their numbers."""
    names = g.class_names
    return "classes " + " and ".join(str(each) if names is None else names[each] for each in labels)


def _known(p: PrototypeGeometry) -> str:
    if p.reachable == p.ceiling:
        return ", which can be reached"
    return "" if math.isnan(p.reachable) else f"; {_degrees(p.reachable)} is known to be possible"


def _margin_table(g: Geometry, width: int) -> list[str]:
    heads = ("mean", "std", "mean/std", "min", "5 %", "median")
    lines = [f"{'sample margins':<{width}}" + "".join(f"{head:>11}" for head in heads)]
    labels = {"raw": "logits", "cosine": "cosine", "distance": "distance to the boundary"}
    for name, label in labels.items():
        d = g.margins[name].overall
        values = (d.mean, d.std, d.ratio, d.minimum, d.quantiles[0.05], d.median)
        lines.append(f"{'  ' + label:<{width}}" + "".join(f"{number(v):>11}" for v in values))
    return lines


def _layer_table(g: Geometry, width: int) -> list[str]:
    """One line a layer; margins and diameters where features were kept."""
    if not g.layers:
        return []
    width = max(width, *(len(each.name) + 3 for each in g.layers))
    kept = any(each.compactness is not None for each in g.layers)
    heads = ("dim", "variance", "NC1", *(("accuracy", "left out", "margin") if kept else ()))
    title = f"layers, by class means ({len(g.layers)})"
    lines = [f"{title:<{width}}" + "".join(f"{head:>11}" for head in heads)]
    for each in g.layers:
        values = _layer_values(each)[: len(heads)]
        lines.append(f"{'  ' + each.name:<{width}}" + "".join(f"{v:>11}" for v in values))
    return lines


def _layer_values(layer: LayerGeometry) -> list[str]:
    nc1 = math.nan if layer.collapse is None else layer.collapse.variability
    margin = math.nan if layer.margins is None else layer.margins["distance"].overall.mean
    shares = _percent(layer.accuracy), _percent(layer.left_out_accuracy)
    return [f"{layer.dim:,}", number(layer.variance.ratio), number(nc1), *shares, number(margin)]


def _space(g: Geometry) -> list[tuple[str, str]]:
    norm, closest = g.feature_norm, number(g.centers.smallest_distance)
    if g.class_names is not None and g.centers.closest_classes:
        closest += f" between {_classes(g, g.centers.closest_classes)}"
    lines = [
        ("feature length", f"{number(norm.mean)} ± {number(norm.std)}"),
        ("variance between / within classes", number(g.variance.ratio)),
        ("closest class means", closest),
    ]
    if g.collapse is not None:
        c = g.collapse
        lines += [
            ("collapse: variability (NC1)", number(c.variability)),
            ("collapse: from simplex (NC2)", number(c.simplex_gap)),
            ("collapse: from duality (NC3)", number(c.duality)),
        ]
        if not math.isnan(c.nearest_center):
            lines.append(("collapse: not nearest mean (NC4)", _percent(c.nearest_center)))
    if g.compactness is not None:
        k = g.compactness
        ideal = "ideal" if k.ideal_ratio < 1 else "not ideal"
        lines += [
            ("largest dispersion", number(k.largest_dispersion)),
            ("separation of classes", number(k.separation)),
            ("dispersion / separation", f"{number(k.ideal_ratio)} ({ideal}: below 1 is)"),
            (f"within {k.radius:g} of the class mean", _percent(k.inside_radius)),
        ]
    return lines


def _trust(g: Geometry) -> list[tuple[str, str]]:
    lines = [("calibration error", _percent(g.calibration.expected_error))]
    for name, found in (("errors", g.errors), ("OOD samples", g.ood)):
        if found is not None:
            value = f"AUROC {number(found.auroc['lead_raw'])}, {found.rejected:,} of them"
            told = value if found.kept else "nothing right to tell them from"
            told = told if found.rejected else "none to tell"
            lines.append((f"{name} told by logit margin", told))
    return lines


def _behind(g: Geometry) -> list[tuple[str, str]]:
    """What was measured behind the features: in input space, at layers, of the network."""
    lines = []
    own = {} if g.input_margins is None else {"input": g.input_margins}
    for name, found in [*own.items(), *(g.layer_margins or {}).items()]:
        d = found.overall
        value = f"{number(d.mean)} ± {number(d.std)}, mean/std {number(d.ratio)} ({found.rival})"
        lines.append((f"linearised margin at {name}", value))
    if g.curvature is not None:
        c = g.curvature
        value = f"{number(c.overall.mean)} ({number(c.overall.median)})"
        lines.append(("input curvature, mean (median)", value))
        for kind, robust in c.robustness.items():
            told = f"{_percent(robust.accuracy)}, correlation with curvature "
            value = told + number(robust.correlation)
            lines.append((f"accuracy, {kind} noise {robust.amount:g}", value))
        if c.stability is not None:
            t = c.stability
            value = f"{_percent(t.eta.mean)} of noise {t.sigma:g} (curvature within the bound of "
            told = f"Theorem 6.1, a heuristic: {_percent(t.upper_kept)})"
            lines.append((f"features stay within {t.radius:g}", value + told))
    lines += [(each.name, f"{number(each.value)}, {each.verdict}") for each in g.bounds or ()]
    return lines


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
    first, second = _numbers(a), _numbers(b)
    first["relative_margin"], second["relative_margin"] = relative_margin(a), relative_margin(b)
    return GeometryComparison(
        tuple(str(each) for each in names),
        {
            path: Difference(one, other, 0.0 if one == other else other - one)
            for path, one in first.items()
            if (other := second.get(path)) is not None
        },
        tuple(_notes(a, b, names)),
    )


def _numbers(geometry: Geometry) -> dict[str, float]:
    """Every single number of a geometry by its path; lists of numbers are left out."""
    data = dataclasses.asdict(geometry)
    del data["format"]
    data["layers"] = {each["name"]: each for each in data["layers"] or ()}
    return dict(_flat(data))


def _flat(data: dict[Any, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in data.items():
        if isinstance(value, dict) and 0.5 in value:  # quantiles
            yield f"{path}minimum", value[0.0]
            yield f"{path}median", value[0.5]
        elif isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{name}", float(value)


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


def number(value: float) -> str:
    """Four digits, whatever the size."""
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _degrees(value: float) -> str:
    return f"{value:.2f}°"
