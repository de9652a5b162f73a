"""What a run trains on and what it is judged on; never more."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.augment import Augment
from largemargin.app.data.load import Data, load_data
from largemargin.app.data.modify import modified
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.app.training.config_file import settings_from
from largemargin.errors import LargeMarginError
from largemargin_papers.benchmark.protocol import Situation

HELD_OUT_ALPHABETS = 6


class Task(NamedTuple):
    """Images of a run."""

    data: Data
    """Training images alone: no validation and no test images, so that none can be looked at."""
    judged: Samples


class Images:
    """Tasks by situation and seed; the files of a data set are read once.

    Args:
        paths: where data sets lie, by name; a .npz or .safetensors file stands for the data set.
    """

    def __init__(self, paths: Mapping[str, str] | None = None) -> None:
        self.paths = dict(paths or {})
        self.whole: dict[str, Data] = {}
        self.made: dict[tuple[str, int], dict[str, Any]] = {}

    def task(self, situation: Situation, seed: int, split: str) -> Task:
        """The images of a seed: its part of the training images, and a split to be judged on."""
        key = (situation.name, seed)
        if key not in self.made:
            build = self._omniglot if situation.data["name"] == "omniglot" else self._split
            self.made[key] = build(situation, seed)
        made = self.made[key]
        return Task(made["data"], made[split])

    def forget(self, situation: Situation) -> None:
        """Let go of the tasks of a situation; files stay read."""
        for key in [key for key in self.made if key[0] == situation.name]:
            del self.made[key]

    def _split(self, situation: Situation, seed: int) -> dict[str, Any]:
        config = settings_from({**situation.data, "seed": seed}, DataConfig, "data")
        whole = self._read(config)
        if whole.test is None:
            raise LargeMarginError(f"{config.name} has no test images to compare methods on.")
        left = round(len(whole.train) * (1 - config.validation))
        if situation.images is not None:
            config = replace(config, fraction=situation.images / left)
        source = Source(whole.classes, {"train": whole.train})
        changed, record = modified(source, config)
        train = changed.train
        if situation.images not in (None, len(train)):
            raise LargeMarginError(
                f"{situation.name} is about {situation.images} training images, but "
                f"{len(train)} were taken."
            )
        data = replace(
            whole,
            train=train,
            validation=None,
            test=None,
            augment=Augment(config.augment) if config.augment != "auto" else whole.augment,
            record={"modifiers": record},
        )
        return {"data": data, "validation": changed.splits["validation"], "test": whole.test}

    def _read(self, config: DataConfig) -> Data:
        """All training and test images as they are stored."""
        if config.name not in self.whole:
            plain = DataConfig(config.name, validation=0.0)
            path = self.paths.get(config.name)
            if path is not None:
                arrays = path.endswith((".npz", ".safetensors"))
                plain = replace(plain, name="arrays" if arrays else config.name, path=path)
            self.whole[config.name] = load_data(plain)
        return self.whole[config.name]

    def _omniglot(self, situation: Situation, seed: int) -> dict[str, Any]:
        """Characters of some alphabets to train on, of others to be judged on.

        Of the 30 background alphabets six, drawn by the seed, are for validation. The 20 of the
        evaluation set are the test.
        """
        path = Path(self.paths.get("omniglot", "data/omniglot.npz"))
        if not path.is_file():
            raise LargeMarginError(
                f"omniglot is not at {path}. Make the file from the original archive with "
                "papers/benchmark/pack.py, and name it: --data omniglot=FILE."
            )
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("images", "labels", "names", "evaluation")}
        alphabets = [str(name).split("/")[0] for name in arrays["names"]]
        background = sorted(
            {name for name, late in zip(alphabets, arrays["evaluation"], strict=True) if not late}
        )
        held_out = set(random.Random(f"omniglot {seed}").sample(background, HELD_OUT_ALPHABETS))
        parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
        for label, name in enumerate(alphabets):
            late = bool(arrays["evaluation"][label])
            parts["test" if late else "validation" if name in held_out else "train"].append(label)
        pixels = torch.from_numpy(arrays["images"])[:, None]
        labels = torch.from_numpy(arrays["labels"].astype("int64"))
        splits = {name: _of_classes(name, pixels, labels, each) for name, each in parts.items()}
        train = splits["train"]
        assert train.pixels is not None
        ink = train.pixels.double() / 255
        data = Data(
            name="omniglot",
            classes=tuple(str(arrays["names"][label]) for label in parts["train"]),
            channels=1,
            size=(pixels.shape[2], pixels.shape[3]),
            mean=(float(ink.mean()),),
            std=(float(ink.std()),),
            licence="MIT",
            train=train,
            validation=None,
            test=None,
            augment=Augment("none"),
            record={"held out": sorted(held_out)},
        )
        return {"data": data, **splits}


def _of_classes(
    split: str, pixels: torch.Tensor, labels: torch.Tensor, chosen: list[int]
) -> Samples:
    """The images of these classes, which are numbered anew."""
    numbers = torch.full((int(labels.max()) + 1,), -1)
    numbers[chosen] = torch.arange(len(chosen))
    rows = (numbers[labels] >= 0).nonzero().flatten()
    return in_memory(split, pixels[rows], numbers[labels[rows]])
