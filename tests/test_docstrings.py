"""Every example in a docstring is run, and every public function and loss has one."""

import doctest
import importlib
import inspect
import math
import pkgutil
from pathlib import Path

import pytest
import torch

import largemargin as lm
from largemargin import functional

NAMES = {
    "torch": torch,
    "math": math,
    "lm": lm,
    **{name: getattr(lm, name) for name in lm.__all__},
    **{name: getattr(functional, name) for name in functional.__all__},
}
CORE = (
    "largemargin.ops",
    "largemargin.losses",
    "largemargin.heads",
    "largemargin.heads.optim",
    "largemargin.dropin",
    "largemargin.geometry",
    "largemargin.measuring",
    "largemargin.measuring.robust",
    "largemargin.app.data",
    "largemargin.app.models",
    "largemargin.measuring",
    "largemargin.app.training",
    "largemargin_papers.benchmark",
    "largemargin_papers.recipes",
    "largemargin.app.report",
    "largemargin.export",
    "largemargin.app.cli",
)


def core_modules() -> list[str]:
    found = [info.name for info in pkgutil.walk_packages(lm.__path__, "largemargin.")]
    return [name for name in found if name.startswith(CORE)]


@pytest.mark.parametrize("name", core_modules())
def test_examples_print_what_they_say(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(name)
    known = {**NAMES, "tmp_path": tmp_path}
    results = doctest.testmod(module, extraglobs=known, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


@pytest.mark.parametrize("name", functional.__all__)
def test_every_function_has_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(functional, name)) or ""
    assert ">>>" in doc or name == "super_symmetry_penalty", f"{name} shows no example"


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_every_loss_says_where_it_comes_from(name: str) -> None:
    doc = inspect.getdoc(lm.LOSSES[name]) or ""
    assert ":func:`" in doc or "(NG" in doc or "(BAS" in doc
