"""Which lines of the package each test runs, and for how long.

A test can only kill a mutant whose statement it runs. Lines are noted by function, so that the
notes hold when something else in the file changes.
"""

import ast
import hashlib
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Function:
    """A function or method of a file: ``name`` is stable, ``key`` changes with its text."""

    name: str
    key: str
    first: int
    last: int


@cache
def functions(path: Path, file: str) -> list[Function]:
    source = path.read_text(encoding="utf-8")
    lines, found = source.splitlines(), []
    for name, node in _definitions(ast.parse(source).body, ""):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        last = node.end_lineno or node.lineno
        text = "\n".join(lines[first - 1 : last])
        mark = hashlib.sha256(text.encode()).hexdigest()[:8]
        found.append(Function(f"{file} {name}", f"{file} {name} {mark}", first, last))
    return found


def _definitions(body: list[ast.stmt], scope: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{scope}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{scope}{node.name}", node


@cache
def function_at(path: Path, file: str, line: int) -> Function | None:
    return next((f for f in functions(path, file) if f.first <= line <= f.last), None)


class Recorder:
    """Notes the lines of rooms of a package that run while it is on."""

    def __init__(self, folder: Path, rooms: tuple[str, ...]) -> None:
        self.folder, self.prefix, self.rooms = folder, f"{folder}/", rooms
        self.folders = {f"{folder}/{room}" for room in rooms}
        self.lines: dict[str, set[int]] = defaultdict(set)

    def __enter__(self) -> "Recorder":
        self.began = time.monotonic()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)
        self.seconds = time.monotonic() - self.began

    def _enter(self, frame: FrameType, _: str, __: Any) -> Any:
        file = frame.f_code.co_filename
        if file.rpartition("/")[0] not in self.folders:
            return None
        seen = self.lines[file.removeprefix(self.prefix)]

        def line(inner: FrameType, _: str, __: Any) -> Any:
            seen.add(inner.f_lineno)
            return line

        return line

    def row(self) -> dict[str, Any]:
        """Lines, counted from the head of their function, as the bits of hexadecimal numbers."""
        masks: dict[str, int] = defaultdict(int)
        for file, numbers in self.lines.items():
            for number in numbers:
                function = function_at(self.folder / file, file, number)
                if function is not None:
                    masks[function.key] |= 1 << (number - function.first)
        lines = {key: f"{mask:x}" for key, mask in masks.items()}
        seconds = round(self.seconds, 3)
        return {"seconds": seconds, "package": mark_of(self.folder, self.rooms), "lines": lines}


class Index:
    """Finds the tests that run a line."""

    def __init__(
        self, package: Path, rooms: tuple[str, ...], notes: dict[str, dict[str, Any]]
    ) -> None:
        self.package = package
        self.masks: dict[str, dict[str, int]] = defaultdict(dict)
        self.by_name: dict[str, set[str]] = defaultdict(set)
        self.earlier: dict[str, set[str]] = defaultdict(set)
        """Tests by functions and files, of those that were watched on other source."""
        now = mark_of(package, rooms)
        for test, row in notes.items():
            for key, mask in row["lines"].items():
                file, name, _ = key.split(" ")
                self.masks[key][test] = int(mask, 16)
                for place in (f"{file} {name}", file):
                    self.by_name[place].add(test)
                    if row.get("package") != now:
                        self.earlier[place].add(test)

    def tests(self, file: str, line: int) -> set[str]:
        """Those of the whole function where it has changed since; of a new one, of the file."""
        path = self.package / file
        function = function_at(path, file, line)
        if function is None:
            return self.by_name[file]
        known = self.masks[function.key]
        lines = statement_lines(ast.parse(path.read_text(encoding="utf-8")), line)
        wanted = sum(1 << (number - function.first) for number in lines)
        running = {test for test, mask in known.items() if mask & wanted}
        is_new = function.name not in self.earlier
        others = self.earlier[file] if is_new else self.by_name[function.name]
        return running | (others - known.keys())

    def naming(self, file: str, names: set[str]) -> set[str]:
        """Tests that run a function that speaks of one of the names; if none does, of the file."""
        words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b") if names else None
        found: set[str] = set()
        for path in sorted(self.package.rglob("*.py")) if words else ():
            lines = path.read_text(encoding="utf-8").splitlines()
            for each in functions(path, path.relative_to(self.package).as_posix()):
                if words.search("\n".join(lines[each.first - 1 : each.last])):
                    found |= self.by_name[each.name]
        return found or self.by_name[file]


def most_varied(tests: Iterable[str], notes: dict[str, dict[str, Any]]) -> list[str]:
    """One case of every test function, quickest first, then the second of each, and so on."""
    turn: Counter[str] = Counter()
    places = {}
    for name in sorted(tests, key=lambda name: (notes[name]["seconds"], name)):
        function = name.partition("[")[0]
        places[name] = turn[function]
        turn[function] += 1
    return sorted(places, key=lambda name: places[name])


def affordable(tests: list[str], notes: dict[str, dict[str, Any]], budget: float) -> list[str]:
    """The first of them, for so many seconds; at least one."""
    ends = list(accumulate(notes[name]["seconds"] for name in tests))
    return [name for name, end in zip(tests, ends, strict=True) if end <= budget] or tests[:1]


@cache
def mark_of(package: Path, rooms: tuple[str, ...]) -> str:
    """Changes with the source of the rooms."""
    whole = hashlib.sha256()
    for room in rooms:
        for path in sorted((package / room).glob("*.py")):
            whole.update(path.read_bytes())
    return whole.hexdigest()[:8]


def statement_lines(tree: ast.Module, line: int) -> range:
    """Lines of the statement around a line: of one with blocks, those of its head.

    The head of a function, where its defaults stand, runs when it is defined: then the lines of
    the whole function.
    """
    innermost = range(line, line + 1)
    for node in ast.walk(tree):  # outer statements come before those inside
        if not isinstance(node, ast.stmt) or node.end_lineno is None:
            continue
        if not node.lineno <= line <= node.end_lineno:
            continue
        body = getattr(node, "body", None)
        first = body[0].lineno if body else node.end_lineno + 1
        if isinstance(node, ast.FunctionDef):
            innermost = range(first, node.end_lineno + 1)
        elif line < first:
            innermost = range(node.lineno, first)
    return innermost
