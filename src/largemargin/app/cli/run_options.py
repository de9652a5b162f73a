"""The options that make a ``RunConfig``, for every sub-command that trains."""

import argparse
import sys
from collections.abc import Collection
from dataclasses import fields
from typing import Any

import jsonargparse

from largemargin.app.cli.parser import CommandParser
from largemargin.app.config import RunConfig
from largemargin.errors import LargeMarginError

TITLES = {
    "data": "Data: --data NAME, FOLDER or FILE, or in detail",
    "model": "Network: --model NAME, or in detail",
    "objective": "Objective: --objective NAME or 'NAME + 0.5*NAME', or in detail",
    "noise": "Noise on training images",
    "optimizer": "Optimizer: --optimizer NAME, or in detail",
}
NAMED = ("data", "model", "objective", "optimizer")


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
    parser.add_argument(
        "--format_version", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
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
    given = {name: options[name] for name in names}
    return RunConfig(**{**given, **changes})


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
