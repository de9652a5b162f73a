"""Known data sets from tiny files in their own layouts; what is said where files are missing."""

import gzip
import hashlib
import pickle
import urllib.error

import numpy as np
import pytest
import torch

from largemargin.app.data import DataConfig, load_data
from largemargin.app.data.sources.standard_datasets import KNOWN
from largemargin.errors import LargeMarginError

RNG = np.random.default_rng(1)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def no_network(*args, **settings):
    raise urllib.error.URLError("no network here")


def idx(array):
    head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4) for n in array.shape)
    return head + array.tobytes()


def mnist_files(folder, packed=True):
    """Twenty training and ten test images; returns the former."""
    folder.mkdir(parents=True, exist_ok=True)
    images = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    for prefix, count in (("train", 20), ("t10k", 10)):
        for name, array in (
            ("images-idx3", images[:count]),
            ("labels-idx1", (np.arange(count) % 10).astype(np.uint8)),
        ):
            path = folder / f"{prefix}-{name}-ubyte"
            if packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))
    return images


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "place"),
    [("mnist", ""), ("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")],
)
def test_mnist(tmp_path, name, place, packed):
    images = mnist_files(tmp_path / place, packed)
    data = load_data(DataConfig(name, str(tmp_path), validation=0))
    assert torch.equal(data.train.pixels[:, 0], torch.from_numpy(images))
    assert len(data.test) == 10
    assert (data.channels, data.size) == (1, (28, 28))
    assert data.mean == ((0.13066048,) if name == "mnist" else (0.28604059,))
    assert data.classes[1] == ("1" if name == "mnist" else "Trouser")
    assert data.augment.kind == ("none" if name == "mnist" else "flip")
    assert ("MIT" in data.licence) == (name == "fashion_mnist")


def test_mnist_that_is_not_whole(tmp_path, monkeypatch):
    mnist_files(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    config = DataConfig("mnist", str(tmp_path))
    for content in (
        whole[:100],
        b"",
        gzip.compress(b"hello"),
        gzip.compress(gzip.decompress(whole)[:-1]),
    ):
        path.write_bytes(content)
        with pytest.raises(LargeMarginError, match=r"train-images-idx3-ubyte\.gz .*Fetch it again"):
            load_data(config)
    path.unlink()
    with pytest.raises(
        LargeMarginError, match=r"train-images-idx3-ubyte not found.*download: true"
    ):
        load_data(config)
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(
        LargeMarginError, match=r"cannot be downloaded.*Place train-images"
    ) as error:
        load_data(DataConfig("mnist", str(tmp_path), download=True))
    assert str(tmp_path) in str(error.value)


def cifar_files(folder, monkeypatch):
    """Ten images per batch in CIFAR-10's pickles, with sums that torchvision then expects."""
    from torchvision.datasets import CIFAR10

    root = folder / "cifar-10-batches-py"
    root.mkdir()
    batches = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        images = RNG.integers(0, 256, (10, 3072), dtype=np.uint8)
        (root / name).write_bytes(pickle.dumps({"data": images, "labels": list(range(10))}))
        batches[name] = images
    names = [f"class {i}" for i in range(10)]
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    lists = {
        "train_list": [[f"data_batch_{i}", md5(root / f"data_batch_{i}")] for i in range(1, 6)],
        "test_list": [["test_batch", md5(root / "test_batch")]],
        "meta": {
            "filename": "batches.meta",
            "key": "label_names",
            "md5": md5(root / "batches.meta"),
        },
    }
    for name, value in lists.items():
        monkeypatch.setattr(CIFAR10, name, value)
    return batches


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("mnist", (0.1307,), (0.3081,)),
        ("fashion_mnist", (0.2860,), (0.3530,)),
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        ("svhn", (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    ],
)
def test_pixels_are_normalised_as_published(name, mean, std):
    assert KNOWN[name].statistics[0] == pytest.approx(mean, abs=6e-5)
    assert KNOWN[name].statistics[1] == pytest.approx(std, abs=6e-5)


@pytest.mark.parametrize("inner", [False, True])
def test_cifar(tmp_path, monkeypatch, inner):
    batches = cifar_files(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-py" if inner else tmp_path
    data = load_data(DataConfig("cifar10", str(path), validation=0))
    wanted = torch.from_numpy(batches["data_batch_2"]).reshape(10, 3, 32, 32)
    assert torch.equal(data.train.pixels[10:20], wanted)
    assert data.classes[3] == "class 3"
    assert (len(data.train), len(data.test)) == (50, 10)
    assert data.augment.kind == "crop_flip"
    assert data.std == (0.24703223, 0.24348513, 0.26158784)
    assert "no formal licence" in data.licence


def test_svhn(tmp_path, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    images = RNG.integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
    sums = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": images, "y": (np.arange(20) % 10 + 1).reshape(-1, 1)})
        sums[split] = ["", path.name, md5(path)]
    monkeypatch.setattr(SVHN, "split_list", sums)
    data = load_data(DataConfig("svhn", str(tmp_path), validation=0))
    assert torch.equal(data.train.pixels, torch.from_numpy(images).permute(3, 2, 0, 1))
    assert data.train.labels.tolist() == ([1, 2, 3, 4, 5, 6, 7, 8, 9, 0]) * 2
    assert "non-commercial" in data.licence


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cifar10", "cifar-10-python.tar.gz, or the folder cifar-10-batches-py"),
        ("cifar100", "cifar-100-python.tar.gz, or the folder cifar-100-python"),
        ("svhn", "train_32x32.mat and test_32x32.mat"),
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz"),
    ],
)
def test_what_to_place_where(tmp_path, monkeypatch, name, what):
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    for download in (False, True):
        with pytest.raises(LargeMarginError) as error:
            load_data(DataConfig(name, str(tmp_path), download=download))
        text = str(error.value)
        assert f"Place {what}" in text
        assert str(tmp_path) in text
        assert ("download: true" in text) == (not download)
