"""Copies of this process that may die: what a fault does to a run, without starting Python anew."""

import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
LONGEST = 120.0
"""Seconds after which a child counts as hanging."""


@dataclass(frozen=True)
class Ended:
    """How a child ended: a signal, a value, or an error as text."""

    signal: int
    value: Any = None
    error: str = ""
    kind: str = ""


class Child:
    """``work()`` in a forked process, which ends without cleaning up after pytest."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries are idle
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            _carry_out(work, write)
        os.close(write)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that the child brings about."""
        limit = time.monotonic() + LONGEST
        while not reached():
            if time.monotonic() > limit:
                self.kill()
                pytest.fail(f"waited {LONGEST:g} s in vain: {self.wait()}")
            time.sleep(0.001)

    def wait(self) -> Ended:
        """How it ended; fails where it does not end."""
        said = b""
        limit = time.monotonic() + LONGEST
        os.set_blocking(self._read, False)
        while True:
            try:
                part = os.read(self._read, 1 << 16)
            except BlockingIOError:
                part = None
            said += part or b""
            if part == b"":
                break
            if part is None:
                if time.monotonic() > limit:
                    self.kill()
                    os.waitpid(self.pid, 0)
                    pytest.fail(f"the process did not end within {LONGEST:g} s")
                time.sleep(0.005)
        os.close(self._read)
        status = os.waitpid(self.pid, 0)[1]
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return Ended(number, **(pickle.loads(said) if said else {}))


def _carry_out(work: Callable[[], Any], write: int) -> None:
    import torch

    torch.set_num_threads(1)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    try:
        said = {"value": work()}
    except BaseException as error:
        kind = type(error).__name__
        text = str(error) if kind in ("LargeMarginError", "Interrupted") else _all(error)
        said = {"error": text, "kind": kind}
    with os.fdopen(write, "wb") as file:
        file.write(pickle.dumps(said))
    os._exit(0)


def _all(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def ended(work: Callable[[], Any]) -> Ended:
    """``work()`` in a child, waited for."""
    return Child(work).wait()


def as_nobody(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same without the rights of the administrator, whom no permission stops."""

    def without() -> Any:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return work()

    return without


def kill_at(count: int, *places: tuple[Any, str]) -> None:
    """In a child: die of SIGKILL just before the ``count``-th call of any of these functions."""
    left = [count]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for owner, name in places:
        setattr(owner, name, deadly(getattr(owner, name)))


def open_folder(path: Path) -> Path:
    """A folder that every user may enter, and those above it."""
    path.mkdir(parents=True, exist_ok=True)
    for each in (path, *path.parents):
        if each.stat().st_uid == os.getuid() and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o055)
    return path
