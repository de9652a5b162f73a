"""From what a pass has left behind to a result."""

from collections.abc import Iterable

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.measuring.batches import NOTHING
from largemargin.measuring.distributions import Margins, describe, describe_classes
from largemargin.measuring.features import (
    measure_centers,
    measure_collapse,
    measure_compactness,
    measure_variance,
)
from largemargin.measuring.layer_geometry import LayerGeometry, measure_layer
from largemargin.measuring.layers import LayerStreams
from largemargin.measuring.prototypes import measure_prototypes
from largemargin.measuring.reliability import Rejection, calibration, rejection
from largemargin.measuring.results import Geometry, WorstSample
from largemargin.measuring.scores import LEADS
from largemargin.measuring.sphere import measure_sphere
from largemargin.measuring.stream import Stream, check_norms


def conclude(
    stream: Stream,
    *,
    radius: float,
    worst: int,
    bins: int,
    strangers: list[dict[str, Tensor]] | None = None,
    pairwise: bool = False,
    sphere: bool = False,
    layers: LayerStreams | None = None,
    notes: Iterable[str] = (),
) -> Geometry:
    """The geometry of what a stream has taken in."""
    if stream.seen == 0:
        raise LargeMarginError(NOTHING)
    head, notes = stream.head, list(notes)
    labels, predicted = stream.column("label"), stream.column("predicted")
    norms = stream.column("norm")
    check_norms(norms, stream.column("index"))
    absent = (stream.sums.counts == 0).nonzero()[:, 0].tolist()
    if absent:
        notes.append(f"no samples of class {_listed(absent)}: numbers by class are NaN there")
    if stream.scores.curved:
        notes.append(
            "distances to boundaries are NaN: those of a cosine head with a bias are not planes"
        )
    correct = predicted == labels
    leads = {name: stream.column(name) for name in LEADS}
    return Geometry(
        samples=stream.seen,
        classes=stream.num_classes,
        dim=stream.dim,
        similarity=head.similarity,
        scale=float(head.scale),
        accuracy=float(correct.double().mean()),
        loss=float(stream.column("loss").mean()),
        feature_norm=describe(norms, bins=bins),
        margins={
            name: Margins(
                describe(stream.column(name), bins=bins),
                describe_classes(stream.column(name), labels, stream.num_classes),
            )
            for name in ("raw", "cosine", "distance")
        },
        softmax_bias=describe(stream.column("softmax_bias"), bins=bins),
        worst=_worst(stream, worst),
        prototypes=measure_prototypes(head.weight, notes),
        centers=measure_centers(stream.sums),
        variance=measure_variance(stream.sums, notes),
        collapse=measure_collapse(stream, notes),
        compactness=measure_compactness(stream, radius, notes) if pairwise else None,
        calibration=calibration(stream.column("confidence"), correct),
        errors=rejection(
            {name: each[correct] for name, each in leads.items()},
            {name: each[~correct] for name, each in leads.items()},
        ),
        strangers=_rejected(leads, strangers, notes),
        sphere=measure_sphere(stream, notes) if sphere else None,
        layers=None if layers is None else _layers(layers, stream, radius, bins, notes),
        notes=tuple(notes),
    )


def _layers(
    layers: LayerStreams, stream: Stream, radius: float, bins: int, notes: list[str]
) -> tuple[LayerGeometry, ...]:
    notes += layers.reader.notes()
    found = tuple(
        measure_layer(each, stream, radius=radius, bins=bins, notes=notes)
        for each in layers.streams.values()
    )
    if any(each.store is None for each in layers.streams.values()):
        notes.append("margins and accuracy at layers need the features, which pairwise=True keeps")
    return found


def _rejected(
    leads: dict[str, Tensor], strangers: list[dict[str, Tensor]] | None, notes: list[str]
) -> Rejection | None:
    if strangers is None:
        return None
    others = {name: torch.cat([each[name] for each in strangers]) for name in LEADS}
    if len(others[LEADS[0]]) == 0:
        notes.append("the loader given as ood is empty: its AUROC is NaN")
    return rejection(leads, others)


def _worst(stream: Stream, count: int) -> tuple[WorstSample, ...]:
    names = ("index", "label", "predicted", "rival", "raw", "cosine", "distance")
    columns = [stream.column(name) for name in names]
    order = columns[0].argsort(stable=True)
    order = order[columns[4][order].argsort(stable=True)][:count]
    return tuple(
        WorstSample(*row) for row in zip(*(c[order].tolist() for c in columns), strict=True)
    )


def _listed(classes: list[int]) -> str:
    shown = ", ".join(str(each) for each in classes[:8])
    return shown if len(classes) <= 8 else f"{shown} and {len(classes) - 8} others"
