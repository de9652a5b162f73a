"""What ``compare`` and ``tune`` share: many runs in one folder, with a plan that goes on."""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from largemargin.app.cli.run_options import Resume
from largemargin.app.config import RunConfig
from largemargin.errors import LargeMarginError

CONTENT = {"compare": "comparison", "tune": "search"}
"""What the folder of a command holds."""


def add_folder_options(group: Any, command: str, *, further: str) -> None:
    """Where it is written, and how it goes on; neither is part of a configuration.

    Args:
        further: the option that may be given with ``--resume``, to go further than was planned.
    """
    group.add_argument(
        "--folder",
        type=str,
        default=argparse.SUPPRESS,
        help=f"folder of the {CONTENT[command]}; default a new one in --out",
    )
    group.add_argument(
        "--resume",
        action=Resume,
        further=further,
        type=str,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help=f"continue the {CONTENT[command]} in this folder",
    )


def refuse_several_processes(command: str) -> None:
    """Every process of torchrun would start a study of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LargeMarginError(
            f"{command} runs in one process, but it was started in {os.environ['WORLD_SIZE']}. "
            "Start it without torchrun; several machines can share a search with tune --storage."
        )


def study_folder(options: Any, config: RunConfig, command: str) -> str:
    """The folder asked for, or a new one in ``out`` with a name that says what is in it."""
    from largemargin.app.training.runs import new_folder

    folder = options.get("folder")
    if folder is None:
        name = command if config.name == RunConfig().name else f"{command}-{config.name}"
        return str(new_folder(replace(config, name=name)))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LargeMarginError(f"cannot make the folder {folder}: {error.strerror}.") from error
    return str(folder)


def stored_plan(
    folder: str, file: str, command: str, names: Sequence[str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Settings of the runs in a folder to continue, and the rest of its plan, by these names."""
    from largemargin.app.training.config_file import from_dict, read_yaml

    path = Path(folder) / file
    if not path.is_file():
        raise LargeMarginError(
            f"{folder} is no {CONTENT[command]}: it has no {file}. Pass a folder that `largemargin "
            f"{command}` made."
        )
    known = read_yaml(path)
    plan = {name: known.pop(name) for name in names}
    return from_dict(known), plan


@contextmanager
def resumable(command: str, folder: str) -> Iterator[None]:
    """Ctrl-C says how to go on."""
    from largemargin.app.training.engine import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        again = f"largemargin {command} --resume {shlex.quote(folder)}"
        raise KeyboardInterrupt(again) from None


def say(line: str) -> None:
    """At once, also where the output goes to a file."""
    print(line, flush=True)
