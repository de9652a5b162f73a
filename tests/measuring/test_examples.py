"""Every example in a docstring of the room prints what it says."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import largemargin.measuring

MODULES = [each.name for each in pkgutil.iter_modules(largemargin.measuring.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"largemargin.measuring.{name}")
    names = {"torch": torch, "nn": torch.nn}
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
