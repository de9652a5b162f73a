"""The images of recipes: where they lie, loaded once for all runs that share them."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from largemargin.app.config import DataConfig, RunConfig
from largemargin.app.data.load import CROPPED, Data, load_data
from largemargin.app.data.sources.standard_datasets import KNOWN
from largemargin.errors import LargeMarginError

ARRAYS = (".npz", ".safetensors")
KEPT = 3
"""Data sets that stay in memory: runs side by side may need different ones."""


class Images:
    """Data by its settings.

    Args:
        paths: where data sets lie, by name, as ``{"cifar10": "~/cifar"}``; a .npz or .safetensors
            file stands for the data set.
    """

    def __init__(self, paths: Mapping[str, str] | None = None) -> None:
        self.paths = dict(paths or {})
        self.loaded: OrderedDict[str, Data] = OrderedDict()

    def placed(self, config: RunConfig) -> RunConfig:
        """The same run with the place of its images."""
        return replace(config, data=self._placed(config.data))

    def _placed(self, config: DataConfig) -> DataConfig:
        path = self.paths.get(config.name)
        if path is None or config.name == "arrays":
            return config
        if not path.endswith(ARRAYS):
            return replace(config, path=path)
        augment = config.augment
        if augment == "auto":  # what the file holds is known by its name alone
            augment = "crop_flip" if config.name in CROPPED else "none"
            augment = "flip" if config.name == "fashion_mnist" else augment
        return replace(config, name="arrays", path=path, augment=augment)

    def data(self, config: DataConfig, needed: str = "") -> Data:
        """The images; ``needed`` says what a recipe needs, for the error where they are missing."""
        key = repr(config)
        if key in self.loaded:
            self.loaded.move_to_end(key)
            return self.loaded[key]
        while len(self.loaded) >= KEPT:
            self.loaded.popitem(last=False)
        try:
            data = load_data(self._placed(config))
        except LargeMarginError as error:
            if not needed:
                raise
            raise LargeMarginError(f"{error}\nThis table needs: {needed.strip()}") from error
        self.loaded[key] = self._as_known(data, config)
        return self.loaded[key]

    def _as_known(self, data: Data, config: DataConfig) -> Data:
        """A file that stands for a data set is normalised as the data set is."""
        facts = KNOWN.get(config.name)
        if facts is None or data.name != "arrays" or config.normalize != "auto":
            return data
        mean, std = facts.statistics
        return replace(data, name=config.name, mean=mean, std=std, licence=facts.licence)


def train_size(config: DataConfig) -> int | None:
    """About how many images a run trains on; None for data whose size is not known."""
    sizes = {
        "digits": 1257,
        "mnist": 60_000,
        "fashion_mnist": 60_000,
        "cifar10": 50_000,
        "cifar100": 50_000,
        "svhn": 73_257,
    }
    size = sizes.get(config.name)
    if size is None:
        return None
    classes = 100 if config.name == "cifar100" else 10
    kept = len(config.classes) if config.classes else classes
    left = size * kept / classes * (1 - config.validation) * config.fraction
    if config.imbalance == "exp":
        left *= sum(config.imbalance_ratio ** (-j / (kept - 1)) for j in range(kept)) / kept
    elif config.imbalance == "step":
        left *= (1 + 1 / config.imbalance_ratio) / 2
    return round(left)
