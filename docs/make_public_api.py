"""Writes docs/public_api.txt: every public name and signature, one per line.

Run ``python docs/make_public_api.py`` when the interface changes on purpose; a test shows the
difference until then. Signatures are read from the source text, so that the list does not depend
on the versions of Python and torch; the names of losses are asked of ``lm.LOSSES``.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from site_pages import api

FILE = Path(__file__).parent / "public_api.txt"


def listing() -> str:
    lines = []
    for module, names in api.modules().items():
        lines += [f"[{module}]", *(line for name in names for line in described(module, name)), ""]
    return "\n".join(lines)


def described(module: str, name: str) -> Iterator[str]:
    """A name, and for classes what they hold."""
    found = api.find(module, name)
    home = api.homes()[found.path]
    if home != (module, name):
        yield f"{name} = {home[0]}.{home[1]}"
    elif found.is_class:
        bases = ", ".join(str(base) for base in found.bases)
        yield f"class {name}({bases})"
        # Attributes of other classes are set in __init__, by the arguments that are listed already.
        plain = "__init__" not in found.members
        for member in found.members.values():
            if _is_public(member) and (plain or _is_callable(member)):
                yield f"    {_member(member)}"
    else:
        yield _member(found)


def _is_public(member: griffe.Object | griffe.Alias) -> bool:
    if member.is_alias:
        return False
    return member.name == "__init__" or not member.name.startswith("_")


def _is_callable(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_function or "property" in member.labels


def _member(member: griffe.Object | griffe.Alias) -> str:
    if member.is_function:
        return f"def {member.name}{_signature(member)}"
    kind = "property " if "property" in member.labels else ""
    annotation = f": {member.annotation}" if getattr(member, "annotation", None) else ""
    value = getattr(member, "value", None)
    if member.parent is not None and member.parent.is_module:
        keys = re.findall(r"'(\w+)': ", str(value)) or _keys(member)
        return f"{member.name}{annotation}" + (f" of {', '.join(keys)}" if keys else "")
    default = f" = {value}" if value is not None and annotation and not kind else ""
    return f"{kind}{member.name}{annotation}{default}"


def _keys(member: griffe.Object | griffe.Alias) -> list[str]:
    """Keys of a table that is derived, as ``LOSSES`` is from the losses."""
    if not str(member.annotation).startswith("dict[str, type["):
        return []
    assert member.parent is not None
    return list(getattr(importlib.import_module(member.parent.path), member.name))


def _signature(function: griffe.Object | griffe.Alias) -> str:
    """As it is written in the source, on one line."""
    shown, marked = [], False
    for parameter in function.parameters:
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not marked:
            shown.append("*")
        marked = marked or kind in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        )
        stars = {
            griffe.ParameterKind.var_positional: "*",
            griffe.ParameterKind.var_keyword: "**",
        }.get(kind, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}"
        shown.append(text)
    returned = f" -> {function.returns}" if function.returns is not None else ""
    return f"({', '.join(shown)}){returned}"


if __name__ == "__main__":
    FILE.write_text(listing(), encoding="utf-8")
    sys.stdout.write(f"wrote {FILE.name}\n")
