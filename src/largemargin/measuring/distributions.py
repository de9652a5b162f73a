"""A set of numbers, summarised: moments, quantiles, histogram, density."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.errors import check_number
from largemargin.measuring.records import Record

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
DENSITY_POINTS = 128
DENSITY_SAMPLES = 20_000
"""More samples than this are thinned for the kernel density."""


@dataclass(frozen=True)
class Distribution(Record):
    """Numbers of many samples: see :func:`describe`."""

    count: int
    mean: float
    std: float
    """Population standard deviation, as ODN-RATIO needs."""
    ratio: float
    """Mean over standard deviation (ODN-RATIO); infinite when all are equal and not 0."""
    quantiles: dict[float, float]
    """From 0 (the minimum) to 1 (the maximum), interpolated linearly."""
    edges: tuple[float, ...]
    """Borders of the histogram's bins, equally wide from minimum to maximum."""
    counts: tuple[int, ...]
    density_at: tuple[float, ...]
    density: tuple[float, ...]
    """Gaussian kernel density at ``density_at``, Silverman's bandwidth; empty where all numbers
    are equal. Beyond 20,000 samples every k-th in order of size is used."""
    negative: float = math.nan
    """Share of the numbers below 0; NaN in files from before it was counted."""

    @property
    def minimum(self) -> float:
        return self.quantiles[0.0]

    @property
    def maximum(self) -> float:
        return self.quantiles[1.0]

    @property
    def median(self) -> float:
        return self.quantiles[0.5]


@dataclass(frozen=True)
class ClassDistribution(Record):
    """The same by class, without histograms; NaN where a class has no samples."""

    counts: tuple[int, ...]
    minimum: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    ratio: tuple[float, ...]
    median: tuple[float, ...]
    q05: tuple[float, ...]


@dataclass(frozen=True)
class Margins(Record):
    """Sample margins of one kind, over all samples and by class."""

    overall: Distribution
    classes: ClassDistribution


def describe(values: Tensor, *, bins: int = 50) -> Distribution:
    """Moments, quantiles, histogram and kernel density of (N,) numbers, in float64.

    Sums run over the sorted numbers, so that their order does not matter. NaN anywhere makes
    everything NaN.

    Example:
        >>> describe(torch.tensor([1.0, 3.0])).ratio
        2.0
    """
    check_number("bins", bins, at_least=1)
    ordered = values.detach().reshape(-1).cpu().double().sort().values
    count = len(ordered)
    if count == 0 or bool(ordered[-1].isnan()):  # NaN sorts last
        nothing = dict.fromkeys(QUANTILES, math.nan)
        return Distribution(count, math.nan, math.nan, math.nan, nothing, (), (), (), ())
    # Measured from the smallest, so that equal numbers have a deviation of 0.
    above = ordered - ordered[0]
    std = (above - above.mean()).square().mean().sqrt()
    mean = ordered[0] + above.mean()
    finite = math.isfinite(float(ordered[0])) and math.isfinite(float(ordered[-1]))
    edges, counts = _histogram(ordered, bins) if finite else ((), ())
    points, density = _density(ordered, float(std)) if finite else ((), ())
    return Distribution(
        count,
        float(mean),
        float(std),
        float(mean / std),  # x / 0 is infinite with the sign of x, and 0 / 0 is NaN
        {q: quantile_of(ordered, q) for q in QUANTILES},
        edges,
        counts,
        points,
        density,
        float((ordered < 0).double().mean()),
    )


def describe_classes(values: Tensor, labels: Tensor, num_classes: int) -> ClassDistribution:
    """Moments and quantiles of each class; one sort for all of them."""
    values, labels = values.detach().cpu().double(), labels.cpu().long()
    ordered, order = values.sort(stable=True)
    labels, by_class = labels[order].sort(stable=True)
    ordered = ordered[by_class]
    sizes = torch.bincount(labels, minlength=num_classes)
    present = sizes > 0
    start = (sizes.cumsum(0) - sizes)[present]
    n = sizes[present].double()
    # Measured from the smallest of each class, so that equal numbers have a deviation of 0.
    place = torch.repeat_interleave(torch.arange(len(start)), sizes[present])
    smallest = ordered[start]
    above = ordered - smallest[place]
    mean = torch.zeros_like(n).index_add_(0, place, above) / n
    spread = torch.zeros_like(n).index_add_(0, place, (above - mean[place]).square()) / n
    std, mean = spread.sqrt(), mean + smallest

    def quantile(q: float) -> Tensor:
        position = q * (n - 1)
        below = position.floor().long()
        low = ordered[start + below]
        high = ordered[start + torch.minimum(below + 1, sizes[present] - 1)]
        return torch.where(low == high, low, low + (position - below) * (high - low))

    columns = (smallest, mean, std, mean / std, quantile(0.5), quantile(0.05))
    return ClassDistribution(
        tuple(sizes.tolist()),
        *(
            tuple(torch.full((num_classes,), math.nan, dtype=torch.float64)
                  .masked_scatter(present, column).tolist())
            for column in columns
        ),
    )  # fmt: skip


def quantile_of(ordered: Tensor, q: float) -> float:
    """Linear interpolation between sorted values. (torch.quantile refuses 2^24 of them.)"""
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = float(ordered[below]), float(ordered[above])
    if position == below or low == high:
        return low
    return low + (position - below) * (high - low)


def _histogram(ordered: Tensor, bins: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    low, high = float(ordered[0]), float(ordered[-1])
    if low == high:
        half = max(abs(low), 1.0) * 1e-6
        low, high = low - half, high + half
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    below = torch.searchsorted(ordered, edges[1:-1].contiguous(), right=False)
    cuts = torch.cat([below.new_zeros(1), below, below.new_tensor([len(ordered)])])
    return tuple(edges.tolist()), tuple((cuts[1:] - cuts[:-1]).tolist())


def _density(ordered: Tensor, std: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    count = len(ordered)
    spread = (quantile_of(ordered, 0.75) - quantile_of(ordered, 0.25)) / 1.34
    width = min(std, spread) if spread > 0 else std
    bandwidth = 0.9 * width * count**-0.2
    low, high = float(ordered[0]) - 3 * bandwidth, float(ordered[-1]) + 3 * bandwidth
    if not (width > 0 and low < float(ordered[0])):
        return (), ()
    stride = math.ceil(count / DENSITY_SAMPLES)
    kept = ordered[(stride - 1) // 2 :: stride].contiguous()
    points = torch.linspace(low, high, DENSITY_POINTS, dtype=torch.float64)
    # Beyond nine bandwidths a kernel is below 1e-17 of its top.
    first = torch.searchsorted(kept, points - 9 * bandwidth).tolist()
    last = torch.searchsorted(kept, points + 9 * bandwidth).tolist()
    density = torch.stack(
        [
            torch.exp(-0.5 * ((point - kept[a:b]) / bandwidth).square()).sum()
            for point, a, b in zip(points, first, last, strict=True)
        ]
    )
    density = density / (len(kept) * bandwidth * math.sqrt(2 * math.pi))
    return tuple(points.tolist()), tuple(density.tolist())
