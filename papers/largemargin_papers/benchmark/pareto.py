"""Which methods are on the Pareto front of accuracies that are wanted all at once."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

ACCURACIES = ("accuracy", "gaussian 16/255", "occlusion")
"""On clean images, under noise and under occlusion: those of ``corrupted_mean``."""


def dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """At least as good in all accuracies, and better in one.

    >>> low, high = ({"accuracy": 0.9, "gaussian 16/255": 0.5, "occlusion": x} for x in (0.6, 0.7))
    >>> dominates(high, low), dominates(low, high), dominates(low, low)
    (True, False, False)
    """
    gaps = [one[name] - other[name] for name in ACCURACIES]
    return bool(min(gaps) >= 0 and max(gaps) > 0)


def front(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Means over the runs of every method, and by whom it is dominated: by nobody on the front.

    Args:
        runs: records by method; a method with a run that diverged has no means and is left out.
    """
    means = {
        method: {name: statistics.fmean(each[name] for each in records) for name in ACCURACIES}
        for method, records in runs.items()
        if records and all(each.get(name) is not None for each in records for name in ACCURACIES)
    }
    return {
        method: {
            **mine,
            "runs": len(runs[method]),
            "dominated_by": [name for name, other in means.items() if dominates(other, mine)],
        }
        for method, mine in means.items()
    }
