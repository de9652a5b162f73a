"""The public interface is the one that was agreed on: a change shows up as a difference."""

import difflib
import importlib
from types import ModuleType

import pytest

pytest.importorskip("griffe", reason="mkdocstrings is not installed")

import make_public_api
from site_pages import api


def test_the_public_interface_is_that_of_the_list() -> None:
    agreed = make_public_api.FILE.read_text(encoding="utf-8").splitlines()
    found = make_public_api.listing().splitlines()
    difference = difflib.unified_diff(agreed, found, "docs/public_api.txt", "the code", lineterm="")
    shown = "\n".join(difference)
    assert not shown, (
        f"the public interface changed:\n{shown}\n\nIf that is meant, run "
        "`python docs/make_public_api.py`, commit the new list, and say it in CHANGELOG.md; "
        "docs/stability.md says what users were promised."
    )


@pytest.mark.parametrize("name", ["largemargin", "largemargin.functional", "largemargin.geometry"])
def test_the_list_is_what_importing_gives(name: str) -> None:
    module = importlib.import_module(name)
    public = {each for each in module.__all__ if not each.startswith("__")}
    # lm.report is a room that can be called; it is listed for the call.
    rooms = {each for each in public if isinstance(getattr(module, each), ModuleType)} - {"report"}
    assert public - rooms == set(api.modules()[name])


def test_names_that_are_imported_later_are_offered_too() -> None:
    module = importlib.import_module("largemargin")
    assert set(module.__all__) <= set(dir(module))  # what an interpreter completes


def test_signatures_are_read_from_the_source() -> None:
    lines = make_public_api.FILE.read_text(encoding="utf-8").splitlines()
    cosface = next(line for line in lines if line.startswith("def cosface("))
    assert "*, margin: float | Tensor = 0.2, scale: Scale = 'auto', **how" in cosface
    assert "class CosFace(Loss)" in lines


def test_every_public_name_has_one_entry_in_the_reference() -> None:
    pages = "\n".join(api.pages().values())
    for path in api.homes():
        assert pages.count(f"::: {path}\n") == 1, path
