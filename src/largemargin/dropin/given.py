"""What ``attach`` is given as objective: a loss, several, or what makes them."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES, Loss, Objective
from largemargin.losses.weighted import Weighted


def objective_from(given: Any, num_classes: int, dim: int) -> Objective:
    """The objective of a loss, a weighted one, an objective or a function of the head's size."""
    if isinstance(given, type) and issubclass(given, Loss):
        raise LargeMarginError(
            f"objective must be a loss, but the class {given.__name__} was given. Make one: "
            f"{given.__name__}(...), or pass a function that makes one for this head: lambda "
            f"num_classes, dim: {given.__name__}(...)."
        )
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise _refusal(f"the class {given.__name__}", _instead_of(given))
    made = given
    if not isinstance(given, nn.Module) and callable(given):
        made = given(num_classes, dim)
    if isinstance(made, Objective):
        return made
    inner = made.loss if isinstance(made, Weighted) else made
    if isinstance(made, str):
        raise _refusal(repr(made), _written(made))
    if not isinstance(inner, Loss):
        raise _refusal(type(made).__name__, _instead_of(type(made)))
    names = [name for name, kind in LOSSES.items() if kind is type(inner)]
    return Objective(**{names[0] if names else "loss": made})


def _refusal(what: str, instead: str) -> LargeMarginError:
    return LargeMarginError(
        "objective must be a loss of largemargin, `weight * loss`, an Objective, or a function "
        f"(num_classes, dim) that returns one, but {what} was given.{instead}"
    )


def _written(text: str) -> str:
    """The losses that a text names, as they are made."""
    kinds = [LOSSES.get(part.split("*")[-1].strip()) for part in text.lower().split("+")]
    made = " + ".join(f"lm.{kind.__name__}(...)" for kind in kinds if kind)
    return f" Make it: {made}." if all(kinds) else ""


def _instead_of(kind: type) -> str:
    """What to write for what people try first."""
    if issubclass(kind, nn.CrossEntropyLoss):
        return " torch's cross entropy, with weight and label_smoothing, is lm.CrossEntropy(...)."
    if issubclass(kind, nn.Module):
        return (
            " Add a loss of your own to that of the criterion: criterion(outputs, labels) + "
            "yours(outputs, labels)."
        )
    if issubclass(kind, Iterable):
        return " Losses add up: lm.CosFace() + 0.5 * lm.SampleMargin()."
    return ""
