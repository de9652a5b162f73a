"""The repr of a loss: an expression that builds it again."""

import inspect
import math

from torch import Tensor, nn


def rebuilding_repr(module: nn.Module, base: type[nn.Module]) -> str:
    """A repr that evaluates to an equal module: arguments that differ from their defaults."""
    parameters: dict[str, inspect.Parameter] = {}
    for cls in (type(module), base):
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
                parameters.setdefault(name, parameter)
    shown = []
    for name, parameter in parameters.items():
        value = getattr(module, name)
        default = getattr(module, "defaults", {}).get(name, parameter.default)
        if default is parameter.empty:
            shown.append(_literal(value))
        elif isinstance(value, Tensor) or value != default:
            shown.append(f"{name}={_literal(value)}")
    return f"{type(module).__name__}({', '.join(shown)})"


def _literal(value: object) -> str:
    if isinstance(value, Tensor):
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    return f"float({str(value)!r})" if value in (math.inf, -math.inf) else repr(value)
