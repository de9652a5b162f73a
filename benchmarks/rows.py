"""Timing, and the machine-written rows every benchmark leaves behind."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

Row = dict[str, Any]


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    *,
    repetitions: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each step, one call of each per repetition.

    Interleaving lets a slow minute of the machine hit every provider alike; the starting provider
    rotates, so that none always runs on the caches another one left.
    """
    names = list(steps)
    for _ in range(warm_up):
        for name in names:
            steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            steps[name]()
            seconds[name].append(clock() - start)
    return seconds


def cuda_seconds(step: Callable[[], object], times: int = 1) -> float:
    """Seconds a call takes on the GPU, by its own clock."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph; what it returned lives as long as the graph."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay(_: object = kept) -> None:
        graph.replay()

    return replay


def spread_ms(seconds: Sequence[float]) -> Row:
    """Median, 20th and 80th percentile in milliseconds."""
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "p20_ms": round(1e3 * fifths[0], 3),
        "p80_ms": round(1e3 * fifths[-1], 3),
        "repetitions": len(seconds),
    }


def environment(threads: int) -> Row:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], HERE.parent), *sys.argv[1:]]),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "load_1min_at_start": round(os.getloadavg()[0], 2),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {
            name: _version(name) for name in ("torch", "largemargin", "pytorch-metric-learning")
        },
    }


def write(name: str, rows: Sequence[Row], common: Row) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps([{**row, **common} for row in rows], indent=1) + "\n")
    return path


def verdict(value: float, limit: float, *, strict: bool = False) -> str:
    return "met" if value < limit or (value == limit and not strict) else "MISSED"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit measured, with ``+`` when tracked files differ from it; or what the variable
    COMMIT says, on machines that have the files and not the commits."""
    if named := os.environ.get("COMMIT"):
        return named

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
