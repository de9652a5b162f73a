"""Data sets as one small file each, for machines that have none.

    python papers/benchmark/pack.py mnist FOLDER carry/mnist.npz        folder of the four idx files
    python papers/benchmark/pack.py omniglot omniglot.tar.xz carry/omniglot.npz

Omniglot's 105 x 105 drawings are reduced to 32 x 32 with a box filter (white paper, black ink).
"""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np

from largemargin.app.data import DataConfig, load_data

SIDE = 32


def mnist(source: str, target: str) -> None:
    data = load_data(DataConfig("mnist", path=source, validation=0.0))
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
            image = Image.open(io.BytesIO(file.read())).convert("L")
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


if __name__ == "__main__":
    {"mnist": mnist, "omniglot": omniglot}[sys.argv[1]](*sys.argv[2:])
