"""Small image files for the tests of data: each with pixels that tell it apart."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def pixels(number: int, height: int = 12, width: int = 12) -> np.ndarray:
    """(H, W, 3) bytes that no other number gives."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(path: Path, number: int = 0, height: int = 12, width: int = 12) -> Path:
    """A file with these pixels, of the format its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(number, height, width)).save(path)
    return path


def class_folders(
    root: Path, classes: Iterable[str], count: int, first: int = 0, **size: int
) -> Path:
    """``root/CLASS/000.png`` and so on, ``count`` in each."""
    for place, name in enumerate(classes):
        for i in range(count):
            picture(root / name / f"{i:03d}.png", first + 1000 * place + i, **size)
    return root


def truncated(path: Path, number: int = 7) -> Path:
    """A JPEG file whose second half is missing; its header is fine."""
    picture(path, number, 64, 64)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path
