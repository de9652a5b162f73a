"""Images that stay in files, or in rows of a table, until they are decoded.

Every colour mode is turned into RGB: transparent pixels are laid over white, 16-bit grey is scaled
to 8 bits. The first frame of an animation is taken, a rotation noted by the camera (EXIF) is
applied, and an image with more pixels than Pillow's limit (a decompression bomb) is unreadable.
Files hold one of ``FORMATS``; others are unreadable.
"""

import io
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, optional_module

DEEP_GREY = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")
"""Pillow's modes of one channel with more than 8 bits."""
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000", "TGA")
"""What a file may hold, whatever it is called. Pillow would open others too: EPS, for one, is a
program, which it hands to Ghostscript. TGA has no mark at its beginning, so it is tried last."""


class UnreadableImage(Exception):
    """An image that cannot be decoded; the message says why."""


class Encoded(Protocol):
    """A path or the bytes of a file for every row; a list of paths is one."""

    def __getitem__(self, row: int, /) -> str | bytes | None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Encoded images and the size they are decoded to.

    Args:
        encoded: where the images are.
        rows: which of them belong to the split.
        size: (H, W) after decoding.
        stretch: reach it by changing the proportions; otherwise by cutting out the middle.
    """

    encoded: Encoded
    rows: Sequence[int]
    size: tuple[int, int] = (224, 224)
    stretch: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def source(self, index: int) -> str | bytes | None:
        return self.encoded[self.rows[index]]

    def pixels(self, index: int) -> Tensor:
        """One image, (3, H, W) uint8."""
        with self._failures_named(index):
            return read_pixels(self.source(index), self.size, self.stretch)

    def picture(self, index: int) -> Any:
        """One image as it is in the file: an RGB Pillow image of any size."""
        with self._failures_named(index):
            return read_rgb(self.source(index))

    def fitted(self, picture: Any) -> Tensor:
        """A Pillow image at this size, (3, H, W) uint8."""
        height, width = self.size
        return to_tensor(fit(picture, (width, height), self.stretch))

    def subset(self, indices: Sequence[int]) -> "ImageFiles":
        return replace(self, rows=tuple(self.rows[index] for index in indices))

    @contextmanager
    def _failures_named(self, index: int) -> Iterator[None]:
        with bombs_are_errors():
            try:
                yield
            except UnreadableImage as error:
                source = self.source(index)
                name = source if isinstance(source, str) else f"row {self.rows[index]}"
                raise LargeMarginError(
                    f"the image {name} cannot be read: {error}. Repair or remove it, or "
                    "find all such images when the data is loaded and leave them out: "
                    "--data.corrupt skip (in Python and YAML corrupt: skip)."
                ) from None


def pillow() -> Any:
    return optional_module("PIL.Image", "reading image files needs Pillow")


@contextmanager
def bombs_are_errors() -> Iterator[None]:
    """Pillow only warns up to twice its limit of pixels; here the limit is the limit.

    Filters of warnings belong to the process, so this stands around whole loops, not in threads.
    """
    with warnings.catch_warnings():
        # Odd metadata is no reason to mistrust the pixels.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", pillow().DecompressionBombWarning)
        yield


def open_image(source: str | bytes | None) -> Any:
    """The header of an image: a Pillow image whose pixels are not read yet."""
    image_class = pillow()
    try:
        if source is None:
            raise OSError("there is no image in this row")
        if isinstance(source, str) and not stat.S_ISREG(os.stat(source).st_mode):
            raise OSError("it is no file but a folder, a pipe or a device")
        image_class.init()
        formats = [each for each in FORMATS if each in image_class.OPEN]
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        return image_class.open(file, formats=formats)
    except Exception as error:  # decoders raise what they like: SyntaxError, struct.error, ...
        raise UnreadableImage(reason(error)) from None


def lies_on_its_side(image: Any) -> bool:
    """Whether the rotation noted by the camera exchanges width and height."""
    from PIL import ExifTags

    try:
        return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # as above; what is wrong with it is found when it is decoded
        return False


def read_rgb(source: str | bytes | None, at_least: tuple[int, int] | None = None) -> Any:
    """A whole image as an upright 8-bit RGB Pillow image.

    Args:
        source: path, or the bytes of a file.
        at_least: (width, height) that will do: large JPEG files are then decoded at a half, a
            quarter or an eighth of their size, which is several times faster.
    """
    from PIL import ImageOps

    image = open_image(source)
    try:
        if at_least is not None:
            image.draft(None, at_least)
        image.load()
        return in_rgb(ImageOps.exif_transpose(image))
    except UnreadableImage:
        raise
    except Exception as error:
        raise UnreadableImage(reason(error)) from None
    finally:
        image.close()


def read_pixels(source: str | bytes | None, size: tuple[int, int], stretch: bool) -> Tensor:
    """An image as (3, H, W) uint8, its path or bytes decoded as :class:`ImageFiles` says."""
    height, width = size
    # Twice the size leaves enough to reduce from; a square because the image may lie on its side.
    enough = 2 * max(size)
    return to_tensor(fit(read_rgb(source, (enough, enough)), (width, height), stretch))


def fit(image: Any, size: tuple[int, int], stretch: bool) -> Any:
    """A Pillow image at (width, height)."""
    from PIL import ImageOps

    if image.size == size:
        return image
    bilinear = pillow().Resampling.BILINEAR
    return image.resize(size, bilinear) if stretch else ImageOps.fit(image, size, bilinear)


def to_tensor(image: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def in_rgb(image: Any) -> Any:
    if image.mode in DEEP_GREY:
        image = shallow(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, "white")
        image = pillow().alpha_composite(white, image)
    return image.convert("RGB")


def shallow(image: Any) -> Any:
    """Grey of 16 or 32 bits, or of floating point numbers, as 8 bits."""
    import numpy as np

    values = np.asarray(image, dtype=np.float64)
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > 65535:
        raise UnreadableImage(
            f"grey values of mode {image.mode} reach from {values.min():g} to {values.max():g}, "
            "which is neither 8 nor 16 bits"
        )
    tops = {"F": (1, 255, 65535), "I": (255, 65535)}.get(image.mode, (65535,))
    top = next(each for each in tops if values.max() <= each)
    return pillow().fromarray(np.rint(values * (255 / top)).astype(np.uint8))


def reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which is named beside it
    text = " ".join(str(error).split())
    if type(error).__name__.startswith("DecompressionBomb"):
        return f"it has more pixels than Pillow's limit: {text}"
    # Addresses of objects would make two records of one data set differ.
    if "cannot identify image file" in text:
        return f"its content is none of {', '.join(FORMATS)}"
    return text or type(error).__name__
