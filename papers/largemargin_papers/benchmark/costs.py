"""What a training step of a method costs, from the rows of ``benchmarks/method_cost.py``.

Not from the seconds of the benchmark's own runs: these took their steps in turns on one GPU, so
that a method with twice the work of another was hardly slower.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Costs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By situation and method: ``over_softmax``, a ratio, and ``on``, the device; where the steps were
also timed in other ways, ``beside`` has those ratios."""

FILES = {"": "method_cost_cuda", "eager": "method_cost_cuda_eager", "CPU": "method_cost_cpu"}
"""On a GPU, captured in graphs; on a GPU without graphs; on a CPU."""


def read_costs(results: Path) -> Costs:
    """The rows of a GPU where there are some, else those of a CPU, and what was timed beside."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for way, name in FILES.items():
        file = results / f"{name}.json"
        for row in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ():
            on = row["device"]
            if on.startswith("cpu"):
                on = f"{row['cpu']}, {row['threads']} threads"
            for situation in row["situations"]:
                methods = found.setdefault(situation, {})
                if row["method"] not in methods:
                    methods[row["method"]] = {"over_softmax": row["ratio"], "on": on}
                else:
                    beside = methods[row["method"]].setdefault("beside", {})
                    beside[way] = row["ratio"]
    return found
