"""Whether a run that came to its end has diverged, and what it left out on the way."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from largemargin.data import Batches
from largemargin.dropin import MarginWarning
from largemargin.measuring.batches import evaluating
from largemargin.training.config import RunConfig
from largemargin.training.runs import Run

TOLD = "the run diverged"


def why_diverged(model: nn.Module, batches: Batches, config: RunConfig) -> str | None:
    """What is wrong with a trained model, and what to do; None where nothing is.

    A model has diverged where a weight or a buffer is not finite, or where most of the first batch
    of images have outputs that are not. Images that are not finite themselves say nothing.
    """
    states = model.state_dict()
    broken = [name for name, each in states.items() if not bool(torch.isfinite(each).all())]
    if broken:
        seen = f"{len(broken)} of the {len(states)} tensors of its model are not finite"
        return f"{seen} ({broken[0]}). {advice(config)}"
    with evaluating(model):
        images, _ = next(iter(batches))
        sound = images.flatten(1).isfinite().all(1)
        finite = model(images).flatten(1).isfinite().all(1)[sound]
    wrong = len(finite) - int(finite.sum())
    if 2 * wrong <= len(finite):  # also where no image is finite
        return None
    return f"its outputs are not finite for {wrong:,} of {len(finite):,} images. {advice(config)}"


def advice(config: RunConfig) -> str:
    """What keeps a run from diverging."""
    clip = config.optimizer.clip_norm
    clipping = "set optimizer.clip_norm" if clip is None else f"optimizer.clip_norm ({clip:g})"
    return (
        f"Lower optimizer.lr ({config.optimizer.lr:g}) or {clipping}, and look at the samples that "
        "metrics.jsonl names under bad_steps."
    )


def left_out(rows: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    """A note where the run ended with epochs in which no step was finite.

    Args:
        rows: of the epochs, as ``Run.metrics("epoch")`` gives them.
        config: of the run.
    """
    count = 0
    for row in reversed(rows):
        if not row.get("bad_steps") or row["loss"] is not None:
            break
        count += 1
    if count == 0:
        return []
    which = "the last epoch" if count == 1 else f"the last {count} epochs"
    return [f"all steps of {which} were skipped, because none was finite. {advice(config)}"]


def warn_diverged(run: Run) -> Run:
    """The run; with a warning where it diverged."""
    failure = run.failure
    if failure is not None:
        warnings.warn(f"{TOLD}: {failure}", MarginWarning, stacklevel=3)
    return run
