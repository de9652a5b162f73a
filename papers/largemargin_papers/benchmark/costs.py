"""What a training step of a method costs, from the rows of ``benchmarks/method_cost.py``.

Not from the seconds of the benchmark's own runs: these took their steps in turns on one GPU, so
that a method with twice the work of another was hardly slower.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Costs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By situation and method: ``over_softmax``, a ratio, and ``on``, the device."""


def read_costs(results: Path) -> Costs:
    """The rows of a GPU where there are some, else those of a CPU, else nothing."""
    files = (results / f"method_cost_{device}.json" for device in ("cuda", "cpu"))
    file = next((each for each in files if each.is_file()), None)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads(file.read_text(encoding="utf-8")) if file else ():
        on = row["device"]
        if on.startswith("cpu"):
            on = f"{row['cpu']}, {row['threads']} threads"
        for situation in row["situations"]:
            cost = {"over_softmax": row["ratio"], "on": on}
            found.setdefault(situation, {})[row["method"]] = cost
    return found
