"""What was injected, tried and survived, for people to read: build/reliability/faults.json.

A test says what it does with the fixture ``faults``; whether it passed is added when it ends. Every
test leaves a file of its own, so that processes running side by side need not wait for each other,
and whoever ends last writes all of them together.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.counting import Faults

FOLDER = Path(__file__).resolve().parents[2] / "build" / "reliability"
SEVERAL = pytest.StashKey[Faults]()


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    found = Faults()
    request.node.stash[SEVERAL] = found
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call" and SEVERAL in item.stash:
        found = item.stash[SEVERAL]
        _keep(
            {
                "test": item.nodeid,
                "says": _sentence(item),
                "suite": "full" if item.get_closest_marker("slow") else "quick",
                "injected": dict(found.injected),
                "tried": dict(found.tried),
                "took": found.took,
                "passed": bool(report.passed),
                "skipped": str(report.longrepr[2]) if report.skipped else None,
            }
        )
    return report


def _sentence(item: pytest.Item) -> str:
    """The test's name as a sentence."""
    return item.name.partition("[")[0].removeprefix("test_").replace("_", " ")


def _keep(row: dict[str, Any]) -> None:
    place = FOLDER / "tests"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # a checkout that may only be read: its tests are run all the same
        return
    name = hashlib.sha256(row["test"].encode()).hexdigest()[:16]
    _write(place / f"{name}.json", row)


def pytest_sessionfinish() -> None:
    rows = []
    for path in sorted((FOLDER / "tests").glob("*.json")):
        row = json.loads(path.read_text(encoding="utf-8"))
        if _is_there(row["test"]):
            rows.append(row)
        else:
            path.unlink(missing_ok=True)
    if rows:
        _write(FOLDER / "faults.json", summary(rows))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All tests, and sums over those that passed."""
    done = [row for row in rows if row["passed"]]
    sums: dict[str, Counter[str]] = {"injected": Counter(), "tried": Counter()}
    for row in done:
        for kind, total in sums.items():
            total.update(row[kind])
    return {
        "tests": len(rows),
        "passed": len(done),
        "skipped": sum(row["skipped"] is not None for row in rows),
        **{kind: dict(sorted(total.items())) for kind, total in sums.items()},
        "took": {k: v for row in done if row["suite"] == "full" for k, v in _took(row).items()},
        "each": sorted(rows, key=lambda row: str(row["test"])),
    }


def _took(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = row.get("took", {})  # files of earlier versions have none
    return found


def _is_there(test: str) -> bool:
    """Whether the test still exists: files of earlier runs may speak of others."""
    file, _, name = test.partition("::")
    path = FOLDER.parents[1] / file
    return path.is_file() and f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8")


def _write(path: Path, value: Any) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)
