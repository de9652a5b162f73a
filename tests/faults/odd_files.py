"""Image files as strangers have them: every kind that is readable, and every kind that is not."""

import os
import struct
import unicodedata
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from app.data.pictures import picture, pixels, truncated
from PIL import Image

LONGEST = 255
"""Bytes of the longest name that file systems allow."""

Make = Callable[[Path], None]


def _saved(mode: str, name: str, **options: object) -> tuple[str, Make]:
    def make(folder: Path) -> None:
        Image.fromarray(pixels(3)).convert(mode).save(folder / name, **options)

    return name, make


def _sixteen_bits(folder: Path) -> None:
    values = np.arange(144, dtype=np.uint16).reshape(12, 12) * 400
    Image.fromarray(values).save(folder / "deep.png")


def _frames(name: str) -> Make:
    def make(folder: Path) -> None:
        frames = [Image.fromarray(pixels(number)) for number in range(3)]
        frames[0].save(folder / name, save_all=True, append_images=frames[1:])

    return make


def _turned(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels(5, 10, 14)).save(folder / "turned.jpg", exif=exif)


def _named(name: str) -> tuple[str, Make]:
    return name, lambda folder: picture(folder / name, 9) and None


def _wrong_extension(folder: Path) -> None:
    picture(folder / "is.png", 11).rename(folder / "is.jpg")


READABLE: dict[str, tuple[str, Make]] = {
    "CMYK": _saved("CMYK", "cmyk.jpg"),
    "16 bits": ("deep.png", _sixteen_bits),
    "grey": _saved("L", "grey.png"),
    "one bit": _saved("1", "bit.png"),
    "palette": _saved("P", "palette.gif"),
    "transparent": _saved("RGBA", "alpha.png"),
    "YCbCr": _saved("YCbCr", "ycbcr.jpg"),
    "TIFF": _saved("RGB", "plain.tiff"),
    "WebP": _saved("RGB", "plain.webp"),
    "animated GIF": ("moving.gif", _frames("moving.gif")),
    "animated PNG": ("moving.png", _frames("moving.png")),
    "pages of TIFF": ("pages.tiff", _frames("pages.tiff")),
    "rotation in EXIF": ("turned.jpg", _turned),
    "wrong extension": ("is.jpg", _wrong_extension),
    "longest name": _named("n" * (LONGEST - 4) + ".png"),
    "unicode": _named("Приветმსოფლიო猫🐈\u200f.png"),
    "decomposed accents": _named(unicodedata.normalize("NFD", "éèü.png")),
    "spaces and quotes": _named(" a 'b' \"c\", d;.png"),
    "line break": _named("a\nb.png"),
    "formula": _named("=HYPERLINK(1).png"),
    "tags": _named("<img src=x onerror=alert(1)>.png"),
}


def _empty(folder: Path) -> None:
    (folder / "empty.png").write_bytes(b"")


def _text(folder: Path) -> None:
    (folder / "text.jpg").write_text("not an image")


def _cut(folder: Path) -> None:
    truncated(folder / "cut.jpg")


def _cut_png(folder: Path) -> None:
    content = picture(folder / "cut.png", 4, 64, 64).read_bytes()
    (folder / "cut.png").write_bytes(content[: len(content) // 2])


def _header_alone(folder: Path) -> None:
    content = picture(folder / "head.gif", 4).read_bytes()
    (folder / "head.gif").write_bytes(content[:12])


def _noise(folder: Path) -> None:
    content = bytearray(picture(folder / "noise.png", 4, 32, 32).read_bytes())
    content[60:200] = bytes(140)
    (folder / "noise.png").write_bytes(content)


def chunk(name: bytes, content: bytes) -> bytes:
    size, check = struct.pack(">I", len(content)), zlib.crc32(name + content)
    return size + name + content + struct.pack(">I", check)


def bomb(side: int) -> Make:
    """A PNG file of a few bytes that says it has so many pixels on each side."""

    def make(folder: Path) -> None:
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        inside = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
        (folder / f"bomb{side}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + inside)

    return make


def _pickle(folder: Path) -> None:
    (folder / "pickle.png").write_bytes(b"\x80\x04cos\nsystem\n")


def _nowhere(folder: Path) -> None:
    (folder / "nowhere.png").symlink_to(folder / "not there.png")


def _itself(folder: Path) -> None:
    (folder / "itself.png").symlink_to(folder / "itself.png")


UNREADABLE: dict[str, tuple[str, Make, str]] = {
    "zero bytes": ("empty.png", _empty, "none of JPEG, PNG, GIF"),
    "text": ("text.jpg", _text, "none of JPEG, PNG, GIF"),
    "truncated JPEG": ("cut.jpg", _cut, "truncated"),
    "truncated PNG": ("cut.png", _cut_png, ""),
    "header alone": ("head.gif", _header_alone, ""),
    "damaged PNG": ("noise.png", _noise, ""),
    "bomb that Pillow refuses": ("bomb60000.png", bomb(60_000), "more pixels than Pillow's limit"),
    "bomb that Pillow warns of": ("bomb11000.png", bomb(11_000), "more pixels than Pillow's limit"),
    "pickle": ("pickle.png", _pickle, "none of JPEG, PNG, GIF"),
    "link to nothing": ("nowhere.png", _nowhere, "No such file or directory"),
    "link to itself": ("itself.png", _itself, "symbolic links"),
}


def pipe(folder: Path) -> Path:
    """A named pipe: whoever opens it waits for ever."""
    path = folder / "pipe.png"
    os.mkfifo(path)
    return path
