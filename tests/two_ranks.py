"""Processes, two unless said, that run named checks: what every test of ranks starts and reads."""

import datetime
import importlib
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NEEDS_GLOO = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


def run_checks(module: str, names: list[str], folder: Path, *, ranks: int = 2) -> None:
    """Run ``check_<name>()`` of a module on every rank; fail with every difference they yield.

    One start for all of them, from a process that has imported torch already: importing it twice
    is most of what a check costs.
    """
    # Elsewhere forks of a process that has loaded torch may be refused by the system.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    if method == "forkserver":
        mp.get_context(method).set_forkserver_preload(["torch", "numpy", "largemargin"])
    args = (ranks, module, str(folder), names)
    mp.start_processes(_run_rank, args, nprocs=ranks, start_method=method)
    failures = []
    for name in names:
        for rank in range(ranks):
            report = folder / f"{name}.{rank}"
            text = report.read_text() if report.exists() else "did not run: a check before it broke"
            if text:
                failures.append(f"== {name}, rank {rank}\n{text}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def meeting_folder() -> Path:
    """Where the ranks of this process group met: a folder both can write to."""
    return _folder[0]


_folder: list[Path] = []


def _run_rank(rank: int, ranks: int, module: str, folder: str, names: list[str]) -> None:
    """Run the named checks on one rank and leave what they found in ``folder``."""
    torch.set_num_threads(1)
    _folder[:] = [Path(folder)]
    checks = importlib.import_module(module)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=300),
    )
    for name in names:
        report = Path(folder) / f"{name}.{rank}"
        try:
            found = list(getattr(checks, f"check_{name}")())
        except Exception:
            # The other rank may be waiting for this one: nothing after it can be trusted.
            report.write_text(traceback.format_exc())
            break
        report.write_text("\n".join(found))
    dist.destroy_process_group()
