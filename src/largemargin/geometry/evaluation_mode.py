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

_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = Lock()
STANCE = RLock()
"""Whether compiled code may run is one setting of the process, not of a model."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and without compiled code, which knows no new hooks.

    One thread at a time.
    """
    with model_lock(model), evaluation_mode(model), ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(STANCE)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def model_lock(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread reads this model; a thread may lock it several times."""
    with _GUARD:
        mine = _LOCKS.setdefault(unwrapped(model)[0], RLock())
    with mine:
        yield


@contextmanager
def evaluation_mode(model: object, *, frozen: bool = False) -> Iterator[None]:
    """Evaluation mode, every module's own mode restored afterwards; no mode for plain functions.

    Args:
        model: a module, or a function that is called like one.
        frozen: parameters collect no gradients meanwhile.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    learned = [
        parameter
        for module in modules
        for parameter in module.parameters(recurse=False)
        if frozen and parameter.requires_grad
    ]
    try:
        if isinstance(model, nn.Module):
            model.eval()
        for parameter in learned:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
