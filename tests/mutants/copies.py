"""Mutants in copies of the package: slower than forks, but all of a file is changed.

For what a module or class computes when it is imported, and for tests in processes of their own.
"""

import argparse
import compileall
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutants.changes import Mutant
from mutants.suites import is_beyond, stages

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "largemargin"
DID_DETACH = "the mutant has detached a tensor"
QUICK = 2
"""Sets of tests that --quick runs."""
BROKEN = 70
"""Exit status of a run of tests that could not be made."""
SOUND: set[str] = set()
"""Tests that have killed, and pass where nothing is changed."""


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

    def __init__(
        self, options: argparse.Namespace, noted: Callable[[Mutant], list[str]] | None = None
    ) -> None:
        self.bench = Bench()
        self.timeout, self.quick, self.noted = options.timeout, options.quick, noted
        self.mutant: Mutant | None = None
        self.pid = 0
        self.checking = ""
        """A test that has killed, while it is run where nothing is changed."""

    def start(self, mutant: Mutant) -> None:
        self.mutant, self.began, self.checking = mutant, time.monotonic(), ""
        tests = self.noted(mutant) if self.noted is not None else []
        # A test may read a constant without a function that speaks of it.
        self.stages = [tests, *stages(mutant.file)[:1]] if tests else stages(mutant.file)
        self.real = mutant.kind != "detach"
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
        assert self.mutant is not None
        if code in (0, 5):  # nothing failed, or nothing was selected
            if self.checking:
                SOUND.add(self.checking.partition(" ")[2])
                return self._outcome("killed", self.checking)
            if self.stages:
                self._next()
                return None
            return self._outcome("survived" if self.real else "void")
        if code == BROKEN:
            raise RuntimeError(f"the tests could not be run:\n{said[-2000:]}")
        by = self.checking or _first_failure(said)
        if self.checking:
            return self._outcome("void", f"fails without any change: {by}")
        test = by.partition(" ")[2]
        if is_beyond(self.mutant.file) and "::" in test and test not in SOUND:
            self.checking, self.stages = by, [[test]]
            self._put_back()
            self._next()
            return None
        return self._outcome("killed", by)

    def _outcome(self, what: str, by: str = "") -> dict[str, Any]:
        self._put_back()
        seconds = round(time.monotonic() - self.began, 1)
        found = {"outcome": what, "by": by, "seconds": seconds}
        self.mutant = None
        return found

    def _put_back(self) -> None:
        assert self.mutant is not None
        original = (PACKAGE / self.mutant.file).read_text(encoding="utf-8")
        self.bench.put(self.mutant.file, original)

    def close(self) -> None:
        if self.mutant is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self.bench.close()


def _first_failure(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0][:200] if lines else said.strip()[-200:]


def python_path(first: Path) -> str:
    """For processes that tests start."""
    earlier = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(first), str(ROOT / "tests"), *([earlier] if earlier else [])])


def run_tests(folder: Path, arguments: list[str]) -> None:
    """In a process of its own: pytest with the copy first on the path. Does not return."""
    said = open(folder / "said.txt", "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(ROOT)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = python_path(folder)
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
