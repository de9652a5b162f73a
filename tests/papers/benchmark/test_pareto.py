"""Accuracies wanted all at once, and what stands beside the registered tests."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the protocol is a YAML file")
pytest.importorskip("scipy", reason="the paired tests are scipy's")

from largemargin_papers.benchmark import Protocol, conclude, next_jobs, plan
from largemargin_papers.benchmark.conclude import preset_entries
from largemargin_papers.benchmark.costs import read_costs
from largemargin_papers.benchmark.pareto import ACCURACIES, front
from largemargin_papers.benchmark.tables import readme
from papers.benchmark.tiny import TINY, tiny_protocol

ROOT = Path(__file__).resolve().parents[3]
NAME = "digits_corrupted"
MADE = {
    "softmax": (0.90, 0.40, 0.50),
    "label_smoothing": (0.80, 0.70, 0.60),
    "cosface": (0.79, 0.70, 0.60),
    "kobayashi": (0.82, 0.75, 0.65),
}
"""Clean, under noise, under occlusion."""
COSTS = {
    NAME: {
        "label_smoothing": {"over_softmax": 1.25, "on": "a device"},
        "kobayashi": {"over_softmax": 3.0, "on": "a device"},
        "odn": {"over_softmax": 5.0, "on": "a device"},
    }
}


@pytest.fixture
def protocol(tmp_path: Path) -> Protocol:
    situation = {
        **TINY["situations"]["digits_few"],
        "title": "Corrupted digits",
        "score": "corrupted_mean",
        "baseline": "label_smoothing",
        "beside": "softmax",
    }
    return tiny_protocol(
        tmp_path, situations={NAME: situation}, presets={"corruption": [NAME]}, seeds=[0, 1, 2, 3]
    )


def made(protocol: Protocol, *, everyone: bool = False) -> dict[str, Any]:
    records: dict[str, Any] = {}
    while jobs := list(next_jobs(protocol, protocol.situations[NAME], records, everyone=everyone)):
        for each in jobs:
            wobble = 0.001 * (each.seed % 3) if each.stage == "final" else 0.0
            values = [value + wobble * (each.method == "kobayashi") for value in MADE[each.method]]
            curve = {"area": 0.03, "accuracy at 0.8": 0.91, "accuracy at 0.5": 0.99}
            records[each.key] = {
                "key": each.key,
                "method": each.method,
                "status": "finished",
                "score": sum(values) / 3,
                **dict(zip(ACCURACIES, values, strict=True)),
                "ece": 0.0712,
                "rejection_by_margin": curve,
                "rejection_by_probability": curve,
            }
    return records


def test_who_is_dominated() -> None:
    runs = {name: [dict(zip(ACCURACIES, values, strict=True))] * 2 for name, values in MADE.items()}
    runs["diverged"] = [dict.fromkeys(ACCURACIES)]
    runs["not run"] = []
    found = front(runs)
    assert {name: each["dominated_by"] for name, each in found.items()} == {
        "softmax": [],
        "label_smoothing": ["kobayashi"],
        "cosface": ["label_smoothing", "kobayashi"],
        "kobayashi": [],
    }
    assert found["softmax"]["accuracy"] == pytest.approx(0.9)
    assert found["softmax"]["runs"] == 2
    alike = front({"one": runs["softmax"], "other": runs["softmax"]})
    assert alike["one"]["dominated_by"] == alike["other"]["dominated_by"] == []


def test_whether_the_chosen_method_dominates_the_baseline(protocol: Protocol) -> None:
    """Unknown where a run diverged: there is no mean then."""
    records = made(protocol)
    assert protocol.situations[NAME].baseline == "label_smoothing"
    assert conclude(protocol, {NAME: records})[NAME]["dominates"] is True
    final = [each for key, each in records.items() if "/kobayashi/final/" in key]
    for each in final:
        each["occlusion"] = 0.55
    assert conclude(protocol, {NAME: records})[NAME]["dominates"] is False
    final[0] |= {"score": None, "status": "diverged", **dict.fromkeys(ACCURACIES)}
    found = conclude(protocol, {NAME: records})[NAME]
    assert found["dominates"] is None
    assert found["pareto"]["test"].keys() == {"softmax", "label_smoothing"}  # and not the chosen


def test_the_page_has_the_front_of_all_methods(protocol: Protocol) -> None:
    found = conclude(protocol, {NAME: made(protocol)})
    page = readme(found, plan(protocol, {}))
    assert found[NAME]["pareto"]["test"].keys() == {"softmax", "label_smoothing", "kobayashi"}
    assert "| test | softmax | 90.00 | 40.00 | 50.00 | 60.00 | 4 | on it |" in page
    assert (
        "| validation | cosface | 79.00 | 70.00 | 60.00 | 69.67 | 1 | "
        "dominated by label_smoothing, kobayashi |" in page
    )
    assert "| test | **kobayashi** |" in page
    assert "| test | cosface" not in page
    whole = conclude(protocol, {NAME: made(protocol, everyone=True)})
    assert whole[NAME]["pareto"]["test"].keys() == MADE.keys()


def page_maker() -> Any:
    spec = importlib.util.spec_from_file_location("decisions", ROOT / "docs" / "make_decisions.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_calibration_rejection_and_cost_are_told(protocol: Protocol) -> None:
    found = conclude(protocol, {NAME: made(protocol)}, costs=COSTS)
    page = readme(found, plan(protocol, {}))
    assert "each alone on a device (`benchmarks/method_cost.py`)" in page
    assert (
        "| Corrupted digits | label_smoothing | 7.12 | 3.00 | 3.00 | 91.00 | x1.25 |\n"
        "| Corrupted digits | kobayashi | 7.12 | 3.00 | 3.00 | 91.00 | x3.00 |" in page
    )
    assert "| kobayashi | margin | 3.00 | – | – | 91.00 | – | 99.00 |" in page
    assert "| kobayashi | probability | 3.00 |" in page
    nothing = readme(conclude(protocol, {}), plan(protocol, {}))
    assert "Calibration" not in nothing
    entries = preset_entries(protocol, found, "papers/benchmark")
    chosen = entries["corruption"]["recommended"]
    assert (chosen["method"], chosen["cost"]["over_softmax"]) == ("kobayashi", 3.0)
    decisions = page_maker()
    assert "| x3.00 |" in decisions.decision_table(entries)
    assert "each alone on a device, " in decisions.decision_table(entries)
    unknown = conclude(protocol, {NAME: made(protocol)})
    page = readme(unknown, plan(protocol, {}))
    assert "| Corrupted digits | kobayashi | 7.12 | 3.00 | 3.00 | 91.00 | – |" in page
    assert "Costs were not measured." in page
    table = decisions.decision_table(preset_entries(protocol, unknown, "papers/benchmark"))
    assert "| not measured |" in table
    assert "Cost:" not in table


def test_costs_are_those_of_a_gpu_where_there_are_some(tmp_path: Path) -> None:
    decisions = page_maker()
    assert read_costs(tmp_path) == {}
    row = {"method": "cosface", "situations": ["one", "two"], "ratio": 1.5}
    machine = {"device": "cpu (x86_64, 2 cores)", "cpu": "CPU", "threads": 2}
    (tmp_path / "method_cost_cpu.json").write_text(json.dumps([{**row, **machine}]))
    slow = {"cosface": {"over_softmax": 1.5, "on": "CPU, 2 threads"}}
    assert read_costs(tmp_path) == {"one": slow, "two": slow}
    other = {**row, "situations": ["one"], "ratio": 1.1, "device": "NVIDIA H200"}
    (tmp_path / "method_cost_cuda.json").write_text(json.dumps([other]))
    fast = {"over_softmax": 1.1, "on": "NVIDIA H200", "beside": {"CPU": 1.5}}
    assert read_costs(tmp_path) == {"one": {"cosface": fast}, "two": slow}
    eager = {**other, "ratio": 1.3}
    (tmp_path / "method_cost_cuda_eager.json").write_text(json.dumps([eager]))
    fast = {**fast, "beside": {"eager": 1.3, "CPU": 1.5}}
    assert read_costs(tmp_path) == {"one": {"cosface": fast}, "two": slow}
    entries = {"few_labels": {**entry_of(fast), "doubts": [], "others": {}}}
    assert "| x1.10, eager x1.30, CPU x1.50 |" in decisions.decision_table(entries)


def entry_of(cost: dict[str, object]) -> dict[str, object]:
    chosen = {"objective": "cosface", "settings": {}, "cost": cost}
    return {"recommended": chosen, "compared": None, "situation": "digits", "source": "digits.json"}
