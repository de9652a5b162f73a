"""How the class vectors of a head are arranged, and how tight and how far apart its classes are.

In three dimensions both are points on a sphere, which can be drawn.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.geometry.margins import angle_matrix, class_minimum, magnitude_ratio, riesz_energy
from largemargin.geometry.pairs import (
    blocks,
    closest_pair,
    diameters,
    distances,
    row_distance,
    widen,
)
from largemargin.heads.packing import best_packing, packing_bound
from largemargin.losses.prototype_penalties import super_symmetry
from largemargin.measuring.records import Record
from largemargin.measuring.scores import rows_at_once
from largemargin.measuring.stream import ClassSums, Stream
from largemargin.ops.norms import EPS, normalize, safe_norm

MATRIX_CLASSES = 512
"""Up to this many classes matrices of angles and distances are part of the result."""

PACKED_CLASSES = 64
"""Up to this many classes a best packing is searched where no closed form is known."""

SEARCH_STEPS, SEARCH_STARTS = 400, 8
"""Of that search, less than the default: it stands beside a measurement."""

PAIRED_CLASSES = 4096
"""Up to this many classes all pairs enter a sum."""

POINTS = 5000
"""A sphere of more samples is thinned: more would only hide each other."""

POINT_SEED = 0
"""Of the samples that are kept then."""

Point = tuple[float, float, float]


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


@dataclass(frozen=True)
class Variance(Record):
    """Variance within and between classes (ODN-VAR)."""

    within: float
    between: float
    total: float
    ratio: float
    """between / within; infinite for collapsed classes."""


@dataclass(frozen=True)
class Centers(Record):
    """Class means."""

    smallest_distance: float
    """Between two class means; NaN with one class."""
    closest_classes: tuple[int, ...]
    distances: tuple[tuple[float, ...], ...] | None
    """(C, C), NaN for classes without samples; None beyond 512 classes."""


@dataclass(frozen=True)
class Collapse(Record):
    """Neural collapse (Papyan, Han and Donoho 2020): every number tends to 0 in it.

    Class means are centred at their own mean, which is the global mean where classes are of equal
    size, as the paper has them. Only classes with samples take part.
    """

    variability: float
    """NC1, tr(Sigma_W pinv(Sigma_B)) / C; NaN beyond 4096 dimensions."""
    norm_spread: float
    """NC2, std / mean of the lengths of the centred class means."""
    angle_spread: float
    """NC2, standard deviation of the cosines between centred class means."""
    simplex_gap: float
    """NC2, mean |cosine + 1/(C-1)|."""
    duality: float
    """NC3, || W / ||W|| - M / ||M|| ||_F of class vectors and centred class means; NaN at a layer
    without class vectors."""
    nearest_center: float
    """NC4, share of samples the head classifies otherwise than the nearest class mean does; NaN
    where features were not kept."""


@dataclass(frozen=True)
class ClassCompactness(Record):
    """Pairwise quantities of the features themselves (NGY-D4, NGY-P4.2)."""

    dispersion: tuple[float, ...]
    """Diameter of each class; NaN without samples."""
    largest_dispersion: float
    margin: tuple[float, ...]
    """Smallest unsigned distance of a class to a decision boundary, as LMD defines it."""
    signed_margin: tuple[float, ...]
    """The same, negative where a sample is on the wrong side: the one to read."""
    separation: float
    """Smallest distance between samples of different classes; infinite with one class."""
    closest_samples: tuple[int, ...]
    """Their indices."""
    ideal_ratio: float
    """Largest dispersion over separation; below 1 features are ideal (NGY-P4.2)."""
    radius: float
    """delta_v of the next number."""
    inside_radius: float
    """Share of samples within the radius around their class mean."""


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


def measure_prototypes(weight: Tensor, notes: list[str]) -> PrototypeGeometry:
    weight = widen(weight)
    num_classes, dim = weight.shape
    unit = normalize(weight)
    pair = _closest_vectors(weight, unit, notes)
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


def _closest_vectors(weight: Tensor, unit: Tensor, notes: list[str]) -> tuple[int, int]:
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


def measure_variance(sums: ClassSums, notes: list[str]) -> Variance:
    count = int(sums.counts.sum())
    present = sums.counts > 0
    means, n = sums.means[present], sums.counts[present].to(sums.sums.dtype)[:, None]
    # From one of the means, so that coinciding classes have no variance between them.
    apart = means - means[0]
    center = (n * apart).sum(0) / count
    within = float(sums.scatter.sum()) / count
    between = float((n * (apart - center).square()).sum()) / count
    if within == 0 and between == 0:
        notes.append("all features are equal: the ratio of variances is NaN")
    ratio = between / within if within > 0 else math.inf if between > 0 else math.nan
    return Variance(within, between, within + between, ratio)


def measure_centers(sums: ClassSums) -> Centers:
    present = (sums.counts > 0).nonzero()[:, 0]
    means, num_classes = sums.means[present], len(sums.counts)
    pair = closest_pair(means)
    matrix: tuple[tuple[float, ...], ...] | None = None
    if num_classes <= MATRIX_CLASSES:
        full = means.new_full((num_classes, num_classes), math.nan)
        full[present[:, None], present] = distances(means, means)
        matrix = tuple(tuple(row) for row in full.tolist())
    if pair is None:
        return Centers(math.nan, (), matrix)
    closest = tuple(int(present[each]) for each in pair)
    return Centers(float(row_distance(means, pair)), closest, matrix)


def measure_collapse(
    sums: ClassSums,
    weight: Tensor | None,
    rows: Tensor | None,
    predicted: Tensor | None,
    notes: list[str],
) -> Collapse | None:
    """Measures of collapse of class sums; NaN for those of the class vectors or the rows not given.

    ``predicted`` are the classes the head gives the rows.
    """
    present = (sums.counts > 0).nonzero()[:, 0]
    count = len(present)
    if count < 2:
        notes.append("neural collapse needs samples of two classes at least")
        return None
    means = sums.means[present]
    # From one of them, so that coinciding means are 0 exactly.
    centred = means - means[0]
    centred = centred - centred.mean(0)
    lengths = centred.norm(dim=1)
    if sums.outer is None:
        notes.append(
            f"NC1 needs a D x D covariance, which is not kept at D = {means.shape[1]}: NaN"
        )
    variability = norm_spread = spread = gap = duality = math.nan
    if float(lengths.max()) == 0:
        notes.append("class means coincide: measures of neural collapse are NaN")
    else:
        if sums.outer is not None:
            error = sums.rounding * float(means.norm(dim=1).max())
            variability = _variability(sums.within, centred, error)
            if math.isnan(variability):
                notes.append("class means coincide but for rounding: NC1 is NaN")
        norm_spread = float(lengths.std(correction=0) / lengths.mean())
        spread, gap = _cosines(centred / lengths.clamp_min(1e-300)[:, None])
        if weight is not None:
            own = weight[present]
            apart = own / own.norm().clamp_min(1e-300) - centred / centred.norm()
            duality = float(apart.norm())
    other = math.nan
    if rows is not None and predicted is not None:
        other = _disagreement(rows, predicted, present, means)
    return Collapse(variability, norm_spread, spread, gap, duality, other)


def _variability(within: Tensor, centred: Tensor, error: float) -> float:
    """tr(Sigma_W pinv(Sigma_B)) / C with Sigma_B = M^T M / C, by the singular vectors of M.

    Directions in which the means differ by rounding alone are none: what would be divided there is
    rounding too. That of Sigma_B, as any pseudo-inverse has it, and ``error``, that of a mean.
    """
    _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
    relative = math.sqrt(max(centred.shape) * torch.finfo(centred.dtype).eps)
    kept = values > max(relative * float(values[0]), error)
    if not bool(kept.any()):
        return math.nan
    along = ((vectors[kept] @ within) * vectors[kept]).sum(1).clamp_min(0)
    return float((along / values[kept].square()).sum())


def _cosines(unit: Tensor) -> tuple[float, float]:
    """Standard deviation of the cosines of different rows, and mean distance from a simplex."""
    count = len(unit)
    wanted, pairs = -1 / (count - 1), count * (count - 1)
    mean = (float(unit.sum(0).square().sum()) - float(unit.square().sum())) / pairs
    square, gap = 0.0, 0.0
    for part in blocks(count, rows_at_once(count)):
        table = unit[part] @ unit.T
        own = torch.arange(part.start, part.stop, device=unit.device)[:, None]
        square += float((table - mean).scatter_(1, own, 0).square_().sum())
        gap += float(table.sub_(wanted).scatter_(1, own, 0).abs_().sum())
    return math.sqrt(square / pairs), gap / pairs


def _disagreement(rows: Tensor, predicted: Tensor, present: Tensor, means: Tensor) -> float:
    center = means.mean(0)
    centred = means - center
    half = 0.5 * centred.square().sum(1)
    differing = 0
    for part in blocks(len(rows), rows_at_once(len(means))):
        features = rows[part].to(means) - center
        nearest = present[torch.addmm(half, features, centred.T, beta=-1).argmax(1)].cpu()
        differing += int((nearest != predicted[part]).sum())
    return differing / max(len(rows), 1)


def measure_compactness(
    kept: Tensor, columns: dict[str, Tensor], sums: ClassSums, radius: float, notes: list[str]
) -> ClassCompactness:
    """Pairwise quantities of (N, D) rows; ``columns`` are labels, indices and margins of them."""
    labels, num_classes = columns["label"], len(sums.counts)
    device = _with_room(kept, sums.counts.device)
    rows, labels_there = kept.to(device), labels.to(device)
    dispersion = diameters(rows, labels_there, num_classes)
    largest = float(dispersion[~dispersion.isnan()].max())
    pair = closest_pair(rows, labels_there)
    if pair is None:
        notes.append("samples of one class only: nothing is separated, and the separation infinite")
    separation = math.inf if pair is None else float(row_distance(rows, pair))
    means = sums.means.to(device)
    inside = 0
    for part in blocks(len(rows), 65_536):
        apart = (widen(rows[part]) - means[labels_there[part]]).norm(dim=1)
        inside += int((apart <= radius).sum())
    unsigned, signed = (
        class_minimum(columns[name], labels, num_classes) for name in ("boundary", "distance")
    )
    index = columns["index"]
    return ClassCompactness(
        tuple(dispersion.tolist()),
        largest,
        tuple(unsigned.masked_fill(unsigned.isinf(), math.nan).tolist()),
        tuple(signed.masked_fill(signed.isinf(), math.nan).tolist()),
        separation,
        () if pair is None else tuple(int(index[each]) for each in pair),
        largest / separation if separation > 0 else math.inf,
        radius,
        inside / max(len(rows), 1),
    )


def _with_room(rows: Tensor, device: torch.device) -> torch.device:
    """The accelerator where it has room for the features and their float32 copy, or the CPU."""
    if device.type != "cuda":
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info(device)
    needed = 3 * rows.numel() * rows.element_size()
    return device if needed < free // 2 else torch.device("cpu")


def check_sphere(dim: int) -> None:
    if dim != 3:
        raise LargeMarginError(
            f"sphere=True needs features of 3 dimensions, but these have {dim}. Train the model "
            f"with a feature layer of 3 before its head, as nn.Linear({dim}, 3) and "
            "lm.ClassHead(3, C); for a picture of these features use lm.measuring.embed."
        )


def measure_sphere(stream: Stream, notes: list[str]) -> Sphere:
    """Points of a stream that has kept its features."""
    assert stream.kept is not None
    index = stream.column("index")
    chosen = _shown_rows(index)
    if len(chosen) < len(index):
        notes.append(f"the sphere shows {len(chosen)} of {len(index)} samples, seed {POINT_SEED}")
    rows = widen(stream.kept[chosen])
    labels = stream.column("label")[chosen]
    unit, prototypes = _directions(rows), _directions(stream.scores.weight.cpu())
    angles = _angles_between(unit, prototypes)
    if bool(angles.isnan().any()):
        notes.append("a feature or class vector of length 0 has no place on the sphere: angles NaN")
    own = angles.gather(1, labels[:, None])[:, 0]
    others = angles.scatter(1, labels[:, None], math.inf)
    rival = torch.where(others.isnan(), math.inf, others).amin(1)
    return Sphere(
        len(index),
        POINT_SEED,
        _points(unit),
        tuple(index[chosen].tolist()),
        tuple(labels.tolist()),
        tuple(stream.column("predicted")[chosen].tolist()),
        tuple(own.tolist()),
        tuple(rival.masked_fill(rival.isinf(), math.nan).tolist()),
        _points(prototypes),
    )


def _shown_rows(index: Tensor) -> Tensor:
    """Rows to keep, in the order of their samples: the same on any number of processes."""
    order = index.argsort(stable=True)
    if len(order) <= POINTS:
        return order
    drawn = torch.randperm(len(order), generator=torch.Generator().manual_seed(POINT_SEED))
    return order[drawn[:POINTS].sort().values]


def _directions(rows: Tensor) -> Tensor:
    norms = safe_norm(rows)[:, None]
    return torch.where(norms < EPS, 0.0, rows / norms.clamp_min(EPS))


def _angles_between(points: Tensor, prototypes: Tensor) -> Tensor:
    """(N, C) degrees, exact for small ones too: twice the arctangent of chord and its partner."""
    chords = torch.linalg.vector_norm(points[:, None] - prototypes, dim=2)
    partners = torch.linalg.vector_norm(points[:, None] + prototypes, dim=2)
    angles = torch.rad2deg(2 * torch.atan2(chords, partners))
    nowhere = (points == 0).all(1)[:, None] | (prototypes == 0).all(1)
    return angles.masked_fill(nowhere, math.nan)


def _points(rows: Tensor) -> tuple[Point, ...]:
    return tuple((x, y, z) for x, y, z in rows.tolist())
