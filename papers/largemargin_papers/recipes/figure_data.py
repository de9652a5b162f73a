"""What is kept of a run for figures: short lists of numbers, taken when its numbers are measured.

t-SNE is left to where the tables are written: the machine that trains may have no scikit-learn, and
its time is better spent. Until then features travel as 16-bit numbers of few dimensions.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from largemargin.app.training.run_scores import spread
from largemargin.errors import LargeMarginError
from largemargin.geometry.curvature import low_curvature_mask
from largemargin.geometry.dispersion import variance_split
from largemargin.measuring.embed import FIRST_PCA, Projector
from largemargin_papers.recipes.metrics import SAMPLES, Subject, label

Drawn = dict[str, Any]
"""A sketch, ready for JSON."""

FAILED = "failed"
"""Stands in a sketch that could not be made, with the reason."""

VARIANCES = ("within", "between", "ratio")

LOW = 0.9
"""Share of the images, those of lowest curvature, whose curvatures are shown (ROB Figure 10)."""


def stages(subject: Subject, *, samples: int = SAMPLES, noise: float = 0.0) -> Drawn:
    """Features along the network (LMD Figures 4 and 6), not yet in the plane.

    With ``noise`` those of noisy images come after them (ROB Figures 12 and 13).
    """
    panels = {}
    for level in [0.0, noise] if noise else [0.0]:
        found = subject.stages(samples, level)
        labels = found.labels.tolist()
        for name, rows in found.rows.items():
            panels[f"{name}, noisy" if level else name] = {"labels": labels, **packed(rows)}
    return {"split": subject.split, "panels": panels}


def planes(subject: Subject, *, parts: Sequence[str], samples: int = 2 * SAMPLES) -> Drawn:
    """Features of splits before the head (ODN Figures 3 and 4), not yet in the plane."""
    panels = {}
    for name in parts:
        features, labels = subject.features(name)
        chosen = spread(labels, samples)
        panels[name] = {"labels": labels[chosen].tolist(), **packed(features[chosen])}
    return {"panels": panels}


def margin_density(subject: Subject, *, part: str = "test") -> Drawn:
    """Kernel density of the linearised margins in input space (ODN Figure 5)."""
    found = subject.input_margins(part)
    return {
        "split": part,
        "at": _short(found.density_at),
        "density": _short(found.density),
        **{name: _short([getattr(found, name)])[0] for name in ("mean", "std", "ratio")},
        "samples": found.count,
    }


def curvature(subject: Subject) -> Drawn:
    """Box plot of curvatures, accuracy by curvature, curvature by robustness (ROB 8 to 10)."""
    found = subject.curvature
    values = torch.tensor(found.values, dtype=torch.float64)
    return {
        "samples": found.samples,
        "share": LOW,
        "box": box_of(values[low_curvature_mask(values, LOW)]),
        "noise": {
            name: {
                "amount": each.amount,
                "shares": list(each.shares),
                "accuracy": _short([100 * value for value in each.weak]),
                "group_curvature": _short(each.group_curvature),
                "group_size": list(each.group_size),
                "correlation": _short([each.correlation])[0],
            }
            for name, each in found.robustness.items()
        },
    }


def box_of(values: Tensor) -> dict[str, float]:
    """Median, quartiles, and whiskers to the last values within 1.5 quartile distances of them.

    >>> box_of(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 99.0]))["whishi"]
    4.0
    """
    values = values.double()
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    reach = 1.5 * (high - low)
    inside = values[(values >= low - reach) & (values <= high + reach)]
    return {
        "med": middle,
        "q1": low,
        "q3": high,
        "whislo": float(inside.min()),
        "whishi": float(inside.max()),
    }


SKETCHES: Mapping[str, Callable[..., Drawn]] = MappingProxyType(
    {"stages": stages, "planes": planes, "margin_density": margin_density, "curvature": curvature}
)


def sketched(subject: Subject, kind: str, options: Mapping[str, Any]) -> Drawn:
    """A sketch by name; it says of which kind it is."""
    check_kind(kind)
    return {"kind": kind, **SKETCHES[kind](subject, **options)}


def check_kind(kind: str) -> None:
    if kind not in SKETCHES:
        raise LargeMarginError(f"there is no sketch {kind!r}. There are {', '.join(SKETCHES)}.")


def settled(sketch: Drawn) -> Drawn:
    """The same with features embedded in the plane; one that has been stays as it is."""
    panels = sketch.get("panels", {})
    made = {name: in_plane(panel) if "rows" in panel else panel for name, panel in panels.items()}
    return {**sketch, "panels": made} if made else sketch


def in_plane(panel: Mapping[str, Any]) -> Drawn:
    """Packed features by t-SNE, as ``largemargin.embed`` does it, and their variances there."""
    points = Projector("tsne", seed=0, perplexity=30.0)(unpacked(panel)).points
    labels = list(panel["labels"])
    split = variance_split(points, torch.tensor(labels))
    x, y = ([round(value, 1) for value in axis] for axis in points.T.tolist())
    variances = {name: _short([float(getattr(split, name))])[0] for name in VARIANCES}
    return {"labels": labels, "x": x, "y": y, **variances}


def settled_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run with its sketches in the plane, and the numbers that follow from them (ODN-VAR)."""
    given = run.get("sketches", {})
    if not isinstance(given, Mapping):
        return dict(run)
    made = {name: settled(sketch) for name, sketch in given.items()}
    numbers = {
        label("plane_variance", {"part": part, "of": of}): [panel[of], None]
        for sketch in made.values()
        if sketch["kind"] == "planes"
        for part, panel in sketch.get("panels", {}).items()
        for of in VARIANCES
    }
    found = {**run, "numbers": {**run["numbers"], **numbers}}
    return {**found, "sketches": made} if made else found


def packed(rows: Tensor) -> Drawn:
    """(N, D) as text: the first 50 principal components, which is what t-SNE is given anyway."""
    rows = rows.double() - rows.double().mean(0)
    if rows.shape[1] > FIRST_PCA:
        _, _, axes = torch.linalg.svd(rows, full_matrices=False)
        rows = rows @ axes[:FIRST_PCA].T
    # The scale means nothing to t-SNE started from principal components, and 16 bits overflow.
    rows = rows / rows.abs().amax().clamp(min=1e-30)
    if not bool(rows.isfinite().all()):
        raise LargeMarginError("features must be finite to be drawn. Look for a diverged model.")
    numbers = bytes(rows.half().contiguous().view(torch.uint8).flatten().tolist())
    return {"rows": base64.b64encode(numbers).decode(), "dim": rows.shape[1]}


def unpacked(panel: Mapping[str, Any]) -> Tensor:
    numbers = torch.frombuffer(bytearray(base64.b64decode(panel["rows"])), dtype=torch.float16)
    return numbers.view(-1, panel["dim"]).double()


def _short(values: Sequence[float]) -> list[float | None]:
    """Five digits; JSON has no NaN."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
