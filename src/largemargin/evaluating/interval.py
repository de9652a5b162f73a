"""How far an accuracy may be off because the test data is only a sample."""

import math
from statistics import NormalDist

from largemargin.errors import check_number


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
    check_number("samples", samples, at_least=1)
    check_number("right", right, at_least=0, at_most=samples)
    check_number("confidence", confidence, above=0, below=1)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / samples, z * z / samples
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / samples + spread / (4 * samples))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # At 0 and 1 the formula gives them up to rounding.
    return max(low, 0.0) if right else 0.0, min(high, 1.0) if right < samples else 1.0
