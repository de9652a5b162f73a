"""Threads that read one model take turns: its modes and hooks belong to one reader at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from largemargin.dropin.find import unwrapped

_TURNS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = Lock()
STANCE = RLock()
"""Whether compiled code may run is one setting of the process, not of a model."""


@contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread reads this model; a thread may take its turn within its turn."""
    with _GUARD:
        mine = _TURNS.setdefault(unwrapped(model)[0], RLock())
    with mine:
        yield
