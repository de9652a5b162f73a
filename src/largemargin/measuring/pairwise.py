"""What margin bounds need of the features of every class: balls, reaches and pairwise margins."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.geometry import ramp_loss
from largemargin.geometry.pairs import blocks, distances, widen
from largemargin.measuring.stream import Stream
from largemargin.prototypes.form import boundary_form

ROWS = 8192


@dataclass
class ClassBalls:
    """Numbers by class (as lists) and by pair of classes (as arrays) of a stream's features."""

    curved: bool
    """The head's boundaries are no planes: there are no pairwise margins."""
    present: list[int]
    sizes: list[int]
    norms: list[float]
    """Lengths of the class means."""
    reach: list[float]
    """Largest distance of a sample from the mean of its class."""
    inside: list[float]
    """Share of samples within the radius of the mean of their class."""
    ball_ramp: list[float]
    """Mean ramp loss of leaving the ball, with r^2 = 2 radius^2 and rho = radius^2."""
    longest: float
    """Length of the longest feature."""
    closest: float
    """Smallest distance between class means."""
    ramps: Tensor
    """(C, C) sums of ramp losses of the samples of a class against a rival."""
    gaps: Tensor
    """(C, C) lengths of differences of (class vector, bias)."""

    def pairs(self) -> Iterator[tuple[int, int]]:
        for position, first in enumerate(self.present):
            for second in self.present[position + 1 :]:
                yield first, second

    def ramp(self, first: int, second: int) -> float:
        """Mean ramp loss of telling two classes apart."""
        total = self.ramps[first, second] + self.ramps[second, first]
        return float(total) / (self.sizes[first] + self.sizes[second])

    def gap(self, first: int, second: int) -> float:
        return float(self.gaps[first, second])


def class_balls(stream: Stream, radius: float, rho: float) -> ClassBalls:
    """Measure the kept features of a stream, in one pass over them."""
    assert stream.store is not None
    rows, labels = stream.store.all(), stream.column("label")
    head, count = stream.head, stream.num_classes
    weight, bias = (
        None if each is None else widen(each.cpu())
        for each in boundary_form(head, head.weight.detach(), head.bias)
    )
    assert weight is not None
    means = stream.sums.means.cpu()
    reach, inside, leaving = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
    ramps = torch.zeros(count, count, dtype=torch.float64)
    longest = 0.0
    for part in blocks(len(rows), ROWS):
        features, own = widen(rows[part]), labels[part]
        longest = max(longest, float(features.norm(dim=1).max()))
        apart = (features - means[own]).norm(dim=1)
        reach.scatter_reduce_(0, own, apart, "amax")
        inside.index_add_(0, own, (apart <= radius).double())
        ball = 2 * radius**2 - apart.square()
        leaving.index_add_(0, own, ramp_loss(ball, rho=radius**2))
        scores = features @ weight.T
        scores = scores if bias is None else scores + bias
        margins = scores.gather(1, own[:, None]) - scores
        ramps.index_add_(0, own, ramp_loss(margins, rho=rho))
    sizes = stream.sums.counts.cpu()
    present = (sizes > 0).nonzero()[:, 0]
    between = distances(means[present], means[present]).fill_diagonal_(torch.inf)
    full = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    n = sizes.clamp_min(1).double()
    return ClassBalls(
        stream.scores.curved,
        present.tolist(),
        sizes.tolist(),
        means.norm(dim=1).tolist(),
        reach.tolist(),
        (inside / n).tolist(),
        (leaving / n).tolist(),
        longest,
        float(between.min()) if len(present) > 1 else torch.inf,
        ramps,
        distances(full, full),
    )
