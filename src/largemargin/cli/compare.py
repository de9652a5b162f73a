"""``largemargin compare``: several objectives under equal conditions, against softmax."""

import argparse
import os
import shlex
from typing import Any

import jsonargparse

from largemargin.cli.run_options import (
    Resume,
    add_run_options,
    refuse_several_processes,
    run_config,
    show_progress,
    study_folder,
)
from largemargin.errors import LargeMarginError

HELP = "compare losses with softmax under equal conditions, with a significance test"

DESCRIPTION = """\
Train the same network on the same data with the same seeds and several losses, and say which
differences to softmax are more than noise. Softmax (cross_entropy) is always among them. With
--trials every loss is tuned with the same number of trials on the validation images; the test
images are used once, at the end."""

EXAMPLES = """\
Examples:
  largemargin compare --methods cosface,kobayashi --seeds 5
  largemargin compare --methods 'cosface,cross_entropy + 0.5*sample_margin' --trials 20
  largemargin compare --config compare.yaml       with methods that have settings of their own:

    methods:
      - kobayashi
      - {name: cosface, label: CosFace 0.2, settings: {margin: 0.2}, optimizer: {lr: 0.1}}
    seeds: 5
    data: {name: cifar10, path: ~/cifar}
    epochs: 100

  largemargin compare --resume runs/20260101-120000-compare    after Ctrl-C or a crash"""

DEFAULT_SEEDS = 3


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    group = parser.add_argument_group("Comparison")
    group.add_argument(
        "--methods",
        type=Any,
        default=None,
        metavar="NAME,NAME",
        help="losses or sums of losses between commas, or a YAML list",
    )
    group.add_argument(
        "--seeds",
        type=Any,
        default=None,
        metavar="N",
        help=f"how many seeds, or a list of them: [0,1,7] (default {DEFAULT_SEEDS})",
    )
    group.add_argument(
        "--trials",
        type=int,
        default=0,
        help="tuning trials for each method; 0 trains with the settings as given (default 0)",
    )
    group.add_argument(
        "--space",
        type=dict[str, Any],
        default={},
        help="changes of what tuning searches: {optimizer.lr: [0.01, 0.5], ...}",
    )
    add_folder_options(group, "comparison", further="seeds")
    add_run_options(parser, skip=("objective", "seed"), title="What all methods have in common")


def add_folder_options(group: Any, what: str, *, further: str) -> None:
    """Where it is written, and how it goes on; neither is part of a configuration.

    Args:
        further: the option that may be given with ``--resume``, to go further than was planned.
    """
    group.add_argument(
        "--folder",
        type=str,
        default=argparse.SUPPRESS,
        help=f"folder of the {what}; default a new one in --out",
    )
    group.add_argument(
        "--resume",
        action=Resume,
        further=further,
        type=str,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help=f"continue the {what} in this folder",
    )


def run(options: Any) -> int:
    from largemargin.training import Interrupted
    from largemargin.training.comparison import checked_plan, compare
    from largemargin.training.methods import read_methods

    refuse_several_processes("compare")
    if options.get("resume"):
        config, given = _begun(options)
        folder = options.resume
    else:
        config, given = run_config(options), options
        if not options.methods:
            raise LargeMarginError(
                "compare needs methods beside softmax: --methods cosface,kobayashi. "
                "largemargin list shows them all."
            )
    methods = read_methods(given["methods"])
    seeds = read_seeds(given["seeds"])
    plan = {"seeds": seeds, "trials": given["trials"], "space": given["space"]}
    # Before a folder is made for nothing.
    _, _, data = checked_plan(config, methods, **plan)
    if not options.get("resume"):
        folder = study_folder(options, config, "compare")
    print(f"Comparing {', '.join(m.title for m in methods)}: {len(seeds)} seeds, in {folder}")
    try:
        found = compare(
            config,
            methods,
            folder=folder,
            **plan,
            data=data,
            progress=show_progress(),
            say=_say,
        )
    except (Interrupted, KeyboardInterrupt):
        again = f"largemargin compare --resume {shlex.quote(str(folder))}"
        raise KeyboardInterrupt(again) from None
    print(f"\n{found}\n\nwritten to {os.path.join(folder, 'compare.json')}")
    print(f"Margins, features and classes: largemargin report {shlex.quote(str(folder))}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _begun(options: Any) -> tuple[Any, dict[str, Any]]:
    """The plan of the folder to continue; more seeds may be asked for, nothing else changes."""
    from pathlib import Path

    from largemargin.training.comparison import PLAN
    from largemargin.training.config_file import from_dict, read_yaml

    path = Path(options.resume) / PLAN
    if not path.is_file():
        raise LargeMarginError(
            f"{options.resume} is no comparison: it has no {PLAN}. Pass a folder that `largemargin "
            "compare` made."
        )
    plan = read_yaml(path)
    given = {name: plan.pop(name) for name in ("methods", "seeds", "trials", "space")}
    if options.seeds is not None:
        given["seeds"] = options.seeds
    return from_dict(plan), given


def read_seeds(given: Any) -> list[int]:
    """``5`` is five seeds, from 0 on; a list is itself."""
    if given is None:
        given = DEFAULT_SEEDS
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(",")]
        given = [int(part) for part in parts if part.isdigit()] if all(parts) else given
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return list(range(given))
    if isinstance(given, list) and given and all(isinstance(seed, int) for seed in given):
        return list(given)
    raise LargeMarginError(
        f"--seeds must be how many, as 5, or a list of them, as [0,1,7], but {given!r} was given."
    )
