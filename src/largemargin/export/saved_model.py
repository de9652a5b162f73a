"""``save``: a model, its head's form, its criterion and a configuration as a folder of plain data.

model.safetensors       the model's parameters and buffers
criterion.safetensors   centroid banks, parameters, buffers and tensor arguments of the losses
config.json             the rest, readable

``load``: a saved folder back into a freshly built model.

A loss is its name in ``LOSSES`` and the arguments of its constructor. Values JSON does not know are
dictionaries with one key: ``{"$tensor": name}`` (in the tensor file), ``{"$float": "inf"}``,
``{"$tuple": [...]}``, ``{"$bank": {arguments}}``.
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import largemargin.losses.base.schedules as schedules
from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.dropin.find_head import find_layer, parents_of, unwrapped
from largemargin.dropin.saved_heads import form_is_kept
from largemargin.errors import LargeMarginError, check_choice, check_count, check_number
from largemargin.export.plain_model import (
    HeadFacts,
    check_class_names,
    check_target,
    check_whole,
    find_head,
    head_facts,
)
from largemargin.export.tensor_files import listed, read_tensors, require_safetensors, write_tensors
from largemargin.heads.centroid_bank import CentroidBank
from largemargin.heads.class_head import ClassHead
from largemargin.heads.simplex import SimplexHead
from largemargin.losses import LOSSES
from largemargin.losses.base.constructor_arguments import constructor_arguments
from largemargin.losses.base.loss import Loss
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.schedules import Schedule
from largemargin.losses.base.terms import matrix_of
from largemargin.ops.similarity import SIMILARITIES, check_scale
from largemargin.version import __version__

FORMAT = "largemargin"
FORMAT_VERSION = 1
CONFIG, MODEL, CRITERION = "config.json", "model.safetensors", "criterion.safetensors"

STATE, ASIDE = "state.", "set_aside.bias"
"""Names in the tensor file: entries of the state dict; the bias of a head that has none now."""

Tensors = dict[str, Tensor]


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
    with form_is_kept():
        state = bare.state_dict()
    extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    for name, value in extra.items():
        check_json(f"the extra state {name!r} of the model", value)
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
    tensors: Tensors = {}
    if criterion is not None:
        written["criterion"] = describe_criterion(bare, criterion, tensors)
    with _drafted(target) as draft:
        write_tensors(draft / MODEL, {k: v for k, v in state.items() if k not in extra})
        if criterion is not None:
            write_tensors(draft / CRITERION, tensors)
        text = json.dumps(written, indent=2, ensure_ascii=False, allow_nan=False)
        (draft / CONFIG).write_text(text + "\n", encoding="utf-8")
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    empty = target.is_dir() and not any(target.iterdir())
    check_target(target, overwrite or empty)
    if empty or not target.exists():
        return
    try:
        ours = json.loads((target / CONFIG).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        ours = False
    if not ours or {each.name for each in target.iterdir()} - {CONFIG, MODEL, CRITERION}:
        raise LargeMarginError(
            f"{target} exists and was not written by save(), or not all that is in it, so it is "
            "not replaced. Choose another path or remove it yourself."
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
    tensors: Tensors = {}
    with _reports_damage(folder):
        _check_entries(saved)
        _check_criterion(criterion, saved, bare)
        state: dict[str, Any] = read_tensors(folder / MODEL)
        state |= saved["model_extra_state"] or {}
        if criterion != "none" and saved["criterion"] is not None:
            tensors = read_tensors(folder / CRITERION)
    head = saved["head"]
    with form_is_kept(), _reports_damage(folder), ExitStack() as undo:
        attached = _attached(model, criterion, saved, tensors, undo)
        _check_state(bare, state, strict)
        _try_extra_state(bare, saved["model_extra_state"] or {}, undo)
        if attached is not None:
            load_criterion_state(attached, saved["criterion"], tensors, undo)
        layer = bare.get_submodule(head["layer"])
        if isinstance(layer, ClassHead):
            layer.similarity, layer.scale = head["similarity"], float(head["scale"])
        bare.load_state_dict(state, strict=strict)
        undo.pop_all()
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
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LargeMarginError(f"{file} is not JSON ({error}); the file is damaged.") from error
    _check_format(file, config)
    for name in (MODEL, CRITERION) if config.get("criterion") else (MODEL,):
        if not (folder / name).is_file():
            raise LargeMarginError(
                f"{folder} holds no {name}, which its {CONFIG} refers to. Copy the whole folder."
            )
    return config


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


@contextmanager
def _reports_damage(folder: Path) -> Iterator[None]:
    """Errors of a configuration that was edited or cut short, as one about the folder."""
    try:
        yield
    except LargeMarginError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise LargeMarginError(
            f"{folder} is damaged: its configuration lacks or misspells something "
            f"({type(error).__name__}: {error})."
        ) from error


def _check_entries(saved: Mapping[str, Any]) -> None:
    """Refuse values that would only be noticed later, or never."""
    facts = HeadFacts(**saved["head"])
    _check_head(facts)
    if saved["class_names"] is not None:
        check_class_names(saved["class_names"], facts)
    for name in ("model_extra_state", "criterion", "config"):
        if not isinstance(saved[name], dict | None):
            raise TypeError(f"{name} is {saved[name]!r}")
    if saved["criterion"] is not None:
        check_choice("replaced_head", saved["criterion"]["replaced_head"], (True, False))
        for name in ("steps", "micro"):
            count = saved["criterion"]["extra_state"]["_extra_state"][name]
            check_count(name, count, at_least=0)


def _check_head(facts: HeadFacts) -> None:
    for name, kind in HeadFacts.__annotations__.items():
        value = getattr(facts, name)
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(f"head.{name} is {value!r}")
    check_choice("head.kind", facts.kind, ("Linear", "ClassHead", "SimplexHead"))
    check_choice("head.similarity", facts.similarity, SIMILARITIES)
    check_number("head.scale", facts.scale, above=0)
    check_scale(float(facts.scale))
    if facts.kind == "Linear" and (facts.similarity, facts.scale) != ("dot", 1):
        raise TypeError(f"a Linear has no similarity={facts.similarity!r}, scale={facts.scale:g}")


def _attached(
    model: nn.Module,
    criterion: Criterion | str,
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    undo: ExitStack,
) -> Criterion | None:
    """Give the head the saved form; the criterion given, or the saved one attached anew."""
    head, described = saved["head"], saved["criterion"]
    bare = unwrapped(model)[0]
    shape = matrix_of(find_layer(bare, head["layer"])[1]).shape
    has = shape[0], shape[-1]
    wanted = (head["num_classes"], head["in_features"])
    if has != wanted:
        raise LargeMarginError(
            f"the saved head {head['layer']!r} has {wanted[0]} classes and {wanted[1]} features, "
            f"but the model's has {has[0]} and {has[1]}. Build the model as it was saved."
        )
    if isinstance(criterion, Criterion):
        _check_form(criterion.layer, bare.get_submodule(head["layer"]), head)
    rebuilt = criterion == "saved" and described is not None
    if not (rebuilt and described["replaced_head"]):
        _take_form(bare, head, undo)
    if not rebuilt:
        return criterion if isinstance(criterion, Criterion) else None
    attached = rebuild_criterion(model, described, head, tensors)
    undo.callback(attached.undo)
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


def _check_form(own: nn.Module, layer: nn.Module, head: Mapping[str, Any]) -> None:
    """Refuse a criterion on a head that cannot predict as the saved one."""
    made = getattr(own, "similarity", "dot")
    fixed = not isinstance(own, ClassHead) and head["scale"] != getattr(own, "scale", 1.0)
    if own is not layer or made != head["similarity"] or fixed:
        raise LargeMarginError(
            f"the saved head {head['layer']!r} has similarity={head['similarity']!r} and scale="
            f"{head['scale']:g}, but the criterion is attached to a {type(own).__name__} with "
            f"similarity={made!r}. Attach the objective that was saved, to the same layer."
        )


def _take_form(model: nn.Module, head: Mapping[str, Any], undo: ExitStack) -> None:
    """Turn the model's plain head into the kind that was saved."""
    layer, kind = model.get_submodule(head["layer"]), head["kind"]
    if kind == "Linear" or isinstance(layer, SimplexHead):
        return
    if isinstance(layer, ClassHead):
        undo.callback(setattr, layer, "similarity", layer.similarity)
        undo.callback(setattr, layer, "scale", layer.scale)
        layer.similarity, layer.scale = head["similarity"], float(head["scale"])
        return
    if not isinstance(layer, nn.Linear):
        return
    if kind == "SimplexHead":
        size, weight = (layer.in_features, layer.out_features), layer.weight
        new: nn.Module = SimplexHead(*size, device=weight.device, dtype=weight.dtype)
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

    new.train(layer.training)
    for parent, name in places:
        undo.callback(setattr, parent, name, layer)
        setattr(parent, name, new)


def _try_extra_state(model: nn.Module, state: Mapping[str, Any], undo: ExitStack) -> None:
    """Set what modules keep beside tensors: only they can tell whether they take it."""
    own = model.state_dict()
    for name in state.keys() & own.keys():
        module = model.get_submodule(name.rpartition(".")[0])
        undo.callback(module.set_extra_state, deepcopy(own[name]))
        try:
            module.set_extra_state(deepcopy(state[name]))
        except Exception as error:
            raise LargeMarginError(
                f"{type(module).__name__} does not take its saved extra state {name!r} "
                f"({type(error).__name__}: {error}). The folder is damaged, or the module is "
                "another one than was saved."
            ) from error


def _check_state(model: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Compare names and shapes before anything is written."""
    own = model.state_dict()
    problems = []
    if strict:
        problems += listed("the folder lacks", [name for name in own if name not in state])
        problems += listed("the model lacks", [name for name in state if name not in own])
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, Tensor)
        and isinstance(state.get(name), Tensor)
        and state[name].shape != value.shape
    ]
    problems += listed("the folder has other shapes:", shapes)
    if problems:
        hint = " strict=False loads what is in both." if strict and not shapes else ""
        raise LargeMarginError(
            f"the saved weights do not fit the model: {'; '.join(problems)}. Build the model as it "
            f"was saved.{hint}"
        )


def describe_criterion(model: nn.Module, criterion: Criterion, tensors: Tensors) -> dict[str, Any]:
    """Everything :func:`rebuild_criterion` needs; tensors are put into ``tensors``."""
    extra: dict[str, Any] = {}
    for name, value in criterion.state_dict().items():
        if isinstance(value, Tensor):
            tensors[STATE + name] = value
        else:
            extra[name] = encode(value, name, tensors)
    bias = _set_aside(criterion)
    if bias is not None:
        tensors[ASIDE] = bias
    objective = criterion.objective
    scheduled = [path for each in criterion.schedules for path in each.moves(objective)]
    return {
        "objective": describe_objective(objective, tensors, scheduled),
        "schedules": [
            _describe_schedule(each, f"schedules.{index}", tensors)
            for index, each in enumerate(criterion.schedules)
        ],
        "extra_state": extra,
        "attach": {
            **_named_modules(model, criterion),
            "stepping": "automatic" if criterion.automatic else "manual",
            "accumulate": criterion.accumulate,
            "gradient_norms": criterion.measures_gradients,
            "warn": criterion._watch is not None,
        },
        "replaced_head": criterion._owns_head,
    }


def rebuild_criterion(
    model: nn.Module,
    described: Mapping[str, Any],
    head: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Criterion:
    """Attach the described objective to the model; the state is loaded separately."""
    options = dict(described["attach"])
    return attach(
        model,
        build_objective(described["objective"], tensors),
        layer=head["layer"],
        similarity=head["similarity"],
        features=options.pop("features") or None,
        schedule=[_build_schedule(each, tensors) for each in described["schedules"]],
        **options,
    )


def load_criterion_state(
    criterion: Criterion,
    described: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    undo: ExitStack,
) -> None:
    """Banks, parameters, buffers, steps and schedules as they were saved."""
    state: dict[str, Any] = {
        name.removeprefix(STATE): tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE)
    }
    undo.callback(criterion.set_extra_state, deepcopy(criterion.get_extra_state()))
    for name, tensor in (*criterion.named_buffers(), *criterion.named_parameters()):
        undo.callback(setattr, tensor, "data", tensor.data)
        # The saved dtype, so that loading loses no digit.
        tensor.data = tensor.data.to(state.get(name, tensor).dtype, copy=True)
    state |= {name: decode(value, tensors) for name, value in described["extra_state"].items()}
    try:
        criterion.load_state_dict(state)
    except RuntimeError as error:
        raise LargeMarginError(
            f"the saved state does not fit the criterion. {error} Attach the objective that was "
            "saved, or pass criterion='saved' to have it rebuilt."
        ) from error
    aside, bias = tensors.get(ASIDE), _set_aside(criterion)
    if aside is not None and bias is not None and aside.shape == bias.shape:
        undo.callback(setattr, bias, "data", bias.data)
        bias.data = aside.to(bias)


def _set_aside(criterion: Criterion) -> Tensor | None:
    """The bias of the layer that ``undo`` puts back, where the present head has none."""
    if getattr(criterion.layer, "bias", None) is not None:
        return None
    for entry in criterion._undo:
        bias = getattr(getattr(entry, "old", entry), "bias", None)
        if isinstance(bias, Tensor):
            return bias
    return None


def _named_modules(model: nn.Module, criterion: Criterion) -> dict[str, Any]:
    """The names that were given to ``attach`` as features and layers."""
    features: dict[str, str] = {}
    layers: dict[int, str] = {}
    for path, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if getattr(hook, "owner", None) is criterion._hooks and hasattr(hook, "name"):
                kind, which = hook.name.split(" ", 1)
                if kind == "features":
                    features[which] = path
                else:
                    layers[int(which)] = path
    return {"features": features, "layers": [layers[index] for index in sorted(layers)]}


def describe_objective(
    objective: Objective, tensors: Tensors, scheduled: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The terms of an objective, in order.

    What a schedule moves, named as "term.margin", is described as it was before it was moved:
    schedules go from there.
    """
    terms = []
    for name, loss in objective.terms.items():
        assert isinstance(loss, Loss)
        weight = objective.weights[name]
        if f"{name}.weight" in scheduled:
            weight = _before(objective).get(name, weight)
        moved = {path.split(".", 1)[1] for path in scheduled if path.split(".", 1)[0] == name}
        terms.append(
            {
                "term": name,
                "weight": encode(weight, f"weights.{name}", tensors),
                **_describe_loss(loss, f"arguments.{name}", tensors, moved),
            }
        )
    return terms


def _before(module: Objective | Loss) -> dict[str, Any]:
    """Settings as they were before they were moved first."""
    moving = getattr(module, "moving", None)
    return {} if moving is None else dict(moving.built)


def _describe_loss(
    loss: Loss, place: str, tensors: Tensors, moved: Collection[str]
) -> dict[str, Any]:
    names = [name for name, kind in LOSSES.items() if kind is type(loss)]
    if not names:  # a loss of the user, who attaches it again on loading
        return {"loss": None, "class": f"{type(loss).__module__}.{type(loss).__qualname__}"}
    arguments = constructor_arguments(loss, Loss)
    for name, value in _before(loss).items():
        # A term's weight is not a class weight; schedules call the latter so.
        if ("class weights" if name == "weight" else name) in moved:
            arguments[name] = value
    return {"loss": names[0], "arguments": encode(arguments, place, tensors)}


def build_objective(terms: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> Objective:
    """The objective of a description, without the state of its losses."""
    made: dict[str, Any] = {}
    for term in terms:
        name = term["term"]
        if term["loss"] is None:
            raise LargeMarginError(
                f"the term {name!r} is a {term['class']}, which is not a loss of this library, so "
                "it cannot be built from the configuration. Attach it yourself and pass the "
                "criterion: load(path, model, criterion=lm.attach(model, objective))."
            )
        if term["loss"] not in LOSSES:
            raise LargeMarginError(
                f"the term {name!r} is the loss {term['loss']!r}, which this version does not "
                "have. Upgrade largemargin, or attach a criterion yourself and pass it."
            )
        arguments = decode(term["arguments"], tensors)
        try:
            loss = LOSSES[term["loss"]](**arguments)
        except (TypeError, RuntimeError) as error:
            raise LargeMarginError(
                f"the term {name!r} ({term['loss']}) was saved with other arguments than this "
                f"version takes: {error}. Attach a criterion yourself and pass it."
            ) from error
        made[name] = decode(term["weight"], tensors) * loss
    return Objective(**made)


def _describe_schedule(schedule: Schedule, place: str, tensors: Tensors) -> dict[str, Any]:
    kind = type(schedule)
    if kind.__module__ != schedules.__name__:  # one of the user, who attaches it again on loading
        return {"schedule": None, "class": f"{kind.__module__}.{kind.__qualname__}"}
    arguments = {name: getattr(schedule, name) for name in kind.arguments}
    return {"schedule": kind.__name__, "arguments": encode(arguments, place, tensors)}


def _build_schedule(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Schedule:
    name = described["schedule"]
    kind = getattr(schedules, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Schedule)):
        raise LargeMarginError(
            f"the schedule {name or described.get('class')!r} is not one of this version of "
            "largemargin, so it cannot be built from the configuration. Attach the criterion "
            "yourself and pass it: load(path, model, criterion=...)."
        )
    made: Schedule = kind(**decode(described["arguments"], tensors))
    return made


def is_plain(value: object) -> bool:
    """Whether JSON holds a value as it is: text, a boolean, None or a finite number."""
    return (
        value is None
        or isinstance(value, bool | int | str)
        or (isinstance(value, float) and math.isfinite(value))
    )


def encode(value: Any, place: str, tensors: Tensors) -> Any:
    """A value as JSON; tensors in it are put into ``tensors`` under their place."""
    if is_plain(value):
        return value
    match value:
        case float():
            return {"$float": str(value)}
        case Tensor():
            tensors[place] = value
            return {"$tensor": place}
        case CentroidBank():
            own = constructor_arguments(value, CentroidBank)
            return {"$bank": encode(own, place, tensors)}
        case list() | tuple():
            items = [encode(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        case Mapping() if all(map(_is_plain_key, value)):
            return {key: encode(item, f"{place}.{key}", tensors) for key, item in value.items()}
    raise LargeMarginError(
        f"{place} is a {type(value).__name__}, which cannot be written as JSON. Use numbers, text, "
        "booleans, None, tensors, and lists, tuples and dicts (with text keys) of them."
    )


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str) and not key.startswith("$")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` wrote."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        ((kind, inner),) = value.items()
        return _decode_special(kind, inner, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_special(kind: str, inner: Any, tensors: Mapping[str, Tensor]) -> Any:
    if kind == "$float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if kind == "$tuple":
        return tuple(decode(item, tensors) for item in inner)
    if kind == "$bank":
        return CentroidBank(**decode(inner, tensors))
    if kind == "$tensor" and inner in tensors:
        return tensors[inner].clone()
    raise LargeMarginError(
        f"the configuration is damaged: {{{kind!r}: {inner!r}}} means nothing, or names a tensor "
        "that is not in the file."
    )
