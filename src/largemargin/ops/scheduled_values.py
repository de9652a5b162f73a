"""Numbers that change during training, kept where compiled code follows them.

``torch.compile`` takes a Python number for a constant and compiles again when it changes. So a
number that is moved has a 0-dim tensor beside it: eager code reads the number, compiled code the
tensor. Modules whose numbers stay put have neither.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ScheduledValue(nn.Module):
    """The moved numbers of one module, its child ``moving``; no part of any ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, float] = {}
        """What each was set to last."""
        self.built: dict[str, Any] = {}
        """What each was before it was moved first."""

    def put(self, name: str, value: float, *, in_place: bool = True) -> None:
        """Set a number. In place keeps CUDA graphs valid, but must not fall between a compiled
        forward pass and its backward pass.
        """
        self.numbers[name] = value
        old = self.tensor(name)
        if old is not None and in_place:
            old.fill_(value)
        else:
            like = torch.zeros(()) if old is None else old
            self.register_buffer(_key(name), _number(value, like), persistent=False)

    def tensor(self, name: str) -> Tensor | None:
        return self._buffers.get(_key(name))

    def settle(self) -> None:
        """Nothing is moved any longer: compiled code reads the numbers again."""
        self.numbers.clear()
        self._buffers.clear()

    def follow(self, weight: Tensor) -> None:
        """Be where a weight is, and double where it is double."""
        for name, value in self.numbers.items():
            old = self.tensor(name)
            if old is not None and (old.device, old.dtype) != (weight.device, _dtype(weight)):
                self._buffers[_key(name)] = _number(value, weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ScheduledValue":
        # Made again rather than converted: a device is followed, half precision is not.
        for name, value in self.numbers.items():
            old = self.tensor(name)
            if old is not None:
                probe = torch.zeros_like(old, device="cpu" if old.is_meta else old.device)
                self._buffers[_key(name)] = _number(value, fn(probe))
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in self.numbers.items())


def _key(name: str) -> str:
    return f"live_{name}"


def _dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _number(value: float, like: Tensor) -> Tensor:
    # Filled on the device: copying a number there would wait for it.
    return torch.full((), value, dtype=_dtype(like), device=like.device)


def scheduled_value_of(module: nn.Module) -> ScheduledValue:
    """The moved numbers of a module, from now on."""
    moving = getattr(module, "moving", None)
    if not isinstance(moving, ScheduledValue):
        moving = ScheduledValue()
        module.add_module("moving", moving)
    return moving


def move(module: nn.Module, name: str, value: float, *, in_place: bool = True) -> None:
    """Set a number of a module, and the tensor that compiled code reads."""
    setattr(module, name, value)
    scheduled_value_of(module).put(name, value, in_place=in_place)


def followed(module: nn.Module, name: str) -> Tensor | None:
    """The tensor beside a moved number, inside ``torch.compile`` and ``torch.export`` only."""
    if not torch.compiler.is_compiling():
        return None
    moving = getattr(module, "moving", None)
    return None if moving is None else moving.tensor(name)


def current(module: nn.Module, name: str, otherwise: Any = None) -> Any:
    """``module.name``, as compiled code has to read it; ``otherwise`` where there is none."""
    tensor = followed(module, name) if torch.compiler.is_compiling() else None
    return getattr(module, name, otherwise) if tensor is None else tensor
