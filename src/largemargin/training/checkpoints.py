"""Checkpoints of a run: safetensors and JSON, whole or not there, checked when they are read.

checkpoints/epoch-0007/model/            what `largemargin.export.save` writes: model and criterion
checkpoints/epoch-0007/rest.safetensors  optimizer, averaged weights
checkpoints/epoch-0007/state.json        counters, results so far, checksums of all files
checkpoints/best-0005/                   the same for the best model, which only predicts
checkpoints/last.json, best.json         which of the folders is meant
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largemargin import export
from largemargin.dropin import Criterion
from largemargin.errors import LargeMarginError
from largemargin.export.tensors import read_tensors, write_tensors
from largemargin.training.averaging import Average
from largemargin.training.files import (
    checksum,
    drafted_folder,
    read_json,
    remove_drafts,
    write_json,
)

FOLDER, MODEL, REST, STATE = "checkpoints", "model", "rest.safetensors", "state.json"


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
        average: Average | None,
        config: dict[str, Any],
        classes: Sequence[str],
    ) -> None:
        """Write everything needed to go on, and make it the last checkpoint."""

        def fill(draft: Path) -> None:
            export.save(draft / MODEL, model, criterion, config=config, class_names=classes)
            write_tensors(draft / REST, _rest(optimizer, average))

        self._write(name, state, fill)
        self._point("last", name)

    def write_best(
        self,
        name: str,
        state: dict[str, Any],
        *,
        model: nn.Module,
        config: dict[str, Any],
        classes: Sequence[str],
    ) -> None:
        """Write a model that predicts, and make it the best one."""

        def fill(draft: Path) -> None:
            export.save(draft / MODEL, model, config=config, class_names=classes)

        self._write(name, state, fill)
        self._point("best", name)

    def _write(self, name: str, state: dict[str, Any], fill: Callable[[Path], None]) -> None:
        self.folder.mkdir(exist_ok=True)
        remove_drafts(self.folder)
        target = self.folder / name
        if target.exists():
            shutil.rmtree(target)
        with drafted_folder(target) as draft:
            fill(draft)
            files = sorted(path for path in draft.rglob("*") if path.is_file())
            sums = {path.relative_to(draft).as_posix(): checksum(path) for path in files}
            write_json(draft / STATE, {**state, "files": sums})

    def _point(self, which: str, name: str) -> None:
        """Make ``name`` the last or best one, then forget what nothing points at."""
        write_json(self.folder / f"{which}.json", {"checkpoint": name})
        kept = {self._named("last"), self._named("best")}
        for path in (*self.folder.glob("epoch-*"), *self.folder.glob("best-*")):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _named(self, which: str) -> str | None:
        pointer = self.folder / f"{which}.json"
        return str(read_json(pointer)["checkpoint"]) if pointer.exists() else None

    def find(self, which: str) -> Path | None:
        """The folder of the "last" or "best" checkpoint, its files checked; None without one."""
        name = self._named(which)
        if name is None:
            return None
        folder = self.folder / name
        state = read_json(folder / STATE)
        for file, expected in state["files"].items():
            path = folder / file
            if not path.is_file() or checksum(path) != expected:
                raise LargeMarginError(
                    f"the checkpoint {folder} is damaged: {file} is "
                    f"{'not what was written' if path.is_file() else 'missing'}. Remove "
                    f"{self.folder} to begin again, or point {which}.json at another checkpoint."
                )
        return folder

    def load(
        self,
        folder: Path,
        *,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        average: Average | None,
    ) -> dict[str, Any]:
        """Put everything back as it was; returns the state."""
        state: dict[str, Any] = read_json(folder / STATE)
        export.load(folder / MODEL, model, criterion=criterion)
        rest = read_tensors(folder / REST)
        _restore_optimizer(optimizer, rest)
        if average is not None:
            average.model.load_state_dict(_averaged(rest), strict=False)
        return state


def model_weights(folder: Path, model: nn.Module) -> nn.Module:
    """``model`` with the weights of a checkpoint, averaged ones where there are, to predict."""
    export.load(folder / MODEL, model, criterion="none")
    if (folder / REST).is_file():
        kept = _averaged(read_tensors(folder / REST))
        if kept:
            model.load_state_dict(kept, strict=False)
    return model.eval()


def _averaged(rest: dict[str, Tensor]) -> dict[str, Tensor]:
    mark = "average."
    return {name[len(mark) :]: tensor for name, tensor in rest.items() if name.startswith(mark)}


def _rest(optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            elif value is not None:
                tensors[f"optimizer.{index}.{name}"] = torch.tensor(value)
    if average is not None:
        for name, value in average.model.state_dict().items():
            if isinstance(value, Tensor):
                tensors[f"average.{name}"] = value
    return tensors


def _restore_optimizer(optimizer: torch.optim.Optimizer, rest: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in rest.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            # Fused optimizers want the memory layout of the parameter.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)
