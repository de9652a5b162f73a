"""``predict``: images in, classes with probability, margin and a flag out."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from largemargin.app.data.image_files import UnreadableImage, bombs_are_errors, read_pixels
from largemargin.app.data.samples import Samples, as_float
from largemargin.app.data.sources.image_folders import images as images_below
from largemargin.errors import LargeMarginError, check_number
from largemargin.geometry.pairs import blocks
from largemargin.measuring.batches import device_for, with_bar
from largemargin.measuring.calibrate import Temperature, Threshold, number_of
from largemargin.measuring.confidence import Scorer
from largemargin.measuring.logit_model import LogitModel
from largemargin.measuring.predictions import Prediction, Predictions

GREY = (0.299, 0.587, 0.114)
"""Luma of ITU-R 601, as Pillow makes grey images."""


class _Read(NamedTuple):
    """An image that was tried to read."""

    name: str
    pixels: Tensor | None
    error: str | None


def predict(
    model: nn.Module,
    images: Samples | Sequence[str | os.PathLike[str]],
    *,
    class_names: Sequence[str] | None = None,
    threshold: Threshold | float | None = None,
    temperature: Temperature | float | None = None,
    size: tuple[int, int] = (224, 224),
    channels: int = 3,
    stretch: bool = False,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Predictions:
    """Predict the class of every image, and how far it is from being another.

    An image that cannot be read gives a row that says why; the others are predicted all the same.

    Args:
        model: takes images in [0, 1]: a model of this library, which normalises them itself.
        images: a split, or paths of image files and of folders, which are searched for images.
        class_names: one for each class, in the order of the labels; default their numbers.
        threshold: margin below which a prediction is flagged, from :func:`calibrate_threshold`, or
            a number.
        temperature: of the probabilities, from :func:`calibrate_temperature`, or a number;
            default 1, the softmax of the logits as they are.
        size: (H, W) image files are brought to; that of the training images.
        channels: 3, or 1 for a model of grey images.
        stretch: reach the size by changing proportions; otherwise by cutting out the middle.
        batch_size: images at a time.
        device: where to compute; default where the model is.
        progress: show a progress bar (needs tqdm).

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
        >>> _ = model[1].weight.data.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]]))
        >>> pixels = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]])
        >>> row, = predict(model, Samples(torch.tensor([0]), ["a"], pixels), class_names=["x", "y"])
        >>> row.label, round(row.margin, 4)
        ('x', 0.7071)
    """
    check_number("batch_size", batch_size, at_least=1)
    reader = LogitModel(model)
    names = _names(class_names, reader.num_classes)
    scorer = Scorer(reader, temperature=1.0 if temperature is None else number_of(temperature))
    limit = _limit(threshold, scorer.margin)
    where = device_for(reader.model, device)
    if not isinstance(size, Sequence) or len(size) != 2:
        raise LargeMarginError(f"size must be (height, width), but {size!r} was given.")
    if isinstance(images, Samples):
        total, parts = len(images), _of_split(images, batch_size)
    else:
        paths = image_files(images)
        read = partial(_of_file, size=size, channels=_colours(channels), stretch=stretch)
        total, parts = len(paths), _of_files(paths, batch_size, read)
    rows: list[Prediction] = []
    with reader.evaluating():
        for part in with_bar(parts, "predict", -(-total // batch_size), progress):
            rows += _rows(part, scorer, names, limit, where)
    kept = threshold if isinstance(threshold, Threshold) else limit
    divided = temperature if isinstance(temperature, Temperature | None) else scorer.temperature
    return Predictions(tuple(rows), scorer.margin, kept, divided)


def image_files(given: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files among these paths and the image files below the folders among them."""
    if isinstance(given, str | os.PathLike):
        given = [given]
    found: list[str] = []
    for each in given:
        if not isinstance(each, str | os.PathLike):
            raise LargeMarginError(
                "images must be a split, or paths of image files and folders, but they hold "
                f"{type(each).__name__}. Call the model itself on tensors."
            )
        path = Path(each).expanduser()
        if path.is_dir():
            inside, _ = images_below(path)
            if not inside:
                raise LargeMarginError(f"there are no image files below {path}.")
            found += [str(file) for file in inside]
        else:
            found.append(str(path))  # a missing file becomes a row that says so
    if not found:
        raise LargeMarginError("there is nothing to predict: no image was given.")
    return found


def _names(classes: Sequence[str] | None, count: int) -> list[str]:
    if classes is None:
        return [str(number) for number in range(count)]
    if isinstance(classes, str) or len(classes) != count:
        raise LargeMarginError(
            f"class_names must be the names of the model's {count} classes, but "
            f"{classes if isinstance(classes, str) else len(classes)!r} was given."
        )
    return [str(each) for each in classes]


def _limit(threshold: Threshold | float | None, margin: str) -> float | None:
    if threshold is None:
        return None
    if not isinstance(threshold, Threshold):
        try:
            limit = float(threshold)
        except (TypeError, ValueError):
            raise LargeMarginError(
                f"threshold must be a number or a Threshold, but {threshold!r} was given."
            ) from None
        # Not even infinity: a file of predictions should say which margin they were held against.
        check_number("threshold", limit)
        return limit
    if threshold.margin != margin:
        raise LargeMarginError(
            f"the threshold is one of {threshold.margin} margins, but this model's margins are "
            f"{margin} margins. Calibrate one for this model."
        )
    return threshold.value


def _of_split(samples: Samples, batch_size: int) -> Iterator[list[_Read]]:
    def read(index: int) -> _Read:
        name = str(samples.ids[index])
        try:
            return _Read(name, samples.image(index), None)
        except LargeMarginError as error:
            return _Read(name, None, str(error))

    for part in blocks(len(samples), batch_size):
        yield [read(index) for index in range(part.start, part.stop)]


def _of_files(
    paths: Sequence[str], batch_size: int, read: Callable[[str], _Read]
) -> Iterator[list[_Read]]:
    # Decoders let other threads run.
    with bombs_are_errors(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for part in blocks(len(paths), batch_size):
            yield list(pool.map(read, paths[part]))


def _of_file(path: str, *, size: tuple[int, int], channels: int, stretch: bool) -> _Read:
    try:
        pixels = as_float(read_pixels(path, size, stretch))
    except UnreadableImage as error:
        return _Read(path, None, str(error))
    return _Read(path, grey(pixels) if channels == 1 else pixels, None)


def grey(images: Tensor) -> Tensor:
    """(..., 3, H, W) colour images as (..., 1, H, W) grey ones."""
    return (images * images.new_tensor(GREY)[:, None, None]).sum(-3, keepdim=True)


def image_samples(
    paths: Sequence[str], size: tuple[int, int], channels: int, stretch: bool
) -> Samples:
    """Image files in memory, without labels (all are 0); unreadable ones are an error."""
    read = partial(_of_file, size=size, channels=_colours(channels), stretch=stretch)
    pixels = []
    for part in _of_files(paths, len(paths), read):
        for each in part:
            if each.pixels is None:
                raise LargeMarginError(f"the image {each.name} cannot be read: {each.error}.")
            pixels.append(each.pixels)
    return Samples(torch.zeros(len(paths), dtype=torch.long), paths, torch.stack(pixels))


def _colours(channels: int) -> int:
    if channels not in (1, 3):
        raise LargeMarginError(
            f"image files have 1 or 3 channels, but the model takes {channels}. Read them yourself "
            "and pass Samples."
        )
    return channels


def _rows(
    part: Sequence[_Read],
    scorer: Scorer,
    names: list[str],
    limit: float | None,
    device: torch.device,
) -> Iterator[Prediction]:
    pixels = [each.pixels for each in part if each.pixels is not None]
    if pixels:
        scored = scorer(torch.stack(pixels).to(device))
        columns = (scored.predicted, scored.probability, scored.margin)
        known = iter(list(zip(*(column.tolist() for column in columns), strict=True)))
    for each in part:
        if each.pixels is None:
            yield Prediction(each.name, None, None, None, None, each.error)
            continue
        label, probability, margin = next(known)
        flag = None if limit is None else not margin >= limit
        yield Prediction(each.name, names[label], probability, margin, flag)
