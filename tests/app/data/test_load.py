"""``load_data`` as a whole: what it records, refuses and repeats."""

import json
import shutil
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from app.data.pictures import class_folders

from largemargin.app.data import DataConfig, Samples, load, load_data
from largemargin.app.data.image_files import ImageFiles
from largemargin.app.data.load import pixel_statistics, resized
from largemargin.app.data.sources import SOURCES
from largemargin.errors import LargeMarginError


def test_the_record_says_everything():
    config = DataConfig("digits", fraction=0.5, label_noise=0.1, classes=("1", "7", "9"), seed=4)
    data = load_data(config)
    record = json.loads(json.dumps(data.record))
    assert record == data.record
    assert record["source"] == "digits"
    assert record["classes"] == ["1", "7", "9"]
    assert record["images"] == {name: len(getattr(data, name)) for name in record["images"]}
    assert sum(record["counts"]["train"].values()) == len(data.train)
    assert [each["name"] for each in record["modifiers"]] == [
        "classes",
        "validation",
        "fraction",
        "label_noise",
    ]
    assert all(each["seed"] == 4 for each in record["modifiers"][1:])
    assert (record["mean"], record["std"]) == (list(data.mean), list(data.std))
    assert record["skipped"] == []


def test_equal_settings_give_equal_data():
    config = DataConfig("digits", fraction=0.3, label_noise=0.2)
    first, second, other = (load_data(replace(config, seed=seed)) for seed in (1, 1, 2))
    assert first.record == second.record
    assert torch.equal(first.train.pixels, second.train.pixels)
    assert first.record["digests"]["train"] != other.record["digests"]["train"]
    assert first.record["digests"]["test"] == other.record["digests"]["test"]


def test_noise_changes_the_digest_of_the_training_part_alone():
    plain, noisy = (load_data(DataConfig(label_noise=share)) for share in (0.0, 0.1))
    changed = [
        name
        for name, digest in plain.record["digests"].items()
        if noisy.record["digests"][name] != digest
    ]
    assert changed == ["train"]


@pytest.mark.parametrize("normalize", ["auto", "imagenet", "computed", "none"])
def test_normalization(normalize):
    data = load_data(DataConfig(normalize=normalize))
    wanted = {"imagenet": ((0.449,), (0.226,)), "none": ((0.0,), (1.0,))}
    pixels = data.train.pixels.double()
    exact = ((pixels.mean().item(),), (pixels.std(correction=0).item(),))
    for found, each in zip((data.mean, data.std), wanted.get(normalize, exact), strict=True):
        assert found == pytest.approx(each, rel=1e-9)


def test_normalization_has_a_number_for_every_channel(tmp_path):
    class_folders(tmp_path, ("a", "b"), 6)
    data = load_data(DataConfig("folder", str(tmp_path), normalize="none", validation=0))
    assert (data.mean, data.std) == ((0.0,) * 3, (1.0,) * 3)
    photos = load_data(DataConfig("folder", str(tmp_path), validation=0))
    assert photos.mean == (0.485, 0.456, 0.406)
    assert photos.std == (0.229, 0.224, 0.225)


def test_statistics_of_bytes_and_of_their_floats_agree():
    pixels = torch.randint(0, 256, (30, 3, 5, 4), dtype=torch.uint8)
    labels, ids = torch.zeros(30).long(), ("x",) * 30
    whole = pixel_statistics(Samples(labels, ids, pixels))
    floats = pixel_statistics(Samples(labels, ids, pixels.float() / 255))
    for a, b in zip(whole, floats, strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def test_statistics_of_files_hold_one_image_at_a_time(tmp_path, monkeypatch):
    class_folders(tmp_path, ("a", "b"), 6)
    data = load_data(DataConfig("folder", str(tmp_path), resident="no", validation=0))
    held: list[weakref.ref] = []
    most = 0

    def read(files, index, real=ImageFiles.pixels):
        nonlocal most
        found = real(files, index)
        held.append(weakref.ref(found))
        most = max(most, sum(each() is not None for each in held))
        return found

    monkeypatch.setattr(ImageFiles, "pixels", read)
    mean, _ = pixel_statistics(data.train)
    assert (len(held), most <= 2) == (12, True)
    every = torch.stack([data.train.image(i) for i in range(12)])
    torch.testing.assert_close(torch.tensor(mean), every.mean((0, 2, 3)))


def test_a_changed_copy_leaves_the_data_alone():
    data = load_data(DataConfig())
    before = data.train.pixels.clone()
    data.train.image(0).zero_()
    data.train.subset([0, 1]).pixels.zero_()
    assert torch.equal(data.train.pixels, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cifar-10"}, "no data called 'cifar-10'.*Did you mean cifar10"),
        ({"name": "imagenet22k"}, "but digits, cifar10"),
        ({"augment": "mixup"}, "augment must be one of 'auto'"),
        ({"normalize": "mean"}, "normalize must be one of"),
        ({"corrupt": "ignore"}, "corrupt must be one of"),
        ({"resident": "maybe"}, "resident must be one of"),
        ({"imbalance": "linear"}, "imbalance must be one of"),
        ({"size": 0}, "size must be"),
        ({"size": 8, "width": -1}, "width must be"),
        ({"width": 8}, "width goes with size"),
        ({"workers": -1}, "workers must be"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    with pytest.raises(LargeMarginError, match=message):
        load_data(DataConfig(**settings))


def test_every_source_is_named_in_the_help():
    for name in SOURCES:
        assert name in (DataConfig.__doc__ or "")


def test_images_under_two_labels_are_reported(tmp_path):
    """Two of them, one three times; a copy under the same label is none."""
    class_folders(tmp_path, ("a", "b", "c"), 4)
    for source, copy in (("a/000", "b/x"), ("a/000", "c/y"), ("b/001", "c/z"), ("c/002", "c/v")):
        shutil.copy(tmp_path / f"{source}.png", tmp_path / f"{copy}.png")
    message = r"has two labels, byte for byte, 2 times: a/000.png and b/x.png; b/001.png and c/z"
    with pytest.warns(UserWarning, match=message):
        data = load_data(DataConfig("folder", str(tmp_path), validation=0, label_noise=0.5))
    found = data.record["duplicates"]["train under two labels"]
    assert (found["looked_for"], found["count"]) == (True, 2)
    assert found["pairs"] == [["a/000.png", "b/x.png"], ["b/001.png", "c/z.png"]]


def test_only_files_that_may_be_copies_are_read(tmp_path, monkeypatch):
    """Those of a have the length of none of b, but that of each other."""
    for name, size in (("a", 12), ("b", 20)):
        class_folders(tmp_path, (name,), 2, height=size, width=size)
        shutil.copy(tmp_path / name / "000.png", tmp_path / name / "copy.png")
    train = load_data(DataConfig("folder", str(tmp_path), validation=0, resident="no")).train
    files = sorted(tmp_path.rglob("*.png"))
    lengths = dict(zip(train.ids, load.image_lengths(train), strict=True))
    assert lengths == {str(each.relative_to(tmp_path)): each.stat().st_size for each in files}
    read = []
    monkeypatch.setattr(load, "image_digest", lambda samples, index: read.append(index))
    assert load.contradicting_labels(train)["count"] == 0
    assert read == []


def test_arrays_under_two_labels_are_reported_up_to_a_size(tmp_path, monkeypatch):
    images = np.stack([np.full((8, 8), i, dtype=np.uint8) for i in range(6)])
    images[5] = images[1] = images[0]
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([0, 0, 0, 1, 1, 1]))
    config = DataConfig("arrays", str(tmp_path / "a.npz"), validation=0)
    monkeypatch.setattr("largemargin.app.data.load.MOST_COMPARED", 6)
    with pytest.warns(UserWarning, match="1 times: train/0 and train/5"):
        load_data(config)
    monkeypatch.setattr("largemargin.app.data.load.MOST_COMPARED", 5)
    found = load_data(config).record["duplicates"]["train under two labels"]
    assert found == {"looked_for": False, "reason": "more than 5 images"}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_that_would_grow_beyond_memory_are_refused(monkeypatch, dtype):
    small = Samples(torch.zeros(2).long(), ("a", "b"), torch.zeros(2, 3, 4, 4, dtype=dtype))
    config = DataConfig(size=8)
    whole = 2 * 3 * 8 * 8 * dtype.itemsize
    monkeypatch.setattr("largemargin.app.data.load.IN_MEMORY", whole)
    assert resized(small, config).pixels.nbytes == whole
    monkeypatch.setattr("largemargin.app.data.load.IN_MEMORY", whole - 1)
    with pytest.raises(LargeMarginError, match="2 images of 8 x 8 pixels take"):
        resized(small, config)
    assert resized(small, replace(config, resident="yes")).pixels.nbytes == whole
    monkeypatch.setattr("largemargin.app.data.load.IN_MEMORY", 0)
    assert resized(small, DataConfig(size=4)) is small  # they have that size already


@pytest.mark.parametrize("resident", ["auto", "yes", "no"])
def test_two_gibibytes_of_images_fit(resident):
    """Of 3 MiB each: 682 are a little less, 683 a little more."""
    config = DataConfig(resident=resident)
    for count, fit in ((682, resident != "no"), (683, resident == "yes")):
        nowhere = ImageFiles(("",), [0] * count, (1024, 1024))
        part = Samples(torch.zeros(count).long(), ("x",) * count, files=nowhere)
        assert load.fits({"train": part}, config) == fit


def test_files_are_read_where_the_number_of_processors_is_not_known(tmp_path, monkeypatch):
    config = DataConfig("folder", str(class_folders(tmp_path, ("a", "b"), 3)), validation=0)
    data = load_data(config)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    again = load_data(config)
    assert torch.equal(again.train.pixels, data.train.pixels)
    assert again.record == data.record
