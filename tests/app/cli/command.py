"""The command as a user runs it: another process, in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

SMALL = ("--epochs", "1", "--batch_size", "256", "--device", "cpu")
"""The quickest training there is: digits, five steps."""


def largemargin(
    *words: str, folder: Path, status: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``largemargin words...`` in ``folder`` and expect this exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "largemargin", *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "LARGEMARGIN_TRACEBACK"}
    paths = kept.get("PYTHONPATH", "").split(os.pathsep)
    kept["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths if path)
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def runs_in(folder: Path, name: str = "*") -> list[Path]:
    """The folders of runs, oldest first."""
    return sorted((folder / "runs").glob(f"[0-9]*-{name}"))
