"""Embeddings for ``embeddings.py``: sentences by a transformer, images by a network of timm.

    python benchmarks/make_embeddings.py sentences MODEL_FOLDER texts.json clinc.npz
    python benchmarks/make_embeddings.py images WEIGHTS.pth images.npz cifar100.npz

``texts.json`` has lists of [text, label] by split ("train", "test", and "ood" with any label);
``images.npz`` has ``x_train``, ``y_train``, ``x_test``, ``y_test``, images (N, H, W, 3) in uint8.
Sentences get the mean of the last hidden states, of unit length; images are 128 pixels wide. The
weights of EfficientNet-Lite0 are matched by the order of their definition.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate, normalize


@torch.no_grad()
def sentences(folder: str, texts: list[str]) -> np.ndarray:
    from transformers import AutoModel, AutoTokenizer

    tokens, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = []
    for start in range(0, len(texts), 128):
        batch = tokens(
            texts[start : start + 128], padding=True, truncation=True, return_tensors="pt"
        )
        mask = batch["attention_mask"][..., None].float()
        states = model(**batch).last_hidden_state
        found.append(normalize((states * mask).sum(1) / mask.sum(1)))
    return torch.cat(found).numpy()


@torch.no_grad()
def images(weights: str, pixels: np.ndarray) -> np.ndarray:
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    given = torch.load(weights, weights_only=True)
    names = [name for name in model.state_dict() if "num_batches" not in name]
    values = [value for name, value in given.items() if "num_batches" not in name]
    model.load_state_dict(dict(zip(names, values, strict=True)), strict=False)
    model.reset_classifier(0)
    model.eval()
    found = []
    for start in range(0, len(pixels), 100):
        batch = torch.from_numpy(pixels[start : start + 100]).permute(0, 3, 1, 2).float()
        batch = interpolate(batch, size=(128, 128), mode="bicubic").clamp(0, 255)
        found.append(model((batch - 127) / 128))
    return torch.cat(found).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("sentences", "images"))
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    arrays: dict[str, np.ndarray] = {}
    if given.kind == "sentences":
        for split, pairs in json.loads(given.data.read_text(encoding="utf-8")).items():
            texts, labels = zip(*pairs, strict=True)
            arrays[f"x_{split}"] = sentences(given.model, list(texts))
            arrays[f"y_{split}"] = np.array(labels)
    else:
        with np.load(given.data, allow_pickle=False) as file:
            for name in file.files:
                arrays[name] = images(given.model, file[name]) if name[0] == "x" else file[name]
    np.savez(given.out, **arrays)


if __name__ == "__main__":
    main()
