"""Recall@1 on characters never seen: our ArcFace and that of pytorch-metric-learning.

Both train the network of ``docs/how-to/omniglot_embeddings.py`` in the same way, from the same
weights; only loss and class vectors are each library's own. Both are tuned on the same grid of
learning rate and margin, on 25 of the 30 background alphabets, by recall@1 on the other five. The
best setting of each is then trained on all 964 background characters with three seeds and looks for
the nearest neighbour of each of the 13,180 drawings of the 20 evaluation alphabets. Rows go to
``results/omniglot.json``.

    python papers/benchmark/pack.py omniglot omniglot.tar.xz omniglot.npz
    python benchmarks/omniglot.py --data omniglot.npz
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pytorch_metric_learning import losses as pml
from rows import HERE, Row, environment, write
from torch import Tensor, nn

import largemargin as lm

sys.path.insert(0, str(HERE.parent / "docs" / "how-to"))
from omniglot_embeddings import embedding_network, recall_at_1, train

DIM, WIDTH, SCALE, BATCH = 128, 64, 32.0, 256
RATES = (1e-3, 3e-3, 1e-2)
MARGINS = (0.2, 0.5)
SEEDS = (0, 1, 2)
HELD_OUT = 6
"""Every sixth background alphabet, in the order of their names, is for tuning."""
OURS, THEIRS = "largemargin ArcFace", "pytorch-metric-learning ArcFace"


class Part(NamedTuple):
    images: Tensor
    labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def load(path: Path, device: str, characters: int | None) -> dict[str, Part]:
    """Drawings by what they are for, ink 1 on paper 0, all on the device."""
    with np.load(path, allow_pickle=False) as file:
        images = torch.from_numpy(file["images"])[:, None]
        labels = torch.from_numpy(file["labels"].astype("int64"))
        alphabets = [str(name).split("/")[0] for name in file["names"]]
        evaluation = file["evaluation"].tolist()
    background = sorted({a for a, late in zip(alphabets, evaluation, strict=True) if not late})
    held_out = set(background[::HELD_OUT])
    chosen: dict[str, list[int]] = {"train": [], "tune": [], "held out": [], "new": []}
    for label, (alphabet, late) in enumerate(zip(alphabets, evaluation, strict=True)):
        if late:
            chosen["new"].append(label)
        else:
            chosen["train"].append(label)
            chosen["held out" if alphabet in held_out else "tune"].append(label)
    parts = {}
    for name, kept in chosen.items():
        number = torch.full((len(alphabets),), -1)
        number[kept[:characters]] = torch.arange(len(kept[:characters]))
        rows = (number[labels] >= 0).nonzero().flatten()
        ink = 1 - images[rows].to(device).float() / 255
        parts[name] = Part(ink, number[labels[rows]].to(device))
    return parts


def head_of(
    provider: str, classes: int, margin: float, device: str
) -> tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Parameter]]:
    """Loss as a function of features and labels, and its class vectors."""
    if provider == OURS:
        head = lm.ClassHead(DIM, classes, similarity="cosine").to(device)
        loss = lm.ArcFace(margin=margin, scale=SCALE, impl="auto")
        return lambda features, labels: loss(features, head, labels), list(head.parameters())
    theirs = pml.ArcFaceLoss(classes, DIM, margin=math.degrees(margin), scale=SCALE).to(device)
    return theirs, list(theirs.parameters())


def trial(
    provider: str, fit: Part, judge: Part, *, lr: float, margin: float, seed: int, epochs: int
) -> Row:
    torch.manual_seed(seed)
    device = fit.images.device.type
    network = embedding_network(DIM, WIDTH).to(device)
    loss, parameters = head_of(provider, fit.classes, margin, device)
    start = time.perf_counter()
    train(network, loss, parameters, *fit, epochs=epochs, lr=lr, batch=BATCH, seed=seed)
    if device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    return {
        "benchmark": "omniglot",
        "provider": provider,
        "lr": lr,
        "margin": margin,
        "scale": SCALE,
        "seed": seed,
        "epochs": epochs,
        "classes": fit.classes,
        "drawings": len(fit.images),
        "judged_on": len(judge.images),
        "recall_at_1": round(recall_at_1(network, *judge), 5),
        "train_seconds": round(taken, 2),
        "ms_per_step": round(1e3 * taken / (epochs * (len(fit.images) // BATCH)), 3),
    }


def measure(parts: dict[str, Part], epochs: int, seeds: tuple[int, ...]) -> list[Row]:
    rows = []
    for provider in (OURS, THEIRS):
        tried = []
        for lr in RATES:
            for margin in MARGINS:
                row = trial(
                    provider,
                    parts["tune"],
                    parts["held out"],
                    lr=lr,
                    margin=margin,
                    seed=0,
                    epochs=epochs,
                )
                tried.append({"phase": "tuning", **row})
                say(tried[-1])
        best = max(tried, key=lambda row: row["recall_at_1"])
        rows += tried
        for seed in seeds:
            row = trial(
                provider,
                parts["train"],
                parts["new"],
                lr=best["lr"],
                margin=best["margin"],
                seed=seed,
                epochs=epochs,
            )
            rows.append({"phase": "final", **row})
            say(rows[-1])
    return rows


def floor(parts: dict[str, Part]) -> Row:
    """What the pixels themselves, and the network before training, find."""
    torch.manual_seed(0)
    new = parts["new"]
    network = embedding_network(DIM, WIDTH).to(new.images.device)
    return {
        "benchmark": "omniglot",
        "phase": "floor",
        "provider": "none",
        "pixels_recall_at_1": round(recall_at_1(nn.Flatten(), *new), 5),
        "untrained_recall_at_1": round(recall_at_1(network, *new), 5),
    }


def say(row: Row) -> None:
    print(
        f"{row['phase']:<8}{row['provider']:<34}lr {row['lr']:<7g}margin {row['margin']:<6g}"
        f"seed {row['seed']}  recall@1 {row['recall_at_1']:.4f}  {row['train_seconds']:.1f} s, "
        f"{row['ms_per_step']:.2f} ms a step",
        flush=True,
    )


def summary(rows: list[Row]) -> None:
    for provider in (OURS, THEIRS):
        final = [r for r in rows if r["phase"] == "final" and r["provider"] == provider]
        found = [row["recall_at_1"] for row in final]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(
            f"{provider:<34}recall@1 {100 * statistics.mean(found):.2f} +- {100 * spread:.2f} % "
            f"over {len(found)} seeds (lr {final[0]['lr']:g}, margin {final[0]['margin']:g})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--data", type=Path, required=True, help="made by papers/benchmark/pack.py")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--characters", type=int, help="of each part; default all")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--name", default="omniglot", help="of the file in results/")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    common = environment(torch.get_num_threads())
    on_gpu = options.device == "cuda"
    common["device"] = torch.cuda.get_device_name() if on_gpu else common["cpu"]
    parts = load(options.data, options.device, options.characters)
    print({name: (len(part.images), part.classes) for name, part in parts.items()})
    rows = [floor(parts), *measure(parts, options.epochs, SEEDS[: options.seeds])]
    summary(rows)
    print(f"rows in {write(options.name, rows, common)}")


if __name__ == "__main__":
    main()
