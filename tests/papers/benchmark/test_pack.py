"""Data as one file each."""

import importlib.util
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pack() -> Any:
    spec = importlib.util.spec_from_file_location("pack", ROOT / "papers" / "benchmark" / "pack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mosaics_in_two_folders(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image", reason="mosaics are pictures")
    monkeypatch.setattr(pack, "PER_MOSAIC", 20)
    draw = np.random.default_rng(0)
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    whole = {}
    for split, count in (("train", 33), ("test", 7)):
        whole[split] = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        np.save(tmp_path / "one" / f"labels-{split}.npy", np.arange(count, dtype=np.uint8))
        for number in range(-(-count // 20)):
            part = whole[split][20 * number : 20 * (number + 1)]
            tiles = np.zeros((-(-len(part) // 10) * 10, 32, 32, 3), np.uint8)
            tiles[: len(part)] = part
            rows = tiles.reshape(-1, 10, 32, 32, 3).swapaxes(1, 2).reshape(-1, 320, 3)
            place = tmp_path / ("other" if number else "one") / f"{split}-{number}.webp"
            image.fromarray(rows).save(place, lossless=True)
    pack.mosaics(str(tmp_path / "one"), str(tmp_path / "other"), str(tmp_path / "all.npz"))
    with np.load(tmp_path / "all.npz") as file:
        for split, images in whole.items():
            np.testing.assert_array_equal(file[f"{split}_images"], images)
            assert file[f"{split}_labels"].tolist() == list(range(len(images)))


def test_pictures_are_read_in_the_format_of_their_name(pack: Any, tmp_path: Path) -> None:
    """Pillow would start a program for PostScript, whatever its name is."""
    pillow = pytest.importorskip("PIL", reason="mosaics are pictures")
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"
    np.save(tmp_path / "labels-train.npy", np.zeros(3, np.uint8))
    (tmp_path / "train-0.webp").write_bytes(postscript)
    with pytest.raises(pillow.UnidentifiedImageError):
        pack.mosaics(str(tmp_path), str(tmp_path / "all.npz"))
    with tarfile.open(tmp_path / "letters.tar", "w") as archive:
        member = tarfile.TarInfo("omniglot/images_background/Greek/character01/0001.png")
        member.size = len(postscript)
        archive.addfile(member, io.BytesIO(postscript))
    with pytest.raises(pillow.UnidentifiedImageError):
        pack.omniglot(str(tmp_path / "letters.tar"), str(tmp_path / "letters.npz"))


def test_sentences_become_token_ids(pack: Any, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="reads the vocabulary")
    words = {"[PAD]": 0, "[UNK]": 1, "where": 2, "who": 3}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = {
        "train": [["who", "HUM:ind"], ["where where", "LOC:city"]],
        "test": [["where who what", "HUM:gr"]],
    }
    with lzma.open(tmp_path / "trec.json.xz", "wt") as file:
        json.dump(rows, file)
    pack.trec(str(tmp_path), str(tmp_path), str(tmp_path / "trec.npz"))
    with np.load(tmp_path / "trec.npz") as found:
        assert found["train_inputs"].shape == (2, 1, 1, 40)
        assert found["test_inputs"][0, 0, 0, :5].tolist() == [2, 3, 1, 0, 0]
        assert found["train_labels"].tolist() == [0, 1]
        assert found["test_labels"].tolist() == [0]
        assert found["classes"].tolist() == ["HUM", "LOC"]


def test_letters_are_standardised_by_those_trained_on(pack: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 16, (20_000, 16)).astype(np.uint8)
    values[16_000:] += 3
    np.savez(tmp_path / "letter.npz", x=values, y=np.arange(20_000) % 26)
    pack.letters(str(tmp_path / "letter.npz"), str(tmp_path / "letters.npz"))
    with np.load(tmp_path / "letters.npz") as found:
        assert found["train_inputs"].shape == (16_000, 1, 4, 4)
        assert abs(found["train_inputs"].mean()) < 1e-3
        assert found["test_inputs"].mean() > 0.5
        assert found["classes"][25] == "Z"
