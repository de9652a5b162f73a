"""Mutants in forks of one process that has imported and collected everything already.

A plugin of pytest: where the tests would be run, the process is forked for each mutant, and the
fork puts the mutant's code into the functions that exist already. So a mutant costs what its tests
cost until the first of them fails. Tests that do not run the changed statement are left out; those
that have killed most mutants of the same function, then of the same file, come first. A test has
killed if it fails alone, and passes alone where nothing is changed.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mutants.changes import Mutant
from mutants.swap import Swap
from mutants.touched import Index, Recorder, affordable, most_varied

OUTCOMES = {0: "survived", 1: "killed", 3: "void", 70: "broken", -signal.SIGALRM: "timed out"}
SURVIVED, KILLED, VOID, BROKEN = [code for code in OUTCOMES if code >= 0]
ENOUGH = 100
"""Tests after which a place that no gradient has come by counts as one without."""
PATIENCE = 20
"""Seconds a test may take beyond ten times what it took before."""
WATCHED = 120
"""Seconds a test may take when its lines are noted; one that takes longer is left out."""


@dataclass
class Job:
    """Tests in a fork: with a mutant, with none, or (``watching``) to note their lines."""

    tests: list[str]
    mutant: Mutant | None = None
    killed: "Job | None" = None
    """The job that found what this one checks."""
    watching: bool = False
    began: float = 0.0
    outcome: str = ""
    said: str = ""
    folder: Path = Path()
    """What is written goes there, and is removed with it."""

    @property
    def by(self) -> str:
        return self.said.partition("\n")[0]


class Forks:
    """The plugin: tests of ``budget`` seconds for each mutant in ``todo``, until ``ends``.

    ``notes`` is a file about the tests, ``results`` are the earlier outcomes of mutants, ``apart``
    says that tests share too much to be watched several in a process.
    """

    def __init__(
        self,
        package: Path,
        rooms: tuple[str, ...],
        notes: Path,
        results: dict[str, dict[str, Any]],
        record: Callable[[Mutant, dict[str, Any]], None],
        *,
        workers: int,
        budget: float,
        ends: float,
        apart: bool = False,
    ) -> None:
        self.package, self.rooms, self.notes, self.record = package, rooms, notes, record
        self.workers, self.budget, self.ends = workers, budget, ends
        self.at_once = 1 if apart else 100
        self.todo: list[Mutant] = []
        self.sound: set[str] = set()
        """Tests that passed in this run without any change."""
        self.unsound: set[str] = set()
        self.failed = self.why = ""
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)
        for row in results.values():
            self._remember(row)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed, self.why = report.nodeid, report.longreprtext.strip()[-300:]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for file in {mutant.file for mutant in self.todo}:
            with contextlib.suppress(ImportError):  # imported by no test, or for lack of a library
                name = file.removesuffix(".py").replace("/", ".")
                importlib.import_module(f"{self.package.name}.{name}")
        gc.unfreeze()  # what is frozen is not found
        self.swap = Swap(self.package)
        gc.collect()
        gc.freeze()
        self._watch_all(session)
        self.index = Index(self.package, self.rooms, self.touched)
        self.waiting = [Job([], mutant) for mutant in reversed(self.todo)]
        self._work_off()
        return True

    def _watch_all(self, session: pytest.Session) -> None:
        """Notes about every test, made now where there are none."""
        noted = json.loads(self.notes.read_text("utf-8")) if self.notes.exists() else {}
        self.known = {name: row for name, row in noted.items() if name in self.items}
        texts = {path: _digest(path) for path in {item.path for item in session.items}}
        fresh = [
            item.nodeid
            for item in session.items
            if self.known.get(item.nodeid, {}).get("text") != texts[item.path]
        ]
        print(f"lines of {len(fresh)} tests are noted first", flush=True)
        parts = [fresh[at : at + self.at_once] for at in range(0, len(fresh), self.at_once)]
        self.waiting = [Job(part, watching=True) for part in reversed(parts)]
        if fresh or len(self.known) < len(noted):  # some do not exist any more
            try:
                self._work_off()
            finally:
                self.notes.write_text(json.dumps(self.known), encoding="utf-8")
        rows = {name: self.known[name] for name in self.items if name in self.known}
        failing = [f"{name}: {row['failed']}" for name, row in rows.items() if row["failed"]]
        if failing:
            print("left out, for they fail without any change:", *failing, sep="\n  ", flush=True)
        self.touched = {name: row for name, row in rows.items() if not row["failed"]}

    def _watch(self, job: Job) -> int:
        for name, following in pairwise([*job.tests, None]):
            item, self.failed, self.why = self.items[name], "", ""
            with Recorder(self.package, self.rooms) as recorder:
                _run(item, self.items.get(following))
            row = {**recorder.row(), "failed": self.why, "text": _digest(item.path)}
            with (job.folder / "rows").open("a", encoding="utf-8") as rows:
                rows.write(json.dumps({name: row}) + "\n")
        return SURVIVED

    def _watched(self, job: Job) -> None:
        if len(self.waiting) % 100 == 0:
            print(f"{len(self.waiting) * self.at_once} tests left", flush=True)
        rows = job.folder / "rows"
        for line in rows.read_text("utf-8").splitlines() if rows.exists() else ():
            self.known |= json.loads(line)
        for name in job.tests:
            if name not in self.known:
                text = _digest(self.items[name].path)
                why = f"{job.outcome} {job.said}"
                self.known[name] = {"seconds": 0, "lines": {}, "failed": why, "text": text}

    def order(self, mutant: Mutant) -> list[str]:
        """Tests that run the changed statement, the likeliest to fail first."""
        found = self.index.tests(mutant.file, mutant.line) - self.unsound
        scope, file = self.kills[_scope(mutant.file, mutant.scope)], self.kills[mutant.file]

        def kills(name: str) -> tuple[float, ...]:
            cost = self.touched[name]["seconds"] + 0.05
            return -scope[name] / cost, -file[name] / cost, not name.startswith("tests/mutants/")

        varied = most_varied(found, self.touched)
        return affordable(sorted(varied, key=kills), self.touched, self.budget)

    def _work_off(self) -> None:
        """What waits, in so many forks at a time; what is not done when time is up is stopped."""
        running: dict[int, Job] = {}
        try:
            while (running or self.waiting) and time.monotonic() < self.ends:
                while self.waiting and len(running) < self.workers:
                    job = self.waiting.pop()
                    running[self._start(job)] = job
                self._collect(running)
                time.sleep(0.01)
        finally:
            for pid, job in running.items():
                _end(pid)
                os.waitpid(pid, 0)
                shutil.rmtree(job.folder, ignore_errors=True)

    def _start(self, job: Job) -> int:
        if not job.tests and job.mutant is not None:
            job.tests = self.order(job.mutant)
        job.began, job.folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="mutant-"))
        return self._fork(job, self._watch if job.watching else self._try)

    def _collect(self, running: dict[int, Job]) -> None:
        for pid, job in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                job.outcome = OUTCOMES.get(os.waitstatus_to_exitcode(status), "killed")
            elif time.monotonic() > job.began + self._limit(job):
                job.outcome = "timed out"
            else:
                continue
            _end(pid)
            if not done:
                os.waitpid(pid, 0)
            del running[pid]
            said = job.folder / "said"
            job.said = said.read_text("utf-8") if said.exists() else ""
            (self._watched if job.watching else self._tried)(job)
            shutil.rmtree(job.folder, ignore_errors=True)

    def _limit(self, job: Job) -> float:
        if job.watching:
            return WATCHED * len(job.tests)
        return PATIENCE + sum(map(self._patience, job.tests))

    def _patience(self, test: str) -> int:
        return math.ceil(PATIENCE + 10 * self.touched[test]["seconds"])

    def _tried(self, job: Job) -> None:
        """A test that failed is tried alone with the mutant, then alone without any change."""
        first = job.killed or job
        test = job.by if job is first else first.by
        if job is first and (job.outcome != "killed" or test not in self.items):
            return self._done(first)
        holds = job.outcome == ("survived" if job.mutant is None else "killed")
        if not holds:
            self._leave_out(test, job)
        if test in self.unsound:
            return self.waiting.append(Job([], first.mutant))
        if job.mutant is None:
            self.sound.add(test)
        elif job is first and test != job.tests[0]:
            return self.waiting.append(Job([test], job.mutant, killed=first))
        if test not in self.sound:
            return self.waiting.append(Job([test], None, killed=first))
        return self._done(first)

    def _leave_out(self, test: str, job: Job) -> None:
        how = "fails without any change" if job.mutant is None else "fails only after other tests"
        print(f"left out, for it {how}: {test}\n{job.said}", flush=True)
        self.unsound.add(test)

    def _done(self, job: Job) -> None:
        mutant = job.mutant
        assert mutant is not None
        seconds = round(time.monotonic() - job.began, 1)
        by = job.said[-500:] if job.outcome == "broken" else job.by
        found = {"outcome": job.outcome, "by": by, "seconds": seconds}
        self._remember({"file": mutant.file, "scope": mutant.scope, **found})
        self.record(mutant, found)

    def _try(self, job: Job) -> int:
        if not job.tests:
            (job.folder / "said").write_text("no test in this process runs it", encoding="utf-8")
            return BROKEN
        names = self.swap.put(job.mutant) if job.mutant is not None else {}
        for number, (name, following) in enumerate(pairwise([*job.tests, None])):
            signal.alarm(self._patience(name))
            _run(self.items[name], self.items.get(following))
            if self.failed:
                text = f"{self.failed}\n{self.why}"
                (job.folder / "said").write_text(text, encoding="utf-8")
                return KILLED
            if number >= ENOUGH and names.get("_tensors_detached") == []:
                break
        return VOID if names.get("_tensors_detached") == [] else SURVIVED

    def _remember(self, row: dict[str, Any]) -> None:
        if row["outcome"] == "killed" and row["by"]:
            self.kills[_scope(row["file"], row.get("scope", ""))][row["by"]] += 1
            self.kills[row["file"]][row["by"]] += 1

    def _fork(self, job: Job, task: Callable[[Job], int]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        tempfile.tempdir = os.environ["TMPDIR"] = str(job.folder)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(job.folder)
        code = BROKEN
        try:
            code = task(job)
        except BaseException:
            (job.folder / "said").write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(code)


def _end(pid: int) -> None:
    """A fork and the processes it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run(item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def _scope(file: str, scope: str) -> str:
    return f"{file} | {scope}"
