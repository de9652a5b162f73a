"""Features in three dimensions as points on a sphere, with the class vectors beside them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.geometry.pairs import widen
from largemargin.measuring.records import Record
from largemargin.measuring.stream import Stream
from largemargin.ops.norms import EPS, safe_norm

POINTS = 5000
"""More samples than this are thinned: more would only hide each other."""

SEED = 0
"""Of the samples that are kept then."""

Point = tuple[float, float, float]


@dataclass(frozen=True)
class Sphere(Record):
    """Directions of features and class vectors; angles in degrees.

    Beyond 5000 samples a random part of that size, drawn with ``seed``, is kept.
    """

    samples: int
    """That were measured; ``points`` are as many or fewer."""
    seed: int
    points: tuple[Point, ...]
    """Features of length 1, in the order of sample indices; (0, 0, 0) for a feature of length 0."""
    index: tuple[int, ...]
    labels: tuple[int, ...]
    predicted: tuple[int, ...]
    angles: tuple[float, ...]
    """Of each point to its class vector; NaN where one of them has no direction."""
    rival_angles: tuple[float, ...]
    """To the nearest class vector of another class."""
    prototypes: tuple[Point, ...]
    """Class vectors of length 1, by class."""


def check_sphere(dim: int) -> None:
    if dim != 3:
        raise LargeMarginError(
            f"sphere=True needs features of 3 dimensions, but these have {dim}. Train the model "
            f"with a feature layer of 3 before its head, as nn.Linear({dim}, 3) and "
            "lm.ClassHead(3, C); for a picture of these features use lm.measuring.embed."
        )


def measure_sphere(stream: Stream, notes: list[str]) -> Sphere:
    """Points of a stream that has kept its features."""
    assert stream.store is not None
    index = stream.column("index")
    chosen = _chosen(index)
    if len(chosen) < len(index):
        notes.append(f"the sphere shows {len(chosen)} of {len(index)} samples, seed {SEED}")
    rows = widen(stream.store.all()[chosen])
    labels = stream.column("label")[chosen]
    unit, prototypes = _directions(rows), _directions(stream.scores.weight.cpu())
    angles = _angles(unit, prototypes)
    if bool(angles.isnan().any()):
        notes.append("a feature or class vector of length 0 has no place on the sphere: angles NaN")
    own = angles.gather(1, labels[:, None])[:, 0]
    others = angles.scatter(1, labels[:, None], math.inf)
    rival = torch.where(others.isnan(), math.inf, others).amin(1)
    return Sphere(
        len(index),
        SEED,
        _points(unit),
        tuple(index[chosen].tolist()),
        tuple(labels.tolist()),
        tuple(stream.column("predicted")[chosen].tolist()),
        tuple(own.tolist()),
        tuple(rival.masked_fill(rival.isinf(), math.nan).tolist()),
        _points(prototypes),
    )


def _chosen(index: Tensor) -> Tensor:
    """Rows to keep, in the order of their samples: the same on any number of processes."""
    order = index.argsort(stable=True)
    if len(order) <= POINTS:
        return order
    drawn = torch.randperm(len(order), generator=torch.Generator().manual_seed(SEED))
    return order[drawn[:POINTS].sort().values]


def _directions(rows: Tensor) -> Tensor:
    norms = safe_norm(rows)[:, None]
    return torch.where(norms < EPS, 0.0, rows / norms.clamp_min(EPS))


def _angles(points: Tensor, prototypes: Tensor) -> Tensor:
    """(N, C) degrees, exact for small ones too: twice the arctangent of chord and its partner."""
    chords = torch.linalg.vector_norm(points[:, None] - prototypes, dim=2)
    partners = torch.linalg.vector_norm(points[:, None] + prototypes, dim=2)
    angles = torch.rad2deg(2 * torch.atan2(chords, partners))
    nowhere = (points == 0).all(1)[:, None] | (prototypes == 0).all(1)
    return angles.masked_fill(nowhere, math.nan)


def _points(rows: Tensor) -> tuple[Point, ...]:
    return tuple((x, y, z) for x, y, z in rows.tolist())
