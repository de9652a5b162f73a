"""Mutation check: does some test fail for every small wrong change to the arithmetic?

``python tests/mutants/run.py --sample 200 --seed 1`` or ``make mutants``. Every mutant is run in a
copy of the package in a temporary folder that stands first on the path; the source is not touched.
Results go to build/mutants.json as they come, so that an interrupted run goes on where it stopped;
``--score`` writes the sums to tests/mutants/score.json.

One process imports torch and the test tools once and is forked for every mutant: a run then costs
what its tests cost. Mutants that no test can tell apart stand in equivalent.yaml, each with the
reason.
"""

import argparse
import compileall
import datetime
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mutants.changes import Mutant, mutants
from mutants.suites import files, stages

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "largemargin"
RESULTS = ROOT / "build" / "mutants.json"
SCORE = HERE / "score.json"
EQUIVALENT = HERE / "equivalent.yaml"
DID_DETACH = "the mutant has detached a tensor"
QUICK = 2
BROKEN = 70
"""Exit status of a run of tests that could not be made."""
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


class Bench:
    """A copy of the package, one file of which is replaced at a time."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.package = self.folder / "largemargin"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self.package, quiet=2)

    def put(self, file: str, source: str) -> None:
        path = self.package / file
        path.write_text(source, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Worker:
    """Runs one mutant after the other, each stage of its tests in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.bench = Bench()
        self.timeout, self.quick, self.again = options.timeout, options.quick, options.survivors
        self.mutant: Mutant | None = None
        self.pid = 0

    def start(self, mutant: Mutant) -> None:
        self.mutant, self.began = mutant, time.monotonic()
        self.stages = stages(mutant.file)
        self.real = mutant.kind != "detach"
        if self.again:  # tests were added for it: those first
            self.stages[:QUICK] = reversed(self.stages[:QUICK])
        if self.quick:
            self.stages = self.stages[:QUICK]
        self.bench.put(mutant.file, mutant.source)
        self._next()

    def _next(self) -> None:
        self.stage = self.stages.pop(0)
        self.since = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            run_tests(self.bench.folder, self.stage)

    def poll(self) -> dict[str, Any] | None:
        """The outcome once there is one."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            if time.monotonic() - self.since < self.timeout:
                return None
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return self._outcome("timed out")
        said = (self.bench.folder / "said.txt").read_text(encoding="utf-8", errors="replace")
        code = os.waitstatus_to_exitcode(status)
        self.real = self.real or DID_DETACH in said
        if code in (0, 5):  # nothing failed, or nothing was selected
            if self.stages:
                self._next()
                return None
            return self._outcome("survived" if self.real else "void")
        if code == BROKEN:
            raise RuntimeError(f"the tests could not be run:\n{said[-2000:]}")
        return self._outcome("killed", _first_failure(said))

    def _outcome(self, what: str, by: str = "") -> dict[str, Any]:
        assert self.mutant is not None
        original = (PACKAGE / self.mutant.file).read_text(encoding="utf-8")
        self.bench.put(self.mutant.file, original)
        seconds = round(time.monotonic() - self.began, 1)
        found = {"outcome": what, "kind": self.mutant.kind, "by": by, "seconds": seconds}
        self.mutant = None
        return found


def _first_failure(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0][:200] if lines else said.strip()[-200:]


def run_tests(folder: Path, arguments: list[str]) -> None:
    """In a process of its own: pytest with the copy first on the path. Does not return."""
    said = open(folder / "said.txt", "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(ROOT)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT / "tests")))
    import pytest

    quiet = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported before the fork
    code = BROKEN
    try:
        code = int(pytest.main([*arguments, "-m", "not slow", *quiet]))
        ours = [m for name, m in sys.modules.items() if name.startswith("largemargin")]
        if any(getattr(module, "_tensors_detached", None) for module in ours):
            print(DID_DETACH)
        package = sys.modules.get("largemargin")
        if package is not None and not str(package.__file__).startswith(str(folder)):
            raise RuntimeError(f"the tests ran {package.__file__}, not the mutant")
    except BaseException:
        traceback.print_exc()
        code = BROKEN
    finally:
        sys.stdout.flush()
        os._exit(code)


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


def go(todo: list[Mutant], results: dict[str, Any], options: argparse.Namespace) -> None:
    for name in BEFORE_FORKING:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    ends = time.monotonic() + options.minutes * 60
    workers = [Worker(options) for _ in range(options.workers)]
    waiting, count = list(reversed(todo)), Counter[str]()
    try:
        while waiting or any(worker.mutant for worker in workers):
            time.sleep(0.05)
            for worker in workers:
                mutant = worker.mutant
                if mutant is not None:
                    found = worker.poll()
                    if found is not None:
                        where = {"file": mutant.file, "source": digest(mutant.file)}
                        results[mutant.key] = {**where, "line": mutant.line, **found}
                        count[found["outcome"]] += 1
                        write(RESULTS, results)
                        _tell(mutant, found, count, len(todo))
                elif waiting and time.monotonic() < ends:
                    worker.start(waiting.pop())
                elif waiting and not any(each.mutant for each in workers):
                    print(f"time is up: {len(waiting)} left; run it again to go on")
                    return
    finally:
        for worker in workers:
            if worker.mutant is not None:
                os.killpg(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
            worker.bench.close()


def _tell(mutant: Mutant, found: dict[str, Any], count: Counter[str], total: int) -> None:
    done = f"[{sum(count.values())}/{total}]"
    print(f"{done} {found['outcome']:9} {found['seconds']:5.1f} s  {mutant.file}:{mutant.line}")
    if found["outcome"] == "survived" and mutant.line:
        print(f"    {mutant.scope}\n    {mutant.before}\n    {mutant.after}")
    sys.stdout.flush()


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
    return {"date": today, "seed": seed, "total": total, "files": tried}


def main() -> int:
    parser = argparse.ArgumentParser(description="Does some test fail for every small change?")
    parser.add_argument("--file", action="append", default=[], help="such as losses/cosface.py")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a set of tests")
    parser.add_argument("--minutes", type=float, default=1e6, help="start none after these")
    parser.add_argument(
        "--quick", action="store_true", help="only the sharpest tests; then run --survivors"
    )
    parser.add_argument("--survivors", action="store_true", help="only those that survived so far")
    parser.add_argument("--score", action="store_true", help="write tests/mutants/score.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # copies are removed then, too
    if unknown := set(options.file) - set(files(PACKAGE)):
        parser.error(f"not mutated: {', '.join(sorted(unknown))}")
    every, results, reasons = all_mutants(options.file), read_results(), explained()
    chosen = [mutant for made in every.values() for mutant in made]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    if options.survivors:
        todo = [m for m in chosen if results.get(m.key, {}).get("outcome") == "survived"]
    else:
        todo = [m for m in chosen if m.key not in results]
    # An unchanged file first: its tests must pass, or nothing below means anything.
    tests = "quick" if options.quick else "all tests"
    first = [unchanged(file, tests) for file in dict.fromkeys(m.file for m in todo)]
    go([m for m in first if m.key not in results], results, options)
    if broken := [m.key for m in first if results.get(m.key, {}).get("outcome") != "survived"]:
        print("tests fail without any change:", *broken, sep="\n")
        return 2
    go([m for m in todo if m.key not in reasons or not options.survivors], results, options)
    if options.score:
        whole = all_mutants([]) if options.file else every
        write(SCORE, score(whole, results, options.seed))
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
