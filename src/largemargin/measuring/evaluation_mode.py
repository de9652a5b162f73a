"""Evaluation mode for as long as a model is read: one thread at a time, its modes restored."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from largemargin.dropin.find_head import unwrapped

_TURNS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = Lock()
STANCE = RLock()
"""Whether compiled code may run is one setting of the process, not of a model."""


@contextmanager
def model_lock(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread reads this model; a thread may take its turn within its turn."""
    with _GUARD:
        mine = _TURNS.setdefault(unwrapped(model)[0], RLock())
    with mine:
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and without compiled code, which knows no new hooks.

    One thread at a time.
    """
    with model_lock(model), ExitStack() as stack:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            stack.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(STANCE)
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
        finally:
            for module, mode in modes:
                module.training = mode
