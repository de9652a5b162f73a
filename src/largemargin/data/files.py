"""Images that stay in files, or in rows of a table, until they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from largemargin.data.decode import (
    UnreadableImage,
    bombs_are_errors,
    fit,
    read_pixels,
    read_rgb,
    to_tensor,
)
from largemargin.errors import LargeMarginError


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
        with bombs_are_errors():
            try:
                return read_pixels(self.source(index), self.size, self.stretch)
            except UnreadableImage as error:
                raise self.failure(index, error) from None

    def picture(self, index: int) -> Any:
        """One image as it is in the file: an RGB Pillow image of any size."""
        with bombs_are_errors():
            try:
                return read_rgb(self.source(index))
            except UnreadableImage as error:
                raise self.failure(index, error) from None

    def fitted(self, picture: Any) -> Tensor:
        """A Pillow image at this size, (3, H, W) uint8."""
        height, width = self.size
        return to_tensor(fit(picture, (width, height), self.stretch))

    def subset(self, indices: Sequence[int]) -> "ImageFiles":
        return replace(self, rows=tuple(self.rows[index] for index in indices))

    def failure(self, index: int, error: UnreadableImage) -> LargeMarginError:
        source = self.source(index)
        name = source if isinstance(source, str) else f"row {self.rows[index]}"
        return LargeMarginError(
            f"the image {name} cannot be read: {error}. Repair or remove it, or set corrupt: skip "
            "to find all such images when the data is loaded and leave them out."
        )
