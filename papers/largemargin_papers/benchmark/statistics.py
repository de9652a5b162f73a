"""What a paired t-test could have seen."""

import math

from largemargin.errors import check_number


def power_of(effect: float, pairs: int, level: float) -> float:
    r"""Probability that a two-sided paired t-test finds a true effect.

    .. math:: P(|T| > t_{1-\alpha/2,\,n-1}),\quad T \sim t_{n-1}(\delta\sqrt n)

    with the non-central t distribution; ``effect`` is :math:`\delta`, the mean of the differences
    over their standard deviation.

    Example:
        >>> round(power_of(0.0, 6, 0.05), 3), power_of(3.0, 6, 0.05) > 0.99
        (0.05, True)
    """
    from scipy import stats

    limit = stats.t.ppf(1 - level / 2, pairs - 1)
    away = abs(effect) * math.sqrt(pairs)
    moved = stats.nct(pairs - 1, away) if away else stats.t(pairs - 1)
    above, below = float(moved.sf(limit)), float(moved.cdf(-limit))
    # So far out that scipy has no number for it: nothing is left there.
    return above + (0.0 if math.isnan(below) else below)


def detectable_effect(std: float, pairs: int, *, level: float, power: float) -> float:
    """The smallest true difference that a two-sided paired t-test finds with this probability.

    Args:
        std: of the differences (n - 1).
        pairs: n.
        level: of the test.
        power: probability wanted.

    Example:
        >>> round(detectable_effect(1.0, 6, level=0.05, power=0.8), 3)
        1.435
    """
    check_number("pairs", pairs, at_least=2)
    check_number("std", std, at_least=0)
    check_number("level", level, above=0, below=1)
    check_number("power", power, above=level, below=1)
    from scipy import optimize

    # In the unit of standard errors an effect is a few, whatever the number of pairs.
    high = 1 / math.sqrt(pairs)
    while power_of(high, pairs, level) < power:
        high *= 1.5
    found = optimize.brentq(lambda effect: power_of(effect, pairs, level) - power, 0.0, high)
    return float(std * found)
