"""How the class vectors of a head are arranged, against the best possible arrangement."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from largemargin.geometry.margins import angle_matrix, magnitude_ratio, riesz_energy
from largemargin.geometry.pairs import closest_pair, row_distance, widen
from largemargin.heads.packing import best_packing, packing_bound
from largemargin.losses.prototype_penalties import super_symmetry
from largemargin.measuring.records import Record
from largemargin.ops.norms import EPS, normalize

MATRIX_CLASSES = 512
"""Up to this many classes the whole angle matrix is part of the result."""

PACKED_CLASSES = 64
"""Up to this many classes a best packing is searched where no closed form is known."""

SEARCH_STEPS, SEARCH_STARTS = 400, 8
"""Of that search, less than the default: it stands beside a measurement."""

PAIRED_CLASSES = 4096
"""Up to this many classes all pairs enter a sum."""


@dataclass(frozen=True)
class PrototypeGeometry(Record):
    """Angles in degrees. Lengths do not enter angles; see ``magnitude_ratio`` for them."""

    class_margin: float
    """Smallest angle between two class vectors (ZHO-MC)."""
    closest_classes: tuple[int, ...]
    """The two classes of that angle."""
    ceiling: float
    """No arrangement of C vectors in D dimensions has a wider smallest angle."""
    reachable: float
    """The widest arrangement known here: the ceiling where the optimum is known, otherwise what a
    short search finds, or this one where that is wider; NaN where none was searched."""
    magnitude_ratio: float
    """Longest over shortest class vector."""
    symmetry: float
    """Distance from the simplex, 0 at it (KOB-SS); NaN beyond 4096 classes."""
    riesz_energy: float
    """Energy of the unit vectors at t = 2; smaller is wider. NaN beyond 4096 classes."""
    smallest_distance: float
    """Between two unit vectors; one that is zero is at a right angle to the others."""
    angles: tuple[tuple[float, ...], ...] | None
    """(C, C); None beyond 512 classes."""


def measure_prototypes(weight: Tensor, notes: list[str]) -> PrototypeGeometry:
    weight = widen(weight)
    num_classes, dim = weight.shape
    unit = normalize(weight)
    pair = _closest(weight, unit, notes)
    margin = angle_matrix(weight[list(pair)])[0, 1]
    angles = torch.rad2deg(angle_matrix(weight)) if num_classes <= MATRIX_CLASSES else None
    if angles is None:
        notes.append(f"the angle matrix of {num_classes} classes is left out")
        closest = pair
    else:
        closest = divmod(int(angles.clone().fill_diagonal_(math.inf).argmin()), num_classes)
    ceiling, reachable = packing_bound(num_classes, dim), widest_known(num_classes, dim)
    if reachable < ceiling:  # searched, and what is measured may be wider
        reachable = min(ceiling, max(reachable, float(margin)))
    if math.isnan(reachable):
        notes.append(
            f"the best packing of {num_classes} classes in {dim} dimensions was not searched; the "
            "ceiling is an upper bound that may be out of reach"
        )
    few = num_classes <= PAIRED_CLASSES
    if not few:
        notes.append(f"symmetry and Riesz energy of {num_classes} classes are left out: NaN")
    return PrototypeGeometry(
        math.degrees(float(margin)),
        closest,
        math.degrees(ceiling),
        math.degrees(reachable),
        float(magnitude_ratio(weight)),
        float(super_symmetry(weight)) if few else math.nan,
        float(riesz_energy(unit, 2.0)) if few else math.nan,
        2 * math.sin(float(margin) / 2),
        None if angles is None else tuple(tuple(row) for row in angles.tolist()),
    )


def _closest(weight: Tensor, unit: Tensor, notes: list[str]) -> tuple[int, int]:
    """The two class vectors at the smallest angle; one that is zero is at a right angle to all."""
    empty = weight.norm(dim=1) < EPS
    if not bool(empty.any()):
        pair = closest_pair(unit)
        assert pair is not None
        return pair
    notes.append("a class vector is zero; it counts as orthogonal to every other")
    others = (~empty).nonzero()[:, 0]
    pair = closest_pair(unit[others])
    if pair is not None:
        first, second = (int(others[each]) for each in pair)
        if float(row_distance(unit, (first, second))) < math.sqrt(2):
            return first, second
    zero = int(empty.int().argmax())
    return (0, 1) if zero == 0 else (0, zero)


@lru_cache(maxsize=64)
def widest_known(num_classes: int, dim: int) -> float:
    """Smallest angle in radians of the widest arrangement known, NaN where none was searched.

    A search takes seconds, so it is done once for each C and D.
    """
    if num_classes <= 2 * dim or dim <= 2:  # known: no search
        return packing_bound(num_classes, dim)
    if num_classes > PACKED_CLASSES:
        return math.nan
    return best_packing(num_classes, dim, steps=SEARCH_STEPS, restarts=SEARCH_STARTS).angle
