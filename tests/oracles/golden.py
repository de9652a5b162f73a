"""Reading the golden cases of the items that have an oracle."""

import json
from pathlib import Path

import numpy as np

from oracles.golden_items import ITEMS

FOLDER = Path(__file__).parents[1] / "golden"


def decode(entry):
    if isinstance(entry, dict) and "shape" in entry:
        data = [float(v) if isinstance(v, str) else v for v in entry["data"]]
        return np.array(data, dtype=entry["dtype"]).reshape(entry["shape"])
    if entry in ("inf", "-inf", "nan"):
        return float(entry)
    return entry


def decode_all(entries):
    return {name: decode(entry) for name, entry in entries.items()}


def read_cases():
    """(item, case) for every golden case of an item that has an oracle."""
    for item in ITEMS:
        for case in json.loads((FOLDER / f"{item}.json").read_text())["cases"]:
            yield item, case


def steps_of(item, case):
    """(inputs, params, expected, grads) of a case, once or, with a state, once per batch."""
    inputs, params = decode_all(case["inputs"]), decode_all(case["params"])
    if "steps" not in case:
        yield inputs, params, decode_all(case["expected"]), case.get("grads", {})
        return
    shape = (params["num_classes"], inputs["W"].shape[1])
    state = {"bank": np.zeros(shape), "seen": np.zeros(shape[0], dtype=bool)}
    for step in case["steps"]:
        batch = {**inputs, **state, "q": decode(step["q"]), "y": decode(step["y"])}
        yield batch, params, decode_all(step["expected"]), step["grads"]
        after = ITEMS[item](batch, params, batch)
        state = {"bank": after["bank_after"], "seen": after["seen_after"]}
