"""An objective as data, and the objective from that data: JSON and tensors, never code.

A loss is its name in ``LOSSES`` and the arguments of its constructor. Values JSON does not know are
dictionaries with one key: ``{"$tensor": name}`` (in the tensor file), ``{"$float": "inf"}``,
``{"$tuple": [...]}``, ``{"$bank": {arguments}}``.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES, Loss, Objective
from largemargin.losses.rebuild import constructor_arguments
from largemargin.prototypes import CentroidBank

Tensors = dict[str, Tensor]


def encode(value: Any, place: str, tensors: Tensors) -> Any:
    """A value as JSON; tensors in it are put into ``tensors`` under their place."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        tensors[place] = value
        return {"$tensor": place}
    if isinstance(value, CentroidBank):
        own = constructor_arguments(value, CentroidBank)
        return {"$bank": encode(own, place, tensors)}
    if isinstance(value, list | tuple):
        items = [encode(each, f"{place}.{index}", tensors) for index, each in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(_plain_key(key) for key in value):
        return {key: encode(each, f"{place}.{key}", tensors) for key, each in value.items()}
    raise LargeMarginError(
        f"{place} is a {type(value).__name__}, which cannot be written as JSON. Use numbers, text, "
        "booleans, None, tensors, and lists, tuples and dicts (with text keys) of them."
    )


def _plain_key(key: object) -> bool:
    return isinstance(key, str) and not key.startswith("$")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`encode` wrote."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        ((kind, inner),) = value.items()
        return _decode_special(kind, inner, tensors)
    return {key: decode(each, tensors) for key, each in value.items()}


def _decode_special(kind: str, inner: Any, tensors: Mapping[str, Tensor]) -> Any:
    if kind == "$float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if kind == "$tuple":
        return tuple(decode(each, tensors) for each in inner)
    if kind == "$bank":
        return CentroidBank(**decode(inner, tensors))
    if kind == "$tensor" and inner in tensors:
        return tensors[inner].clone()
    raise LargeMarginError(
        f"the configuration is damaged: {{{kind!r}: {inner!r}}} means nothing, or names a tensor "
        "that is not in the file."
    )


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
    if not names:  # a loss of the user: loading asks for it
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
