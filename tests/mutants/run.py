"""Mutation check: does some test fail for every small wrong change to the arithmetic?

``python tests/mutants/run.py --sample 200 --seed 1`` or ``make mutants``. Results go to
build/mutants.json as they come, so that an interrupted run goes on where it stopped; ``--score``
writes the sums to tests/mutants/score.json. The source is not touched.

Mutants inside functions are put into forks of one process that has collected the tests (warm.py):
about a second each. The others are run in a copy of the package (copies.py). The first run notes
which lines every test runs, which takes minutes; later ones know. Mutants that no test can tell
apart stand in equivalent.yaml, each with the reason.
"""

import argparse
import ast
import datetime
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mutants.changes import Mutant, mutants
from mutants.copies import PACKAGE, ROOT, Worker, python_path
from mutants.suites import BEYOND, ROOMS, WARM, WARM_BEYOND, files, is_beyond
from mutants.swap import swappable
from mutants.touched import Index, affordable, most_varied

HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "build" / "mutants.json"
NOTES = ROOT / "build" / "mutants_tests.json"
NOTES_BEYOND = ROOT / "build" / "mutants_tests_beyond.json"
SCORE = HERE / "score.json"
SCORE_BEYOND = HERE / "score_beyond.json"
EQUIVALENT = HERE / "equivalent.yaml"
BEFORE_FORKING = ("torch", "numpy", "pytest", "hypothesis", "yaml", "torch.utils.checkpoint")


def explained() -> dict[str, str]:
    """Reasons by the keys of mutants that cannot be told apart."""
    import yaml

    entries = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    return {
        f"{e['file']} | {e['in']} | {e['before']} | {e['after']}"
        + (f" #{e['number']}" if e.get("number") else ""): e["reason"]
        for e in entries
    }


def digest(file: str) -> str:
    return hashlib.sha256((PACKAGE / file).read_bytes()).hexdigest()[:16]


def all_mutants(chosen: list[str]) -> dict[str, list[Mutant]]:
    return {
        file: mutants((PACKAGE / file).read_text(encoding="utf-8"), file)
        for file in chosen or files(PACKAGE)
    }


def unchanged(file: str, tests: str) -> Mutant:
    source = (PACKAGE / file).read_text(encoding="utf-8")
    return Mutant(file, 0, "", "none", "unchanged", tests, 0, source)


def read_results() -> dict[str, dict[str, Any]]:
    """Earlier outcomes, of files that have not changed since."""
    if not RESULTS.exists():
        return {}
    kept = read_json(RESULTS)
    marks = {file: digest(file) for file in {row["file"] for row in kept.values()}}
    return {key: row for key, row in kept.items() if row["source"] == marks[row["file"]]}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


class Book:
    """Writes down what became of each mutant, and tells it."""

    def __init__(self, results: dict[str, Any], total: int) -> None:
        self.results, self.total, self.count = results, total, Counter[str]()
        self.written = time.monotonic()

    def record(self, mutant: Mutant, found: dict[str, Any]) -> None:
        where = {"file": mutant.file, "source": digest(mutant.file), "scope": mutant.scope}
        row = {**where, "line": mutant.line, "kind": mutant.kind, **found}
        self.results[mutant.key] = row
        self.count[found["outcome"]] += 1
        if time.monotonic() > self.written + 5:
            self.write()
        done = f"[{self.count.total()}/{self.total}]"
        print(f"{done} {found['outcome']:9} {found['seconds']:5.1f} s  {mutant.file}:{mutant.line}")
        if found["outcome"] == "survived" and mutant.line:
            print(f"    {mutant.scope}\n    {mutant.before}\n    {mutant.after}")
        sys.stdout.flush()

    def write(self) -> None:
        write(RESULTS, self.results)
        self.written = time.monotonic()


def in_forks(todo: list[Mutant], book: Book, options: argparse.Namespace, ends: float) -> None:
    if not todo:
        return
    sys.path.insert(0, str(PACKAGE.parent))
    os.environ["PYTHONPATH"] = python_path(PACKAGE.parent)
    os.chdir(ROOT)
    import pytest
    import torch
    from mutants.warm import Forks

    torch.set_num_threads(1)
    NOTES.parent.mkdir(parents=True, exist_ok=True)
    beyond = is_beyond(todo[0].file)
    tests, rooms, notes = (WARM_BEYOND, BEYOND, NOTES_BEYOND) if beyond else (WARM, ROOMS, NOTES)
    how = {"workers": options.workers, "budget": options.budget, "ends": ends, "apart": beyond}
    forks = Forks(PACKAGE, rooms, notes, book.results, book.record, **how)
    forks.todo = todo
    how_run = ["-m", "not slow and not gpu and not needs_cxx", "-q", "-s", "-p", "no:cacheprovider"]
    how_run += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    try:
        code = pytest.main([*tests, *how_run], plugins=[forks])
    finally:
        book.write()
    # Files that could not be imported, for lack of a library, are reported as failed and left out.
    ended = pytest.ExitCode
    if code not in (ended.OK, ended.NO_TESTS_COLLECTED, ended.TESTS_FAILED):
        raise RuntimeError(f"the tests could not be run: pytest ended with {code}")


def apart(task: Callable[[], None]) -> dict[str, Any]:
    """Results after a task in a process of its own: copies need one that has not imported."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            task()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    try:
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if status:
        raise RuntimeError("the mutants in forks ended with an error")
    return read_results()


def tests_by_lines(budget: float) -> Callable[[Mutant], list[str]]:
    """Tests of what a module or class beyond the losses computes when it is imported."""
    notes = {name: row for name, row in read_json(NOTES_BEYOND).items() if not row["failed"]}
    index = Index(PACKAGE, BEYOND, notes)

    def tests(mutant: Mutant) -> list[str]:
        if swappable(mutant) or not is_beyond(mutant.file):
            return []
        found = index.naming(mutant.file, defined(mutant.before))
        return affordable(most_varied(found, notes), notes, budget)

    return tests


def defined(statement: str) -> set[str]:
    """Names that get a value."""
    nodes = ast.walk(ast.parse(statement))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def in_copies(todo: list[Mutant], book: Book, options: argparse.Namespace, ends: float) -> None:
    for name in BEFORE_FORKING:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    noted = tests_by_lines(options.budget) if NOTES_BEYOND.exists() else None
    workers = [Worker(options, noted) for _ in range(options.workers if todo else 0)]
    waiting = list(reversed(todo))
    try:
        while waiting or any(worker.mutant for worker in workers):
            if time.monotonic() > ends:
                print("time is up; run it again to go on")
                return
            time.sleep(0.05)
            for worker in workers:
                mutant = worker.mutant
                if mutant is not None:
                    found = worker.poll()
                    if found is not None:
                        book.record(mutant, found)
                elif waiting:
                    worker.start(waiting.pop())
    finally:
        book.write()
        for worker in workers:
            worker.close()


def score(every: dict[str, list[Mutant]], results: dict[str, Any], seed: int) -> dict[str, Any]:
    """Sums by file, of the mutants that still exist."""
    reasons = explained()
    rows = {}
    for file, made in every.items():
        outcomes: Counter[str] = Counter()
        for mutant in made:
            found = results.get(mutant.key)
            if found is not None:
                known = found["outcome"] == "survived" and mutant.key in reasons
                outcomes["explained" if known else found["outcome"]] += 1
        void = outcomes.pop("void", 0)
        rows[file] = {
            "possible": len(made) - void,
            "tried": sum(outcomes.values()),
            **{name: outcomes[name] for name in ("killed", "timed out", "explained", "survived")},
        }
    total = {name: sum(row[name] for row in rows.values()) for name in next(iter(rows.values()))}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    tried = {file: row for file, row in rows.items() if row["tried"]}
    drawn = sum(mutant.key in results for made in every.values() for mutant in made)
    about = {"date": today, "commit": commit(), "seed": seed, "sample": drawn}
    return {**about, "total": total, "files": tried}


def commit() -> str:
    """The last one that changed the package."""
    asked = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", str(PACKAGE)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is known is written, copies are removed
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description="Does some test fail for every small change?")
    parser.add_argument("--file", action="append", default=[], help="such as losses/cosface.py")
    parser.add_argument("--room", action="append", help="such as measuring; or beyond: the losses")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a set of tests")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after these")
    parser.add_argument(
        "--quick", action="store_true", help="only the sharpest tests; then run --survivors"
    )
    parser.add_argument("--survivors", action="store_true", help="only those that survived so far")
    parser.add_argument("--copies", action="store_true", help="all in copies of the package")
    parser.add_argument(
        "--budget", type=float, default=60, help="seconds of tests for each mutant in a fork"
    )
    parser.add_argument("--score", action="store_true", help="write tests/mutants/score.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    if unknown := set(options.file) - set(files(PACKAGE)):
        parser.error(f"not mutated: {', '.join(sorted(unknown))}")
    rooms = [
        each for room in options.room or () for each in ([*BEYOND] if room == "beyond" else [room])
    ]
    if unknown := set(rooms) - {*ROOMS, *BEYOND}:
        parser.error(f"no such room: {', '.join(sorted(unknown))}")
    options.file += [f for f in files(PACKAGE) if Path(f).parent.as_posix() in rooms]
    every, results, reasons = all_mutants(options.file), read_results(), explained()
    chosen = [mutant for made in every.values() for mutant in made]
    if options.sample is not None:
        # The whole order is drawn, so that a smaller sample is the first part of a larger one.
        chosen = random.Random(options.seed).sample(chosen, len(chosen))[: options.sample]
    if options.survivors:
        again = {k for k, row in results.items() if row["outcome"] == "survived"} - reasons.keys()
        todo = [m for m in chosen if m.key in again]
    else:
        todo = [m for m in chosen if m.key not in results]
    ends = time.monotonic() + options.minutes * 60
    book = Book(results, len(todo))
    warm = [] if options.copies else [m for m in todo if swappable(m)]
    for part in ([m for m in warm if is_beyond(m.file) is beyond] for beyond in (False, True)):
        results.update(apart(lambda part=part: in_forks(part, book, options, ends)) if part else {})
    cold = [m for m in todo if m not in warm or results.get(m.key, {}).get("outcome") == "broken"]
    # An unchanged file first: its tests must pass, or nothing below means anything.
    tests = "quick" if options.quick else "all tests"
    asked = dict.fromkeys(m.file for m in cold if not is_beyond(m.file))
    first = [unchanged(file, tests) for file in asked]
    in_copies([m for m in first if m.key not in results], Book(results, len(first)), options, ends)
    if broken := [m.key for m in first if results.get(m.key, {}).get("outcome") == "killed"]:
        print("tests fail without any change:", *broken, sep="\n")
        return 2
    in_copies(cold, book, options, ends)
    if options.score:
        whole = all_mutants([]) if options.file else every
        drawn = {m.key for m in chosen} if options.sample is not None else results.keys()
        counted = {key: row for key, row in results.items() if key in drawn}
        for path, beyond in ((SCORE, False), (SCORE_BEYOND, True)):
            part = {file: made for file, made in whole.items() if is_beyond(file) is beyond}
            sums = score(part, counted, options.seed)
            if sums["total"]["tried"]:
                write(path, sums)
    left = [
        m.key
        for m in chosen
        if results.get(m.key, {}).get("outcome") == "survived" and m.key not in reasons
    ]
    tried = sum(m.key in results for m in chosen)
    print(f"{tried} of {len(chosen)} mutants tried, {len(left)} survived without an explanation")
    print("\n".join(left))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
