"""Data sets as one small file each, for machines that have none.

    python papers/benchmark/pack.py mnist FOLDER carry/mnist.npz        folder of the four idx files
    python papers/benchmark/pack.py fashion_mnist FOLDER carry/fashion_mnist.npz         likewise
    python papers/benchmark/pack.py omniglot omniglot.tar.xz carry/omniglot.npz
    python papers/benchmark/pack.py mosaics FOLDER ... carry/cifar100.npz                and SVHN
    python papers/benchmark/pack.py clinc150 FOLDER MODEL carry/clinc150.npz
    python papers/benchmark/pack.py trec FOLDER MODEL carry/trec.npz
    python papers/benchmark/pack.py letters letter.npz carry/letters.npz
    python papers/benchmark/pack.py efficientnet_lite0 FILE.pth carry/efficientnet_lite0.safetensors
    python papers/benchmark/pack.py minilm MODEL carry/minilm.safetensors

Omniglot's 105 x 105 drawings are reduced to 32 x 32 with a box filter (white paper, black ink).
Mosaics are lossless pictures SPLIT-K.webp of 32 x 32 images, ten in a row, with labels-SPLIT.npy;
they may lie in several folders and are half as large as the .npz file that is made of them. Texts
become token ids of the model in the folder MODEL (vocab.txt, model.safetensors); its weights are
stored in half precision. The labels of CIFAR-10N and CIFAR-100N need no packing: cifar10n.npz and
cifar100n.npz.
"""

import io
import json
import lzma
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np

from largemargin.app.data import DataConfig, load_data

SIDE, PER_MOSAIC, LETTERS = 32, 5000, 16_000


TOKENS = {"clinc150": 32, "trec": 40}
"""Of a sentence; what is longer is cut."""


def idx(name: str, source: str, target: str) -> None:
    data = load_data(DataConfig(name, path=source, validation=0.0))
    assert data.train.pixels is not None
    assert data.test is not None
    assert data.test.pixels is not None
    np.savez_compressed(
        target,
        train_images=data.train.pixels.numpy(),
        train_labels=data.train.labels.numpy(),
        test_images=data.test.pixels.numpy(),
        test_labels=data.test.labels.numpy(),
    )


def mosaics(*places: str) -> None:
    from PIL import Image

    *folders, target = map(Path, places)
    files = {file.name: file for folder in folders for file in folder.iterdir()}
    arrays = {}
    for split in ("train", "test"):
        labels = np.load(files[f"labels-{split}.npy"])
        parts = []
        for number in range(-(-len(labels) // PER_MOSAIC)):
            picture = Image.open(files[f"{split}-{number}.webp"], formats=["WEBP"])
            tiles = np.asarray(picture.convert("RGB")).reshape(-1, SIDE, 10, SIDE, 3).swapaxes(1, 2)
            parts.append(tiles.reshape(-1, SIDE, SIDE, 3))
        arrays[f"{split}_images"] = np.concatenate(parts)[: len(labels)]
        arrays[f"{split}_labels"] = labels.astype(np.int64)
    np.savez(target, **arrays)


def sentences(name: str, parts: dict[str, list[list[str]]], model: str, target: str) -> None:
    """Token ids (N, 1, 1, L) and labels of every part; those without known classes have none."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(TOKENS[name])
    tokenizer.enable_padding(length=TOKENS[name])
    classes = sorted({label for _, label in parts["train"]})
    arrays = {"classes": np.array(classes)}
    for split, rows in parts.items():
        ids = [each.ids for each in tokenizer.encode_batch([text for text, _ in rows])]
        arrays[f"{split}_inputs"] = np.array(ids, dtype=np.uint16)[:, None, None]
        if not split.endswith("_ood"):
            numbers = [classes.index(label) for _, label in rows]
            arrays[f"{split}_labels"] = np.array(numbers, dtype=np.int64)
    np.savez_compressed(target, **arrays)


def clinc150(source: str, model: str, target: str) -> None:
    with lzma.open(f"{source}/clinc150_full.json.xz", "rt") as file:
        full = json.load(file)
    with lzma.open(f"{source}/clinc150_imbalanced.json.xz", "rt") as file:
        imbalanced = json.load(file)
    parts = {
        "train": full["train"],
        "imbalanced": imbalanced["train"],
        "validation": full["val"],
        "test": full["test"],
        "validation_ood": full["oos_val"],
        "test_ood": full["oos_test"],
    }
    sentences("clinc150", parts, model, target)


def trec(source: str, model: str, target: str) -> None:
    with lzma.open(f"{source}/trec.json.xz", "rt") as file:
        rows = json.load(file)
    parts = {
        split: [[text, label.partition(":")[0]] for text, label in rows[split]]
        for split in ("train", "test")
    }
    sentences("trec", parts, model, target)


def letters(source: str, target: str) -> None:
    """The 16 numbers of every letter, standardised, as 4 x 4 grey images; the last 4,000 test."""
    with np.load(source) as file:
        values, labels = file["x"].astype(np.float32), file["y"].astype(np.int64)
    known = values[:LETTERS]
    values = (values - known.mean(0)) / known.std(0)
    inputs = values.reshape(-1, 1, 4, 4)
    np.savez_compressed(
        target,
        train_inputs=inputs[:LETTERS],
        train_labels=labels[:LETTERS],
        test_inputs=inputs[LETTERS:],
        test_labels=labels[LETTERS:],
        classes=np.array([chr(ord("A") + each) for each in range(26)]),
    )


def efficientnet_lite0(source: str, target: str) -> None:
    import torch
    from largemargin_papers.networks.efficientnet_lite import renamed
    from safetensors.torch import save_file

    save_file(renamed(torch.load(source, map_location="cpu", weights_only=True)), target)


def minilm(source: str, target: str) -> None:
    from largemargin_papers.networks.minilm import renamed
    from safetensors.torch import load_file, save_file

    state = renamed(load_file(f"{source}/model.safetensors"))
    save_file({name: each.half() for name, each in state.items()}, target)


def omniglot(source: str, target: str) -> None:
    from PIL import Image

    drawings: dict[tuple[bool, str], list[np.ndarray]] = {}
    with tarfile.open(source) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if not member.name.endswith(".png"):
                continue
            part, alphabet, character = parts[-4], parts[-3], parts[-2]
            file = archive.extractfile(member)
            assert file is not None
            image = Image.open(io.BytesIO(file.read()), formats=["PNG"]).convert("L")
            small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))
            late = part == "images_evaluation"
            drawings.setdefault((late, f"{alphabet}/{character}"), []).append(small)
    kinds = sorted(drawings)
    labels = [label for label, kind in enumerate(kinds) for _ in drawings[kind]]
    np.savez_compressed(
        target,
        images=np.stack([image for kind in kinds for image in drawings[kind]]),
        labels=np.array(labels, dtype=np.int32),
        names=np.array([name for _, name in kinds]),
        evaluation=np.array([late for late, _ in kinds]),
    )
    print(f"{len(labels)} drawings of {len(kinds)} characters")


PACKERS = {
    "mnist": partial(idx, "mnist"),
    "fashion_mnist": partial(idx, "fashion_mnist"),
    "omniglot": omniglot,
    "mosaics": mosaics,
    "clinc150": clinc150,
    "trec": trec,
    "letters": letters,
    "efficientnet_lite0": efficientnet_lite0,
    "minilm": minilm,
}

if __name__ == "__main__":
    PACKERS[sys.argv[1]](*sys.argv[2:])
