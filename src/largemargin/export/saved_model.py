"""``save``: a model, its head's form, its criterion and a configuration as a folder of plain data.

model.safetensors       the model's parameters and buffers
criterion.safetensors   centroid banks, parameters, buffers and tensor arguments of the losses
config.json             the rest, readable

``load``: a saved folder back into a freshly built model.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.dropin.criterion import Criterion
from largemargin.dropin.find_head import find_layer, parents_of, unwrapped
from largemargin.errors import LargeMarginError
from largemargin.export.criterion_data import (
    describe_criterion,
    is_plain,
    load_criterion_state,
    rebuild_criterion,
)
from largemargin.export.plain_model import (
    HeadFacts,
    check_class_names,
    check_whole,
    find_head,
    head_facts,
)
from largemargin.export.tensor_files import read_tensors, require_safetensors, write_tensors
from largemargin.heads.class_head import ClassHead
from largemargin.heads.simplex import SimplexHead
from largemargin.losses.base.terms import matrix_of
from largemargin.version import __version__

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
        "largemargin": __version__,
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


def _head_of(model: nn.Module, criterion: Criterion | None, layer: str | None) -> HeadFacts:
    if criterion is None:
        return head_facts(*find_head(model, layer))
    if not isinstance(criterion, Criterion):
        raise LargeMarginError(
            f"criterion must be what attach returned, but {type(criterion).__name__} was given. "
            "The order is save(path, model, criterion)."
        )
    if criterion._hooks.removed:
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


def check_json(place: str, value: Any) -> None:
    """Refuse what JSON would lose or cannot hold, saying where it is."""
    if is_plain(value):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(f"{place}[{index}]", item)
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            check_json(f"{place}[{key!r}]", item)
    else:
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


class Loaded(NamedTuple):
    """What a folder held, in place."""

    model: nn.Module
    """The model that was given, with the saved weights and head."""
    criterion: Criterion | None
    config: dict[str, Any] | None
    """Yours, as given to ``save``."""
    class_names: list[str] | None


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    criterion: Criterion | Literal["saved", "none"] = "saved",
    strict: bool = True,
) -> Loaded:
    """Load what :func:`save` wrote into ``model``, a fresh one of the same architecture.

    Its head may be the plain ``nn.Linear`` it was built with: it takes the form that was saved.
    Parameters stay the same objects, so an optimizer made before keeps training them; make it after
    ``load`` where the criterion has parameters of its own. Tensors are read on the CPU and copied
    to where the model is. Nothing in the folder is run as code. If the folder does not fit, the
    model is left as it was.

    Args:
        path: of the folder.
        model: built by you; ``read_config(path)["config"]`` may say how.
        criterion: "saved" attaches the saved objective with its banks, parameters, schedules and
            step count, where one was saved. "none" loads the model alone, for prediction. Or a
            criterion attached to this model already, whose state is loaded: needed for losses and
            schedules that are not this library's.
        strict: every tensor of the model must be in the folder and the other way round. False
            loads those that are in both.
    """
    folder = Path(path)
    saved = read_config(folder)
    bare = unwrapped(model)[0]
    check_whole(bare)
    _check_criterion(criterion, saved, bare)
    state = read_tensors(folder / MODEL)
    with_state = criterion != "none" and saved["criterion"] is not None
    with _undone_on_error(folder) as undo:
        tensors = read_tensors(folder / CRITERION) if with_state else {}
        attached = _attached(model, criterion, saved, tensors, undo)
        _check_state(bare, state, strict)
        if attached is not None:
            load_criterion_state(attached, saved["criterion"], tensors)
    bare.load_state_dict({**state, **(saved["model_extra_state"] or {})}, strict=strict)
    head = saved["head"]
    layer = bare.get_submodule(head["layer"])
    if isinstance(layer, ClassHead):
        layer.similarity, layer.scale = head["similarity"], float(head["scale"])
    if attached is not None:
        attached.train(layer.training)
    return Loaded(model, attached, saved["config"], saved["class_names"])


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
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LargeMarginError(f"{file} is not JSON ({error}); the file is damaged.") from error
    _check_format(file, config)
    for name in (MODEL, CRITERION) if config.get("criterion") else (MODEL,):
        if not (folder / name).is_file():
            raise LargeMarginError(
                f"{folder} holds no {name}, which its {CONFIG} refers to. Copy the whole folder."
            )
    found: dict[str, Any] = config
    return found


def _check_format(file: Path, config: Any) -> None:
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise LargeMarginError(
            f"{file} was not written by largemargin: its entry 'format' is not {FORMAT!r}."
        )
    version = config.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise LargeMarginError(
            f"{file.parent} has format version {version}, written by largemargin "
            f"{config.get('largemargin')}; this one reads up to {FORMAT_VERSION}. Upgrade "
            "largemargin."
        )


Undo: TypeAlias = list[Callable[[], None]]


@contextmanager
def _undone_on_error(folder: Path) -> Iterator[Undo]:
    """What is in the list is undone, last first, if the folder does not fit after all."""
    undo: Undo = []
    try:
        yield undo
    except Exception as error:
        for restore in reversed(undo):
            restore()
        if isinstance(error, KeyError | TypeError | AttributeError):
            raise LargeMarginError(
                f"{folder} is damaged: its configuration lacks or misspells something "
                f"({type(error).__name__}: {error})."
            ) from error
        raise


def _attached(
    model: nn.Module,
    criterion: Criterion | str,
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    undo: Undo,
) -> Criterion | None:
    """Give the head the saved form; the criterion given, or the saved one attached anew."""
    head, described = saved["head"], saved["criterion"]
    bare = unwrapped(model)[0]
    _check_size(find_layer(bare, head["layer"])[1], head)
    rebuilt = criterion == "saved" and described is not None
    if not (rebuilt and described["replaced_head"]):
        _take_form(bare, head, undo)
    if not rebuilt:
        return criterion if isinstance(criterion, Criterion) else None
    attached = rebuild_criterion(model, described, head, tensors)
    undo.append(attached.undo)
    return attached


def _check_criterion(given: object, saved: Mapping[str, Any], model: nn.Module) -> None:
    if isinstance(given, Criterion):
        if saved["criterion"] is None:
            raise LargeMarginError(
                "a criterion was given, but the folder holds a model alone. Leave criterion out."
            )
        if all(module is not given.layer for module in model.modules()):
            raise LargeMarginError(
                "the criterion is attached to another model than the one given. Attach it to this "
                "one."
            )
    elif given not in ("saved", "none"):
        raise LargeMarginError(
            f'criterion must be "saved", "none" or what attach returned, but {given!r} was given.'
        )


def _take_form(model: nn.Module, head: Mapping[str, Any], undo: Undo) -> None:
    """Turn the model's plain head into the kind that was saved."""
    layer, kind = model.get_submodule(head["layer"]), head["kind"]
    if kind == "Linear" or isinstance(layer, SimplexHead):
        return
    if isinstance(layer, ClassHead):
        before = layer.similarity, layer.scale

        def restyle() -> None:
            layer.similarity, layer.scale = before

        undo.append(restyle)
        layer.similarity, layer.scale = head["similarity"], float(head["scale"])
        return
    if not isinstance(layer, nn.Linear):
        return
    if kind == "SimplexHead":
        new: nn.Module = SimplexHead(
            layer.in_features,
            layer.out_features,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
        )
    else:
        new = ClassHead.from_linear(
            layer,
            similarity=head["similarity"],
            scale=head["scale"],
            bias=bool(head["bias"]) and layer.bias is not None,
        )
    places = parents_of(model, layer)
    if not places:
        raise LargeMarginError(
            f"the saved head is a {kind}, but the model is a bare nn.Linear, which cannot be "
            f"replaced from outside. Build the model with lm.{kind}."
        )

    def put(module: nn.Module) -> None:
        for parent, name in places:
            parent._modules[name] = module

    undo.append(partial(put, layer))
    put(new.train(layer.training))


def _check_size(layer: nn.Module, head: Mapping[str, Any]) -> None:
    has, wanted = tuple(matrix_of(layer).shape), (head["num_classes"], head["in_features"])
    if has != wanted:
        raise LargeMarginError(
            f"the saved head {head['layer']!r} has {wanted[0]} classes and {wanted[1]} features, "
            f"but the model's has {has[0]} and {has[1]}. Build the model as it was saved."
        )


def _check_state(model: nn.Module, state: dict[str, Tensor], strict: bool) -> None:
    """Compare names and shapes before anything is written."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    problems = []
    if strict:
        problems += _listed("the folder lacks", [name for name in own if name not in state])
        problems += _listed("the model lacks", [name for name in state if name not in own])
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    problems += _listed("the folder has other shapes:", shapes)
    if problems:
        hint = " strict=False loads what is in both." if strict and not shapes else ""
        raise LargeMarginError(
            f"the saved weights do not fit the model: {'; '.join(problems)}. Build the model as it "
            f"was saved.{hint}"
        )


SHOWN = 6
"""Names listed in a message before the rest is counted."""


def _listed(problem: str, names: Sequence[str]) -> list[str]:
    """A problem with the first names it is about; none where there are none."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{problem} {', '.join(names[:SHOWN])}{more}"] if names else []
