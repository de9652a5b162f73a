"""Mutants in forks of one process that has imported and collected everything already.

A plugin of pytest: where the tests would be run, the process is forked for each mutant, and the
fork puts the mutant's code into the functions that exist already. So a mutant costs what its tests
cost until the first of them fails. Tests that do not run the changed statement are left out; those
that have killed most mutants of the same function, then of the same file, come first.
"""

import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mutants.changes import Mutant
from mutants.swap import Swap
from mutants.touched import Index, Recorder

OUTCOMES = {0: "survived", 1: "killed", 3: "void", 70: "broken"}
SURVIVED, KILLED, VOID, BROKEN = OUTCOMES
ENOUGH = 100
"""Tests after which a place that no gradient has come by counts as one without."""
PATIENCE = 20
"""Seconds a set of tests may take beyond ten times what it took before."""


@dataclass
class Running:
    mutant: Mutant
    began: float
    limit: float


class Forks:
    """The plugin: tests of ``budget`` seconds for each mutant in ``todo``, none after ``ends``.

    ``notes`` is a file about the tests, ``results`` are the earlier outcomes of mutants.
    """

    def __init__(
        self,
        package: Path,
        notes: Path,
        results: dict[str, dict[str, Any]],
        record: Callable[[Mutant, dict[str, Any]], None],
        *,
        workers: int,
        budget: float,
        ends: float,
    ) -> None:
        self.package, self.notes, self.record = package, notes, record
        self.workers, self.budget, self.ends = workers, budget, ends
        self.todo: list[Mutant] = []
        self.sound: set[str] = set()
        """Tests that passed in this run without any change."""
        self.failed = self.why = ""
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)
        for row in results.values():
            self._remember(row)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed, self.why = report.nodeid, report.longreprtext.strip()[-300:]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.swap = Swap(self.package)
        gc.collect()
        gc.freeze()
        self.touched = self._watched(session)
        self.index = Index(self.package, self.touched)
        self._try_all()
        return True

    def _watched(self, session: pytest.Session) -> dict[str, Any]:
        """Notes about every test, made now where there are none."""
        known = json.loads(self.notes.read_text("utf-8")) if self.notes.exists() else {}
        texts = {path: _digest(path) for path in {item.path for item in session.items}}
        fresh = [
            item
            for item in session.items
            if known.get(item.nodeid, {}).get("text") != texts[item.path]
        ]
        drafts = []
        for number in range(self.workers):
            draft = self.notes.with_name(f"{self.notes.name}.{os.getpid()}.{number}")
            part = fresh[number :: self.workers]
            drafts.append(
                (draft, self._fork(lambda part=part, draft=draft: self._watch(part, draft)))
            )
        for draft, pid in drafts:
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"the tests could not be watched: {draft.read_text('utf-8')}")
            known |= json.loads(draft.read_text("utf-8"))
            draft.unlink()
        self.notes.write_text(json.dumps(known), encoding="utf-8")
        failing = [name for name in self.items if known[name]["failed"]]
        if failing:
            print("left out, for they fail without any change:", *failing, sep="\n  ", flush=True)
        return {name: known[name] for name in self.items if not known[name]["failed"]}

    def _watch(self, items: list[pytest.Item], draft: Path) -> int:
        found = {}
        for number, item in enumerate(items):
            self.failed = ""
            with Recorder(self.package) as recorder:
                _run(item, items[number + 1] if number + 1 < len(items) else None)
            found[item.nodeid] = {**recorder.row(), "failed": bool(self.failed)}
            found[item.nodeid]["text"] = _digest(item.path)
        draft.write_text(json.dumps(found), encoding="utf-8")
        return 0

    def order(self, mutant: Mutant) -> list[str]:
        """Tests that run the changed statement, the likeliest to fail first."""
        found = list(self.index.tests(mutant.file, mutant.line))
        scope, file = self.kills[_scope(mutant.file, mutant.scope)], self.kills[mutant.file]
        turn: Counter[str] = Counter()
        places = {}
        # One case of every test function, the quickest, then the second of each, and so on.
        for name in sorted(found, key=lambda name: self.touched[name]["seconds"]):
            function = name.partition("[")[0]
            places[name] = turn[function]
            turn[function] += 1

        def place(name: str) -> tuple[float, ...]:
            cost = self.touched[name]["seconds"] + 0.05
            written_for_mutants = name.startswith("tests/mutants/")
            return (
                *(-scope[name] / cost, -file[name] / cost),
                *(not written_for_mutants, places[name], cost),
            )

        found.sort(key=place)
        seconds, chosen = 0.0, []
        for name in found:
            seconds += self.touched[name]["seconds"]
            if seconds > self.budget and chosen:
                break
            chosen.append(name)
        return chosen

    def _try_all(self) -> None:
        running: dict[int, Running] = {}
        self.waiting = list(reversed(self.todo))
        try:
            while running or (self.waiting and time.monotonic() < self.ends):
                more = self.waiting and time.monotonic() < self.ends
                if more and len(running) < self.workers:
                    self._start(self.waiting.pop(), running)
                else:
                    self._collect(running)
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)

    def _start(self, mutant: Mutant, running: dict[int, Running]) -> None:
        tests = self.order(mutant)
        limit = PATIENCE + 10 * sum(self.touched[name]["seconds"] for name in tests)
        pid = self._fork(lambda: self._try(mutant, tests))
        running[pid] = Running(mutant, time.monotonic(), limit)

    def _collect(self, running: dict[int, Running]) -> None:
        for pid, each in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - each.began
            if done:
                outcome = OUTCOMES.get(os.waitstatus_to_exitcode(status), "killed")
            elif seconds > each.limit:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                outcome = "timed out"
            else:
                continue
            del running[pid]
            by, _, _ = self._read(pid).partition("\n")
            if outcome == "killed" and by in self.items and not self._is_sound(by):
                self.waiting.append(each.mutant)
                continue
            found = {"outcome": outcome, "by": by, "seconds": round(seconds, 1)}
            self._remember({"file": each.mutant.file, "scope": each.mutant.scope, **found})
            self.record(each.mutant, found)
        time.sleep(0.01)

    def _is_sound(self, test: str) -> bool:
        """Whether a test that has killed passes where nothing was changed; left out if not."""
        if test not in self.sound:
            pid = self._fork(lambda: self._try(None, [test]))
            _, status = os.waitpid(pid, 0)
            said = self._read(pid)
            if os.waitstatus_to_exitcode(status) != SURVIVED:
                print("left out, for it fails without any change:", said, flush=True)
                self.touched.pop(test, None)
                self.index = Index(self.package, self.touched)
                return False
            self.sound.add(test)
        return True

    def _try(self, mutant: Mutant | None, tests: list[str]) -> int:
        names = self.swap.put(mutant) if mutant is not None else {}
        for number, name in enumerate(tests):
            following = self.items[tests[number + 1]] if number + 1 < len(tests) else None
            _run(self.items[name], following)
            if self.failed:
                text = f"{self.failed}\n{self.why}"
                self._said(os.getpid()).write_text(text, encoding="utf-8")
                return KILLED
            if number >= ENOUGH and names.get("_tensors_detached") == []:
                break
        return VOID if names.get("_tensors_detached") == [] else SURVIVED

    def _read(self, pid: int) -> str:
        said = self._said(pid)
        text = said.read_text("utf-8") if said.exists() else ""
        said.unlink(missing_ok=True)
        return text

    def _said(self, pid: int) -> Path:
        return self.notes.with_name(
            f"said.{os.getppid() if pid == os.getpid() else os.getpid()}.{pid}"
        )

    def _remember(self, row: dict[str, Any]) -> None:
        if row["outcome"] == "killed" and row["by"]:
            self.kills[_scope(row["file"], row.get("scope", ""))][row["by"]] += 1
            self.kills[row["file"]][row["by"]] += 1

    def _fork(self, task: Callable[[], int]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        code = BROKEN
        try:
            code = task()
        except BaseException:
            self._said(os.getpid()).write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(code)


def _run(item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def _scope(file: str, scope: str) -> str:
    return f"{file} | {scope}"
