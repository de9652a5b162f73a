"""Arrays in .npz and .safetensors files, and tables of Hugging Face datasets."""

import json

import numpy as np
import pytest
import torch
from app.data.pictures import pixels
from PIL import Image

from largemargin.app.data import DataConfig, load_data
from largemargin.errors import LargeMarginError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 8, 6, 3), dtype=np.uint8)
LABELS = np.arange(20) % 4


def saved(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def load(path, **settings):
    return load_data(DataConfig("arrays", str(path), **{"validation": 0, **settings}))


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_splits_by_key(tmp_path, kind):
    arrays = {
        f"{split}_{what}": each[:size].copy()
        for split, size in (("train", 20), ("validation", 8), ("test", 4))
        for what, each in (("images", IMAGES), ("labels", LABELS))
    }
    # Otherwise the splits would share images.
    arrays["validation_images"] ^= 1
    arrays["test_images"] ^= 2
    path = tmp_path / f"data.{kind}"
    if kind == "npz":
        np.savez(path, classes=np.array(["a", "b", "c", "d"]), **arrays)
    else:
        from safetensors.numpy import save_file

        save_file(arrays, path, metadata={"classes": json.dumps(["a", "b", "c", "d"])})
    data = load(path)
    assert data.classes == ("a", "b", "c", "d")
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 8, 4)
    assert (data.channels, data.size) == (3, (8, 6))
    assert torch.equal(data.train.pixels, torch.from_numpy(IMAGES).permute(0, 3, 1, 2))
    assert data.train.ids[3] == "train/3"
    assert data.augment.kind == "none"
    wanted = IMAGES.reshape(-1, 3) / 255
    np.testing.assert_allclose(data.mean, wanted.mean(0), rtol=1e-12)
    np.testing.assert_allclose(data.std, wanted.std(0), rtol=1e-9)


@pytest.mark.parametrize("prefix", ["val_", "valid_"])
def test_short_names_of_the_validation_part(tmp_path, prefix):
    arrays = {"train_images": IMAGES, "train_labels": LABELS}
    held = {f"{prefix}images": IMAGES[:8] ^ 1, f"{prefix}labels": LABELS[:8]}
    data = load(saved(tmp_path / "a.npz", **arrays, **held), validation=0.5)
    assert (len(data.train), len(data.validation)) == (20, 8)
    assert "keys_ignored" not in data.record
    both = {"validation_images": IMAGES[:8] ^ 2, "validation_labels": LABELS[:8]}
    with pytest.raises(LargeMarginError, match="several validation parts"):
        load(saved(tmp_path / "b.npz", **arrays, **held, **both))


@pytest.mark.parametrize(
    "images",
    [
        IMAGES,
        IMAGES.transpose(0, 3, 1, 2),
        IMAGES.astype(np.int64),
        (IMAGES / 255).astype(np.float32),
        IMAGES / 255,
    ],
    ids=["NHWC", "NCHW", "int64", "float32", "float64"],
)
def test_every_form_of_the_same_images(tmp_path, images):
    data = load(saved(tmp_path / "a.npz", images=images, labels=LABELS))
    wanted = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).float() / 255
    found = torch.stack([data.train.image(i) for i in range(20)])
    torch.testing.assert_close(found, wanted)
    assert data.train.pixels.dtype == (torch.float32 if images.dtype.kind == "f" else torch.uint8)


@pytest.mark.parametrize("shape", [(20, 8, 6), (20, 8, 6, 1), (20, 1, 8, 6)])
def test_grey_images(tmp_path, shape):
    grey = IMAGES[..., 0].reshape(shape)
    data = load(saved(tmp_path / "a.npz", images=grey, labels=LABELS), normalize="imagenet")
    assert data.train.pixels.shape == (20, 1, 8, 6)
    assert (data.mean, data.std) == ((0.449,), (0.226,))


def test_labels_of_every_kind(tmp_path):
    for labels, classes in (
        (LABELS * 10 - 5, ("-5", "5", "15", "25")),
        (LABELS.astype(np.float64), ("0", "1", "2", "3")),
        (LABELS.reshape(-1, 1), ("0", "1", "2", "3")),
        (np.array(["x", "w", "é", "z"])[LABELS], ("w", "x", "z", "é")),
    ):
        data = load(saved(tmp_path / "a.npz", images=IMAGES, labels=labels))
        assert data.classes == classes
        assert [data.classes[i] for i in data.train.labels] == [
            str(label) if isinstance(label, str) else str(int(label)) for label in labels.flatten()
        ]


@pytest.mark.filterwarnings("ignore:the same training image has two labels")
def test_images_are_resized(tmp_path):
    path = saved(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    data = load(path, size=16)
    assert data.size == (16, 16)
    assert data.train.pixels.dtype == torch.uint8
    assert load(path, size=4, width=3).train.pixels.shape == (20, 3, 4, 3)
    flat = saved(tmp_path / "b.npz", images=np.full_like(IMAGES, 130), labels=LABELS)
    assert load(flat, size=5).train.pixels.unique().tolist() == [130]
    # A channel that is the same everywhere is not divided by zero.
    assert load(flat).std == (1.0, 1.0, 1.0)


def test_resizing_does_not_fill_the_memory_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr("largemargin.app.data.load.IN_MEMORY", 10_000)
    path = saved(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    with pytest.raises(LargeMarginError, match=r"20 images of 16 x 16 pixels take .*resident: yes"):
        load(path, size=16)
    assert load(path, size=16, resident="yes").size == (16, 16)


def test_images_in_two_parts_are_reported(tmp_path):
    test = np.concatenate([IMAGES[3:5], IMAGES[:2] ^ 1])
    path = saved(
        tmp_path / "a.npz",
        train_images=IMAGES,
        train_labels=LABELS,
        test_images=test,
        test_labels=LABELS[:4],
    )
    with pytest.warns(UserWarning, match="2 in train and test"):
        data = load(path)
    pairs = data.record["duplicates"]["train and test"]["pairs"]
    assert pairs == [["train/3", "test/0"], ["train/4", "test/1"]]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            IMAGES[:, :, 1:],
            "the test images have 3 channels of 8 x 5 pixels, .* 3 channels of 8 x 6",
        ),
        (IMAGES[..., 0], "the test images have 1 channel of 8 x 6 pixels"),
    ],
)
def test_parts_of_other_shapes_are_refused(tmp_path, test, message):
    arrays = {"train_images": IMAGES, "train_labels": LABELS, "test_labels": LABELS}
    path = saved(tmp_path / "a.npz", test_images=test, **arrays)
    with pytest.raises(LargeMarginError, match=message):
        load(path)
    if test.ndim == 4:
        assert load(path, size=8).test.pixels.shape[1:] == (3, 8, 8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "it holds nothing"),
        ({"x": IMAGES, "y": LABELS}, "must hold train_images .* but it holds x, y"),
        ({"train_images": IMAGES}, "but it holds train_images"),
        ({"images": IMAGES, "labels": LABELS[:7]}, "20 images but 7 labels"),
        ({"images": IMAGES[..., [0, 1, 2, 0]], "labels": LABELS}, "1 or 3 channels"),
        ({"images": IMAGES.reshape(20, -1), "labels": LABELS}, "LargeMarginClassifier"),
        ({"images": IMAGES[:, :3, :3], "labels": LABELS}, "channels first or last"),
        ({"images": IMAGES * 1.0, "labels": LABELS}, r"must lie in \[0, 1\], but reach from 0 to"),
        ({"images": IMAGES / 255 - 0.5, "labels": LABELS}, r"must lie in \[0, 1\]"),
        (
            {"images": np.where(LABELS == 3, np.nan, IMAGES.T / 255).T, "labels": LABELS},
            r"must lie in \[0, 1\], but 5 of 20 images hold NaN or infinity, .* image 3\.",
        ),
        ({"images": IMAGES.astype(int) * 9, "labels": LABELS}, r"must lie in \[0, 255\]"),
        ({"images": IMAGES, "labels": LABELS + 0.5}, "integers or names, but row 0 holds 0.5"),
        ({"images": IMAGES, "labels": np.where(LABELS == 2, np.nan, 1)}, "row 2 holds nan"),
        ({"images": IMAGES, "labels": np.eye(20)}, r"one label per image, .*argmax\(1\)"),
        (
            {"images": IMAGES, "labels": LABELS, "classes": np.array(list("abbc"))},
            "different names",
        ),
        ({"images": IMAGES, "labels": LABELS * 0}, "at least 2 classes"),
        ({"images": IMAGES, "labels": LABELS, "classes": np.array(["a", "b"])}, "hold 2, 3, but"),
        (
            {
                "train_images": IMAGES,
                "train_labels": LABELS,
                "test_images": IMAGES[:4] ^ 1,
                "test_labels": LABELS[:4] + 9,
            },
            "the test images have classes that no training image has: 10, 11, 12, 9",
        ),
    ],
)
def test_mistakes(tmp_path, arrays, message):
    with pytest.raises(LargeMarginError, match=message):
        load(saved(tmp_path / "a.npz", **arrays))


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "a.npz").write_text("hello")
    (tmp_path / "a.safetensors").write_text("hello")
    np.savez(tmp_path / "b.npz", images=IMAGES, labels=LABELS.astype(object))
    for name in ("a.npz", "a.safetensors", "b.npz"):
        with pytest.raises(LargeMarginError, match=f"{name} cannot be read") as error:
            load(tmp_path / name)
        # Nobody is told to load what may run a program.
        assert "allow_pickle" not in str(error.value)
    assert "labels holds Python objects" in str(error.value)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(LargeMarginError, match=r"in a \.npz or \.safetensors file"):
        load(tmp_path / "a.txt")


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A data set of 12 + 4 + 4 images, saved; its last split has no labels."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}
    )

    def table(count, first, label=None):
        rows = {
            "image": [Image.fromarray(pixels(first + i)) for i in range(count)],
            "label": [i % 2 if label is None else label for i in range(count)],
        }
        return datasets.Dataset.from_dict(rows, features=features)

    return datasets.DatasetDict(train=table(12, 0), val=table(4, 50), test=table(4, 90, -1))


def test_hugging_face(tmp_path, tables):
    tables.save_to_disk(tmp_path / "saved")
    data = load_data(DataConfig("huggingface", str(tmp_path / "saved")))
    assert data.classes == ("no", "yes")
    assert (len(data.train), len(data.validation), data.test) == (12, 4, None)
    assert data.record["unlabelled_splits"] == ["test"]
    assert torch.equal(data.train.pixels[5], torch.from_numpy(pixels(5)).permute(2, 0, 1))
    assert data.train.labels.tolist() == [0, 1] * 6
    held = load_data(DataConfig("huggingface", str(tmp_path / "saved"), resident="no"))
    assert torch.equal(held.validation.image(2), data.validation.image(2))


def test_hugging_face_table_alone_with_other_columns(tmp_path, tables):
    table = tables["train"].rename_columns({"image": "img", "label": "fine"})
    table.save_to_disk(tmp_path / "saved")
    settings = {"image_column": "img", "label_column": "fine", "validation": 0.25}
    data = load_data(DataConfig("huggingface", str(tmp_path / "saved"), **settings))
    assert (len(data.train), len(data.validation), data.test) == (9, 3, None)
    with pytest.raises(
        LargeMarginError, match=r"no column 'image' but img, fine\. Set image_column"
    ):
        load_data(DataConfig("huggingface", str(tmp_path / "saved")))
    with pytest.raises(LargeMarginError, match="must be of type Image"):
        load_data(
            DataConfig(
                "huggingface", str(tmp_path / "saved"), image_column="fine", label_column="fine"
            )
        )


def relabelled(tables, labels, kind):
    train = tables["train"].remove_columns("label").add_column("label", labels)
    return train.cast_column("label", kind)


def test_hugging_face_names_of_every_split_are_its_own(tmp_path, tables):
    datasets = pytest.importorskip("datasets")
    swapped = datasets.ClassLabel(names=["yes", "no"])
    tables["test"] = relabelled({"train": tables["val"]}, [0, 0, 0, 1], swapped)
    del tables["val"]
    tables.save_to_disk(tmp_path / "saved")
    data = load_data(DataConfig("huggingface", str(tmp_path / "saved")))
    assert data.classes == ("no", "yes")
    assert data.test.labels.tolist() == [1, 1, 1, 0]
    # Numbers without names are those of the training images.
    tables["test"] = tables["test"].cast_column("label", datasets.Value("int64"))
    tables.save_to_disk(tmp_path / "numbers")
    data = load_data(DataConfig("huggingface", str(tmp_path / "numbers")))
    assert data.test.labels.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        (["a", "b", None] * 4, "string", "4 of 12 train images .* no label, .* row 2"),
        ([1.0, 2.0, None] * 4, "float64", "4 of 12 train images"),
        ([0, 1, -1] * 4, None, "4 of 12 train images"),
        ([[0], [0, 1]] * 6, "list", r"must hold one label per image, but there is \[0\]"),
    ],
)
def test_hugging_face_labels_that_are_none(tmp_path, tables, labels, kind, message):
    datasets = pytest.importorskip("datasets")
    kinds = {
        None: datasets.ClassLabel(names=["no", "yes"]),
        "list": datasets.List(datasets.Value("int64")),
    }
    kind = kinds[kind] if kind in kinds else datasets.Value(kind)
    relabelled(tables, labels, kind).save_to_disk(tmp_path / "saved")
    with pytest.raises(LargeMarginError, match=message):
        load_data(DataConfig("huggingface", str(tmp_path / "saved")))


def test_hugging_face_numbers_in_floating_point(tmp_path, tables):
    datasets = pytest.importorskip("datasets")
    relabelled(tables, [9.0, 10.0] * 6, datasets.Value("float64")).save_to_disk(tmp_path / "saved")
    data = load_data(DataConfig("huggingface", str(tmp_path / "saved")))
    assert data.classes == ("9", "10")


def test_hugging_face_that_cannot_be_had(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")

    def fail(*args, **settings):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(LargeMarginError, match=r"nobody/nothing .*no network.*save_to_disk"):
        load_data(DataConfig("huggingface", "nobody/nothing", download=True))
