"""The rule by which a measured number is held against a reported one.

It was fixed beforehand; what it says of single runs was added later, because a difference between
two of them was judged as if it had no noise.

* **reproduced**: the mean over the runs lies within the larger of the recipe's tolerance and twice
  its standard error, 2 s / sqrt(n), of the reported number; otherwise **better** or **worse than
  reported**, or **differs** where neither is better.
* **direction holds**: the difference to the baseline of the table has the reported sign. Where it
  is smaller than twice its standard error it **is within noise**. That of one run is taken to be
  the deviation over its draws or starts. Where it has none it is unknown: then a difference within
  the tolerance is **too close to call in one run**, a larger one holds, or not, **in one run**.
* A run with fewer epochs or other settings than the paper's is never called reproduced or not:
  only its direction is judged. The precision, which no paper prints, counts as printed.
* **not measured**: nothing was run. **failed**: a run broke off, or what it gave is no number.
"""

import math
import statistics
from dataclasses import dataclass

from largemargin_papers.recipes.schema import Measure


@dataclass(frozen=True)
class Sample:
    """Measured numbers of the runs of one cell, one per seed."""

    values: tuple[float, ...] = ()
    draws: float | None = None
    """Standard deviation over draws or starts inside a run, where there are any."""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN for fewer than two runs, or where one gave no number."""
        # statistics.stdev raises AttributeError for NaN in Python 3.11.
        known = self.n > 1 and math.isfinite(self.mean)
        return statistics.stdev(self.values) if known else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 where one run cannot tell."""
        return self.std / math.sqrt(self.n) if self.n > 1 else 0.0

    @property
    def noise(self) -> float:
        """The same, but of one run the deviation over its draws, which is not less."""
        return self.error if self.n > 1 else self.draws or 0.0

    @property
    def unsure(self) -> bool:
        """Whether nothing is known of its noise."""
        return self.n == 1 and self.draws is None


def verdict(
    measure: Measure,
    reported: float | None,
    measured: Sample,
    *,
    as_printed: bool = True,
    baseline: tuple[float | None, Sample] | None = None,
    failure: str = "",
) -> str:
    """What is to be said about a measured number.

    Args:
        measure: with direction and tolerance.
        reported: number of the paper, if it has one.
        measured: ours.
        as_printed: whether the runs followed the paper's protocol to the letter.
        baseline: reported and measured numbers of the baseline.
        failure: why runs broke off.
    """
    if failure:
        return f"failed: {failure}"
    if not measured.n:
        return "not measured"
    if not math.isfinite(measured.mean):
        return "failed: what was measured is no number"
    parts = []
    if reported is None:
        parts.append("nothing reported")
    elif as_printed:
        parts.append(_closeness(measure, reported, measured))
    else:
        parts.append("other protocol")
    if baseline is not None and reported is not None:
        parts.append(direction(measure, reported, measured, *baseline))
    return "; ".join(filter(None, parts))


def _closeness(measure: Measure, reported: float, measured: Sample) -> str:
    gap = measured.mean - reported
    # Reported numbers are rounded decimals, so a gap of exactly the tolerance is inside it.
    if abs(gap) <= max(measure.tolerance, 2 * measured.error) + 1e-9:
        return "reproduced"
    if measure.better == "neither":
        return "differs"
    return (
        "better than reported"
        if (gap > 0) == (measure.better == "higher")
        else ("worse than reported")
    )


def direction(
    measure: Measure, reported: float, measured: Sample, base_reported: float | None, base: Sample
) -> str:
    """Whether a number moves from its baseline as the paper says; empty where nobody can tell."""
    # Without runs the mean of the baseline is NaN, as it is where one of them gave no number.
    if base_reported is None or not math.isfinite(base.mean) or reported == base_reported:
        return ""
    gain, noise = measured.mean - base.mean, 2 * math.hypot(measured.noise, base.noise)
    single = measured.unsure or base.unsure
    if abs(gain) <= noise and not (single and noise == 0):
        return "direction is within noise"
    if single and abs(gain) <= measure.tolerance + 1e-9:
        return "direction too close to call in one run"
    holds = (gain > 0) == (reported > base_reported)
    return f"direction {'holds' if holds else 'does not hold'}{' in one run' if single else ''}"
