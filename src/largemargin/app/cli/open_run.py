"""A trained run opened by the options of a command: its model, its own or other images.

Numbers that are fitted to its validation images are kept in its folder.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from largemargin.app.cli.run_options import SPLITS, number_or, show_progress
from largemargin.app.config import DataConfig
from largemargin.app.data.load import Data, load_data
from largemargin.app.data.samples import Samples
from largemargin.app.data.sources import SOURCES
from largemargin.app.models.build import with_flips
from largemargin.app.training.processes import pick_device
from largemargin.app.training.runs import Run, load_record
from largemargin.exceptions import LargeMarginError
from largemargin.measuring.calibrate import Temperature, calibrate_temperature
from largemargin.measuring.evaluate import Origin
from largemargin.measuring.records import Record

Kept = TypeVar("Kept", bound=Record)

STRETCHED = ("market1501", "dukemtmc")
"""Data whose images are brought to their size by changing their proportions."""
READING = ("workers", "resident", "corrupt", "download")
"""How images are read, whichever they are."""


@dataclass(frozen=True)
class OpenRun:
    """A run and what its model expects of images."""

    run: Run
    model: nn.Module
    device: torch.device
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int]
    stretch: bool
    flips: bool = False


@dataclass(frozen=True)
class ChosenImages:
    """The images that the options ask for."""

    data: Data
    samples: Samples
    origin: Origin

    @property
    def what(self) -> str:
        """As ``test``, or ``test of folder`` where the data is not that of the run."""
        where = "" if self.origin.own else f" of {self.data.name}"
        return f"{self.origin.split}{where}"


def open_run(options: Any) -> OpenRun:
    """Open the run of the options."""
    if options.which not in ("best", "last"):
        raise LargeMarginError(f"--which must be best or last, but {options.which!r} was given.")
    run = Run.open(options.run)
    device = pick_device(options.device)
    facts = run.facts
    flips = bool(options.get("flips"))
    model = run.model(options.which).to(device)
    return OpenRun(
        run=run,
        model=with_flips(model) if flips else model,
        device=device,
        classes=tuple(facts["classes"]),
        channels=facts["channels"],
        size=(facts["size"][0], facts["size"][1]),
        stretch=facts["name"] in STRETCHED,
        flips=flips,
    )


def chosen_images(options: Any, opened: OpenRun) -> ChosenImages:
    """The data of the options, and the split of it that was asked for."""
    if options.split not in SPLITS:
        listed = ", ".join(SPLITS)
        raise LargeMarginError(f"--split must be one of {listed}, but {options.split!r} was given.")
    return _other(options, opened) if options.data.name else _own(options, opened)


def _own(options: Any, opened: OpenRun) -> ChosenImages:
    """The data of the run; the options may say how to read it."""
    plain = DataConfig()
    names = [each.name for each in fields(DataConfig) if each.name != "name"]
    given = {
        name: getattr(options.data, name)
        for name in names
        if getattr(options.data, name) != getattr(plain, name)
    }
    for name, value in given.items():
        if name not in READING:
            hint = value if name == "path" else "FOLDER, FILE or NAME"
            raise LargeMarginError(
                f"--data.{name} {value} is about other data than that of the run, but none was "
                f"named. Name it: --data {hint}. Or leave the option out."
            )
    config = opened.run.config.data
    data = opened.run.data(replace(config, **given))
    # Re-identification is tested by its queries: what the classes are tested on is secondary.
    order = ("test", "validation", *(() if data.query is None else ("train",)))
    samples, split = _split(data, options.split, order)
    asked = options.split == "auto" or split == _split(data, "auto", order)[1]
    usual = asked and options.which == "best" and not opened.flips
    origin = Origin(split, data.name, config.path, True, options.which, usual, opened.flips)
    return ChosenImages(data, samples, origin)


def _other(options: Any, opened: OpenRun) -> ChosenImages:
    # All of it is other data, and nothing is trained: no part to hold out, no whole pictures to
    # keep for augmentation.
    config = _at_size(replace(options.data, validation=0.0, augment="none"), opened)
    data = load_data(config)
    samples, split = _split(data, options.split, ("test", "validation", "train"))
    samples = _relabelled(for_model(samples, opened), data.classes, opened.classes)
    origin = Origin(split, data.name, config.path, False, options.which, False, opened.flips)
    return ChosenImages(data, samples, origin)


def _at_size(config: DataConfig, opened: OpenRun) -> DataConfig:
    """Images as the model takes them, where no other size was asked for."""
    if config.size is not None or config.width is not None:
        return config
    height, width = opened.size
    return replace(config, size=height, width=width)


def _split(data: Data, wanted: str, order: Sequence[str]) -> tuple[Samples, str]:
    names = order if wanted == "auto" else (wanted,)
    for name in names:
        samples = getattr(data, name)
        if samples is not None and len(samples):
            return samples, name
    raise LargeMarginError(
        f"{data.name} has no {' and no '.join(names)} images. Choose others with --split, or give "
        "other data with --data."
    )


def for_model(samples: Samples, opened: OpenRun) -> Samples:
    """The samples with as many channels as the model takes, at its size."""
    pixels = samples.pixels
    if pixels is None:
        if opened.channels != 3:
            raise LargeMarginError(
                "the model takes grey images, but these are too many to convert in memory. Set "
                "--data.resident yes."
            )
        assert samples.files is not None
        files = replace(samples.files, size=opened.size, stretch=opened.stretch)
        return replace(samples, files=files)
    if pixels.shape[1] != opened.channels:
        pixels = _channels(pixels, opened.channels)
    if tuple(pixels.shape[2:]) != opened.size:
        raise LargeMarginError(
            f"the model takes images of {opened.size[0]} x {opened.size[1]} pixels, but these have "
            f"{pixels.shape[2]} x {pixels.shape[3]}."
        )
    return replace(samples, pixels=pixels)


def _channels(pixels: Tensor, wanted: int) -> Tensor:
    """Grey images in three channels, or colour as grey."""
    if pixels.shape[1] == 1 and wanted == 3:
        return pixels.expand(-1, 3, -1, -1)
    if pixels.shape[1] == 3 and wanted == 1:
        from largemargin.app.predict import grey

        return grey(pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels)
    raise LargeMarginError(
        f"the model takes images with {wanted} channels, but these have {pixels.shape[1]}."
    )


def _relabelled(samples: Samples, theirs: tuple[str, ...], ours: tuple[str, ...]) -> Samples:
    """Labels as the model numbers classes of the same names."""
    if theirs == ours:
        return samples
    number = {name: index for index, name in enumerate(ours)}
    unknown = [name for name in theirs if name not in number]
    if unknown:
        shown = ", ".join(unknown[:5]) + (" and others" if len(unknown) > 5 else "")
        raise LargeMarginError(
            f"the model does not know the classes {shown}. It was trained on "
            f"{', '.join(ours[:10])}{' and others' if len(ours) > 10 else ''}. Data of other "
            "classes can be given as out-of-distribution data: --ood."
        )
    table = torch.tensor([number[name] for name in theirs])
    return replace(samples, labels=table[samples.labels])


def ood_samples(given: str, opened: OpenRun) -> Samples:
    """Images of other data: every image below a folder, or the test images of a known data set."""
    if Path(given).expanduser().exists():
        from largemargin.app.data.image_files import ImageFiles
        from largemargin.app.predict import image_files, image_samples

        paths = image_files([given])
        if opened.channels != 3:
            return image_samples(paths, opened.size, opened.channels, opened.stretch)
        files = ImageFiles(paths, range(len(paths)), opened.size, opened.stretch)
        return Samples(torch.zeros(len(paths), dtype=torch.long), paths, files=files)
    name, _, path = given.partition(":")
    if name not in SOURCES:
        raise LargeMarginError(
            f"--ood must be a folder of images or the name of a data set, as svhn or svhn:FOLDER, "
            f"but there is neither a folder nor a data set {name!r}."
        )
    config = DataConfig(name, path=path or None, validation=0.0, augment="none")
    data = load_data(_at_size(config, opened))
    return for_model(data.test or data.train, opened)


class CalibrationCache:
    """Fits on first use; what was fitted before is read from the run's folder.

    A run that was taken to another machine without its data predicts there as it did here. ``say``
    prints what was fitted.
    """

    def __init__(self, opened: OpenRun, *, say: bool = True) -> None:
        self.opened, self.say = opened, say

    def get(
        self, kind: type[Kept], name: str, fit: Callable[[Samples], Kept], *, detail: str = ""
    ) -> Kept:
        """The number called ``name``, as its option is.

        Raises:
            LargeMarginError: where the run has no validation images, or they do not allow it.
        """
        kept = self.kept(kind, name, detail=detail)
        if kept is not None:
            return kept
        found = fit(self._validation(name))
        try:
            found.save(self._path(name, detail))
        except OSError as error:  # a run that others may only read predicts all the same
            print(f"The {name} is not kept: {error.strerror}.", file=sys.stderr)
        if self.say:
            print(found, file=sys.stderr)
        return found

    def kept(self, kind: type[Kept], name: str, *, detail: str = "") -> Kept | None:
        """What was fitted before; None where nothing was."""
        path = self._path(name, detail)
        return load_record(kind, path) if path.is_file() else None

    def _path(self, name: str, detail: str) -> Path:
        flips = "-flips" if self.opened.flips else ""
        return self.opened.run.folder / f"{name}{detail}{flips}-{self._weights}.json"

    @cached_property
    def _weights(self) -> str:
        """Of these weights, and no others: a run may have been continued since."""
        digest = hashlib.blake2b(digest_size=6)
        for tensor in self.opened.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def images(self) -> Samples | None:
        return self.opened.run.data().validation

    def _validation(self, name: str) -> Samples:
        try:
            found = self.images
        except LargeMarginError as error:
            raise LargeMarginError(
                f"the {name} is calibrated on the validation images of the run, which cannot be "
                f"read: {error} Or pass --{name} none, or a number."
            ) from None
        if found is None or len(found) == 0:
            raise LargeMarginError(
                f"the {name} is calibrated on validation images, but this run held none out "
                f"(data.validation). Pass --{name} none, or a number. Training images will not do: "
                "the model knows them too well."
            )
        return found


def cached_temperature(cache: CalibrationCache) -> Temperature:
    """The temperature of the run's model, by its validation images."""
    opened = cache.opened

    fit = partial(
        calibrate_temperature, opened.model, device=opened.device, progress=show_progress()
    )
    return cache.get(Temperature, "temperature", fit)


def temperature_for(option: str, cache: CalibrationCache) -> Temperature | float | None:
    """What --temperature asks for; None where "auto" cannot be fitted, which is said."""
    given = number_or("temperature", option)
    if given != "auto":
        return None if isinstance(given, str) else given
    try:
        return cached_temperature(cache)
    except LargeMarginError as error:
        print(f"Probabilities are those of the logits as they are: {error}", file=sys.stderr)
        return None
