"""Image files of every kind: turned into RGB properly, or named, counted, skipped or fatal."""

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from app.data.pictures import class_folders, picture, pixels, truncated
from PIL import Image

from largemargin.app.data import Batches, DataConfig, load_data
from largemargin.app.data.image_files import UnreadableImage, bombs_are_errors, read_pixels
from largemargin.errors import LargeMarginError


def read(path, size=(4, 4)):
    with bombs_are_errors():
        return read_pixels(str(path), size, stretch=False)


def flat(colour, mode, path, **save):
    Image.new(mode, (4, 4), colour).save(path, **save)
    return read(path)


def is_colour(found, colour, within=0):
    wanted = torch.tensor(colour).reshape(3, 1, 1)
    return found.shape == (3, 4, 4) and bool(((found.int() - wanted).abs() <= within).all())


def test_modes_become_rgb(tmp_path):
    assert is_colour(flat((10, 20, 30), "RGB", tmp_path / "a.png"), (10, 20, 30))
    assert is_colour(flat(77, "L", tmp_path / "b.png"), (77, 77, 77))
    assert is_colour(flat(1, "1", tmp_path / "c.png"), (255, 255, 255))
    # No cyan, magenta, yellow; a fifth of black.
    assert is_colour(flat((0, 0, 0, 51), "CMYK", tmp_path / "d.jpg"), (204, 204, 204), within=2)


def test_transparent_pixels_lie_over_white(tmp_path):
    assert is_colour(flat((200, 0, 0, 0), "RGBA", tmp_path / "a.png"), (255, 255, 255))
    assert is_colour(flat((0, 0, 0, 51), "RGBA", tmp_path / "b.png"), (204, 204, 204), within=1)
    assert is_colour(flat((0, 51), "LA", tmp_path / "c.png"), (204, 204, 204), within=1)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.save(tmp_path / "d.png")
    assert is_colour(read(tmp_path / "d.png"), (0, 0, 255))
    palette.save(tmp_path / "e.png", transparency=1)
    assert is_colour(read(tmp_path / "e.png"), (255, 255, 255))
    palette.save(tmp_path / "f.png", transparency=b"\xff\x00")  # an alpha value per colour
    assert is_colour(read(tmp_path / "f.png"), (255, 255, 255))


def test_sixteen_bits_are_scaled_not_cut(tmp_path):
    for value, wanted in ((0, 0), (257 * 100, 100), (65535, 255)):
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / "a.png")
        assert is_colour(read(tmp_path / "a.png"), (wanted,) * 3)
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "b.tiff")
    assert is_colour(read(tmp_path / "b.tiff"), (128,) * 3)
    for lowest, highest in ((-3.0, -3.0), (-3.0, 5.0), (0.0, 65536.0)):
        values = np.full((4, 4), highest, np.float32)
        values[1, 2] = lowest
        Image.fromarray(values).save(tmp_path / "c.tiff")
        said = f"from {lowest:g} to {highest:g}, which is neither 8 nor 16 bits"
        with pytest.raises(UnreadableImage, match=said):
            read(tmp_path / "c.tiff")


def test_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert is_colour(read(tmp_path / "a.gif"), (255, 0, 0))


def test_the_rotation_of_the_camera_is_applied(tmp_path):
    image = Image.new("RGB", (8, 4), "black")
    image.paste("white", (0, 0, 4, 4))  # the left half
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    image.save(tmp_path / "a.png", exif=exif)
    found = read(tmp_path / "a.png", (8, 4))
    assert bool((found[:, :4] == 255).all())
    assert bool((found[:, 4:] == 0).all())


def test_small_images_that_lie_on_their_side_are_not_cut(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels(len(list(tmp_path.rglob("*.png"))), 12, 20)).save(path, exif=exif)
    data = load_data(DataConfig("folder", str(tmp_path), validation=0))
    assert data.size == (20, 12)
    stored = torch.from_numpy(pixels(0, 12, 20)).permute(2, 0, 1)
    assert torch.equal(data.train.pixels[0], torch.rot90(stored, -1, (1, 2)))


def test_the_middle_is_cut_out_or_the_image_stretched(tmp_path):
    image = Image.new("RGB", (12, 4), "black")
    image.paste("white", (4, 0, 8, 4))
    image.save(tmp_path / "a.png")
    assert is_colour(read(tmp_path / "a.png"), (255, 255, 255))
    with bombs_are_errors():
        stretched = read_pixels(str(tmp_path / "a.png"), (4, 4), stretch=True)
    assert stretched[0, :, 0].max() < 128


def test_images_of_the_right_size_are_not_touched(tmp_path):
    path = picture(tmp_path / "a.png", 3)
    assert torch.equal(read(path, (12, 12)), torch.from_numpy(pixels(3)).permute(2, 0, 1))


def test_large_jpeg_files_are_reduced_alike(tmp_path):
    ramp = np.linspace(0, 255, 512, dtype=np.uint8)
    image = Image.fromarray(np.stack([np.tile(ramp, (512, 1))] * 3, -1))
    for name in ("a.jpg", "a.png"):
        image.save(tmp_path / name)
    found, wanted = (read(tmp_path / name, (16, 16)).int() for name in ("a.jpg", "a.png"))
    assert (found - wanted).abs().max() <= 3


def test_jpeg_files_keep_what_shows_at_the_size_that_is_asked_for(tmp_path):
    """Stripes of two pixels, after four were made one: an eighth would have them in single ones."""
    stripes = np.repeat(np.arange(64) // 8 % 2 * 255, 64).reshape(64, 64).T.astype(np.uint8)
    for name in ("a.jpg", "a.png"):
        Image.fromarray(np.stack([stripes] * 3, -1)).save(tmp_path / name)
    found, wanted = (read(tmp_path / name, (16, 16)).int() for name in ("a.jpg", "a.png"))
    assert (found - wanted).abs().max() <= 3
    assert wanted[0, 0, 1:5].tolist() == [32, 223, 223, 32]


def chunk(name, content):
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def bomb(path, side=20_000):
    """A PNG file that says it is ``side`` x ``side`` pixels large."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n"
    path.write_bytes(start + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))
    return path


@pytest.mark.parametrize("side", [20_000, 11_000])  # Pillow refuses the one, warns of the other
def test_too_many_pixels_are_refused(tmp_path, side):
    with pytest.raises(UnreadableImage, match="more pixels than Pillow's limit"):
        read(bomb(tmp_path / "a.png", side))


def spoiled(root):
    """A folder of twelve good images and five that are not."""
    class_folders(root, ("a", "b"), 6)
    truncated(root / "a" / "half.jpg")
    (root / "a" / "empty.png").write_bytes(b"")
    (root / "b" / "text.jpg").write_text("not an image")
    (root / "b" / "gone.png").symlink_to(root / "nowhere.png")
    bomb(root / "b" / "bomb.png")
    return root


REASONS = {
    "a/half.jpg": "truncated",
    "a/empty.png": "none of JPEG, PNG, GIF",
    "b/text.jpg": "none of JPEG, PNG, GIF",
    "b/gone.png": "No such file",
    "b/bomb.png": "more pixels than Pillow's limit",
}


@pytest.mark.parametrize("resident", ["auto", "no"])
def test_unreadable_images_are_skipped_by_name(tmp_path, resident):
    config = DataConfig("folder", str(spoiled(tmp_path)), corrupt="skip", resident=resident, size=8)
    with pytest.warns(UserWarning, match=r"^5 unreadable images are left out: .*a/empty\.png"):
        data = load_data(config)
    found = {each["file"]: each["reason"] for each in data.record["skipped"]}
    assert found.keys() == REASONS.keys()
    for name, reason in REASONS.items():
        assert reason in found[name]
    assert len(data.train) + len(data.validation) == 12
    assert set(data.train.ids).isdisjoint(REASONS)
    json.dumps(data.record)
    assert sum(len(batch.labels) for batch in Batches(data.train, 4).epoch(0)) == len(data.train)


def test_training_images_that_stay_in_files_are_checked_too(tmp_path):
    # Small enough for memory, but resized_crop, the default of image files, needs whole pictures.
    truncated(class_folders(tmp_path, ("a", "b"), 6, height=80) / "a" / "half.jpg")
    config = DataConfig("folder", str(tmp_path), corrupt="skip", validation=0)
    with pytest.warns(UserWarning, match=r"^1 unreadable images are left out: a/half\.jpg"):
        data = load_data(config)
    assert data.augment.kind == "resized_crop"
    assert [each["file"] for each in data.record["skipped"]] == ["a/half.jpg"]
    batches = Batches(data.train, 4, augment=data.augment)
    assert sum(len(batch.labels) for batch in batches.epoch(0)) == 12


def test_unreadable_images_are_fatal_by_default(tmp_path):
    config = DataConfig("folder", str(spoiled(tmp_path)), size=8)
    with pytest.raises(LargeMarginError, match="5 of 17 images cannot be read") as error:
        load_data(config)
    assert "leave them out: --data.corrupt skip" in str(error.value)
    # The header of the JPEG file that is cut in half is fine.
    for name in REASONS:
        assert name in str(error.value)
        if name != "a/half.jpg":
            (tmp_path / name).unlink()
    with pytest.raises(LargeMarginError, match=r"1 of 13 .* a/half\.jpg .*truncated"):
        load_data(config)


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_errors_and_warnings_count_the_same(tmp_path, resident):
    spoiled(tmp_path / "train")
    truncated(class_folders(tmp_path / "val", ("a", "b"), 2, first=50) / "b" / "cut.jpg", 8)
    config = DataConfig("folder", str(tmp_path), size=8, resident=resident)
    with pytest.raises(LargeMarginError, match="6 of 22 images cannot be read"):
        load_data(config)
    with pytest.warns(UserWarning, match="^6 unreadable images are left out"):
        load_data(replace(config, corrupt="skip"))


def test_a_broken_file_met_while_training_is_named(tmp_path):
    truncated(class_folders(tmp_path, ("a", "b"), 6) / "a" / "half.jpg")
    config = DataConfig("folder", str(tmp_path), resident="no", size=8, validation=0)
    data = load_data(config)
    with pytest.raises(LargeMarginError, match=r"half\.jpg cannot be read: .*truncated"):
        list(Batches(data.train, 4).epoch(0))


def test_a_class_of_unreadable_images_alone_is_an_error(tmp_path):
    class_folders(tmp_path, ("a", "b"), 4)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.png").write_bytes(b"")
    with pytest.raises(LargeMarginError, match="no training images of c"):
        load_data(DataConfig("folder", str(tmp_path), corrupt="skip"))
