"""A criterion and its objective as data, and both from that data: JSON and tensors, never code.

A loss is its name in ``LOSSES`` and the arguments of its constructor. Values JSON does not know are
dictionaries with one key: ``{"$tensor": name}`` (in the tensor file), ``{"$float": "inf"}``,
``{"$tuple": [...]}``, ``{"$bank": {arguments}}``.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import largemargin.losses.base.schedules as schedules
from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError
from largemargin.heads.centroid_bank import CentroidBank
from largemargin.losses import LOSSES
from largemargin.losses.base.constructor_arguments import constructor_arguments
from largemargin.losses.base.loss import Loss
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.schedules import Schedule

Tensors = dict[str, Tensor]

STATE, ASIDE = "state.", "set_aside.bias"
"""Names in the tensor file: entries of the state dict; the bias of a head that has none now."""


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
    criterion: Criterion, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Banks, parameters, buffers, steps and schedules as they were saved."""
    state: dict[str, Any] = {
        name.removeprefix(STATE): tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE)
    }
    _take_dtypes(criterion, state)
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
        with torch.no_grad():
            bias.copy_(aside)


def _take_dtypes(criterion: Criterion, state: Mapping[str, Tensor]) -> None:
    """Give buffers and parameters the saved dtype, so that loading loses no digit."""
    for name, tensor in (*criterion.named_buffers(), *criterion.named_parameters()):
        saved = state.get(name)
        if saved is not None and saved.dtype != tensor.dtype:
            tensor.data = tensor.data.to(saved.dtype)


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
        except TypeError as error:
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
        case Mapping() if all(map(_plain_key, value)):
            return {key: encode(item, f"{place}.{key}", tensors) for key, item in value.items()}
    raise LargeMarginError(
        f"{place} is a {type(value).__name__}, which cannot be written as JSON. Use numbers, text, "
        "booleans, None, tensors, and lists, tuples and dicts (with text keys) of them."
    )


def _plain_key(key: object) -> bool:
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
