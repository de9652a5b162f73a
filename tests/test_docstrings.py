"""Every example in a docstring is run, and every public function and loss has one."""

import doctest
import importlib
import inspect
import math
import pkgutil
import re
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
    if ">>>" not in doc:
        # A loss's function refers to the class, which carries the documentation of both.
        told_by = re.search(r":class:`(\w+)`", doc)
        assert told_by, f"{name} shows no example and names no class that does"
        doc = inspect.getdoc(getattr(lm, told_by[1])) or ""
    assert ">>>" in doc, f"{name} shows no example"


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_every_loss_says_where_it_comes_from(name: str) -> None:
    doc = vars(lm.LOSSES[name])["__doc__"]
    assert re.search(r"\((NGY|NGR|ZHO|KOB|ODN|BAS)-|\(LMD eq\.", doc.split("\n\n")[0])


@pytest.mark.parametrize("name", sorted(lm.LOSSES))
def test_every_class_explains_itself(name: str) -> None:
    """Hovering ``lm.CosFace`` shows what each argument is, and an example."""
    kind = lm.LOSSES[name]
    told = "\n".join(inspect.cleandoc(each.__doc__ or "") for each in kind.__mro__[:-1])
    assert ">>>" in (inspect.getdoc(kind) or "")
    for argument in inspect.signature(kind).parameters:
        assert re.search(rf"^    (\w+, )*{argument}(,| and|:)", told, re.MULTILINE), argument
