"""The geometry of an intermediate layer, where class means stand for class vectors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.geometry.pairs import blocks, widen
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.distributions import Distribution, Margins, describe, describe_classes
from largemargin.measuring.feature_geometry import (
    Centers,
    ClassCompactness,
    Collapse,
    Variance,
    collapse_of,
    compactness_of,
    measure_centers,
    measure_variance,
)
from largemargin.measuring.layers import LayerStream
from largemargin.measuring.records import Record
from largemargin.measuring.scores import HeadScores
from largemargin.measuring.stream import Stream, check_norms

CLASS_MEANS = "class means of these samples"
MARGINS = ("raw", "cosine", "distance")


@dataclass(frozen=True)
class LayerGeometry(Record):
    """How well a layer tells the classes apart.

    There is no linear head at it, so the class means of the measured samples are the prototypes and
    the nearest one is the prediction. They come from the samples they are measured on: with few
    samples per class in many dimensions, accuracy and margins are better than on new data, which
    ``left_out_accuracy`` is not.
    """

    name: str
    module: str
    """Its type."""
    shape: tuple[int, ...]
    """Of the output of one sample."""
    pooling: str
    """How that became one vector."""
    dim: int
    prototypes: str
    """What stands for class vectors."""
    feature_norm: Distribution
    variance: Variance
    centers: Centers
    collapse: Collapse | None
    """NC3 is NaN, there are no class vectors; NC4 is the share of samples whose nearest class mean
    at this layer is not what the head predicts."""
    accuracy: float
    """Of the nearest class mean; NaN where features were not kept."""
    left_out_accuracy: float
    """The same with each sample left out of the mean of its own class, as if it were new; a sample
    alone in its class counts as wrong."""
    margins: dict[str, Margins] | None
    """Of the classifier by the nearest class mean; None where features were not kept. "distance":
    signed Euclidean distance to the nearest boundary, the plane halfway between two means; "raw":
    half the difference of squared distances to the nearest other mean and the own one; "cosine":
    from the middle of the class means."""
    compactness: ClassCompactness | None


def measure_layer(
    layer: LayerStream,
    stream: Stream,
    *,
    radius: float,
    bins: int,
    notes: list[str],
) -> LayerGeometry:
    """The geometry of a layer beside the stream of the head, whose samples it shares."""
    own: list[str] = []
    index, norms = stream.column("index"), layer.norm
    check_norms(norms, index, f"features at layer {layer.name!r}")
    facts, sums = layer.facts, layer.sums
    rows = None if layer.store is None else layer.store.all()
    accuracy = left_out = math.nan
    margins, compactness = None, None
    if rows is not None:
        labels = stream.column("label")
        columns = _by_means(layer, rows, labels, own) | {"label": labels, "index": index}
        if "predicted" in columns:
            accuracy = float((columns["predicted"] == labels).double().mean())
            left_out = float(columns["left_out"].mean())
            margins = {
                name: Margins(
                    describe(columns[name], bins=bins),
                    describe_classes(columns[name], labels, stream.num_classes),
                )
                for name in MARGINS
            }
        compactness = compactness_of(rows, columns, sums, radius, own)
    found = LayerGeometry(
        layer.name,
        facts.module,
        facts.shape,
        facts.pooling,
        facts.dim,
        CLASS_MEANS,
        describe(norms, bins=bins),
        measure_variance(sums, own),
        measure_centers(sums),
        collapse_of(sums, None, rows, stream.column("predicted"), own),
        accuracy,
        left_out,
        margins,
        compactness,
    )
    notes += [f"layer {layer.name!r}: {note}" for note in own]
    return found


def _by_means(
    layer: LayerStream, rows: Tensor, labels: Tensor, notes: list[str]
) -> dict[str, Tensor]:
    """Margins, boundaries and predictions of the nearest class mean, for each row."""
    sums = layer.sums
    present = (sums.counts > 0).nonzero()[:, 0]
    if len(present) < 2:
        notes.append("margins to class means need samples of two classes at least: None")
        unknown = torch.full((len(rows),), math.nan, dtype=torch.float64)
        return {"distance": unknown, "boundary": unknown}
    means = sums.means[present]
    # From the middle of the means: far from it, squares would lose the digits margins are made of.
    middle = means[0] + (means - means[0]).mean(0)
    scores = HeadScores(HeadView(means - middle, None, "euclidean", 1.0))
    sizes = sums.counts[present].to(means.dtype)
    place = torch.full_like(sums.counts, -1)
    place[present] = torch.arange(len(present), device=present.device)
    names = (*MARGINS, "boundary", "predicted", "left_out")
    found = {
        name: torch.empty(len(rows), dtype=torch.long if name == "predicted" else torch.float64)
        for name in names
    }
    for part in blocks(len(rows), scores.rows_at_once):
        features = widen(rows[part].to(means.device)) - middle
        own = place[labels[part].to(means.device)]
        columns = scores.labelled(features, own)
        columns["predicted"] = present[columns["predicted"]]
        columns["left_out"] = _right_when_left_out(
            (features - scores.weight[own]).square().sum(1), columns["raw"], sizes[own]
        )
        for name in names:
            found[name][part] = columns[name].cpu()
    return found


def _right_when_left_out(own: Tensor, raw: Tensor, sizes: Tensor) -> Tensor:
    """Whether the own class mean is nearest when the sample is no part of it, 1 or 0.

    Leaving one of n samples out moves the mean away from it by the factor n / (n - 1). ``own`` are
    squared distances to the whole mean; twice ``raw`` further is the nearest other one.
    """
    moved = own * (sizes / (sizes - 1).clamp_min(1)).square()
    return ((moved < own + 2 * raw) & (sizes > 1)).to(own.dtype)
