"""Checkpoints of a run: safetensors and JSON, whole or not there, checked when they are read.

checkpoints/epoch-0007/model/            what `largemargin.export.save` writes: model and criterion
checkpoints/epoch-0007/rest.safetensors  optimizer, averaged weights
checkpoints/epoch-0007/state.json        counters, results so far, checksums of all files
checkpoints/step-00001234/               the same in the middle of an epoch, for a run asked to stop
checkpoints/best-0005/                   the same for the best model, which only predicts
checkpoints/last.json, best.json         which folder is meant, and the checksum of its state

Replacing last.json is the one moment that counts. Everything before it is written beside what is
there, and nothing is deleted until after it; its state names the best checkpoint that goes with it,
so a run killed at any moment finds both as they belong together.

Whatever is read is checked before anything is changed or deleted, also in folders of releases that
wrote no checksum of the state; and only folders that are named as above are ever deleted.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.training.config_file import STAMP, flat, read_yaml, settings_from
from largemargin.app.training.files import (
    CHECKPOINT,
    check_version,
    checksum,
    damage_named,
    drafted_folder,
    read_json,
    remove_drafts,
    stamp,
    write_json,
)
from largemargin.app.training.journal import Totals
from largemargin.app.training.step import AveragedModel
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError
from largemargin.export.saved_model import load, read_config, save
from largemargin.export.tensor_files import read_tensors, write_tensors

FOLDER, MODEL, REST, STATE = "checkpoints", "model", "rest.safetensors", "state.json"
DATA = "data.json"
"""Of the run: its entry ``run`` is that of the states of its checkpoints, and of no others."""
NAME = re.compile(r"(epoch|step|best)-(\d{4,})")
MID_EPOCH, AVERAGE = "paused.", "average."


@dataclass(frozen=True)
class Pause:
    """Where in an epoch a run was stopped."""

    steps: int
    seconds: float
    sums: dict[str, Any]
    reported: int
    processes: int


@dataclass(frozen=True)
class BestState:
    """What state.json of a best checkpoint holds."""

    files: dict[str, str]
    best: dict[str, float] | None = None
    run: str | None = None


@dataclass(frozen=True)
class State(BestState):
    """What state.json of the last checkpoint holds."""

    epoch: int = field(kw_only=True)
    steps: int = field(kw_only=True)
    waited: int = field(kw_only=True)
    seconds: float = field(kw_only=True)
    scaler: dict[str, float] | None = None
    paused: Pause | None = None
    best_checkpoint: str | None = None
    best_state: str | None = None


class Checkpoints:
    """The checkpoints in a run's folder."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / FOLDER

    @property
    def owner(self) -> str | None:
        """By which the states of this run's checkpoints are known; older runs have none."""
        facts = read_json(self.run / DATA) if (self.run / DATA).is_file() else {}
        return facts.get("run") if isinstance(facts, dict) else None

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
            mid_epoch: what else a run needs in the middle of an epoch: generators, buffers.
            best: name of the checkpoint :meth:`write_best` wrote that goes with it; default the
                one that is pointed at already.
        """

        def fill(draft: Path) -> None:
            save(draft / MODEL, model, criterion, config=config, class_names=classes)
            tensors = {f"{MID_EPOCH}{name}": each for name, each in (mid_epoch or {}).items()}
            write_tensors(draft / REST, _rest(optimizer, average) | tensors)

        if best is None and (known := self._named("best")) is not None:
            best = known[0]
        if best is not None:
            state = {**state, "best_state": checksum(self.folder / best / STATE)}
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
            whole = {**stamp(CHECKPOINT), "run": self.owner, **state, "files": sums}
            write_json(draft / STATE, whole)
            if target.exists():  # of a run that was killed before it became the last one
                shutil.rmtree(target)

    def _point(self, which: str, name: str) -> None:
        state = checksum(self.folder / name / STATE)
        write_json(self.folder / f"{which}.json", {"checkpoint": name, "state": state})

    def _complete(self, last: str, best: str | None) -> None:
        """Do what a run did not come to that was killed just after it had replaced last.json."""
        named = self._named("best")
        if best is not None and named != (best, checksum(self.folder / best / STATE)):
            self._point("best", best)
        remove_drafts(self.folder)
        kept = {last, best or (named and named[0])}
        for path in self.folder.iterdir():
            if NAME.fullmatch(path.name) and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _named(self, which: str) -> tuple[str, str | None] | None:
        """The name of a checkpoint, and the checksum of its state, which older runs have not."""
        pointer = self.folder / f"{which}.json"
        if not pointer.exists():
            return None
        read = read_json(pointer)
        name, state = map(read.get, ("checkpoint", "state")) if isinstance(read, dict) else (0, 0)
        if not _is_name(name, which == "best") or not isinstance(state, str | None):
            raise LargeMarginError(
                f"{pointer} is damaged: it must name a folder beside it, as epoch-0007, but it "
                f"holds {str(read)[:200]}."
            )
        return str(name), state

    def find(self, which: str) -> Path | None:
        """The folder of the "last" or "best" checkpoint, its files checked; None without one."""
        named = self._named(which)
        if named is not None:
            self.checked(*named)
            return self.folder / named[0]
        if which == "last" and (self.folder / "best.json").exists():
            raise LargeMarginError(
                f"{self.folder} is damaged: there is best.json, but no last.json, which is written "
                f"before it. Copy the folder again, or remove {self.folder} to begin again."
            )
        return None

    def where(self, which: str = "last") -> Path | None:
        """Its folder, unchecked, to tell people about."""
        named = self._named(which)
        return None if named is None else self.folder / named[0]

    def checked(self, name: str, expected: str | None = None) -> None:
        """Refuse a checkpoint whose files are not what was written, or for another run.

        ``expected`` is the checksum of its state, where it is known.
        """
        folder = self.folder / name
        state = read_json(folder / STATE)
        check_version(state, CHECKPOINT, folder)
        if expected is not None and checksum(folder / STATE) != expected:
            raise self._damaged(folder, f"{STATE} is not what was written.")
        try:
            _check_state(state, name)
        except LargeMarginError as error:
            raise self._damaged(folder, f"in its {STATE}, {error}") from None
        for file, written in state["files"].items():
            path = folder / file
            if not path.is_file() or checksum(path) != written:
                what = "not what was written" if path.is_file() else "missing"
                raise self._damaged(folder, f"{file} is {what}.")
        if state.get("run") != self.owner:
            raise LargeMarginError(
                f"the checkpoint {folder} is that of another run{self._difference(folder)}. Put "
                f"back those of {self.run}, or begin again in another folder."
            )

    def _difference(self, folder: Path) -> str:
        """What another run was trained with, as far as it is known."""
        with damage_named(f"the checkpoint {folder}"):
            theirs = flat(read_config(folder / MODEL)["config"])
            ours = flat(read_yaml(self.run / "config.yaml"))
        said = (
            f"{name} is {theirs[name]} there and {ours[name]} here"
            for name in ours
            if name in theirs and ours[name] != theirs[name]
        )
        return f": {', '.join(said)}"[:300]

    def _damaged(self, folder: Path, why: str) -> LargeMarginError:
        return LargeMarginError(
            f"the checkpoint {folder} is damaged: {why} Copy the folder again if it is a copy, or "
            f"remove {self.folder} to begin again."
        )

    def load(
        self,
        folder: Path,
        *,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        average: AveragedModel | None,
        scaler: Any = None,
    ) -> dict[str, Any]:
        """Put everything back as it was; returns the state, with ``tensors`` of a pause in it.

        ``folder`` is what :meth:`find` gave. In the folder of the run nothing is changed before all
        of it could be read.
        """
        state: dict[str, Any] = read_json(folder / STATE)
        best = state.get("best_checkpoint")
        if best is not None:
            self.checked(best, state.get("best_state"))
        with damage_named(f"the checkpoint {folder}"):
            load(folder / MODEL, model, criterion=criterion)
            rest = read_tensors(folder / REST)
            _restore_optimizer(optimizer, rest)
            if average is not None:
                _restore_average(average, marked(rest, AVERAGE))
            if scaler is not None and state.get("scaler"):
                scaler.load_state_dict(state["scaler"])
        self._complete(folder.name, best)
        return {**state, "tensors": marked(rest, MID_EPOCH)}


def _is_name(value: object, best: bool) -> bool:
    found = NAME.fullmatch(value) if isinstance(value, str) else None
    return found is not None and (found[1] == "best") == best


def _check_state(read: Mapping[str, Any], name: str) -> None:
    """Refuse a state that cannot be right, whoever wrote it."""
    values = {key: each for key, each in read.items() if key not in STAMP}
    best = name.startswith("best-")
    state = settings_from(values, BestState if best else State)
    inside = [PurePosixPath(file) for file in state.files]
    if any(file.is_absolute() or ".." in file.parts for file in inside):
        raise LargeMarginError("files must name files in the folder.")
    needed = {f"{MODEL}/config.json", f"{MODEL}/model.safetensors", *([] if best else [REST])}
    if needed - state.files.keys():
        raise LargeMarginError("files must name all files of a checkpoint.")
    if isinstance(state, State):
        _check_progress(state, name)


def _check_progress(state: State, name: str) -> None:
    """Refuse sums, counters and names that contradict themselves or the name of the checkpoint."""
    if state.paused is not None:
        sums = {key: each for key, each in state.paused.sums.items() if key != "row"}
        settings_from(sums, Totals, "paused.sums")
    if state.best is not None and not {"score", "epoch"} <= state.best.keys():
        raise LargeMarginError("best must have score and epoch.")
    kind, _, number = name.partition("-")
    counts = {"epoch": state.epoch, "step": state.steps}
    if counts[kind] != int(number) or min(*counts.values(), state.waited) < 0:
        raise LargeMarginError(f"epoch and steps are not those of {name}.")
    if state.best_checkpoint is not None and not _is_name(state.best_checkpoint, best=True):
        raise LargeMarginError("best_checkpoint must be a name, as best-0007.")


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


def _restore_average(average: AveragedModel, tensors: dict[str, Tensor]) -> None:
    own = {name for name, each in average.model.state_dict().items() if isinstance(each, Tensor)}
    if own - tensors.keys():
        raise LargeMarginError(
            "the checkpoint holds no averaged weights, or not all: ema was not set when it was "
            "written. Set ema: null in the run's config.yaml, or begin again."
        )
    average.model.load_state_dict(tensors, strict=False)


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
