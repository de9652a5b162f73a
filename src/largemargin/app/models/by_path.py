"""Networks of your own by their Python path, which only whoever starts the program may allow.

A path in a configuration makes Python import a module, which runs it. So ``trust`` has to be called
first: by ``largemargin train --trust_config``, or by a program that knows its configurations.
"""

import importlib
import inspect

from torch import nn

from largemargin.app.config import ModelConfig
from largemargin.app.models.library_networks import width_of
from largemargin.app.models.networks import Size
from largemargin.app.models.weights import load_backbone
from largemargin.errors import LargeMarginError

_trusted = [False]


def trust(allowed: bool = True) -> None:
    """Allow ``ModelConfig(name="package.module.Network")`` in this process, or forbid it again."""
    _trusted[0] = allowed


def build_by_path(config: ModelConfig, channels: int, size: Size) -> tuple[nn.Module, int]:
    """The backbone that a class or function at ``config.name`` makes, and its number of features.

    It is called with ``config.options``, and with ``channels`` where it has such an argument. Its
    outputs for images (N, channels, *size) must be features (N, D); the head is added to it.
    """
    if not _trusted[0]:
        raise LargeMarginError(
            f"model.name {config.name!r} is a Python path, and importing it runs its code. Pass "
            "--trust_config (in Python: largemargin.app.models.trust()) if you wrote or read it."
        )
    backbone = _made(config, channels)
    if config.weights is not None:
        load_backbone(backbone, config.weights, config.name)
    return backbone, width_of(backbone, config.name, channels, size)


def _made(config: ModelConfig, channels: int) -> nn.Module:
    module, _, name = config.name.rpartition(".")
    try:
        build = getattr(importlib.import_module(module), name)
        options = dict(config.options)
        if "channels" in inspect.signature(build).parameters:
            options.setdefault("channels", channels)
        made = build(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise LargeMarginError(
            f"the network {config.name} cannot be built: {error}. Its module must be found by "
            "Python (PYTHONPATH), and the class or function must take model.options."
        ) from error
    if not isinstance(made, nn.Module):
        raise LargeMarginError(f"{config.name} gives a {type(made).__name__}, not an nn.Module.")
    return made
