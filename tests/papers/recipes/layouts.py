"""A few synthetic images in the layout of every data set that the recipes need."""

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

RNG = np.random.default_rng(5)


def pictures(count: int, classes: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Images whose brightness tells their class, so that training has something to find."""
    labels = np.arange(count) % classes
    noise = RNG.integers(0, 100, (count, *shape))
    light = (labels * 155 // max(1, classes - 1)).reshape(-1, *[1] * len(shape))
    return (noise + light).astype(np.uint8), labels


def mnist(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", 240), ("t10k", 40)):
        images, labels = pictures(count, 10, 28, 28)
        for name, array in (("images-idx3", images), ("labels-idx1", labels.astype(np.uint8))):
            head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4) for n in array.shape)
            path = folder / f"{prefix}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(head + array.tobytes()))


def cifar(folder: Path, monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    """CIFAR-10 or -100 as pickles, with checksums that torchvision then expects."""
    from torchvision.datasets import CIFAR10, CIFAR100

    small = classes == 10
    kind, inner = (CIFAR10, "cifar-10-batches-py") if small else (CIFAR100, "cifar-100-python")
    root = folder / inner
    root.mkdir(parents=True)
    key, meta = ("labels", "batches.meta") if small else ("fine_labels", "meta")
    names = "label_names" if small else "fine_label_names"
    parts = {"data_batch_1": 200, "test_batch": 40} if small else {"train": 400, "test": 100}
    sums = {}
    for name, count in parts.items():
        images, labels = pictures(count, classes, 3 * 32 * 32)
        (root / name).write_bytes(pickle.dumps({"data": images, key: labels.tolist()}))
        sums[name] = [name, md5(root / name)]
    text = [f"class {i}" for i in range(classes)]
    (root / meta).write_bytes(pickle.dumps({names: text}))
    train, test = parts
    monkeypatch.setattr(kind, "train_list", [sums[train]])
    monkeypatch.setattr(kind, "test_list", [sums[test]])
    monkeypatch.setattr(kind, "meta", {"filename": meta, "key": names, "md5": md5(root / meta)})


def svhn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for split, count in (("train", 200), ("test", 40)):
        images, labels = pictures(count, 10, 32, 32, 3)
        path = folder / f"{split}_32x32.mat"
        tens = np.where(labels == 0, 10, labels).reshape(-1, 1)
        savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": tens})
        sums[split] = ["", path.name, md5(path)]
    monkeypatch.setattr(SVHN, "split_list", sums)


def rscd(folder: Path) -> None:
    names = ["dry_asphalt_smooth", "wet_asphalt_smooth", "ice"]
    for number, name in enumerate(names):
        for i in range(6):
            picture(folder / "train" / name / f"{i}.jpg", number, len(names), 36, 24)
        for part in ("vali_20k", "test_50k"):
            for i in range(2):
                file = folder / part / f"2022{i}{number}-{name.replace('_', '-')}.jpg"
                picture(file, number, len(names), 36, 24)


def road(folder: Path) -> None:
    for number, name in enumerate(("dry", "icy", "wet")):
        for i in range(5):
            picture(folder / name / f"{i}.png", number, 3, 50, 40)


def image_folder(folder: Path) -> None:
    """ImageNet or Places with three classes; the official validation images are ``test``."""
    for part, count in (("train", 6), ("test", 2)):
        for number in range(3):
            for i in range(count):
                picture(folder / part / f"n0{number}" / f"{i}.png", number, 3, 40, 40)


def people(folder: Path) -> None:
    """Market-1501 or DukeMTMC: four people under two cameras, a distractor and junk."""
    for number in range(1, 5):
        for camera in (1, 2):
            for part, count in (("bounding_box_train", 3), ("bounding_box_test", 2), ("query", 1)):
                for i in range(count):
                    name = f"{number:04d}_c{camera}s1_{i:06d}_00.jpg"
                    picture(folder / part / name, number, 5, 16, 32)
    picture(folder / "bounding_box_test" / "0000_c1s1_000001_00.jpg", 0, 5, 16, 32)
    picture(folder / "bounding_box_test" / "-1_c1s1_000001_00.jpg", 2, 5, 16, 32)


def picture(path: Path, number: int, classes: int, width: int, height: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    light = number * 155 // max(1, classes - 1)
    pixels = RNG.integers(0, 100, (height, width, 3)) + light
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def all_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Every data set; where each lies, for ``reproduce(paths=...)``."""
    mnist(root / "mnist")
    cifar(root / "cifar10", monkeypatch, 10)
    cifar(root / "cifar100", monkeypatch, 100)
    svhn(root / "svhn", monkeypatch)
    rscd(root / "rscd")
    road(root / "road")
    image_folder(root / "imagenet")
    people(root / "market1501")
    people(root / "dukemtmc")
    names = ("mnist", "cifar10", "cifar100", "svhn", "rscd", "market1501", "dukemtmc")
    return {name: str(root / name) for name in names}
