"""The options of commands that take a run: which of its models, which images.

Apart from what opens it, which needs torch: ``--help`` answers at once.
"""

import os
from pathlib import Path

import jsonargparse

from largemargin.app.cli.parser import CommandParser
from largemargin.app.config import DataConfig
from largemargin.exceptions import LargeMarginError

SPLITS = ("auto", "test", "validation", "train")


def add_run(parser: jsonargparse.ArgumentParser) -> None:
    """The run, which of its models, and where to compute."""
    parser.add_argument("run", type=str, metavar="RUN", help="folder that largemargin train made")
    parser.add_argument("--which", default="best", type=str, help="model to take: best or last")
    parser.add_argument("--device", default="auto", type=str, help="auto, cpu, cuda or cuda:1")


def add_flips(parser: jsonargparse.ArgumentParser) -> None:
    """Test-time augmentation."""
    parser.add_argument(
        "--flips",
        action="store_true",
        help="average the features of every image and its mirror image, which takes twice as long",
    )


def add_data(parser: jsonargparse.ArgumentParser) -> None:
    """Other data than that of the run."""
    parser.add_argument(
        "--split",
        default="auto",
        type=str,
        help="images to take: test, validation, train or auto (test where there is one)",
    )
    parser.add_class_arguments(DataConfig, "data")
    parser.set_defaults({"data.name": ""})  # whoever names digits means digits
    for action in parser._actions:
        if action.dest == "data.name":
            action.help = "other data: folder, csv, arrays, cifar10, ...; default that of the run"
    for group in parser._action_groups:
        if any(action.dest.startswith("data.") for action in group._group_actions):
            group.title = "Other data with the same classes: --data FOLDER, FILE or NAME"
    if isinstance(parser, CommandParser):
        parser.shorthand = ("data",)


def add_ood(parser: jsonargparse.ArgumentParser) -> None:
    """Images of other things, which :func:`ood_samples` reads."""
    parser.add_argument(
        "--ood",
        type=str,
        metavar="FOLDER",
        help="images of other things, or NAME:PATH of a data set: can the model tell?",
    )


def add_temperature(parser: jsonargparse.ArgumentParser, purpose: str, *, fitted: str) -> None:
    """``--temperature``: ``purpose`` is what for, ``fitted`` is what "auto" fits it to."""
    parser.add_argument(
        "--temperature",
        type=str,
        default="auto",
        help=f"{purpose}: a number, none, or auto (fitted to the validation images{fitted})",
    )


def output_file(given: str | Path) -> Path:
    """A file that can be written, found out before the work and not after it."""
    path = Path(given).expanduser()
    if path.is_dir():
        raise LargeMarginError(f"--out must be a file, but {path} is a folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(path.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise LargeMarginError(f"{path} cannot be written: no writable folder {path.parent}.")
    return path


def number_or(option: str, given: str) -> float | str:
    """An option that is a number, or "none" or "auto"."""
    if given in ("none", "auto"):
        return given
    try:
        return float(given)
    except ValueError:
        raise LargeMarginError(
            f"--{option} must be a number, none or auto, but {given!r} was given."
        ) from None
