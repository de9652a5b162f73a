"""Curvature against stability of the features: the bounds of ROB Theorem 6.1 on a model."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.geometry import curvature_bounds
from largemargin.geometry.curvature_bounds import curvature_ceiling
from largemargin.geometry.input_gradients import evaluation, sample_groups
from largemargin.measuring.distributions import Distribution, describe
from largemargin.measuring.draws import SampleDraws
from largemargin.measuring.reading import Reader
from largemargin.measuring.records import Record

ASSUMES = (
    "the loss equals its second-order expansion for noise of this sigma, which no network with "
    "bounded logits does: a heuristic for small sigma, not a theorem (erratum R3)"
)


@dataclass(frozen=True)
class FeatureStability(Record):
    """Both bounds of Theorem 6.1 and what enters them (NGR-T6.1)."""

    sigma: float
    radius: float
    draws: int
    logit_bound: float
    """K: the largest absolute logit met, clean or noisy."""
    prototype_norm: float
    """Largest length of a class vector."""
    eta: Distribution
    """Share of draws whose features stay within the radius of the clean ones."""
    l_out: Distribution
    """Mean loss of the draws that leave, over the samples that have any."""
    never_left: int
    """Samples without such a draw: l_out is not defined for them."""
    upper: Distribution
    """Bound on the curvature."""
    lower: Distribution
    """Bound on 2 sum of squares + (sum of absolutes)^2 of the eigenvalues."""
    upper_kept: float
    """Share of samples whose curvature (exact where asked for, else as measured) is below it."""
    lower_kept: float
    """The same for the lower bound; NaN unless exact."""
    lower_informative: float
    """Share of samples whose lower bound is above 0: below, it says nothing."""
    exact: bool
    assumes: str


class StabilityCollector:
    """The columns that both bounds are made of; K is known only after the last batch."""

    def __init__(
        self, reader: Reader, *, sigma: float, radius: float, draws: int, seed: int, exact: bool
    ) -> None:
        self.reader, self.sigma, self.radius = reader, sigma, radius
        self.draws, self.exact = draws, exact
        self.source = SampleDraws(seed, "stability noise")

    def measure(
        self, images: Tensor, labels: Tensor, index: Tensor, batch_size: int
    ) -> dict[str, Tensor]:
        reader = self.reader
        weight, bias = reader.linear_head()
        found: dict[str, list[Tensor]] = {}
        with evaluation(reader, images):
            for part in sample_groups(images, self.draws, batch_size):
                x = images[part]
                bounds = curvature_bounds(
                    reader.backbone,
                    weight,
                    x,
                    labels[part],
                    sigma=self.sigma,
                    radius=self.radius,
                    bias=bias,
                    noise=self.source.normal(index[part], self.draws, x),
                    left_sides=self.exact,
                    chunk_size=batch_size,
                )
                values = {
                    "eta": bounds.eta,
                    "l_out": bounds.l_out,
                    "lower": bounds.lower,
                    "logit_bound": bounds.logit_bound.expand(len(x)),
                    "w_2inf": bounds.w_2inf.expand(len(x)),
                }
                if bounds.lhs_upper is not None and bounds.lhs_lower is not None:
                    values |= {"left_upper": bounds.lhs_upper, "left_lower": bounds.lhs_lower}
                for name, each in values.items():
                    found.setdefault(name, []).append(each)
        return {name: torch.cat(each) for name, each in found.items()}

    def result(self, columns: dict[str, Tensor], bins: int) -> FeatureStability:
        eta, l_out, lower = (columns[name].double() for name in ("eta", "l_out", "lower"))
        largest, longest = (columns[name].double().max() for name in ("logit_bound", "w_2inf"))
        upper = curvature_ceiling(eta, longest, largest, sigma=self.sigma, radius=self.radius)
        measured = columns["left_upper"] if self.exact else columns["curvature"]
        lower_kept = math.nan
        if self.exact:
            lower_kept = float((columns["left_lower"] >= lower).double().mean())
        left = ~l_out.isnan()
        return FeatureStability(
            self.sigma,
            self.radius,
            self.draws,
            float(largest),
            float(longest),
            describe(eta, bins=bins),
            describe(l_out[left], bins=bins),
            int((~left).sum()),
            describe(upper, bins=bins),
            describe(lower, bins=bins),
            float((measured <= upper).double().mean()),
            lower_kept,
            float((lower > 0).double().mean()),
            self.exact,
            ASSUMES,
        )
