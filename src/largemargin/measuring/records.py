"""Frozen records that go to JSON and come back equal, NaN and infinities included."""

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from largemargin.errors import LargeMarginError


def plain(value: Any) -> Any:
    """A record as dicts, lists, strings and finite numbers: what strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # "NaN", "Infinity" or "-Infinity"
    if isinstance(value, str | int | float | None):
        return value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    raise LargeMarginError(
        f"{type(value).__name__} has no place in a result; it holds numbers, texts and records."
    )


def revive(kind: Any, value: Any) -> Any:
    """The value of type ``kind`` that :func:`plain` made this from."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else revive(_member_of(inner, value), value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(revive(each, part) for each, part in zip(kinds, value, strict=True))
    if origin is dict:
        return {inner[0](key): revive(inner[1], each) for key, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return _revive_record(kind, value)
    return float(value) if kind is float else value


def _member_of(union: tuple[Any, ...], value: Any) -> Any:
    """Which type of a union a value is of: of a record and the number that stands for one."""
    kinds = [each for each in union if each is not type(None)]
    if len(kinds) > 1:
        record = isinstance(value, dict)
        kinds = [each for each in kinds if dataclasses.is_dataclass(each) == record]
    (kind,) = kinds
    return kind


def _revive_record(kind: Any, value: Any) -> Any:
    _check_format(kind, value)
    renamed = getattr(kind, "RENAMED", {})
    value = {renamed.get(name, name): each for name, each in value.items()}
    unknown = sorted(set(value) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise LargeMarginError(
            f"the file holds {unknown} that this version does not know. It was written by a newer "
            "one; upgrade largemargin."
        )
    hints = typing.get_type_hints(kind)
    return kind(**{name: revive(hints[name], each) for name, each in value.items()})


def _check_format(kind: Any, value: Any) -> None:
    """Records with a ``format`` say which they were written in; newer ones mean something else."""
    known = getattr(kind, "format", None)
    found = value.get("format", 0) if isinstance(value, dict) else 0
    if isinstance(known, int) and (not isinstance(found, int) or found > known):
        raise LargeMarginError(
            f"the file was written by a newer version of largemargin: its format is {found!r}, and "
            f"this one reads up to {known}. Upgrade it: pip install --upgrade largemargin"
        )


@contextmanager
def whole_file(
    path: str | Path, *, newline: str | None = None, errors: str | None = None
) -> Iterator[IO[str]]:
    """A UTF-8 file to write, there in the end whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline=newline, errors=errors) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Record:
    """A result that can be written to JSON, read back, and compared: NaN equals NaN."""

    RENAMED: ClassVar[dict[str, str]] = {}
    """Fields that earlier versions wrote under another name: from that name to today's."""

    def __init_subclass__(cls) -> None:
        # Before the dataclass decorator, which leaves alone what a class has already.
        cls.__eq__ = Record.__eq__  # type: ignore[method-assign]
        cls.__hash__ = Record.__hash__  # type: ignore[method-assign]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return plain(self) == plain(other)  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = plain(self)
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        made: Self = revive(cls, data)
        return made

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        with whole_file(path) as file:
            file.write(self.to_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, LargeMarginError):
                raise LargeMarginError(f"{path}: {error}") from error
            raise LargeMarginError(
                f"{path} is not a {cls.__name__} written by save(): {error}."
            ) from error
