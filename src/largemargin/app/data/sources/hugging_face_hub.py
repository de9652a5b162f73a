"""A data set of Hugging Face ``datasets``: by its name on the hub, or a folder on this machine.

A folder may be one that ``save_to_disk`` wrote, or anything that ``load_dataset`` reads. Splits are
called train, validation (or val, valid, dev) and test; the image column must be of type Image.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.image_files import ImageFiles
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, class_indices, listed, ordered
from largemargin.errors import LargeMarginError, optional_module

SPLITS = {
    "train": ("train",),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test",),
}
UNLABELLED = "(no label)"


@dataclass
class Column:
    """The image files in a column of a table, undecoded."""

    table: Any
    name: str

    def __getitem__(self, row: int, /) -> str | bytes | None:
        cell = self.table[row][self.name] or {}
        # A file inside an archive has bytes and a path that leads nowhere.
        found: str | bytes | None = cell.get("bytes") or cell.get("path")
        return found

    def __len__(self) -> int:
        return len(self.table)


def read(config: DataConfig) -> Source:
    tables = load(config)
    check_columns(tables["train"], config)
    names = names_of(tables["train"], config)
    labels = {split: label_names(table, config, names) for split, table in tables.items()}
    # Competitions publish their test images without labels, as -1.
    unlabelled = [
        split for split, each in labels.items() if split != "train" and set(each) == {UNLABELLED}
    ]
    for split, each in labels.items():
        check_labelled(split, each if split not in unlabelled else [], config)
    classes = tuple(names) if names else ordered(set(labels["train"]))
    splits = {
        split: read_split(split, table, class_indices(split, labels[split], classes), config)
        for split, table in tables.items()
        if split not in unlabelled
    }
    return Source(
        classes,
        splits,
        from_files=True,
        licence=tables["train"].info.license or "not known to largemargin: see its page on the hub",
        record={"unlabelled_splits": unlabelled} if unlabelled else {},
    )


def load(config: DataConfig) -> dict[str, Any]:
    """The tables of the splits."""
    found = open_data_set(config)
    tables = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in tables:
        raise LargeMarginError(
            f"{config.path} has no split called train but {listed(sorted(tables))}."
        )
    named = {
        split: next((tables[name] for name in names if name in tables), None)
        for split, names in SPLITS.items()
    }
    return {split: table for split, table in named.items() if table is not None}


def open_data_set(config: DataConfig) -> Any:
    """What ``datasets`` finds: a table, or tables by name. Programs in it are not run."""
    needed = "data 'huggingface' needs datasets"
    datasets = optional_module("datasets", needed, extra="huggingface")
    if config.path is None:
        raise LargeMarginError(
            "data 'huggingface' needs path: the name of a data set on the hub, or a folder."
        )
    folder = Path(config.path).expanduser()
    if not folder.is_dir() and not config.download:
        raise LargeMarginError(
            f"path must be a folder with a Hugging Face data set, but there is none at "
            f"{config.path}. To fetch the data set of that name from the hub, set download: true."
        )
    if any(folder.glob(f"{folder.name}.py")):
        raise LargeMarginError(
            f"{folder} holds {folder.name}.py, a program that loads the data. It is not run: load "
            "the data with it yourself, write it with save_to_disk, and set path to that folder."
        )
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder) if folder.is_dir() else config.path)
    except Exception as error:  # of the network, of the hub, of any reader of files
        raise LargeMarginError(
            f"the data set {config.path} cannot be loaded: {type(error).__name__}: {error}. "
            "Without a network, load it elsewhere, write it with save_to_disk, and set path to "
            "that folder."
        ) from None


def check_columns(table: Any, config: DataConfig) -> None:
    import datasets

    for setting in ("image_column", "label_column"):
        wanted = getattr(config, setting)
        if wanted not in table.column_names:
            raise LargeMarginError(
                f"{config.path} has no column {wanted!r} but {listed(table.column_names)}. "
                f"Set {setting}."
            )
    kind = table.features[config.image_column]
    if not isinstance(kind, datasets.Image):
        raise LargeMarginError(
            f"column {config.image_column!r} of {config.path} must be of type Image, but it is "
            f"{kind}. Turn it into one with cast_column, or store arrays and use data 'arrays'."
        )


def names_of(table: Any, config: DataConfig) -> list[str] | None:
    """Names of the classes where the labels of a table are numbers of names."""
    names: list[str] | None = getattr(table.features[config.label_column], "names", None)
    return names


def label_names(table: Any, config: DataConfig, names: list[str] | None) -> list[str]:
    """The labels of a table as names of classes; numbers are those of its own names, if any."""
    names = names_of(table, config) or names
    labels = table[config.label_column][:]
    if names is None:
        return [as_name(label, config) for label in labels]
    known = dict(enumerate(names)) | {None: UNLABELLED, -1: UNLABELLED}
    return [known.get(label, str(label)) for label in labels]


def as_name(label: Any, config: DataConfig) -> str:
    """A label that is not a number of a name."""
    if isinstance(label, list | dict):
        raise LargeMarginError(
            f"column {config.label_column!r} of {config.path} must hold one label per image, but "
            f"there is {label}. Set label_column, or make a column with one label."
        )
    if label is None or label != label:  # NaN, as tables have it where a number is missing
        return UNLABELLED
    # A column of integers with gaps is one of floating point numbers.
    return str(int(label) if isinstance(label, float) and label.is_integer() else label)


def check_labelled(split: str, labels: list[str], config: DataConfig) -> None:
    missing = [row for row, label in enumerate(labels) if label == UNLABELLED]
    if missing:
        raise LargeMarginError(
            f"{len(missing)} of {len(labels)} {split} images of {config.path} have no label, the "
            f"first of them row {missing[0]}. Leave them out with filter, and save the rest."
        )


def read_split(split: str, table: Any, labels: list[int], config: DataConfig) -> Samples:
    import datasets

    raw = table.cast_column(config.image_column, datasets.Image(decode=False))
    images = ImageFiles(
        Column(raw.select_columns([config.image_column]), config.image_column), range(len(raw))
    )
    ids = tuple(f"{split}/{row}" for row in range(len(raw)))
    return Samples(torch.tensor(labels, dtype=torch.long), ids, files=images)
