"""Puts a mutant into a process that has imported the package already."""

import ast
import gc
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutants.changes import Mutant

Name = tuple[str, int]
"""Qualified name of a function, and which of several with the same."""


def swappable(mutant: Mutant) -> bool:
    """Inside a function: what a module or a class computes once has been computed already."""
    return bool(mutant.scope) and not mutant.scope.split(".")[-1].lstrip("_")[:1].isupper()


class Swap:
    """Functions of the imported package, and how to give them other code."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.functions: dict[str, list[types.FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is types.FunctionType:  # isinstance would ask objects that warn
                self.functions[each.__code__.co_filename].append(each)

    def put(self, mutant: Mutant) -> dict[str, Any]:
        """The names of the changed module, after every function in it has its changed code."""
        path = str(self.package / mutant.file)
        source = Path(path).read_text(encoding="utf-8")
        here = self.functions[path]
        names = here[0].__globals__
        start = mutant.source.find("\n_tensors_detached")
        if start >= 0:
            exec(mutant.source[start:], names)
        _put_defaults(here, source, mutant.source, names)
        old, new = (
            dict(_named(compile(text, path, "exec", dont_inherit=True)))
            for text in (source, mutant.source)
        )
        known = {_place(code): name for name, code in old.items()}
        for function in here:
            name = known.get(_place(function.__code__))
            if name in new:
                function.__code__ = new[name]
        return names


def _place(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _named(code: types.CodeType) -> Iterator[tuple[Name, types.CodeType]]:
    count: Counter[str] = Counter()
    for each in _inside(code):
        yield (each.co_qualname, count[each.co_qualname]), each
        count[each.co_qualname] += 1


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inside(constant)


def _put_defaults(
    functions: list[types.FunctionType], old: str, new: str, names: dict[str, Any]
) -> None:
    pairs = zip(_definitions(old), _definitions(new), strict=False)
    for before, after in pairs:
        if ast.dump(before.args) == ast.dump(after.args):
            continue
        heads = range(min([before.lineno, *_lines(before)]), before.lineno + 1)
        for function in functions:
            if function.__name__ == before.name and function.__code__.co_firstlineno in heads:
                _set_defaults(function, after.args, names)


def _definitions(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]


def _lines(node: ast.FunctionDef) -> list[int]:
    return [each.lineno for each in node.decorator_list]


def _set_defaults(
    function: types.FunctionType, arguments: ast.arguments, names: dict[str, Any]
) -> None:
    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "<default>", "eval"), names)

    if arguments.defaults:
        function.__defaults__ = tuple(value(node) for node in arguments.defaults)
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = {name.arg: value(node) for name, node in named if node is not None}
    if found:
        function.__kwdefaults__ = found
