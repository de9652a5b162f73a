"""``--data photos/ --model resnet18 --objective cosface``: names without ``.name``."""

import sys
from collections.abc import Sequence
from pathlib import Path

CONFIG_FILES = (".yaml", ".yml", ".json")
LAYOUTS = ("folder", "csv", "arrays", "huggingface")
"""Ways to keep any images, not data sets with a name."""

ARRAY_FILES = (".npz", ".npy", ".safetensors")


def expand(words: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Write out what stands for more: ``--model resnet18`` is ``--model.name resnet18``.

    ``--data`` also takes what the images lie in: a folder (``folder``), a CSV file (``csv``) or an
    array file (``arrays``). The name of a data set is that data set, unless a folder of that name
    lies here and holds images; which was taken is said then. YAML files and ``{...}`` stay what
    they are for jsonargparse, the settings of the whole group.

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
    if value.lower().endswith(CONFIG_FILES) or value.startswith("{"):
        return [f"--{group}={value}"]
    if group != "data":
        return [f"--{group}.name={value}"]
    path = Path(value).expanduser()
    written_as_path = any(mark in value for mark in "/\\~")
    if path.is_dir() and not written_as_path and _is_data_set(value, path):
        return [f"--data.name={value}"]
    suffix = path.suffix.lower()
    if path.is_dir() or (not suffix and written_as_path):
        return ["--data.name=folder", f"--data.path={value}"]
    if suffix == ".csv":
        return ["--data.name=csv", f"--data.path={value}"]
    if suffix in ARRAY_FILES:
        return ["--data.name=arrays", f"--data.path={value}"]
    return [f"--data.name={value}"]


def _is_data_set(name: str, folder: Path) -> bool:
    """Whether the name of this folder means the data set that is called so; either way it says."""
    from largemargin.data.sources import SOURCES
    from largemargin.data.sources.walk import holds_images

    if name not in SOURCES or name in LAYOUTS:
        return False
    if holds_images(folder):
        print(
            f"--data {name}: the images in the folder {name} here are taken. For the data set of "
            f"that name write --data.name {name}.",
            file=sys.stderr,
        )
        return False
    print(
        f"--data {name}: the data set is taken, not the folder {name} here, which holds no images. "
        f"For the folder write ./{name}.",
        file=sys.stderr,
    )
    return True
