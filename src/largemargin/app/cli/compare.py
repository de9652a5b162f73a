"""``largemargin compare``: several objectives under equal conditions, against softmax."""

import os
import re
import shlex
from dataclasses import replace
from typing import Any

import jsonargparse

from largemargin.app.cli.run_options import (
    add_folder_options,
    add_options,
    add_run_options,
    refuse_several_processes,
    resumable,
    run_config,
    say,
    show_progress,
    stored_plan,
    study_folder,
)
from largemargin.exceptions import LargeMarginError

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
    group = parser.add_argument_group("Comparison")
    methods = "losses or sums of losses between commas, or a YAML list"
    seeds = f"how many seeds, or a list of them: [0,1,7] (default {DEFAULT_SEEDS})"
    trials = "tuning trials for each method; 0 trains with the settings as given (default 0)"
    space = "changes of what tuning searches: {optimizer.lr: [0.01, 0.5], ...}"
    add_options(
        group,
        ("methods", Any, None, methods, "NAME,NAME"),
        ("seeds", Any, None, seeds, "N"),
        ("trials", int, 0, trials),
        ("space", dict[str, Any], {}, space),
    )
    add_folder_options(group, "compare", further="seeds")
    add_run_options(parser, skip=("objective", "seed"), title="What all methods have in common")


def run(options: Any) -> int:
    from largemargin.app.training.comparison import PLAN, checked_plan, compare, read_methods

    refuse_several_processes("compare")
    if options.get("resume"):
        folder = options.resume
        config, given = stored_plan(
            folder, PLAN, "compare", ("methods", "seeds", "trials", "space")
        )
        if options.seeds is not None:
            given["seeds"] = options.seeds
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
    configs, _, data = checked_plan(config, methods, **plan)
    if configs[0].data != config.data:
        config = replace(config, data=configs[0].data)
        say(
            f"The data has no test images: {len(data.test or ()):,} of the training images are "
            "held out to compare the tuned methods on. --data.test says how many, or put images "
            "into test/."
        )
    if not options.get("resume"):
        folder = study_folder(options, config, "compare")
    say(f"Comparing {', '.join(m.title for m in methods)}: {len(seeds)} seeds, in {folder}")
    say(f"on {data.about}")
    with resumable("compare", folder):
        found = compare(
            config, methods, folder=folder, **plan, data=data, progress=show_progress(), say=say
        )
    print(f"\n{found}\n\nwritten to {os.path.join(folder, 'compare.json')}")
    print(f"Margins, features and classes: largemargin report {shlex.quote(folder)}")
    return 0


def read_seeds(given: Any) -> list[int]:
    """``5`` is five seeds, from 0 on; a list is itself."""
    if given is None:
        given = DEFAULT_SEEDS
    if isinstance(given, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", given):
        return [int(part) for part in given.split(",")]
    if type(given) is int and given >= 1:
        return list(range(given))
    if isinstance(given, list) and set(map(type, given)) == {int}:
        return list(given)
    raise LargeMarginError(
        f"--seeds must be how many, as 5, or a list of them, as [0,1,7], but {given!r} was given."
    )
