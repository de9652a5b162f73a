"""Arrays of features and images as the estimator takes them: as rows, as tensors, as classes."""

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice

Array = NDArray[Any]


def as_rows(X: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Images as flat rows (N, D) and the shape of one; anything else as it is, and None."""
    if isinstance(X, list | tuple) and len(X) and np.ndim(X[0]) >= 2:
        X = np.asarray(X)
    if getattr(X, "ndim", 2) <= 2:
        return X, None
    X = np.asarray(X.cpu() if isinstance(X, Tensor) else X)
    return X.reshape(len(X), -1), tuple(X.shape[1:])


def as_tensor(rows: Array, shape: tuple[int, ...], channels: str) -> Tensor:
    """Rows as a tensor (N, D), or (N, C, H, W) where ``shape`` is that of an image."""
    if prod(shape) != rows.shape[1]:
        raise LargeMarginError(
            f"input_shape {shape} has {prod(shape)} entries, but X has {rows.shape[1]} features."
        )
    if not rows.flags.writeable:
        rows = rows.copy()  # torch shares memory with arrays and warns about read-only ones
    if rows.dtype.kind == "u" and rows.dtype.itemsize > 1:
        rows = rows.astype(np.int64)  # torch has few operations on these
    tensor = torch.from_numpy(np.ascontiguousarray(rows))
    if len(shape) == 1:
        return tensor
    target, place = images_first(shape, channels)
    if place == "last":
        return tensor.reshape(-1, *shape).movedim(-1, 1)
    return tensor.reshape(-1, *target)


def known_labels(y: Array, classes: Array) -> NDArray[np.int64]:
    """Indices of labels in the sorted ``classes``."""
    index = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    strange = classes[index] != y
    if np.any(strange):
        found = np.unique(y[strange]).tolist()
        raise LargeMarginError(
            f"y holds labels that are not among the classes {classes.tolist()}: {found}. Name all "
            "classes in the first call of partial_fit; fit without warm_start for other classes."
        )
    return index.astype(np.int64)


def images_first(shape: tuple[int, ...], channels: str) -> tuple[tuple[int, ...], str]:
    """The (C, H, W) shape of images given as ``shape``, and where their channels stand."""
    check_choice("channels", channels, ("auto", "first", "last"))
    if len(shape) == 2:
        return (1, *shape), "none"
    if len(shape) != 3:
        raise LargeMarginError(
            f"X must hold features (N, D) or images (N, H, W), (N, C, H, W) or (N, H, W, C), but "
            f"one sample has shape {shape}."
        )
    if channels == "auto":
        likely = [place for place, size in (("first", shape[0]), ("last", shape[2])) if size <= 4]
        if len(likely) != 1:
            raise LargeMarginError(
                f"images of shape {shape} may have their channels first or last. Say which: "
                'channels="first" or channels="last".'
            )
        channels = likely[0]
    return (shape if channels == "first" else (shape[2], shape[0], shape[1])), channels
