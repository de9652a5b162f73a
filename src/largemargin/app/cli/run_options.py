"""Options that several sub-commands have, and what ``compare`` and ``tune`` share.

Options of what trains, which make a ``RunConfig``; options of what takes a trained run. ``compare``
and ``tune`` are many runs in one folder, with a plan that goes on. What needs torch is imported
where it is used: ``--help`` answers at once.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonargparse

from largemargin.app.cli.parser import CommandParser
from largemargin.app.config import DataConfig, RunConfig
from largemargin.exceptions import LargeMarginError

TITLES = {
    "data": "Data: --data NAME, FOLDER or FILE, or in detail",
    "model": "Network: --model NAME, or in detail",
    "objective": "Objective: --objective NAME or 'NAME + 0.5*NAME', or in detail",
    "noise": "Noise on training images",
    "optimizer": "Optimizer: --optimizer NAME, or in detail",
}
NAMED = ("data", "model", "objective", "optimizer")
CONTENT = {"compare": "comparison", "tune": "search"}
"""What the folder of a command holds."""

SPLITS = ("auto", "test", "validation", "train")


def add_options(parser: Any, *rows: tuple[Any, ...]) -> None:
    """Options by name, type, default and help; a metavar where the name says too little."""
    for name, kind, default, text, *metavar in rows:
        words = {"metavar": metavar[0]} if metavar else {}
        parser.add_argument(f"--{name}", type=kind, default=default, help=text, **words)


def add_switches(parser: Any, **texts: str) -> None:
    """Options that are false, true by their name alone, or what stands after it."""
    for name, text in texts.items():
        parser.add_argument(f"--{name}", type=bool, nargs="?", const=True, default=False, help=text)


def add_run_options(
    parser: jsonargparse.ArgumentParser, *, skip: Collection[str] = (), title: str = "Training"
) -> None:
    """Every setting of a run, by its name in YAML; ``skip`` names those that do not apply."""
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of the settings below; options after it override it",
    )
    # What files of settings begin with; it is checked before they are parsed.
    add_options(parser, ("format_version", int, argparse.SUPPRESS, argparse.SUPPRESS))
    parser.add_class_arguments(RunConfig, skip=set(skip))
    for group in parser._action_groups:
        names = {action.dest.partition(".")[0] for action in group._group_actions}
        if group.title and group.title.startswith("One training run"):
            group.title = title
        elif len(names) == 1 and (only := names.pop()) in TITLES:
            group.title = TITLES[only]
    if isinstance(parser, CommandParser):
        parser.shorthand = tuple(name for name in NAMED if name not in skip)


def run_config(options: Any, **changes: Any) -> RunConfig:
    """The ``RunConfig`` that the options of :func:`add_run_options` describe."""
    names = [field.name for field in fields(RunConfig) if field.name in options]
    return RunConfig(**{name: options[name] for name in names}, **changes)


class Resume(argparse.Action):
    """``--resume FOLDER``: what is continued keeps the settings it began with.

    Other options are refused by the words of the command line: a setting that is given and equals
    its default differs from what the folder began with all the same.

    Args:
        further: the option that may stand beside it, to go further than was planned.
    """

    def __init__(self, *, further: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.further = further

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        words: list[str] = getattr(parser, "args", [])  # all of them, with names written out
        given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
        others = [name for name in given if name not in (self.dest, self.further, "help")]
        if others:
            only = f" (only --{self.further} may be)" if self.further else ""
            raise LargeMarginError(
                f"--resume continues {values} with the settings it began with, but {others[0]} was "
                f"given too{only}. Leave it out, or start anew without --resume."
            )
        setattr(namespace, self.dest, values)


def show_progress() -> bool:
    """Progress bars are for people: none where the output goes to a file."""
    return sys.stderr.isatty()


def add_folder_options(group: Any, command: str, *, further: str) -> None:
    """Where it is written, and how it goes on; neither is part of a configuration.

    ``further`` is the option that may be given with ``--resume``.
    """
    text = f"folder of the {CONTENT[command]}; default a new one in --out"
    add_options(group, ("folder", str, argparse.SUPPRESS, text))
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
    """The folder asked for, or a new one in ``out`` with a name that says what is in it.

    The folder of a plan is gone on with; one of other things, as of images, is not written into.
    """
    from largemargin.app.training.comparison import PLAN
    from largemargin.app.training.files import made_folder
    from largemargin.app.training.runs import new_folder

    folder = options.get("folder")
    if folder is None:
        name = command if config.name == RunConfig().name else f"{command}-{config.name}"
        return str(new_folder(replace(config, name=name)))
    if any(made_folder(Path(folder)).iterdir()) and not (Path(folder) / PLAN).is_file():
        raise LargeMarginError(
            f"--folder {folder} exists already and holds other things. Choose another folder."
        )
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


def add_run(parser: jsonargparse.ArgumentParser) -> None:
    """The run, which of its models, and where to compute."""
    parser.add_argument("run", type=str, metavar="RUN", help="folder that largemargin train made")
    add_options(
        parser,
        ("which", str, "best", "model to take: best or last"),
        ("device", str, "auto", "auto, cpu, cuda or cuda:1"),
    )


def add_flips(parser: jsonargparse.ArgumentParser) -> None:
    """Test-time augmentation."""
    parser.add_argument(
        "--flips",
        action="store_true",
        help="average the features of every image and its mirror image, which takes twice as long",
    )


def add_data(parser: jsonargparse.ArgumentParser) -> None:
    """Other data than that of the run."""
    text = "images to take: test, validation, train or auto (test where there is one)"
    add_options(parser, ("split", str, "auto", text))
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
    text = "images of other things, or NAME:PATH of a data set: can the model tell?"
    add_options(parser, ("ood", str, None, text, "FOLDER"))


def add_temperature(parser: jsonargparse.ArgumentParser, purpose: str, *, fitted: str) -> None:
    """``--temperature``: ``purpose`` is what for, ``fitted`` is what "auto" fits it to."""
    text = f"{purpose}: a number, none, or auto (fitted to the validation images{fitted})"
    add_options(parser, ("temperature", str, "auto", text))


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
