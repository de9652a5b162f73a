"""What a test did to the program, and what that took."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Faults:
    """Counts of one test: ``injected`` are things that went wrong, ``tried`` inputs given."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.tried: Counter[str] = Counter()
        self.took: dict[str, dict[str, float]] = {}

    def inject(self, what: str, count: int = 1) -> None:
        self.injected[what] += count

    def attempt(self, what: str, count: int = 1) -> None:
        self.tried[what] += count

    def measure(self, what: str, took: "Took") -> None:
        """Seconds and memory of a large job, for people to read."""
        self.took[what] = {"seconds": round(took.seconds, 1), "mib": round(took.bytes / 2**20)}


@dataclass
class Took:
    """Seconds, and by how many bytes the process grew at most."""

    seconds: float = 0.0
    bytes: int = 0


@contextmanager
def watched() -> Iterator[Took]:
    """What is done inside, in time and memory; memory only where the system tells."""
    took, started = Took(), time.perf_counter()
    if not RESET.exists():
        yield took
        took.seconds = time.perf_counter() - started
        return
    RESET.write_text("5")  # forget the highest memory so far
    before = _kib("VmRSS")
    yield took
    took.seconds = time.perf_counter() - started
    took.bytes = max(0, _kib("VmHWM") - before) * 1024


def _kib(name: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found)
