"""Failures from outside a run, in words that say what to do: disks, folders, processes, devices."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from largemargin.errors import LargeMarginError
from largemargin.training.runs import resume_command


@contextmanager
def explained(place: "Place", *, timeout: float) -> Iterator[None]:
    """Turn what the system and libraries raise into errors that name the folder of the run.

    Args:
        place: where the run is, as soon as it is known.
        timeout: seconds for which processes wait for each other.
    """
    try:
        yield
    except LargeMarginError:
        raise
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        file = "" if error.filename is None else f" ({error.filename})"
        raise LargeMarginError(f"the run stopped: {why}{file}. {place.hint()}") from error
    except Exception as error:
        said = _explanation(error, int(os.environ.get("WORLD_SIZE", "1")), timeout)
        if said is None:
            raise
        raise LargeMarginError(f"the run stopped: {said}. {place.hint()}") from error


class Place:
    """The folder of a run, which is known only after it was made."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def hint(self) -> str:
        """What is still there, and how to go on."""
        if self.folder is None or not self.folder.is_dir():
            return "Nothing was trained yet."
        return (
            "Checkpoints written before are whole. When the cause is gone, continue: "
            f"{resume_command(self.folder)}"
        )


def _explanation(error: Exception, processes: int, timeout: float) -> str | None:
    text = " ".join(str(error).split())
    if type(error).__name__ == "SafetensorError":
        return f"a checkpoint could not be written: {text}"
    if not isinstance(error, RuntimeError):
        return None
    if "deterministic implementation" in text or "CUBLAS_WORKSPACE_CONFIG" in text:
        return (
            f"deterministic is true, but a part of this model cannot be computed so here: {text} "
            "Use another network, or deterministic: false"
        )
    if processes > 1 and _is_about_processes(error, text):
        return (
            f"another of the {processes} processes ended, or did not answer for {timeout:g} s "
            f"(timeout): {text}"
        )
    return None


def _is_about_processes(error: Exception, text: str) -> bool:
    named = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    marks = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "peer")
    return named or any(mark in text.lower() for mark in marks)
