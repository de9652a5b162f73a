"""Arrays in a .npz or .safetensors file.

Keys: ``train_images``, ``train_labels`` and the same with ``validation_`` (or ``val_``, ``valid_``)
and ``test_``, or just ``images`` and ``labels`` (then a part is held out for validation). Images
are (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, bytes or floating point in [0, 1].
Labels are integers, or names in a .npz file. Names of classes may come as ``classes``: an array of
strings in a .npz file, a JSON list in the metadata of a .safetensors file.
"""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largemargin.app.config import DataConfig
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.image_folders import given_file
from largemargin.app.data.sources.source import Source, class_indices, in_memory, listed
from largemargin.errors import LargeMarginError, optional_module

KEYS = (
    "train_images and train_labels (and the same with validation_ and test_), or images and labels"
)
VALIDATION = ("validation_", "val_", "valid_")


def read(config: DataConfig) -> Source:
    path = given_file(config)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise LargeMarginError(
            f"arrays must be in a {' or '.join(READERS)} file, but path is {config.path}."
        )
    try:
        arrays, names = reader(path)
    except LargeMarginError:
        raise
    except Exception as error:
        raise LargeMarginError(f"{config.path} cannot be read: {error}.") from None
    return from_arrays(arrays, names)


def read_npz(path: Path) -> tuple[dict[str, Any], list[str] | None]:
    np = optional_module("numpy", f"{path.name} needs NumPy")
    if not zipfile.is_zipfile(path):
        raise LargeMarginError(f"{path} cannot be read: it is no .npz file, or not a whole one.")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: without_objects(file, name, path) for name in file.files}
    names = arrays.pop("classes", None)
    return arrays, None if names is None else [str(name) for name in np.atleast_1d(names)]


def without_objects(file: Any, name: str, path: Path) -> Any:
    """An array of the file; one of Python objects, as of a table's column of names, is refused."""
    try:
        return file[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise LargeMarginError(
            f"{path} cannot be read: {name} holds Python objects, which may run a program when "
            f"loaded. Save names as text, {name}.astype(str), and numbers as numbers."
        ) from None


def read_safetensors(path: Path) -> tuple[dict[str, Any], list[str] | None]:
    safetensors = optional_module("safetensors", f"{path.name} needs safetensors")
    with safetensors.safe_open(str(path), framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        names = (file.metadata() or {}).get("classes")
    return arrays, None if names is None else [str(name) for name in json.loads(names)]


Reader = Callable[[Path], tuple[dict[str, Any], list[str] | None]]
READERS: dict[str, Reader] = {".npz": read_npz, ".safetensors": read_safetensors}


def from_arrays(arrays: dict[str, Any], names: list[str] | None) -> Source:
    """A source made of arrays by the keys above; ``names`` are those of the classes."""
    prefixes = split_prefixes(arrays)
    labels = {split: label_list(f"{each}labels", arrays) for split, each in prefixes.items()}
    if names is None:
        # All labels once, numbers by value and names by alphabet.
        classes = tuple(map(str, sorted(set(labels["train"]))))
    else:
        classes = tuple(names)
        if len(set(classes)) < len(classes):
            given = listed(classes)
            raise LargeMarginError(f"classes must be different names, but they are {given}.")
        labels = {split: named(each, names, split) for split, each in labels.items()}
    splits: dict[str, Samples] = {}
    for split, prefix in prefixes.items():
        pixels = image_tensor(f"{prefix}images", arrays[f"{prefix}images"])
        own = class_indices(split, [str(label) for label in labels[split]], classes)
        if len(pixels) != len(own):
            raise LargeMarginError(
                f"the {split} part has {len(pixels)} images but {len(own)} labels."
            )
        splits[split] = in_memory(split, pixels, torch.tensor(own, dtype=torch.long))
    used = {f"{each}{what}" for each in prefixes.values() for what in ("images", "labels")}
    unused = sorted(arrays.keys() - used)
    return Source(classes, splits, record={"keys_ignored": unused} if unused else {})


def split_prefixes(arrays: dict[str, Any]) -> dict[str, str]:
    """How the keys of every part begin that is there; it has images and labels."""
    held = [each for each in VALIDATION if f"{each}images" in arrays]
    if len(held) > 1:
        raise LargeMarginError(
            f"the file has several validation parts: {held[0]}images and {held[1]}images. Keep one."
        )
    train = "train_" if "train_images" in arrays else ""
    prefixes = {"train": train, "validation": (held or VALIDATION)[0], "test": "test_"}
    found = {split: each for split, each in prefixes.items() if f"{each}images" in arrays}
    if "train" not in found or any(f"{each}labels" not in arrays for each in found.values()):
        raise LargeMarginError(
            f"the file must hold {KEYS}, but it holds {listed(sorted(arrays)) or 'nothing'}."
        )
    return found


def named(labels: list[Any], names: list[str], split: str) -> list[Any]:
    """Labels that are positions in ``names``, as names; those that are names already stay."""
    if isinstance(labels[0], str):
        return labels
    strange = sorted({label for label in labels if not 0 <= label < len(names)})
    if strange:
        raise LargeMarginError(
            f"the {split} labels hold {listed([str(each) for each in strange])}, but there are "
            f"{len(names)} names of classes: labels must lie in [0, {len(names)})."
        )
    return [names[label] for label in labels]


def label_list(key: str, arrays: dict[str, Any]) -> list[Any]:
    """Labels as a list of int or str."""
    import numpy as np

    array = np.asarray(arrays[key])
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or len(array) == 0:
        hint = " Of rows with a 1 at the class, store argmax(1)." if array.ndim == 2 else ""
        raise LargeMarginError(
            f"{key} must have one label per image, shape (N,) with N > 0, but its shape is "
            f"{array.shape}.{hint}"
        )
    if array.dtype.kind == "f":
        strange = np.flatnonzero(~(np.isfinite(array) & (array == np.rint(array))))
        if len(strange):
            raise LargeMarginError(
                f"{key} must hold integers or names, but row {strange[0]} holds "
                f"{array[strange[0]]:g}."
            )
        array = array.astype(np.int64)
    if array.dtype.kind not in "iubU":
        raise LargeMarginError(
            f"{key} must hold integers or names, but its dtype is {array.dtype}."
        )
    return list((array.astype(np.int64) if array.dtype.kind in "iub" else array).tolist())


def image_tensor(key: str, array: Any) -> Tensor:
    """Images as (N, C, H, W), uint8 or float32 in [0, 1]."""
    import numpy as np

    array = channels_first(key, np.asarray(array))
    if array.dtype.kind == "f":
        array = array.astype(np.float32)
        check_unit_range(key, array)
    elif array.dtype.kind in "iu":
        if array.dtype != np.uint8 and not (array.min() >= 0 and array.max() <= 255):
            raise LargeMarginError(
                f"{key} in integers must lie in [0, 255], but reach from {array.min()} to "
                f"{array.max()}. Store uint8, or floating point in [0, 1]."
            )
        array = array.astype(np.uint8)
    else:
        raise LargeMarginError(f"{key} must hold numbers, but its dtype is {array.dtype}.")
    # A copy of what may be a view or read-only memory.
    return torch.from_numpy(np.array(array, order="C"))


def check_unit_range(key: str, array: Any) -> None:
    """Images in floating point must lie in [0, 1]."""
    import numpy as np

    low, high = float(array.min()), float(array.max())
    if not np.isfinite((low, high)).all():
        strange = np.flatnonzero(~np.isfinite(array).all((1, 2, 3)))
        raise LargeMarginError(
            f"{key} in floating point must lie in [0, 1], but {len(strange)} of {len(array)} "
            f"images hold NaN or infinity, the first of them image {strange[0]}. Repair or "
            "remove them."
        )
    if low < 0 or high > 1:
        raise LargeMarginError(
            f"{key} in floating point must lie in [0, 1], but reach from {low:g} to {high:g}. "
            "Store bytes (uint8), or undo their normalisation: the model normalises them."
        )


TABLE = (
    "Rows of numbers are for LargeMarginClassifier of largemargin.integrations.scikit_learn, or "
    "for lm.attach in a loop of your own."
)


def channels_first(key: str, array: Any) -> Any:
    if array.ndim == 3:
        array = array[:, None]
    places = [axis for axis in (1, 3) if array.ndim == 4 and array.shape[axis] in (1, 3)]
    if array.size == 0 or not places:
        raise LargeMarginError(
            f"{key} must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, "
            f"but its shape is {array.shape}." + (f" {TABLE}" if array.ndim == 2 else "")
        )
    if len(places) == 2 and array.shape[2] in (1, 3):
        raise LargeMarginError(
            f"{key} of shape {array.shape} may have its channels first or last. Store (N, H, W)."
        )
    # Of two narrow axes the first is that of the channels: (N, 1, H, 3) is an image, if a slim one.
    return array if places[0] == 1 else array.transpose(0, 3, 1, 2)
