"""Files damaged at random: what is done to their bytes and values, and what may happen then."""

import json
import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from largemargin.errors import LargeMarginError

STUCK_S = 120
"""Seconds after which a case is hung: a guard, hundreds of times what one takes."""
MOST_MEMORY = 2**30
"""Bytes by which the process may grow over all cases of a test."""
MOST_SAID = 20_000
"""Characters of a message."""
WORDS = (
    *(b"-1", b"0", b"1e308", b"-1e-300", b"NaN", b"Infinity", b"9223372036854775808", b"9" * 5000),
    *(b"null", b"true", b"[]", b"{}", b'""', b'"x"', b"'", b'"', b"[" * 2000, b"{" * 60, b"\n- "),
    *(b"\xff", b"\0", b"\xed\xa0\x80", b'"\\ud800"', b"\xef\xbb\xbf", b"\r\n", b",,,", b"&a [*a]"),
    *(b"../../outside", b"/etc/passwd", b"!!python/object/apply:os.system", b"!!int x", b"*a"),
    *(b"2024-01-01", b"%s", b"=1+1", b"<<: *x", b"class_path: os.system", b"1_0", b"0x1p3", b"~"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, -(2**70), 0.5, -1e-300, 1e308, float("nan")),
    *("", "x", "../../outside", "/etc/passwd", "\ud800", "a\0b", "NaN", "x" * 5000, "<b>"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1, "x"], {"class_path": "os.system"}),
)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The bytes of a file after one or several accidents."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        content = chance.choice(ACCIDENTS)(content, chance)
    return content


def _place(content: bytes, chance: random.Random) -> int:
    return chance.randrange(len(content) + 1)


def _flipped(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return content
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _cut(content: bytes, chance: random.Random) -> bytes:
    return content[: _place(content, chance)]


def _without(content: bytes, chance: random.Random) -> bytes:
    first = _place(content, chance)
    return content[:first] + content[first + chance.choice((1, 2, 8, 64)) :]


def _repeated(content: bytes, chance: random.Random) -> bytes:
    first = _place(content, chance)
    part = content[first : first + chance.choice((1, 4, 64))]
    return content[:first] + part * chance.choice((2, 3)) + content[first:]


def _with_word(content: bytes, chance: random.Random) -> bytes:
    """A strange word in place of one that is there, or between two."""
    marks = [i for i, byte in enumerate(content) if byte in b" :,[]{}\n\"'"]
    first = chance.choice(marks) + 1 if marks else 0
    after = next((i for i in marks if i >= first), len(content))
    keep = first if chance.random() < 0.2 else after
    return content[:first] + chance.choice(WORDS) + content[keep:]


def _shuffled(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"\n".join(lines)


def _noise(content: bytes, chance: random.Random) -> bytes:
    first = _place(content, chance)
    return content[:first] + chance.randbytes(chance.choice((1, 8, 100))) + content[first:]


ACCIDENTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flipped, _flipped, _cut, _without, _repeated, _with_word, _with_word, _with_word),
    *(_shuffled, _noise),
)


def edited(content: bytes, chance: random.Random) -> bytes:
    """JSON with one value, or one name, that is another."""
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        return damaged(content, chance)
    places = list(_places(whole))
    if not places:
        return damaged(content, chance)
    inside, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.15:
        del inside[key]
    elif kind < 0.3 and isinstance(inside, dict):
        inside[chance.choice(("", "x", str(key).upper(), "format"))] = inside.pop(key)
    elif kind < 0.4:
        other, name = chance.choice(places)
        inside[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
    else:
        inside[key] = chance.choice(VALUES)
    return json.dumps(whole).encode()


def _keys(inside: Any) -> Any:
    return inside.keys() if isinstance(inside, dict) else range(len(inside))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where values are: what they are in, and by what name or number."""
    if isinstance(value, dict | list):
        for key in _keys(value):
            yield value, key
            yield from _places(value[key])


Case = Callable[[Path, random.Random], Callable[[], object]]
"""Damages files in an empty folder; returns what reads them there."""


class Watch:
    """What the process does to files and to other programs while a case runs."""

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.seen: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in STARTED and "git" not in str(arguments[:2]):
            self.seen.append(f"{event}{arguments[:2]!r}")
        paths = arguments[:2] if event == "os.rename" else arguments[:1]
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        if event == "open" or event in CHANGED:
            for path in paths:
                self._look(event, path)

    def _look(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a handle that is open already
        where = os.path.realpath(os.fsdecode(path))
        own = os.path.realpath(str(self.allowed))
        if "__pycache__" in where:  # of a module that is imported for the first time
            return
        if where != os.devnull and where != own and not where.startswith(own + os.sep):
            self.seen.append(f"{event} {where}")


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGED = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate")
STARTED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
WATCH = Watch()
sys.addaudithook(WATCH)


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """A list of what is done outside of a folder."""
    WATCH.allowed, WATCH.seen = folder, []
    try:
        yield WATCH.seen
    finally:
        WATCH.allowed = None


def survives(case: Case, folder: Path, name: str) -> str:
    """Run a case, and say how it ended: "read" or "refused"."""
    folder.mkdir()
    chance = random.Random(name)
    read = case(folder, chance)

    def stuck(number: int, frame: object) -> None:
        raise AssertionError(f"{name}: hung")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(STUCK_S)
    try:
        with warnings.catch_warnings(), watched(folder) as outside:
            warnings.simplefilter("ignore")
            try:
                read()
                said = None
            except LargeMarginError as error:
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not outside, f"{name}: {outside}"
    assert said is None or len(said) < MOST_SAID, f"{name}: {said}"
    return "read" if said is None else "refused"


def memory() -> int:
    """The most bytes that this process has had so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size
