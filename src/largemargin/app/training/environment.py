"""What a run runs on: the device that settings name; versions, commit and command."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from largemargin.errors import LargeMarginError
from largemargin.version import __version__

PACKAGES = ("torchvision", "numpy", "accelerate", "safetensors", "scikit-learn", "timm")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LargeMarginError(
            f"device must be auto, cpu, cuda, ..., but {name!r} was given."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LargeMarginError(
            f"device is {name}, but torch sees no CUDA device here. Use device: cpu or auto."
        )
    return device


def environment(device: torch.device, *, processes: int = 1) -> dict[str, Any]:
    """Provenance as plain values. Nothing in it names a user or a path outside the command."""
    return {
        "largemargin": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "packages": _versions(),
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "processes": processes,
        "platform": platform.platform(),
        "commit": commit(),
        "command": command(),
    }


def command() -> list[str]:
    """What was typed, without the folder of the program; ``python -m NAME`` as that."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {os.cpu_count()} cores)"


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the working folder, with a + where files differ from it; None without git."""
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None if shown.returncode == 0 else None
