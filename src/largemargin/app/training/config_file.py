"""Settings as YAML files and plain dictionaries, and back."""

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from largemargin.app.config import RunConfig
from largemargin.app.training.files import CONFIG, DIGITS, KEY, VERSIONS, check_version, write_text
from largemargin.errors import LargeMarginError, optional_module

Settings = TypeVar("Settings")
STAMP = (KEY, "largemargin")
"""What a file may hold beside its settings."""

MOST_BYTES, MOST_VALUES, DEEPEST = 2**20, 100_000, 50
"""Of a YAML file: a hundred bytes of nested aliases may stand for any number of values."""
SHOWN = 300
"""Characters of a value in a message."""
TAGS = ("map", "seq", "str", "int", "float", "bool", "null", "merge")
"""What YAML may hold. Dates are text: no setting is a date, but a name may look like one."""
TIMESTAMP = "tag:yaml.org,2002:timestamp"


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain values: dictionaries, lists, numbers and strings.

    Settings that came later than others (``later`` in their metadata) are there where they are set,
    so that runs, studies and plans of older releases are described as they were.
    """
    return {
        each.name: _plain(getattr(config, each.name))
        for each in fields(config)
        if "later" not in each.metadata or getattr(config, each.name) != each.default
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def flat(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Values in groups by their whole names, as ``optimizer.lr``; an empty group stays one."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inside = flat(value, separator) if isinstance(value, dict) else {}
        whole = {f"{name}{separator}{each}": inside[each] for each in inside}
        found |= whole or {name: value}
    return found


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
            f"{place or 'the configuration'} must be a group of settings, but {_shown(values)} was "
            "given."
        )
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    _refuse_unknown(values, known, place)
    filled = {
        name: _typed(value, hints[name], _joined(place, name)) for name, value in values.items()
    }
    for name, field in known.items():
        if name not in filled and field.default is MISSING and field.default_factory is MISSING:
            raise LargeMarginError(f"{_joined(place, name)} is missing.")
    return kind(**filled)


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any], place: str) -> None:
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), known, n=3, cutoff=0.5) or sorted(known)
            raise LargeMarginError(
                f"{_joined(place, name)} is no setting. Closest: {', '.join(close)}."
            )


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
        return value if isinstance(value, hint) else settings_from(value, hint, place)
    if origin is Literal:
        return _choice(value, get_args(hint), place)
    if origin is tuple:
        return _tuple(value, get_args(hint)[0], place)
    if origin is dict:
        return _group(value, get_args(hint)[1], place)
    return _scalar(value, hint, place)


def _choice(value: Any, names: tuple[Any, ...], place: str) -> str:
    if isinstance(value, str) and value in names:
        return value
    listed = ", ".join(map(str, names))
    raise LargeMarginError(f"{place} must be one of {listed}, but {_shown(value)} was given.")


def _group(value: Any, kind: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise LargeMarginError(
            f"{place} must be a group of settings, but {_shown(value)} was given."
        )
    _refuse_class_paths(value, place)
    return {name: _typed(each, kind, _joined(place, name)) for name, each in value.items()}


def _tuple(value: Any, kind: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise LargeMarginError(f"{place} must be a list, but {_shown(value)} was given.")
    return tuple(_typed(each, kind, f"{place}[{i}]") for i, each in enumerate(value))


def _refuse_class_paths(value: Any, place: str) -> None:
    """Free settings are values too: nothing in them is imported or built."""
    if isinstance(value, Mapping):
        if "class_path" in value:
            raise LargeMarginError(
                f"{place} holds class_path {_shown(value['class_path'])}. Settings are values, and "
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
            f"{place} must be a {kind.__name__}, but {_shown(value)} ({type(value).__name__}) was "
            "given."
        )
    return float(value) if kind is float else value


def read_config(path: str | Path) -> RunConfig:
    """The run that a YAML file describes."""
    return from_dict(read_yaml(path))


def yaml_reader() -> Any:
    return optional_module("yaml", "runs keep their settings as YAML, which needs PyYAML")


def read_yaml(path: str | Path, content: str = "settings (name: value)") -> dict[str, Any]:
    """The values of a file, which holds ``content``."""
    try:
        with open(path, "rb") as file:
            found = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise LargeMarginError(
            f"cannot read {path}: {why}. Pass the path of a YAML file of "
            "settings or of a recipe, seen from this folder."
        ) from error
    if len(found) > MOST_BYTES:
        raise LargeMarginError(f"{path} is larger than {MOST_BYTES:,} bytes: it holds no settings.")
    try:
        values = load_yaml(found.decode())
    except UnicodeDecodeError as error:
        raise LargeMarginError(f"{path} is not text in UTF-8: {error}. Save it as such.") from error
    except yaml_reader().YAMLError as error:
        raise LargeMarginError(f"{path} is not YAML: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise LargeMarginError(f"{path} must hold {content}, but holds {_shown(values)}.")
    return values


def load_yaml(text: str) -> Any:
    """What a text of YAML stands for.

    Raises:
        yaml.YAMLError: for what is no YAML, or none of settings; it names the line.
    """
    yaml = yaml_reader()
    plain = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader = bounded(type("Loader", (plain,), {}))
    loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag != TIMESTAMP]
        for first, forms in plain.yaml_implicit_resolvers.items()
    }
    parser = loader(text)
    try:
        return parser.get_single_data()
    finally:
        parser.dispose()


def bounded(loader: Any) -> Any:
    """A loader of YAML that refuses what is small as a file and huge as a value."""

    class Bounded(loader):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            deep = _first_too_deep(text)
            if deep is not None:
                raise _refusal(f"values are nested more than {DEEPEST} deep", deep)
            super().__init__(text)

        def construct_document(self, node: Any) -> Any:
            _extent(node, 0, {})
            try:
                return super().construct_document(node)
            except (ValueError, LookupError) as error:  # !!int x, !!bool x
                raise _refusal(f"a value that is not of its tag: {error}", node) from error

    return Bounded


def _refusal(problem: str, node: Any) -> Exception:
    refusal: Exception = yaml_reader().MarkedYAMLError(
        problem=problem, problem_mark=node.start_mark
    )
    return refusal


def _first_too_deep(text: str) -> Any:
    """What stands too deep, or None: composing recurses without a limit."""
    yaml, depth = yaml_reader(), 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        start = isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent)
        end = isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent)
        depth += start - end
        if depth > DEEPEST:
            return event
    return None


def _extent(node: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many values a node of YAML stands for, and how deep they are nested."""
    if id(node) in known:
        return known[id(node)]
    if node.tag.rpartition(":")[2] not in TAGS:
        raise _refusal(f"{node.tag} is no kind of setting", node)
    if node.id == "scalar":
        if node.tag.endswith(":int") and len(node.value) > DIGITS:
            raise _refusal(f"a number of {len(node.value):,} digits; quote it if it is text", node)
        return 1, 0
    if node.id == "mapping":
        _refuse_twice([name for name, _ in node.value])
    parts = itertools.chain.from_iterable(node.value) if node.id == "mapping" else node.value
    inside = (_extent(each, depth + 1, known) for each in parts if depth <= DEEPEST)
    sizes, depths = zip((1, 0), *inside, strict=True)
    values, deep = sum(sizes), 1 + max(depths)
    if values > MOST_VALUES or max(deep, depth) > DEEPEST:
        raise _refusal("too many values; aliases (*name) stand for many, or for themselves", node)
    known[id(node)] = values, deep
    return values, deep


def _refuse_twice(names: list[Any]) -> None:
    """Of a name that stands twice YAML's loaders take the last, whatever stood first."""
    seen: set[tuple[str, str]] = set()
    for name in names:
        if name.id == "scalar" and not name.tag.endswith(":merge"):
            if (name.tag, name.value) in seen:
                raise _refusal(f"{name.value[:SHOWN]!r} stands here a second time", name)
            seen.add((name.tag, name.value))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def write_config(config: Any, path: str | Path) -> None:
    """Write a configuration as YAML, with every value, also the defaults."""
    yaml = yaml_reader()
    values = {KEY: VERSIONS[CONFIG], **to_dict(config)}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    write_text(Path(path), text)
