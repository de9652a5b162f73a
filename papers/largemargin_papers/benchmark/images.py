"""What a run trains on and what it is judged on; never more."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from largemargin.app.config import DataConfig
from largemargin.app.data.augment import Augment
from largemargin.app.data.load import Data, load_data
from largemargin.app.data.modify import imbalanced_subset, modified
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources.source import Source, in_memory
from largemargin.app.training.config_file import settings_from
from largemargin.errors import LargeMarginError
from largemargin.measuring.sample_draws import generator_for
from largemargin_papers.benchmark.protocol import OWN_DATA, Situation

HELD_OUT_ALPHABETS = 6
MOST_OTHERS = 5000
"""Images taken of every data set of no known class."""

MOST_SEARCHED = 3000
"""Validation images that are searched for those of the same class."""


class Task(NamedTuple):
    """Images of a run."""

    data: Data
    """Training images alone: no validation and no test images, so that none can be looked at."""
    judged: Samples
    validation: Samples
    """For methods that choose an epoch, and for the choice of a score of confidence."""
    ood: Mapping[str, Mapping[str, Samples]]
    """Data of no known class, of the validation and of the split it is judged on, by name."""


class Images:
    """Tasks by situation and seed; the files of a data set are read once.

    Args:
        paths: where data sets lie, by name; a .npz or .safetensors file stands for the data set.
        most: how many images at most a model is judged on; default all.
    """

    def __init__(self, paths: Mapping[str, str] | None = None, most: int | None = None) -> None:
        self.paths = dict(paths or {})
        self.most = most
        self.whole: dict[str, Data] = {}
        self.made: dict[tuple[str, int], dict[str, Any]] = {}

    def task(self, situation: Situation, seed: int, split: str) -> Task:
        """The images of a seed: its part of the training images, and a split to be judged on."""
        key = (situation.name, seed)
        if key not in self.made:
            name = situation.data["name"]
            build = self._unseen if situation.unseen else self._split
            if name in OWN_DATA:
                build = self._omniglot if name == "omniglot" else self._arrays
            self.made[key] = build(situation, seed)
        made = self.made[key]
        ood = made.get("ood", {})
        held_out = made["validation"]
        others: dict[str, dict[str, Samples]] = {
            each: {name: self._some(samples) for name, samples in ood[each].items()}
            for each in ("validation", "test")
            if each in ood and each in ("validation", split)
        }
        return Task(made["data"], self._some(made[split]), self._some(held_out), others)

    def _some(self, samples: Samples) -> Samples:
        """As many as are judged, from all over."""
        if self.most is None or len(samples) <= self.most:
            return samples
        return samples.subset(range(0, len(samples), len(samples) // self.most))

    def file(self, name: str) -> Path:
        """Where a packed file lies, of data that no source of the library reads."""
        path = Path(self.paths.get(name, f"data/{name}.npz"))
        if not path.is_file():
            raise LargeMarginError(
                f"{name} is not at {path}. Make the file with papers/benchmark/pack.py, and name "
                f"it: --data {name}=FILE."
            )
        return path

    def forget(self, situation: Situation) -> None:
        """Let go of the tasks of a situation; files stay read."""
        for key in [key for key in self.made if key[0] == situation.name]:
            del self.made[key]

    def _split(self, situation: Situation, seed: int) -> dict[str, Any]:
        config = settings_from({**situation.data, "seed": seed}, DataConfig, "data")
        whole = self._read(config)
        if whole.test is None:
            raise LargeMarginError(f"{config.name} has no test images to compare methods on.")
        if situation.labels is not None:
            file, _, array = situation.labels.partition(".")
            labels = torch.from_numpy(_read_npz(self.file(file))[array].astype("int64"))
            whole = replace(whole, train=replace(whole.train, labels=labels))
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
        if config.normalize == "none":  # the network does it as it was trained to
            data = replace(data, mean=(0.0,) * data.channels, std=(1.0,) * data.channels)
        made = {"data": data, "validation": changed.splits["validation"], "test": whole.test}
        return {**made, "ood": self._others(situation.ood)} if situation.ood else made

    def _others(self, names: Sequence[str]) -> dict[str, dict[str, Samples]]:
        """Images of other data sets: of the first one half of the classes is for validation."""
        found: dict[str, dict[str, Samples]] = {"validation": {}, "test": {}}
        for number, name in enumerate(names):
            whole = self._read(DataConfig(name))
            assert whole.test is not None
            count = len(whole.classes)
            known = range(count // 2) if number == 0 else range(0)
            new = [each for each in range(count) if each not in known]
            for split, samples, classes in (
                ("validation", whole.train, list(known)),
                ("test", whole.test, new),
            ):
                if classes:
                    assert samples.pixels is not None
                    chosen = _of_classes(split, samples.pixels, samples.labels, classes)
                    found[split][name] = chosen.subset(range(min(len(chosen), MOST_OTHERS)))
        return found

    def _unseen(self, situation: Situation, seed: int) -> dict[str, Any]:
        """Classes to train on, others to be judged on.

        Those of the test are the same for all seeds, and their test images are searched; those of
        the validation are drawn by the seed.
        """
        whole = self._read(DataConfig(situation.data["name"]))
        train, test = whole.train, whole.test
        assert train.pixels is not None
        assert test is not None
        assert test.pixels is not None
        count, (tested, held_out) = len(whole.classes), situation.unseen
        fixed = random.Random(f"{whole.name} unseen").sample(range(count), count)
        last, rest = fixed[:tested], fixed[tested:]
        chosen = sorted(random.Random(f"{whole.name} unseen {seed}").sample(rest, held_out))
        kept = sorted(set(rest) - set(chosen))
        parts = {
            "train": _of_classes("train", train.pixels, train.labels, kept),
            "validation": _of_classes("validation", train.pixels, train.labels, chosen),
            "test": _of_classes("test", test.pixels, test.labels, sorted(last)),
        }
        for split, images in (("train", situation.images), ("validation", MOST_SEARCHED)):
            parts[split] = _balanced(parts[split], images, seed)
        data = replace(
            whole,
            train=parts["train"],
            classes=tuple(whole.classes[each] for each in kept),
            validation=None,
            test=None,
            augment=Augment(situation.data.get("augment", "none")),
            record={"held out": chosen},
        )
        return {"data": data, **parts}

    def _arrays(self, situation: Situation, seed: int) -> dict[str, Any]:
        """Inputs that are no images, in the form of images: token ids (N, 1, 1, L), numbers."""
        name = situation.data["name"]
        arrays = _read_npz(self.file(name))

        def part(split: str) -> Samples:
            pixels = torch.from_numpy(arrays[f"{split}_inputs"].astype("float32"))
            labels = arrays.get(f"{split}_labels")
            known = torch.zeros(len(pixels), dtype=torch.long)
            if labels is not None:
                known = torch.from_numpy(labels.astype("int64"))
            return in_memory(split, pixels, known)

        train = _balanced(part(situation.data.get("train", "train")), situation.images, seed)
        assert train.pixels is not None
        channels, height, width = train.pixels.shape[1:]
        data = Data(
            name=name,
            classes=tuple(str(each) for each in arrays["classes"]),
            channels=channels,
            size=(height, width),
            mean=(0.0,) * channels,
            std=(1.0,) * channels,
            licence="",
            train=train,
            validation=None,
            test=None,
            augment=Augment("none"),
            record={},
        )
        test = part("test")
        made = {"data": data, "test": test}
        made["validation"] = (
            part("validation") if "validation_inputs" in arrays else test.subset([])
        )
        if situation.ood:
            made["ood"] = {
                split: {name: part(f"{split}_ood") for name in situation.ood}
                for split in ("validation", "test")
            }
        return made

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
        arrays = _read_npz(self.file("omniglot"))
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


def _read_npz(path: Path) -> dict[str, Any]:
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _balanced(samples: Samples, count: int | None, seed: int) -> Samples:
    """So many of them, drawn by the seed, the same number of every class; None: all."""
    if count is None or count >= len(samples):
        return samples
    sizes = torch.bincount(samples.labels)
    counts = torch.full_like(sizes, count // len(sizes))
    generator = generator_for(seed, "fraction")
    return samples.subset(imbalanced_subset(samples.labels, counts, generator=generator))


def _of_classes(
    split: str, pixels: torch.Tensor, labels: torch.Tensor, chosen: list[int]
) -> Samples:
    """The images of these classes, which are numbered anew."""
    numbers = torch.full((int(labels.max()) + 1,), -1)
    numbers[chosen] = torch.arange(len(chosen))
    rows = (numbers[labels] >= 0).nonzero().flatten()
    return in_memory(split, pixels[rows], numbers[labels[rows]])
