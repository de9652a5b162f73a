"""``--data photos/ --model resnet18 --objective cosface``: names without ``.name``."""

from collections.abc import Sequence
from pathlib import Path

CONFIG_FILES = (".yaml", ".yml", ".json")
ARRAY_FILES = (".npz", ".npy", ".safetensors")


def expand(words: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Write out what stands for more: ``--model resnet18`` is ``--model.name resnet18``.

    ``--data`` also takes what the images lie in: a folder (``folder``), a CSV file (``csv``) or an
    array file (``arrays``). YAML files and ``{...}`` stay what they are for jsonargparse, the
    settings of the whole group.

    Example:
        >>> expand(["--model", "resnet18", "--epochs=3"], ["model"])
        ['--model.name=resnet18', '--epochs=3']
    """
    long: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        group = option.removeprefix("--")
        if not option.startswith("--") or group not in groups or not (equals or rest):
            long.append(word)
            continue
        value = value if equals else rest.pop(0)
        long += _written_out(group, value)
    return long


def _written_out(group: str, value: str) -> list[str]:
    if value.endswith(CONFIG_FILES) or value.startswith("{"):
        return [f"--{group}={value}"]
    if group != "data":
        return [f"--{group}.name={value}"]
    path = Path(value).expanduser()
    if path.is_dir() or (not path.suffix and any(mark in value for mark in "/\\~")):
        return ["--data.name=folder", f"--data.path={value}"]
    if path.suffix == ".csv":
        return ["--data.name=csv", f"--data.path={value}"]
    if path.suffix in ARRAY_FILES:
        return ["--data.name=arrays", f"--data.path={value}"]
    return [f"--data.name={value}"]
