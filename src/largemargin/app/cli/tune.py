"""``largemargin tune``: search for good settings on the validation images."""

import os
import shlex
from pathlib import Path
from typing import Any, Literal

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

HELP = "search for learning rate, weight decay, clipping and the loss's own settings"

DESCRIPTION = """\
Try settings and keep the best, judged on the validation images; the test images are not looked at.
Searched are the learning rate, the weight decay, the clipping of gradients and the settings of the
loss. Trials that look bad are stopped early. Beside the trials the folder gets best.yaml, the
settings of the best one, ready for training."""

EXAMPLES = """\
Examples:
  largemargin tune --objective cosface --trials 30
  largemargin tune --space '{optimizer.lr: [0.01, 0.5], optimizer.clip_norm: null}'
      another range; null leaves a setting as it is
  largemargin train --config runs/<time>-tune-run/best.yaml
  largemargin tune --resume runs/<time>-tune-run --trials 60     more trials, or after Ctrl-C
  largemargin tune --storage postgresql://host/db --study shoes  on several machines at once"""

PLAN = "plan.yaml"
PLANNED = ("trials", "space", "pruner", "storage", "study")
"""What a plan has beside the settings of the runs."""
DEFAULT_TRIALS = 20


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Search")
    trials = f"finished trials to reach, earlier ones included (default {DEFAULT_TRIALS})"
    space = "changes of what is searched: [low, high], a list of more values, or null"
    pruner = "which trials are stopped early: worse than the median, asha (halving) or none"
    storage = "database that several machines share; default a file in the folder"
    add_options(
        group,
        ("trials", int | None, None, trials),
        ("space", dict[str, Any], {}, space),
        ("pruner", Literal["median", "asha", "none"], "median", pruner),
        ("storage", str | None, None, storage, "URL"),
        ("study", str, "largemargin", "name of the study in its storage"),
    )
    add_folder_options(group, "tune", further="trials")
    add_run_options(parser, title="What is tuned")


def run(options: Any) -> int:
    from largemargin.app.training.objective import parse_objective
    from largemargin.app.training.tuning import BEST, TRIALS, checked_search, tune

    refuse_several_processes("tune")
    folder = options.get("resume")
    if resumed := bool(folder):
        config, plan = stored_plan(folder, PLAN, "tune", PLANNED)
    else:
        config = run_config(options)
        parse_objective(config.objective)
        plan = {name: options[name] for name in PLANNED}
    if options.trials is not None:
        plan["trials"] = options.trials
    plan["trials"] = DEFAULT_TRIALS if plan["trials"] is None else plan["trials"]
    wanted = {name: plan[name] for name in ("trials", "space", "pruner")}
    # Before a folder is made for nothing.
    _, _, data = checked_search(config, **wanted)
    if not resumed:
        folder = study_folder(options, config, "tune")
    _write_plan(folder, config, plan, resumed=resumed)
    say(f"Tuning {config.objective.name}: {plan['trials']} trials, in {folder}")
    say(f"on {data.about}")
    with resumable("tune", folder):
        found = tune(config, folder=folder, data=data, progress=show_progress(), say=say, **plan)
    print(f"\n{found}\n\nall trials: {os.path.join(folder, TRIALS)}")
    if found.best is None:
        return 1
    print(f"train with the best: largemargin train --config {os.path.join(folder, BEST)}")
    return 0


def _write_plan(folder: str, config: Any, plan: dict[str, Any], *, resumed: bool) -> None:
    import yaml

    from largemargin.app.training.config_file import to_dict
    from largemargin.app.training.files import write_text

    text = yaml.safe_dump({**plan, **to_dict(config)}, sort_keys=False, allow_unicode=True)
    path = Path(folder) / PLAN
    if not resumed:
        _check_same(path, yaml.safe_load(text))
    write_text(path, text)


def _check_same(path: Path, planned: dict[str, Any]) -> None:
    """Refuse a folder that holds another search, whose plan would be lost."""
    from largemargin.app.training.config_file import read_yaml

    if not path.is_file():
        return
    known = read_yaml(path)
    names = [name for name in {**known, **planned} if name != "trials"]
    changed = [name for name in names if known.get(name) != planned.get(name)]
    if changed:
        raise LargeMarginError(
            f"{path.parent} holds another search: its {changed[0]} is "
            f"{known.get(changed[0])!r}, not {planned.get(changed[0])!r}. Take another --folder, "
            f"or continue that one: largemargin tune --resume {shlex.quote(str(path.parent))}"
        )
