"""A criterion as data, and the criterion from that data on a freshly built model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.dropin import Criterion, attach
from largemargin.errors import LargeMarginError
from largemargin.export.describe import (
    Tensors,
    build_objective,
    decode,
    describe_objective,
    encode,
)
from largemargin.losses import schedules
from largemargin.losses.schedules import Schedule

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
            if getattr(hook, "tap", None) is criterion._tap and hasattr(hook, "name"):
                kind, which = hook.name.split(" ", 1)
                if kind == "features":
                    features[which] = path
                else:
                    layers[int(which)] = path
    return {"features": features, "layers": [layers[index] for index in sorted(layers)]}


def _describe_schedule(schedule: Schedule, place: str, tensors: Tensors) -> dict[str, Any]:
    kind = type(schedule)
    if kind.__module__ != schedules.__name__:  # one of the user's: loading asks for it
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
