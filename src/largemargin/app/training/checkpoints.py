"""Checkpoints of a run: safetensors and JSON, whole or not there, checked when they are read.

checkpoints/epoch-0007/model/            what `largemargin.export.save` writes: model and criterion
checkpoints/epoch-0007/rest.safetensors  optimizer, averaged weights
checkpoints/epoch-0007/state.json        counters, results so far, checksums of all files
checkpoints/step-00001234/               the same in the middle of an epoch, for a run asked to stop
checkpoints/best-0005/                   the same for the best model, which only predicts
checkpoints/last.json, best.json         which of the folders is meant

Replacing last.json is the one moment that counts. Everything before it is written beside what is
there, and nothing is deleted until after it; its state names the best checkpoint that goes with it,
so a run killed at any moment finds both as they belong together.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.training.files import (
    CHECKPOINT,
    check_version,
    checksum,
    drafted_folder,
    read_json,
    remove_drafts,
    stamp,
    write_json,
)
from largemargin.app.training.step import AveragedModel
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError
from largemargin.export.saved_model import load, save
from largemargin.export.tensor_files import read_tensors, write_tensors

FOLDER, MODEL, REST, STATE = "checkpoints", "model", "rest.safetensors", "state.json"
KINDS = ("epoch", "step", "best")
NAME = re.compile(rf"({'|'.join(KINDS)})-\d+")
MID_EPOCH, AVERAGE = "paused.", "average."


class Checkpoints:
    """The checkpoints in a run's folder."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def write_last(
        self,
        name: str,
        state: dict[str, Any],
        *,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        average: AveragedModel | None,
        config: dict[str, Any],
        classes: Sequence[str],
        mid_epoch: dict[str, Tensor] | None = None,
        best: str | None = None,
    ) -> None:
        """Write everything needed to go on, and make it the last checkpoint.

        Args:
            name: of its folder.
            state: counters and results, ready for JSON.
            model, criterion, optimizer: with their states.
            average: averaged weights, or None.
            config, classes: of the run.
            mid_epoch: what else a run needs in the middle of an epoch: generators, buffers.
            best: name of the checkpoint :meth:`write_best` wrote that goes with it; default the
                one that is pointed at already.
        """

        def fill(draft: Path) -> None:
            save(draft / MODEL, model, criterion, config=config, class_names=classes)
            tensors = {f"{MID_EPOCH}{name}": each for name, each in (mid_epoch or {}).items()}
            write_tensors(draft / REST, _rest(optimizer, average) | tensors)

        best = best or self._named("best")
        self._write(name, {**state, "best_checkpoint": best}, fill)
        self._point("last", name)
        self._complete(name, best)

    def write_best(
        self,
        name: str,
        state: dict[str, Any],
        *,
        model: nn.Module,
        config: dict[str, Any],
        classes: Sequence[str],
    ) -> None:
        """Write a model that predicts; :meth:`write_last` makes it the best one."""
        fill = partial(save, model=model, config=config, class_names=classes)
        self._write(name, state, lambda draft: fill(draft / MODEL))

    def _write(self, name: str, state: dict[str, Any], fill: Callable[[Path], object]) -> None:
        self.folder.mkdir(exist_ok=True)
        remove_drafts(self.folder)
        target = self.folder / name
        with drafted_folder(target) as draft:
            fill(draft)
            files = sorted(path for path in draft.rglob("*") if path.is_file())
            sums = {path.relative_to(draft).as_posix(): checksum(path) for path in files}
            write_json(draft / STATE, {**stamp(CHECKPOINT), **state, "files": sums})
            if target.exists():  # of a run that was killed before it became the last one
                shutil.rmtree(target)

    def _point(self, which: str, name: str) -> None:
        write_json(self.folder / f"{which}.json", {"checkpoint": name})

    def _complete(self, last: str, best: str | None) -> None:
        """Do what a run did not come to that was killed just after it had replaced last.json."""
        if best is not None and self._named("best") != best:
            self._point("best", best)
        remove_drafts(self.folder)
        kept = {last, best or self._named("best")}
        for path in (each for kind in KINDS for each in self.folder.glob(f"{kind}-*")):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _named(self, which: str) -> str | None:
        pointer = self.folder / f"{which}.json"
        if not pointer.exists():
            return None
        read = read_json(pointer)
        name = read.get("checkpoint") if isinstance(read, dict) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise LargeMarginError(
                f"{pointer} is damaged: it must name a folder beside it, as epoch-0007, but it "
                f"holds {read!r}."
            )
        return name

    def find(self, which: str) -> Path | None:
        """The folder of the "last" or "best" checkpoint, its files checked; None without one."""
        name = self._named(which)
        return None if name is None else self.checked(name)

    def where(self, which: str = "last") -> Path | None:
        """Its folder, unchecked, to tell people about."""
        name = self._named(which)
        return None if name is None else self.folder / name

    def checked(self, name: str) -> Path:
        """The folder of this checkpoint, if its files are what was written."""
        folder = self.folder / name
        state = read_json(folder / STATE)
        check_version(state, CHECKPOINT, folder)
        for file, expected in state["files"].items():
            path = folder / file
            if not path.is_file() or checksum(path) != expected:
                raise LargeMarginError(
                    f"the checkpoint {folder} is damaged: {file} is "
                    f"{'not what was written' if path.is_file() else 'missing'}. Copy the folder "
                    f"again if it is a copy, or remove {self.folder} to begin again."
                )
        return folder

    def load(
        self,
        folder: Path,
        *,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        average: AveragedModel | None,
    ) -> dict[str, Any]:
        """Put everything back as it was; returns the state, with ``tensors`` of a pause in it."""
        state: dict[str, Any] = read_json(folder / STATE)
        self._complete(folder.name, state.get("best_checkpoint"))
        load(folder / MODEL, model, criterion=criterion)
        rest = read_tensors(folder / REST)
        _restore_optimizer(optimizer, rest)
        if average is not None:
            average.model.load_state_dict(marked(rest, AVERAGE), strict=False)
        return {**state, "tensors": marked(rest, MID_EPOCH)}


def model_weights(folder: Path, model: nn.Module) -> nn.Module:
    """``model`` with the weights of a checkpoint, averaged ones where there are, to predict."""
    load(folder / MODEL, model, criterion="none")
    if (folder / REST).is_file():
        kept = marked(read_tensors(folder / REST), AVERAGE)
        if kept:
            model.load_state_dict(kept, strict=False)
    return model.eval()


def marked(tensors: dict[str, Tensor], mark: str) -> dict[str, Tensor]:
    """The tensors whose names begin with this mark, named without it."""
    return {name[len(mark) :]: each for name, each in tensors.items() if name.startswith(mark)}


def _rest(optimizer: torch.optim.Optimizer, average: AveragedModel | None) -> dict[str, Tensor]:
    tensors = {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if value is not None
    }
    averaged = {} if average is None else average.model.state_dict()
    kept = {name: value for name, value in averaged.items() if isinstance(value, Tensor)}
    return tensors | {f"{AVERAGE}{name}": value for name, value in kept.items()}


def _restore_optimizer(optimizer: torch.optim.Optimizer, rest: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in marked(rest, "optimizer.").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            # Fused optimizers want the memory layout of the parameter.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)
