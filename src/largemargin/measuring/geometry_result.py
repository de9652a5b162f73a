"""``Geometry``: what a measurement found, as data, as JSON and as a table."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from largemargin.measuring.calibration import Calibration, Rejection
from largemargin.measuring.distributions import Distribution, Margins
from largemargin.measuring.feature_geometry import Centers, ClassCompactness, Collapse, Variance
from largemargin.measuring.generalization import Bound
from largemargin.measuring.input_curvature import Curvature
from largemargin.measuring.input_margins import LinearizedMargins
from largemargin.measuring.layer_geometry import LayerGeometry
from largemargin.measuring.prototype_geometry import PrototypeGeometry
from largemargin.measuring.records import Record
from largemargin.measuring.sphere import Sphere

FORMAT = 1


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


def table(geometry: Geometry) -> str:
    """A geometry as text: one quantity a line, margins as a small table, notes at the end."""
    g = geometry
    form = f"{g.similarity} head" + ("" if g.scale == 1 else f", scale {g.scale:g}")
    title = f"{g.samples:,} samples, {g.classes:,} classes, {g.dim:,} dimensions, {form}"
    title += "" if g.data is None else f"\n{g.data}"
    facts = [*_overall(g), *_space(g), *_trust(g), *_behind(g)]
    width = max(len(name) for name, _ in facts)
    text = [f"{name:<{width}}  {value}" for name, value in facts]
    at = len(_overall(g))
    return "\n".join(
        [
            title,
            *text[:at],
            *_margin_table(g, width),
            *text[at:],
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
    for name, label in (
        ("raw", "logits"),
        ("cosine", "cosine"),
        ("distance", "distance to the boundary"),
    ):
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
        values = _layer_values(each, kept)
        lines.append(f"{'  ' + each.name:<{width}}" + "".join(f"{v:>11}" for v in values))
    return lines


def _layer_values(layer: LayerGeometry, kept: bool) -> list[str]:
    nc1 = math.nan if layer.collapse is None else layer.collapse.variability
    values = [f"{layer.dim:,}", number(layer.variance.ratio), number(nc1)]
    if kept:
        margin = math.nan if layer.margins is None else layer.margins["distance"].overall.mean
        values += [_percent(layer.accuracy), _percent(layer.left_out_accuracy), number(margin)]
    return values


def _space(g: Geometry) -> list[tuple[str, str]]:
    norm = g.feature_norm
    lines = [
        ("feature length", f"{number(norm.mean)} ± {number(norm.std)}"),
        ("variance between / within classes", number(g.variance.ratio)),
        ("closest class means", _closest_means(g)),
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


def _closest_means(g: Geometry) -> str:
    found = number(g.centers.smallest_distance)
    if g.class_names is None or not g.centers.closest_classes:
        return found
    return f"{found} between {_classes(g, g.centers.closest_classes)}"


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


def number(value: float) -> str:
    """Four digits, whatever the size."""
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _degrees(value: float) -> str:
    return f"{value:.2f}°"
