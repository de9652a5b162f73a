"""Settings as YAML files and plain dictionaries, and back."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from largemargin.app.config import RunConfig
from largemargin.app.training.files import CONFIG, KEY, VERSIONS, check_version, write_text
from largemargin.errors import LargeMarginError, optional_module

Settings = TypeVar("Settings")
STAMP = (KEY, "largemargin")
"""What a file may hold beside its settings."""


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain values: dictionaries, lists, numbers and strings."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The run that ``values`` describe; what they leave out has its default.

    ``format_version`` may stand beside the settings: files of a newer version are refused.

    Example:
        >>> from_dict({"epochs": 3, "data": {"name": "mnist"}}).data.name
        'mnist'
    """
    if isinstance(values, Mapping):
        check_version(values, CONFIG, "the configuration")
        values = {name: each for name, each in values.items() if name not in STAMP}
    return settings_from(values, RunConfig)


def settings_from(values: Mapping[str, Any], kind: type[Settings], place: str = "") -> Settings:
    """The same for any group of settings; ``place`` names it in messages."""
    if not isinstance(values, Mapping):
        raise LargeMarginError(
            f"{place or 'the configuration'} must be a group of settings, but {values!r} was given."
        )
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), known, n=3, cutoff=0.5) or sorted(known)
            raise LargeMarginError(
                f"{_joined(place, name)} is no setting. Closest: {', '.join(close)}."
            )
    hints = get_type_hints(kind)
    filled = {
        name: _typed(value, hints[name], _joined(place, name)) for name, value in values.items()
    }
    for name, field in known.items():
        if name not in filled and field.default is MISSING and field.default_factory is MISSING:
            raise LargeMarginError(f"{_joined(place, name)} is missing.")
    return kind(**filled)


def _joined(place: str, name: object) -> str:
    return f"{place}.{name}" if place else str(name)


def _typed(value: Any, hint: Any, place: str) -> Any:
    """``value`` as ``hint``; integers are accepted as floats, nothing else is converted."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = get_args(hint)
        if value is None and NoneType in kinds:
            return None
        return _typed(value, next(kind for kind in kinds if kind is not NoneType), place)
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, hint):
            return value
        return settings_from(value, hint, place)
    if origin is Literal:
        if value not in get_args(hint):
            names = ", ".join(str(each) for each in get_args(hint))
            raise LargeMarginError(f"{place} must be one of {names}, but {value!r} was given.")
        return value
    if origin is tuple:
        return _tuple(value, get_args(hint)[0], place)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise LargeMarginError(f"{place} must be a group of settings, but {value!r} was given.")
        _refuse_class_paths(value, place)
        kind = get_args(hint)[1]
        return {name: _typed(each, kind, _joined(place, name)) for name, each in value.items()}
    return _scalar(value, hint, place)


def _tuple(value: Any, kind: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise LargeMarginError(f"{place} must be a list, but {value!r} was given.")
    return tuple(_typed(each, kind, f"{place}[{i}]") for i, each in enumerate(value))


def _refuse_class_paths(value: Any, place: str) -> None:
    """Free settings are values too: nothing in them is imported or built."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            raise LargeMarginError(
                f"{place} holds class_path {value['class_path']!r}. Settings are values, and "
                "building a class that a file names would run code."
            )
        for name, each in value.items():
            _refuse_class_paths(each, _joined(place, name))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _refuse_class_paths(each, f"{place}[{index}]")


def _scalar(value: Any, kind: Any, place: str) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 reads 1e-4 as a string: there is no point in it
            value = float(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise LargeMarginError(
            f"{place} must be a {kind.__name__}, but {value!r} ({type(value).__name__}) was given."
        )
    return float(value) if kind is float else value


def read_config(path: str | Path) -> RunConfig:
    """The run that a YAML file describes."""
    return from_dict(read_yaml(path))


def yaml_reader() -> Any:
    return optional_module("yaml", "runs keep their settings as YAML, which needs PyYAML")


def read_yaml(path: str | Path) -> dict[str, Any]:
    yaml = yaml_reader()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LargeMarginError(
            f"cannot read {path}: {error.strerror or error}. Pass the path of a YAML file of "
            "settings or of a recipe, seen from this folder."
        ) from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LargeMarginError(f"{path} is not YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise LargeMarginError(f"{path} must hold settings (name: value), but holds {values!r}.")
    return values


def write_config(config: Any, path: str | Path) -> None:
    """Write a configuration as YAML, with every value, also the defaults."""
    yaml = yaml_reader()
    values = {KEY: VERSIONS[CONFIG], **to_dict(config)}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    write_text(Path(path), text)
