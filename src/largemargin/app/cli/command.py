"""From the words of a command line to a sub-command, its exit status and its messages."""

import ast
import errno
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from largemargin.app.cli.parser import CommandParser

COMMANDS = (
    *("list", "demo", "advise", "train", "evaluate", "measure", "compare"),
    *("report", "tune", "predict", "export", "plan"),
)
"""In the order a newcomer meets them."""

ENTRY_POINTS = "largemargin.commands"
"""The group of entry points by which other packages add sub-commands: name -> module."""

OUTSIDE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
)
"""Failures of disks and folders: nothing in the program is at fault, so they need no traceback."""

NO_PAPERS = (
    "reproduce is a command of the package largemargin-papers, which is not installed. It comes "
    "with a clone of the repository, beside the papers' recipes. In the clone: pip install ./papers"
)
USAGE = "usage: largemargin COMMAND [options]    (largemargin COMMAND --help for its options)"
FIRST_STEPS = """\
First steps:
  largemargin demo                                        four losses on digits, one table
  largemargin list                                        all losses
  largemargin train --data photos/ --objective cosface    photos/ has one folder per class
  largemargin measure runs/<time>-<name>                  the geometry of what came out

  --version    version of this library
  --traceback  with any command: where an error comes from (also LARGEMARGIN_TRACEBACK=1)
  --trust_config  let settings name a network by its Python path: model.name package.module.Net"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    wants_traceback = os.environ.get("LARGEMARGIN_TRACEBACK") == "1" or "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    if isinstance(sys.stdout, TextIOWrapper):  # names of files may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    formatted = warnings.formatwarning
    # The place in our source tells nothing to who typed a command.
    warnings.formatwarning = lambda message, *place, **line: f"warning: {message}\n"
    try:
        return _dispatch(words)
    except SystemExit as stop:  # argparse's own way out: help, print_config, wrong options
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt as stop:
        print("\nStopped.", file=sys.stderr)
        if command := str(stop):
            print(f"Continue where it stopped: {command}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `largemargin list | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        said = _explanation(error)
        if wants_traceback or said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = formatted


def _explanation(error: ValueError | OSError) -> str | None:
    """What to say instead of a traceback; None where the program may be at fault."""
    from largemargin.exceptions import LargeMarginError

    if isinstance(error, LargeMarginError):
        return str(error)
    if not isinstance(error, OSError) or error.errno not in OUTSIDE:
        return None
    return f"{error.strerror}" + ("" if error.filename is None else f": {error.filename}")


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if words[1:]:
            return _dispatch([words[1], "--help"])
        print(overview())
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name == "--version":
        from largemargin.version import __version__

        print(f"largemargin {__version__}")
        return 0
    known = commands()
    if name in known:
        return _run(name, rest)
    if name == "reproduce":
        print(f"error: {NO_PAPERS}", file=sys.stderr)
        return 2
    close = get_close_matches(name, known, n=2, cutoff=0.5)
    *most, last = known
    meant = f"Did you mean {' or '.join(close)}?" if close else ""
    meant = meant or f"They are {', '.join(most)} and {last}."
    print(f"{USAGE}\nerror: there is no command {name!r}. {meant}", file=sys.stderr)
    return 2


def commands() -> dict[str, str]:
    """Every sub-command and its module; those that other installed packages add come last."""
    from importlib.metadata import entry_points

    own = {name: f"largemargin.app.cli.{name}" for name in COMMANDS}
    added = {each.name: each.module for each in entry_points(group=ENTRY_POINTS)}
    return own | {name: module for name, module in added.items() if name not in own}


def _run(name: str, words: list[str]) -> int:
    try:
        parser = parser_of(name)
    except ImportError as error:
        print(
            f"error: the command needs {error.name}. Install it: pip install 'largemargin[train]'",
            file=sys.stderr,
        )
        return 2
    options = parser.instantiate(parser.parse_args(words))
    status: int = _module(name).run(options)
    return status


def parser_of(name: str) -> "CommandParser":
    """The parser of a sub-command."""
    from largemargin.app.cli.parser import CommandParser

    command = _module(name)
    about = getattr(command, "DESCRIPTION", command.HELP)
    examples = getattr(command, "EXAMPLES", None)
    parser = CommandParser(prog=f"largemargin {name}", description=about, epilog=examples)
    command.arguments(parser)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(commands()[name])


def overview() -> str:
    """What ``largemargin --help`` prints."""
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:<{width}}  {help_line(module)}" for name, module in known.items()]
    about = "Large-margin classifiers: train, measure and compare them."
    return "\n".join([USAGE, "", about, "", "Commands:", *lines, "", FIRST_STEPS])


def help_line(module: str) -> str:
    """``HELP`` of a sub-command's module, read without importing it: imports take seconds."""
    found = importlib.util.find_spec(module)
    path = Path(found.origin or "") if found else Path()
    if path.is_file():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [ast.unparse(each) for each in getattr(node, "targets", ())]
            if isinstance(node, ast.Assign) and names == ["HELP"]:
                return str(ast.literal_eval(node.value))
    return ""
