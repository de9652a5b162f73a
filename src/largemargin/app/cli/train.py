"""``largemargin train``: one run, from a data set or an image folder to a measured classifier."""

import argparse
import os
import shlex
import sys
import warnings
from functools import partial
from typing import Any

import jsonargparse

from largemargin.app.cli.run_options import (
    Resume,
    add_options,
    add_run_options,
    run_config,
    say,
    show_progress,
)
from largemargin.exceptions import LargeMarginError

HELP = "train a classifier on a data set or an image folder"

DESCRIPTION = """\
Train one classifier. Everything has a default; without options the small CNN learns the digits
that come with scikit-learn. The run lands in a folder of its own: settings, metrics, checkpoints,
results and the geometry of the best model."""

EXAMPLES = """\
Examples:
  largemargin train --data photos/ --model torchvision/resnet18 --model.weights default
      photos/ holds one folder of images per class, or train/ and val/ with such folders
  largemargin train --objective cosface --objective.settings.margin 0.2 --epochs 30
  largemargin train --objective 'cross_entropy + 0.5*sample_margin' --optimizer.lr 0.1
  largemargin train --preset long_tail --data photos/
  largemargin train --data photos/ --model timm/resnet50 --weights default --freeze backbone
      the head alone is trained; to fine-tune: --lr 0.001 --head_lr 0.05 --freeze_batch_norm true
  largemargin train --data photos/ --mixup 0.2 --cutmix 1 --label_smoothing 0.1
  largemargin train --data photos/ --class_weights balanced --lr_range_test
      a setting may be named without its group where no other has that name
  largemargin train --data cifar10 --data.path ~/cifar --model resnet18 --precision bf16
  largemargin train --print_config > run.yaml      write all settings, change them, then:
  largemargin train --config run.yaml --seed 1
  largemargin train --resume runs/20260101-120000-run

Losses, networks and data sets: largemargin list, list --models, list --data.
Several GPUs: torchrun --nproc-per-node 4 -m largemargin train ..."""


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        action=Resume,
        type=str,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="continue the run in this folder exactly where it stopped",
    )
    text = (
        "objective that was measured to be best: few_labels, long_tail, label_noise, corruption or "
        "embedding; softmax where none was"
    )
    add_options(parser, ("preset", str, argparse.SUPPRESS, text, "SITUATION"))
    parser.add_argument(
        "--preset_optimizer",
        action="store_true",
        default=argparse.SUPPRESS,
        help="take the learning rate, weight decay and clipping that the preset was tuned with, "
        "for another network and batch size than yours; default those of this run",
    )
    parser.add_argument(
        "--lr_range_test",
        action="store_true",
        default=argparse.SUPPRESS,
        help="try rising learning rates in a few steps, show the loss and suggest one; trains "
        "nothing and writes nothing",
    )
    add_run_options(parser, title="Training")


def run(options: Any) -> int:
    from largemargin.app.training.engine import Interrupted, train
    from largemargin.app.training.run_scores import TOLD
    from largemargin.app.training.runs import Run

    warnings.filterwarnings("ignore", message=TOLD)  # said below, with the exit status
    folder = options.get("resume")
    if folder is None:
        given = options.get("preset"), bool(options.get("preset_optimizer"))
        config = _with_preset(run_config(options), *given)
    else:
        config = Run.open(folder).config
    if options.get("lr_range_test"):
        from largemargin.app.data.load import load_data
        from largemargin.app.training.rate_range import rate_range

        data = load_data(config.data)
        say(f"trying rates of {config.model.name} on {data.about}")
        print(rate_range(config, data=data, progress=show_progress()))
        return 0
    try:
        done = train(
            config,
            folder=folder,
            resume=folder is not None,
            progress=show_progress(),
            on_begin=partial(print, flush=True) if _is_first() else None,
            on_epoch=partial(_tell, config) if _is_first() else None,
        )
    except Interrupted as stop:
        if _is_first():
            print(f"\n{stop}", file=sys.stderr)
        return 130
    if _is_first():
        print(summary(done))
        if done.failure is not None:
            print(f"error: the run diverged: {done.failure}", file=sys.stderr)
    return 0 if done.failure is None else 2


def _with_preset(config: Any, name: str | None, tuned: bool = False) -> Any:
    """The run with objective, noise and, if ``tuned``, optimizer of a preset, which is shown."""
    from largemargin.app.config import RunConfig
    from largemargin.app.training.presets import preset

    if name is None:
        if tuned:
            raise LargeMarginError("--preset_optimizer goes with --preset SITUATION. Name one.")
        return config
    chosen, plain = preset(name), RunConfig()
    for part in ("objective", "noise"):
        given, usual = vars(getattr(config, part)), vars(getattr(plain, part))
        for field in given:
            if given[field] != usual[field]:
                raise LargeMarginError(
                    f"--preset {name} sets the {part}, but {part}.{field} was given too. Leave "
                    "one of them out."
                )
    used = {key: getattr(config.optimizer, key) for key in chosen.optimizer}
    hint = " (--preset_optimizer takes those of the preset)"
    if tuned:
        _check_optimizer(name, used, plain.optimizer)
        used, hint = chosen.optimizer, ""
    if _is_first():
        listed = ", ".join(f"{key} {value}" for key, value in used.items())
        print(chosen, *([f"this run    {listed}{hint}"] if used else []), "", sep="\n")
    return chosen.config(config, optimizer=tuned)


def _check_optimizer(preset: str, ours: dict[str, Any], plain: Any) -> None:
    """That of a preset is taken whole, or not at all."""
    given = [key for key in ours if ours[key] != getattr(plain, key)]
    if given or not ours:
        why = f"but optimizer.{given[0]} was given too" if given else "but it has none"
        raise LargeMarginError(
            f"--preset_optimizer takes the optimizer of the preset {preset}, {why}. Leave it out."
        )


def _is_first() -> bool:
    """Of the processes that torchrun started, one speaks."""
    return os.environ.get("RANK", "0") == "0"


def _tell(config: Any, row: dict[str, Any]) -> None:
    """A line per epoch, above the progress bar where there is one."""
    validation = row["validation"]
    said = [f"epoch {row['epoch'] + 1} of {config.epochs}: loss {row['loss']:.4g}"]
    if validation is not None:
        said.append(f"validation accuracy {100 * validation['accuracy']:.2f} %")
    line = ", ".join([*said, f"{row['images_per_s']:,.0f} images/s"])
    if show_progress():
        from tqdm import tqdm

        tqdm.write(line)
    else:
        print(line, flush=True)


def summary(done: Any) -> str:
    """What came out, where it lies and what to do with it: five lines, and notes if there are."""
    result, geometry = done.result, done.result.get("geometry")
    lines = [
        f"{split:<11} {_accuracies(result[split])}"
        for split in ("validation", "test")
        if result.get(split)
    ]
    if geometry is not None:
        between, mean = geometry["class_margin_degrees"], geometry["mean_cosine_margin"]
        said = [f"{between:.1f}° between the closest classes"] if between is not None else []
        lines.append(
            f"{'margins':<11} {', '.join([*said, f'{mean:.2f} of samples (cosine, mean)'])}"
        )
    lines += [f"{'note':<11} {note}" for note in result.get("notes", ())]
    folder = shlex.quote(str(done.folder))
    best = "" if result.get("best_epoch") is None else f", the best was {result['best_epoch'] + 1}"
    epochs = f"{result['epochs']} epoch{'' if result['epochs'] == 1 else 's'}"
    lines.append(f"{'run':<11} {folder}, {epochs}{best}")
    others = "" if done.failure is not None else "    or evaluate, measure, predict, export"
    lines.append(f"{'next':<11} largemargin report {folder}{others}")
    return "\n".join(lines)


def _accuracies(numbers: dict[str, Any]) -> str:
    named = (("accuracy", "accuracy"), ("balanced_accuracy", "balanced"), ("loss", "loss"))
    return ", ".join(
        f"{label} {numbers[key]:.4f}" if key == "loss" else f"{label} {100 * numbers[key]:.2f} %"
        for key, label in named
        if numbers.get(key) is not None
    )
