"""Confidence intervals of accuracies, and of the difference of two on the same samples."""

import math
from statistics import NormalDist

from largemargin.errors import check_count, check_number


def wilson(right: int, samples: int, *, confidence: float = 0.95) -> tuple[float, float]:
    r"""Wilson's score interval of a share (Wilson 1927).

    .. math:: \frac{p + z^2/2n \pm z\sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}

    Unlike p ± z·std it stays inside [0, 1] and keeps its width where p is near 1. It tells where
    the accuracy of this model on unlimited data of the same kind may lie. On another test set of
    this size it varies more, by about a factor of 1.4; another training run changes it too.

    Example:
        >>> low, high = wilson(9, 10)
        >>> round(low, 3), round(high, 3)
        (0.596, 0.982)
    """
    check_count("samples", samples, at_least=1)
    check_count("right", right, at_least=0, at_most=samples)
    check_number("confidence", confidence, above=0, below=1)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / samples, z * z / samples
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / samples + spread / (4 * samples))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # At 0 and 1 the formula gives them up to rounding.
    return max(low, 0.0) if right else 0.0, min(high, 1.0) if right < samples else 1.0


def paired_interval(
    both: int, first: int, second: int, neither: int, *, confidence: float = 0.95
) -> tuple[float, float]:
    r"""Interval of the difference of two shares of the same samples (Newcombe 1998, method 10).

    From Wilson's intervals of both shares, squared and added, less what they have in common:
    with :math:`l_i, u_i` the distances from share i to its limits,

    .. math:: p_1 - p_2 - \sqrt{l_1^2 - 2\phi l_1 u_2 + u_2^2}\quad\text{to}\quad
              p_1 - p_2 + \sqrt{u_1^2 - 2\phi u_1 l_2 + l_2^2}

    where :math:`\phi` is the correlation of the two, with a continuity correction where it is
    positive. Two models are mostly right about the same images, so it is much narrower than one
    that takes the images as drawn for each. R. G. Newcombe, "Improved confidence intervals for the
    difference between binomial proportions based on paired data", Statistics in Medicine 17 (1998).

    Args:
        both: samples that both are right about.
        first: that the first alone is right about.
        second: that the second alone is right about.
        neither: that neither is right about.
        confidence: of the interval.

    Example:
        >>> low, high = paired_interval(36, 12, 2, 0)
        >>> round(low, 4), round(high, 4)
        (0.0569, 0.3404)
    """
    counts = {"both": both, "first": first, "second": second, "neither": neither}
    for name, count in counts.items():
        check_count(name, count, at_least=0)
    # Numbers of Python: a product of four may be too large for those of NumPy.
    both, first, second, neither = (int(count) for count in counts.values())
    samples = both + first + second + neither
    check_count("the number of samples", samples, at_least=1)
    shares = (both + first) / samples, (both + second) / samples
    (low, high), (other_low, other_high) = (
        wilson(both + each, samples, confidence=confidence) for each in (first, second)
    )
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    common = float(both * neither - first * second)
    if common > 0:
        common = max(common - samples / 2, 0.0)
    phi = common / math.sqrt(product) if product else 0.0
    difference = (first - second) / samples
    down = _joined(shares[0] - low, other_high - shares[1], phi)
    up = _joined(high - shares[0], shares[1] - other_low, phi)
    return difference - down, difference + up


def _joined(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))
