"""Image folders, CSV files, RSCD and Market-1501: layouts as people have them, and mistakes."""

import json
import os
import shutil
import unicodedata
import warnings

import pytest
import torch
from app.data.pictures import class_folders, picture, pixels
from PIL import Image

from largemargin.app.data import DataConfig, load_data
from largemargin.app.data.load import SMALL
from largemargin.app.data.sources.source import ordered
from largemargin.errors import LargeMarginError


def load(name, path, **settings):
    return load_data(DataConfig(name, str(path), **settings))


def image(number):
    return torch.from_numpy(pixels(number)).permute(2, 0, 1)


@pytest.mark.parametrize("name", ["val", "validation", "valid", "Val"])
def test_folders_of_splits(tmp_path, name):
    class_folders(tmp_path / "train", ("cat", "dog"), 4)
    class_folders(tmp_path / name, ("cat", "dog"), 2, first=100)
    class_folders(tmp_path / "test", ("dog",), 3, first=200)
    data = load("folder", tmp_path)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 4, 3)
    assert data.train.ids[0] == "train/cat/000.png"
    assert torch.equal(data.train.pixels[5], image(1001))
    assert data.test.labels.tolist() == [1, 1, 1]
    assert data.record["counts"]["test"] == {"cat": 0, "dog": 3}
    assert data.record["modifiers"] == []
    assert data.licence == "not known to largemargin"
    assert (data.channels, data.size) == (3, (12, 12))
    json.dumps(data.record)


@pytest.mark.parametrize(
    ("train", "test"), [("Training", "Testing"), ("training", "test"), ("TRAIN", "testing")]
)
def test_other_names_of_splits(tmp_path, train, test):
    class_folders(tmp_path / train, ("cat", "dog"), 4)
    class_folders(tmp_path / test, ("cat", "dog"), 3, first=200)
    data = load("folder", tmp_path, validation=0.25)
    assert data.classes == ("cat", "dog")
    assert (len(data.train), len(data.validation), len(data.test)) == (6, 2, 6)


def test_folders_that_look_like_parts_are_no_classes_without_a_warning(tmp_path):
    for part in ("first", "second"):
        class_folders(tmp_path / part, ("cat", "dog"), 3, first=100 * len(part))
        (tmp_path / part / ".DS_Store").write_text("x")
    with pytest.warns(UserWarning, match=r"first, second in .* hold the same folders: cat, dog"):
        data = load("folder", tmp_path, validation=0)
    assert data.classes == ("first", "second")
    # Images right in a folder are of its class, whatever lies beside them.
    picture(tmp_path / "first" / "x.png", 77)
    assert len(load("folder", tmp_path, validation=0).train) == 13


def test_class_folders_alone_are_split(tmp_path):
    data = load("folder", class_folders(tmp_path, ("cat", "dog"), 10), validation=0.2)
    assert (len(data.train), len(data.validation), data.test) == (16, 4, None)
    assert data.validation.labels.tolist() == [0, 0, 1, 1]


def test_a_class_called_train(tmp_path):
    assert load("folder", class_folders(tmp_path, ("bus", "train"), 5)).classes == ("bus", "train")


def test_other_files_are_counted_and_folders_searched(tmp_path):
    class_folders(tmp_path, ("a", "b"), 4)
    picture(tmp_path / "a" / "deeper" / "x.JPG", 50)
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "a" / ".DS_Store").write_text("x")
    (tmp_path / "a" / "._000.png").write_text("x")
    (tmp_path / "labels.csv").write_text("x")
    data = load("folder", tmp_path, validation=0)
    assert len(data.train) == 9
    assert data.record["other_files"] == 4


def test_a_wrong_extension_is_no_matter(tmp_path):
    class_folders(tmp_path, ("a", "b"), 4)
    (tmp_path / "a" / "000.png").rename(tmp_path / "a" / "zzz.jpg")
    data = load("folder", tmp_path, validation=0)
    assert torch.equal(data.train.pixels[data.train.ids.index("a/zzz.jpg")], image(0))


def test_names_in_any_script(tmp_path):
    names = ("猫", unicodedata.normalize("NFD", "café"), "собака")
    data = load("folder", class_folders(tmp_path, names, 3), classes=("café", "猫"), validation=0)
    assert data.classes == ("café", "猫")
    assert len(data.train) == 6


def test_the_split_is_the_same_however_accents_are_written(tmp_path):
    found = []
    for form in ("NFC", "NFD"):
        for place, name in enumerate(("é", "f", "zoë", "zz", "ü")):
            picture(tmp_path / form / "a" / unicodedata.normalize(form, f"{name}.png"), place)
        class_folders(tmp_path / form, ("b",), 5, first=50)
        data = load("folder", tmp_path / form, validation=0.4)
        found.append((data.train.ids, data.validation.ids))
    assert found[0] == found[1]


def test_names_that_are_no_text(tmp_path):
    class_folders(tmp_path, ("a", "b"), 3)
    os.rename(tmp_path / "a" / "000.png", os.fsencode(tmp_path / "a") + b"/\xff.png")
    data = load("folder", tmp_path, validation=0)
    assert len(data.train) == 6
    json.dumps(data.record, ensure_ascii=False).encode()
    "".join(data.train.ids).encode()


def test_links_are_followed_but_not_in_circles(tmp_path):
    class_folders(tmp_path / "kept", ("elsewhere",), 3)
    root = class_folders(tmp_path / "data", ("a", "b"), 3, first=50)
    (root / "a" / "round").symlink_to(root / "a")
    (root / "b" / "up").symlink_to(root)
    (root / "c").symlink_to(tmp_path / "kept" / "elsewhere")
    with pytest.warns(UserWarning, match="two labels, .* a/000.png and b/up/a/000.png"):
        data = load("folder", root, validation=0)
    assert data.record["counts"]["train"]["c"] == 3
    assert data.record["counts"]["train"]["a"] == 3


def test_images_in_two_splits_are_reported(tmp_path):
    class_folders(tmp_path / "train", ("a", "b"), 4)
    class_folders(tmp_path / "test", ("a", "b"), 3, first=500)
    copy = (tmp_path / "train" / "b" / "002.png").read_bytes()
    (tmp_path / "test" / "a" / "copy.png").write_bytes(copy)
    with pytest.warns(UserWarning, match=r"1 in train and test \(such as test/a/copy\.png\)"):
        data = load("folder", tmp_path)
    found = data.record["duplicates"]["train and test"]
    assert found["count"] == 1
    assert found["pairs"] == [["train/b/002.png", "test/a/copy.png"]]


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_copies_that_are_held_out_are_reported(tmp_path, resident):
    class_folders(tmp_path, ("a", "b"), 10)
    shutil.copy(tmp_path / "a" / "003.png", tmp_path / "a" / "003 (1).png")
    copies = {"a/003.png", "a/003 (1).png"}
    # The same pixels in another file are not looked for, in memory no more than in files.
    Image.open(tmp_path / "b" / "005.png").save(tmp_path / "b" / "005.bmp")
    settings = {"validation": 0.4, "resident": resident}
    apart = 0
    for seed in range(8):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            data = load("folder", tmp_path, seed=seed, **settings)
        found = data.record["duplicates"]["train and validation"]
        between = len(copies & set(data.train.ids)) == 1
        assert found["count"] == between == len(said)
        assert all(set(pair) == copies for pair in found["pairs"])
        apart += between
    assert 0 < apart < 8


def test_sizes(tmp_path):
    class_folders(tmp_path / "one", ("a", "b"), 3)
    class_folders(tmp_path / "large", ("a", "b"), 3, height=80, width=100)
    mixed = class_folders(tmp_path / "mixed", ("a", "b"), 3)
    picture(mixed / "a" / "x.png", 9, 13, 12)
    class_folders(tmp_path / "upright", ("a", "b"), 3, height=15)
    class_folders(tmp_path / "small", ("a", "b"), 3, height=SMALL, width=SMALL)
    class_folders(tmp_path / "long", ("a", "b"), 3, height=SMALL, width=SMALL + 1)
    assert load("folder", tmp_path / "one").size == (12, 12)
    assert load("folder", tmp_path / "upright").size == (15, 12)
    assert load("folder", tmp_path / "small").size == (SMALL, SMALL)
    assert load("folder", tmp_path / "long").size == (224, 224)
    assert load("folder", tmp_path / "one", size=20).size == (20, 20)
    assert load("folder", tmp_path / "mixed").size == (224, 224)
    data = load("folder", tmp_path / "large", size=40, width=50, augment="none")
    assert data.size == (40, 50)
    assert data.train.pixels.shape[1:] == (3, 40, 50)


def test_what_augmentation_needs_decides_what_is_kept_in_memory(tmp_path):
    class_folders(tmp_path, ("a", "b"), 5, height=80, width=100)
    data = load("folder", tmp_path)
    assert data.augment.kind == "resized_crop"
    assert data.train.pixels is None
    assert data.validation.pixels is not None
    assert load("folder", tmp_path, resident="yes").train.pixels is not None
    assert load("folder", tmp_path, augment="flip").train.pixels is not None
    assert load("folder", tmp_path, augment="flip", resident="no").validation.pixels is None


def test_what_is_too_large_stays_in_files_until_it_is_thinned_out(tmp_path, monkeypatch):
    monkeypatch.setattr("largemargin.app.data.load.IN_MEMORY", 10 * 3 * 12 * 12)
    class_folders(tmp_path, ("a", "b"), 20)
    whole = load("folder", tmp_path, validation=0)
    part = load("folder", tmp_path, validation=0, fraction=0.25)
    assert whole.train.pixels is None
    assert part.train.pixels.shape[0] == 10
    place = whole.train.ids.index(part.train.ids[3])
    assert torch.equal(part.train.image(3), whole.train.image(place))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "has no folders in it"),
        (lambda root: picture(root / "a.png"), "has no folders in it. It holds images without"),
        (lambda root: class_folders(root, ("a",), 3), "at least 2 classes are needed"),
        (lambda root: class_folders(root, ("a", "b"), 3) / "c", ""),
        (
            lambda root: (class_folders(root / "train", ("a", "b"), 3), (root / "train/c").mkdir()),
            "train/c holds no image files",
        ),
        (
            lambda root: (
                class_folders(root / "train", ("a", "b"), 3),
                class_folders(root / "test", ("a", "z"), 3),
            ),
            "the test images have classes that no training image has: z",
        ),
        (
            lambda root: [
                class_folders(root / each, ("a", "b"), 2) for each in ("train", "val", "valid")
            ],
            "several folders of validation images: val, valid",
        ),
        (
            lambda root: [
                class_folders(root / each, ("a", "b"), 2) for each in ("train", "Training")
            ],
            "several folders of train images: Training, train",
        ),
        (
            lambda root: [class_folders(root / each, ("a", "b"), 2) for each in ("test", "val")],
            "has test/, val/ but no train/: there is nothing to train on",
        ),
        (
            lambda root: (class_folders(root / "train", ("a", "b"), 3), (root / "test").mkdir()),
            "no image files below",
        ),
    ],
)
def test_folder_mistakes(tmp_path, make, message):
    made = make(tmp_path)
    if message:
        with pytest.raises(LargeMarginError, match=message):
            load("folder", tmp_path)
    else:
        made.mkdir()
        with pytest.raises(LargeMarginError, match="c holds no image files"):
            load("folder", tmp_path)


def csv_file(root, text, count=8):
    for i in range(count):
        picture(root / "images" / f"{i}.png", i)
    path = root / "list.csv"
    path.write_text(text, encoding="utf-8-sig")
    return path


def test_csv(tmp_path):
    lines = [
        f"images/{i}.png,{'hot' if i % 2 else 'cold'},{s}"
        for i, s in enumerate(["train", "train", "train", "train", "val", "val", "test", "test"])
    ]
    data = load("csv", csv_file(tmp_path, "\n".join(["image, label, split", *lines])))
    assert data.classes == ("cold", "hot")
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert (len(data.validation), len(data.test)) == (2, 2)
    assert data.test.ids == ("images/6.png", "images/7.png")
    assert torch.equal(data.test.pixels[1], image(7))


def test_csv_with_other_columns_and_numbers(tmp_path):
    lines = [f"{(9, 10)[i % 2]},images/{i}.png" for i in range(8)]
    path = csv_file(tmp_path, "\n".join(["digit,file", *lines]))
    data = load("csv", path, image_column="file", label_column="digit", validation=0.25)
    assert data.classes == ("9", "10")
    assert (len(data.train), len(data.validation), data.test) == (6, 2, None)


def test_labels_have_one_order_in_every_process():
    # Sets do not, and these are equal as numbers.
    sevens = ["0" * zeros + "7" for zeros in range(8)]
    assert ordered({*sevens, "-1", "10", "9"}) == ("-1", *sorted(sevens), "9", "10")
    assert ordered({"--1", "10", "9"}) == ("--1", "10", "9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'image' but none at all"),
        ("file,label\nimages/0.png,a", r"'image' but file, label\. Set image_column \(--data\.im"),
        ("image,label\nimages\\0.png,a", "of Windows, which is no file here"),
        ("image,label,label\nimages/0.png,a,b", "several columns 'label'"),
        ("image;label\nimages/0.png;a", "must be separated by commas"),
        ("image,label", "no lines after its header"),
        ("image,label\nimages/0.png,a\nimages/1.png,", "line 3 .* lacks an image or a label"),
        ("image,label,split\nimages/0.png,a,trian", "split 'trian'"),
        ("image,label,split\nimages/0.png,a,test", "no training images"),
        ("image,label\nimages/0.png,a\nimages/99.png,b", "images/99.png .*No such file"),
    ],
)
def test_csv_mistakes(tmp_path, text, message):
    with pytest.raises(LargeMarginError, match=message):
        load("csv", csv_file(tmp_path, text))


def rscd(root):
    names = ("dry_asphalt_smooth", "fresh_snow", "ice", "wet_asphalt_severe")
    class_folders(root / "train", names, 3, height=24, width=36)
    for i, name in enumerate(("dry-asphalt-smooth", "fresh_snow", "ice", "wet-asphalt-severe")):
        picture(root / "vali_20k" / f"20220125{i}-{name}.jpg", 50 + i, 24, 36)
        picture(root / "test_50k" / f"20220126{i}-{name}.jpg", 60 + i, 24, 36)
    return root


@pytest.mark.parametrize("inside", ["", "RSCD dataset-1million"])
def test_rscd(tmp_path, inside):
    rscd(tmp_path / inside)
    data = load("rscd", tmp_path, size=32)
    assert data.classes == ("dry_asphalt_smooth", "fresh_snow", "ice", "wet_asphalt_severe")
    assert len(data.train) == 12
    assert data.validation.labels.tolist() == data.test.labels.tolist() == [0, 1, 2, 3]
    assert data.augment.kind == "perspective_flip"
    assert data.mean == (0.485, 0.456, 0.406)


def test_rscd_mistakes(tmp_path):
    with pytest.raises(LargeMarginError, match="has no train/CLASS folders"):
        load("rscd", tmp_path)
    rscd(tmp_path)
    picture(tmp_path / "test_50k" / "noclass.jpg")
    with pytest.raises(LargeMarginError, match="must hold its class after a hyphen"):
        load("rscd", tmp_path)
    (tmp_path / "test_50k" / "noclass.jpg").rename(tmp_path / "test_50k" / "1-lava.jpg")
    with pytest.raises(LargeMarginError, match="no training image has: lava"):
        load("rscd", tmp_path)


def people(root):
    names = {
        "bounding_box_train": [
            "-1_c4s1_1_01",
            "0000_c5s1_1_01",
            "0002_c1s1_000451_03",
            "0002_c2s1_000451_01",
            "0007_c3s3_1_01",
        ],
        "query": ["0001_c1s1_001051_00"],
        "bounding_box_test": ["-1_c1s1_000401_03", "0000_c1s1_000151_01", "0001_c6s1_1_00"],
    }
    number = 0
    for folder, files in names.items():
        for name in files:
            number += 1
            picture(root / folder / f"{name}.jpg", number, 32, 16)
    (root / "bounding_box_train" / "Thumbs.db").write_text("x")
    return root


@pytest.mark.parametrize("name", ["market1501", "dukemtmc"])
def test_people(tmp_path, name):
    data = load(name, people(tmp_path), validation=0)
    assert data.classes == ("0002", "0007")
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.train.extra["camera"].tolist() == [1, 2, 3]
    assert data.query.labels.tolist() == [1]
    assert data.gallery.labels.tolist() == [-1, 0, 1]
    assert data.gallery.extra["camera"].tolist() == [1, 1, 6]
    assert data.size == (256, 128)
    assert load(name, tmp_path, validation=0, size=64).size == (64, 32)
    assert data.test is None
    assert ("withdrawn" in data.licence) == (name == "dukemtmc")
    assert data.train.subset([2]).extra["camera"].tolist() == [3]


def test_people_mistakes(tmp_path):
    people(tmp_path)
    (tmp_path / "query" / "0001_c1s1_001051_00.jpg").rename(tmp_path / "query" / "john.jpg")
    with pytest.raises(LargeMarginError, match=r"john\.jpg does not"):
        load("market1501", tmp_path)
    (tmp_path / "query" / "john.jpg").unlink()
    with pytest.raises(LargeMarginError, match="there are no image files"):
        load("market1501", tmp_path)
    (tmp_path / "query").rmdir()
    with pytest.raises(LargeMarginError, match="has no query"):
        load("market1501", tmp_path)


@pytest.mark.parametrize("name", ["folder", "csv", "arrays", "rscd", "market1501", "huggingface"])
def test_a_path_is_needed_and_must_exist(name, tmp_path):
    with pytest.raises(LargeMarginError, match="needs path"):
        load_data(DataConfig(name))
    if name != "huggingface":
        with pytest.raises(LargeMarginError, match=r"there is none at .*nowhere"):
            load(name, tmp_path / "nowhere")
