"""The repr of a loss: an expression that builds it again."""

import inspect
import math
from typing import Any

from torch import Tensor, nn


def constructor_arguments(module: nn.Module, base: type[nn.Module]) -> dict[str, Any]:
    """Arguments that build an equal module: those without default, or that differ from it."""
    parameters = _parameters(module, base)
    arguments = {}
    for name, parameter in parameters.items():
        value = getattr(module, name)
        default = getattr(module, "defaults", {}).get(name, parameter.default)
        required = default is parameter.empty
        if required or isinstance(value, Tensor) or value != default:
            arguments[name] = value
    return arguments


def rebuilding_repr(module: nn.Module, base: type[nn.Module]) -> str:
    """A repr that evaluates to an equal module: arguments that differ from their defaults."""
    parameters = _parameters(module, base)
    shown = []
    for name, value in constructor_arguments(module, base).items():
        required = parameters[name].default is inspect.Parameter.empty
        shown.append(_literal(value) if required else f"{name}={_literal(value)}")
    return f"{type(module).__name__}({', '.join(shown)})"


def _parameters(module: nn.Module, base: type[nn.Module]) -> dict[str, inspect.Parameter]:
    parameters: dict[str, inspect.Parameter] = {}
    for cls in (type(module), base):
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
                parameters.setdefault(name, parameter)
    return parameters


def _literal(value: object) -> str:
    if isinstance(value, Tensor):
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    return f"float({str(value)!r})" if value in (math.inf, -math.inf) else repr(value)
