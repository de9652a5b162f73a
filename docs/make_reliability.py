"""Writes docs/reliability.md: faults injected, inputs tried, cases passed, mutants killed.

Run ``python docs/make_reliability.py``; a test fails when the committed page is out of date. The
numbers are committed, too: those of the faults in docs/reliability.json, which ``--take`` makes
from the last run of tests/faults, those of the mutants in tests/mutants/score.json and
score_beyond.json.
"""

import datetime
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
FIGURES = ROOT / "docs" / "reliability.json"
MUTANTS = ROOT / "tests" / "mutants" / "score.json"
BEYOND = ROOT / "tests" / "mutants" / "score_beyond.json"
GOLDEN = ROOT / "tests" / "golden"
LAST_RUN = ROOT / "build" / "reliability" / "faults.json"
COUNTS = ("injected", "tried")

SAMPLED = (
    "Tests were written for mutants of this sample that had survived, so the score is no estimate",
    "for mutants that were not tried yet: more of those may survive at first.",
)


def taken(run: dict[str, Any], date: str) -> dict[str, Any]:
    """A run's numbers, one row for every test function instead of every case."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for case in run["each"]:
        file = case["test"].partition("::")[0]
        new = {"file": file, "says": case["says"], "suite": case["suite"], "cases": 0, "passed": 0}
        row = rows.setdefault((file, case["says"]), {**new, "skipped": 0})
        row["cases"] += 1
        row["passed"] += case["passed"]
        row["skipped"] += case["skipped"] is not None
    totals = {name: run[name] for name in ("tests", "passed", "skipped", *COUNTS)}
    given = {name: sum(sum(case[name].values()) for case in run["each"]) for name in COUNTS}
    took = run.get("took", {})
    return {"date": date, **totals, "given": given, "took": took, "each": list(rows.values())}


def page(faults: dict[str, Any], mutants: dict[str, Any], beyond: dict[str, Any]) -> str:
    given = faults["given"]
    injected, tried = (sum(faults[name].values()) for name in COUNTS)
    golden = [json.loads(path.read_text(encoding="utf-8")) for path in GOLDEN.glob("*.json")]
    cases = sum(len(item["cases"]) for item in golden)
    parts = {"losses, operators and heads": mutants, "a sample of the rest": beyond}
    lines = [
        "# Reliability",
        "",
        "How the tests tried to break this library, and how often it held. (This page is made by",
        "`docs/make_reliability.py` from numbers that the tests recorded; do not edit it by hand.)",
        "For guarantees about files from strangers, and for reporting a vulnerability, see",
        "[SECURITY.md](../SECURITY.md).",
        "",
        "| what | number | held |",
        "|---|---:|---:|",
        f"| faults injected | {given['injected']:,} | {injected:,} |",
        f"| hostile, damaged and odd inputs tried | {given['tried']:,} | {tried:,} |",
        f"| tests with faults or such inputs | {faults['tests']:,} | {faults['passed']:,} |",
        f"| golden cases, values and gradients ({len(golden)} items) | {cases:,} | {cases:,} |",
        *(_tried(name, part) for name, part in parts.items()),
        "",
        "A fault or input counts as held if its whole test passed; the tables below count those.",
        "Golden cases have a separate test, `make conformance`, which fails if any of them fails.",
        "",
        *_failed(faults),
        f"## Faults injected ({faults['date']})",
        "",
        "A run is interrupted or its environment fails, and then the run is resumed. Its weights",
        "and metrics must equal those of an uninterrupted run; otherwise the error must say what",
        "to do, and everything written before must be intact.",
        "",
        *_counted("fault", faults["injected"]),
        "",
        "## Inputs tried",
        "",
        "No input may execute code or hang, and an error must name the input and a solution.",
        "",
        *_counted("input", faults["tried"]),
        "",
        *_load(faults.get("took", {})),
        "## Tests",
        "",
        "Quick tests are part of `make test`, full ones of `make test-all`.",
        "",
        "| test | where | suite | cases passed |",
        "|---|---|---|---:|",
        *(_test(row) for row in faults["each"]),
        "",
        *_mutants(mutants),
        "",
        *_beyond(beyond),
    ]
    return "\n".join(lines) + "\n"


def _failed(faults: dict[str, Any]) -> list[str]:
    """What did not hold, by name: a page of successes alone would say nothing."""
    failed = [row for row in faults["each"] if row["passed"] + row["skipped"] < row["cases"]]
    if not failed:
        return []
    rows = [
        f"- {row['says']} (`{row['file']}`): {row['passed']} of {row['cases']}" for row in failed
    ]
    return ["Failed in the run these numbers are from:", "", *rows, ""]


def _counted(what: str, numbers: dict[str, int]) -> list[str]:
    ordered = Counter(numbers).most_common()
    rows = [f"| {name} | {count:,} |" for name, count in ordered]
    return [f"| {what} | times |", "|---|---:|", *rows]


def _load(took: dict[str, dict[str, float]]) -> list[str]:
    """Large jobs of the full suite."""
    if not took:
        return []
    return [
        "## Large jobs",
        "",
        "The full suite runs these to their end, in parallel with other tests. Memory is the",
        "maximum growth of the process. The tests limit the memory and never the time.",
        "",
        "| job | seconds | MiB |",
        "|---|---:|---:|",
        *(
            f"| {what} | {each['seconds']:,.0f} | {max(0, each['mib']):,.0f} |"
            for what, each in took.items()
        ),
        "",
    ]


def _test(row: dict[str, Any]) -> str:
    skipped = f", {row['skipped']} skipped" if row["skipped"] else ""
    number = f"{row['passed']} of {row['cases']}{skipped}"
    return f"| {row['says']} | `{row['file']}` | {row['suite']} | {number} |"


def _tried(what: str, mutants: dict[str, Any]) -> str:
    total, where = mutants["total"], f"{mutants['date']}, commit `{mutants['commit']}`"
    return f"| mutants tried: {what} ({where}) | {total['tried']:,} | {_found(total):,} killed |"


def _found(total: dict[str, int]) -> int:
    return total["killed"] + total["timed out"]


def _mutants(mutants: dict[str, Any]) -> list[str]:
    total = mutants["total"]
    found = _found(total)
    whole = total["tried"] == total["possible"]
    share = found / max(total["tried"] - total["explained"], 1)
    extent = "all of them" if whole else f"a sample of {total['tried']:,}, not all"
    return [
        f"## Mutants ({mutants['date']})",
        "",
        "A mutant is a file of the losses, operators or heads with one small wrong change,",
        "made from its syntax tree: a sign flipped, a term dropped, a reduction changed, a tensor",
        "detached, a mask or comparison off by one, branches swapped, a constant changed. It is",
        "killed when a test fails, and a test that hangs counts as failed. `make mutants` runs",
        "them; Triton kernels, docstrings, type hints and messages are not changed.",
        "",
        f"At commit `{mutants['commit']}` there were {total['possible']:,} mutants, and the",
        f"numbers below are of {extent}. Code that was changed or added after that commit",
        "has not been tried again as a whole: these numbers say nothing about it. Of the",
        f"mutants tried, {found:,} were killed, {total['explained']:,} are equivalent to",
        "the original (each is explained in `tests/mutants/equivalent.yaml`), and"
        f" {total['survived']:,} survived.",
        f"**Score: {share:.1%}** of the mutants that compute something else.",
        *([] if whole else SAMPLED),
        "",
        *_by_file(mutants),
    ]


def _beyond(mutants: dict[str, Any]) -> list[str]:
    """The rooms beyond the losses, of which a part was tried."""
    total = mutants["total"]
    seed, drawn = mutants["seed"], mutants["sample"]
    command = f"make mutants MUTANTS='--room beyond --sample {drawn} --seed {seed}'"
    return [
        f"## Mutants beyond the losses ({mutants['date']})",
        "",
        "The same changes in what attaches, measures, exports, reads data, builds models, trains",
        "and works with other libraries, with the tests that run the changed line.",
        f"At commit `{mutants['commit']}` there were {total['possible']:,}. Of {drawn:,}, drawn at",
        f"random with seed {seed} (`{command}`),",
        f"{drawn - total['tried']:,} detach a number that has no gradient in any test.",
        f"Of the other {total['tried']:,}, {_found(total):,} were killed, {total['explained']:,}",
        f"are explained and {total['survived']:,} survived. Those explained change no result, or",
        "a constant that is a free choice, or what takes hardware that the tests do not have",
        "(`tests/mutants/equivalent.yaml`). Nothing is known of mutants that",
        "were not drawn. Tests were written for those of the sample that had survived at first, so",
        "more of the others may survive.",
        "",
        *_by_file(mutants),
    ]


def _by_file(mutants: dict[str, Any]) -> list[str]:
    return [
        "| file | possible | tried | killed | explained | survived |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| `{file}` | {row['possible']} | {row['tried']} | {row['killed'] + row['timed out']} "
            f"| {row['explained']} | {row['survived']} |"
            for file, row in mutants["files"].items()
        ),
    ]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if "--take" in sys.argv[1:]:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        text = json.dumps(taken(read(LAST_RUN), today), indent=1, ensure_ascii=False)
        FIGURES.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(page(read(FIGURES), read(MUTANTS), read(BEYOND)), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
