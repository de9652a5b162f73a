"""``save``: a model, its head's form, its criterion and a configuration as a folder of plain data.

model.safetensors       the model's parameters and buffers
criterion.safetensors   centroid banks, parameters, buffers and tensor arguments of the losses
config.json             the rest, readable
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import largemargin
from largemargin.dropin import Criterion
from largemargin.dropin.find import unwrapped
from largemargin.errors import LargeMarginError
from largemargin.export.attached import describe_criterion
from largemargin.export.plain import (
    HeadFacts,
    check_class_names,
    check_whole,
    find_head,
    head_facts,
)
from largemargin.export.tensors import require_safetensors, write_tensors

FORMAT = "largemargin"
FORMAT_VERSION = 1
CONFIG, MODEL, CRITERION = "config.json", "model.safetensors", "criterion.safetensors"


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    criterion: Criterion | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
    layer: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write model and criterion to a folder of safetensors and JSON, without pickle.

    :func:`load` puts both back into a freshly built model. The folder appears under its name only
    when it is complete. The optimizer's and random number generators' state are not in it: save
    ``optimizer.state_dict()`` beside it to resume training.

    Args:
        path: of the folder to make.
        model: attached or not; DDP and torch.compile wrappers are taken off. Under DDP let one
            process save; gather FSDP's shards first.
        criterion: what ``attach`` returned for this model, or None to save the model alone.
        config: yours, anything that is JSON: how to build the model, how it was trained.
        class_names: one per class.
        layer: name of the head where there is no criterion and it is not the last linear layer.
        overwrite: replace a folder that ``save`` wrote. Any other existing path is an error.

    Returns:
        The path of the folder.
    """
    require_safetensors()
    target = Path(path)
    _check_target(target, overwrite)
    bare = unwrapped(model)[0]
    check_whole(bare)
    facts = _head_of(bare, criterion, layer)
    if class_names is not None:
        check_class_names(class_names, facts)
    check_json("config", config)
    state, extra = split_state(bare.state_dict())
    written: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "largemargin": largemargin.__version__,
        "torch": str(torch.__version__),
        "head": facts._asdict(),
        "class_names": None if class_names is None else list(class_names),
        "model_extra_state": extra,
        "criterion": None,
        "config": config,
    }
    tensors: dict[str, Tensor] = {}
    if criterion is not None:
        written["criterion"] = describe_criterion(bare, criterion, tensors)
    with _drafted(target) as draft:
        write_tensors(draft / MODEL, state)
        if criterion is not None:
            write_tensors(draft / CRITERION, tensors)
        text = json.dumps(written, indent=2, ensure_ascii=False, allow_nan=False)
        (draft / CONFIG).write_text(text + "\n", encoding="utf-8")
    return target


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``config.json`` of a saved folder holds, checked; your part is under ``"config"``."""
    folder = Path(path)
    if not folder.is_dir():
        raise LargeMarginError(f"there is no folder {folder}. Pass the one that save() wrote.")
    file = folder / CONFIG
    if not file.is_file():
        raise LargeMarginError(
            f"{folder} holds no {CONFIG}, so save() did not write it, or not all of it is here."
        )
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LargeMarginError(f"{file} is not JSON ({error}); the file is damaged.") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise LargeMarginError(
            f"{file} was not written by largemargin: its entry 'format' is not {FORMAT!r}."
        )
    version = read.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise LargeMarginError(
            f"{folder} has format version {version}, written by largemargin "
            f"{read.get('largemargin')}; this one reads up to {FORMAT_VERSION}. Upgrade "
            "largemargin."
        )
    for name in (MODEL, *([CRITERION] if read.get("criterion") else [])):
        if not (folder / name).is_file():
            raise LargeMarginError(
                f"{folder} holds no {name}, which its {CONFIG} speaks of. Copy the whole folder."
            )
    return read


def check_json(place: str, value: Any) -> None:
    """Refuse what JSON would lose or cannot hold, saying where it is."""
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            check_json(f"{place}[{index}]", each)
        return
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            check_json(f"{place}[{key!r}]", each)
        return
    shown = repr(value) if isinstance(value, float) else f"a {type(value).__name__}"
    raise LargeMarginError(
        f"{place} must be JSON (text, finite numbers, booleans, None, lists, dicts with text "
        f"keys), but it is {shown}."
    )


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a state dict, and the extra state some modules add to it."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    for name, value in extra.items():
        check_json(f"the extra state {name!r} of the model", value)
    return tensors, extra


def _head_of(model: nn.Module, criterion: Criterion | None, layer: str | None) -> HeadFacts:
    if criterion is None:
        return head_facts(*find_head(model, layer))
    if not isinstance(criterion, Criterion):
        raise LargeMarginError(
            f"criterion must be what attach returned, but {type(criterion).__name__} was given. "
            "The order is save(path, model, criterion)."
        )
    if criterion._tap.removed:
        raise LargeMarginError(
            "the criterion was taken off its model by undo(). Save the model alone: "
            "save(path, model)."
        )
    for name, module in model.named_modules():
        if module is criterion.layer:
            return head_facts(name, module)
    raise LargeMarginError(
        "the criterion is attached to another model than the one given. Save them in pairs; a copy "
        "of the model (EMA, deepcopy) needs an attach of its own, or save it with criterion=None."
    )


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise LargeMarginError(f"there is no folder {target.parent} to write {target.name} to.")
    if not target.exists():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    if not overwrite:
        raise LargeMarginError(f"{target} exists already. Pass overwrite=True to replace it.")
    try:
        ours = json.loads((target / CONFIG).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise LargeMarginError(
            f"{target} exists and was not written by save(), so it is not replaced. Choose another "
            "path or remove it yourself."
        )


@contextmanager
def _drafted(target: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name when everything in it is written."""
    mark = uuid.uuid4().hex[:8]
    draft = target.with_name(f".{target.name}.tmp-{mark}")
    draft.mkdir()
    try:
        yield draft
        for file in draft.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        if not target.exists():
            draft.rename(target)
            return
        old = target.with_name(f".{target.name}.old-{mark}")
        target.rename(old)
        try:
            draft.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
