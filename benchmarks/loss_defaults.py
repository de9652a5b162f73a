"""What should the losses' defaults be? Those of face recognition, scales by C, margins: accuracies.

Small networks (three hidden layers of 64, with and without batch norm; ``attach``, 400 steps of 64
samples) are trained with cross entropy, with the settings of face recognition (scale 64 or 30, the
papers' margins), and with ``scale="auto"`` and several margins. Data sets are those that
scikit-learn brings:

* digits: 10 classes, half of them for the test;
* pairs: two digits side by side, 100 classes, made of the two halves of digits.

Labels: ``few`` (5 of each class), ``all`` and, for digits, ``tail`` (the last class has a twentieth
of the first's; the test set is balanced). Two setups: batch norm with AdamW at a learning rate of
0.003, and SGD with momentum at 0.05 without batch norm, both with a cosine to 0. Rows go to
``results/loss_defaults.json``; what they hold is not measured again.

    python benchmarks/loss_defaults.py
    python benchmarks/loss_defaults.py --show
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from rows import RESULTS, Row, environment, write
from sklearn.datasets import load_digits
from torch import Tensor, nn

import largemargin as lm

SEEDS = 3
STEPS, BATCH, HIDDEN = 400, 64, 64
FEW, RATIO, PAIRS = 5, 20, 40
"""Samples of a class with few labels; how much larger the first class is than the last; pairs of
every two digits."""

AUTO: dict[str, Any] = {"scale": "auto"}
CANDIDATES: dict[str, tuple[dict[str, Any], ...]] = {
    "CrossEntropy": ({},),
    "NormFace": ({"scale": 64.0}, AUTO),
    "LMSoftmax": ({"scale": 64.0}, AUTO),
    "CosFace": (
        {"margin": 0.35, "scale": 64.0},
        *({"margin": margin, **AUTO} for margin in (0.1, 0.2, 0.35)),
    ),
    "ArcFace": (
        {"margin": 0.5, "scale": 64.0},
        *({"margin": margin, **AUTO} for margin in (0.1, 0.3, 0.5)),
    ),
    "LDAM": ({"max_margin": 0.5, "scale": 30.0}, {"max_margin": 0.5, **AUTO}),
    "AdaFace": ({"margin": 0.4, "scale": 64.0}, {"margin": 0.4, **AUTO}, {"margin": 0.2, **AUTO}),
    "MagFace": ({"scale": 64.0}, AUTO),
    "ElasticFace": ({"margin": 0.5, "scale": 64.0}, {"margin": 0.5, **AUTO}),
    "CurricularFace": ({"margin": 0.5, "scale": 64.0}, {"margin": 0.5, **AUTO}),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.003),
}
SETUPS = ((True, "adamw"), (False, "sgd"))
"""Batch norm and optimizer: one that forgives a wrong scale, one that does not."""

SETS = (
    *(("digits", kind) for kind in ("few", "all", "tail")),
    *(("pairs", kind) for kind in ("few", "all")),
)


class Split(NamedTuple):
    """Standardised by the training samples."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def halves(x: np.ndarray, y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of two halves that have the same share of each class."""
    draw = np.random.default_rng(seed)
    first = []
    for label in np.unique(y):
        own = draw.permutation(np.flatnonzero(y == label))
        first.append(own[: len(own) // 2])
    train = np.concatenate(first)
    return train, np.setdiff1d(np.arange(len(y)), train)


def paired(x: np.ndarray, y: np.ndarray, draw: np.random.Generator) -> tuple[Any, Any]:
    """Digits side by side: ``PAIRS`` of every two, class 10 * left + right."""
    by_class = [np.flatnonzero(y == label) for label in range(10)]
    left, right = np.divmod(np.repeat(np.arange(100), PAIRS), 10)
    sides = [[x[draw.choice(by_class[label])] for label in side] for side in (left, right)]
    return np.concatenate(sides, axis=1), 10 * left + right


def split(name: str, kind: str, seed: int) -> Split:
    x, y = load_digits(return_X_y=True)
    train, test = halves(x, y, seed)
    draw = np.random.default_rng(1000 + seed)
    parts = (x[train], y[train]), (x[test], y[test])
    (x, y), (x_test, y_test) = (paired(*part, draw) if name == "pairs" else part for part in parts)
    sizes = np.bincount(y)
    if kind == "few":
        sizes = np.full(len(sizes), FEW)
    if kind == "tail":
        powers = np.linspace(0, 1, len(sizes))
        sizes = np.round(sizes.min() * RATIO**-powers).astype(int)
    kept = np.concatenate(
        [draw.permutation(np.flatnonzero(y == c))[:size] for c, size in enumerate(sizes)]
    )
    x, y = x[kept], y[kept]
    mean, std = x.mean(0), x.std(0)
    std[std == 0] = 1.0

    def of(values: np.ndarray) -> Tensor:
        return torch.from_numpy((values - mean) / std).float()

    return Split(of(x), torch.from_numpy(y), of(x_test), torch.from_numpy(y_test))


def network(dim: int, classes: int, norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (dim, HIDDEN, HIDDEN):
        layers += [nn.Linear(size, HIDDEN), *([nn.BatchNorm1d(HIDDEN)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, classes))


def accuracy(
    loss: str, settings: dict[str, Any], norm: bool, optimizer: str, data: Split, seed: int
) -> float:
    """Of the network after training; 0 where the loss stopped being finite."""
    classes = int(data.y.max()) + 1
    torch.manual_seed(seed)
    model = network(data.x.shape[1], classes, norm)
    if loss == "LDAM":
        settings = {"class_counts": torch.bincount(data.y).tolist(), **settings}
    criterion = lm.attach(model, getattr(lm, loss)(**settings), warn=False)
    trained = OPTIMIZERS[optimizer](model.parameters())
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(trained, STEPS)
    for rows in batches(len(data.y)):
        value = criterion(model(data.x[rows]), data.y[rows])
        if not math.isfinite(float(value.detach())):
            return 0.0
        trained.zero_grad()
        value.backward()
        trained.step()
        decay.step()
    model.eval()
    with torch.no_grad():
        return float((model(data.x_test).argmax(1) == data.y_test).double().mean())


def batches(count: int) -> Iterator[Tensor]:
    """Indices of ``STEPS`` batches, every sample once before any comes again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(STEPS):
        while len(order) < min(BATCH, count):
            order = torch.cat([order, torch.randperm(count)])
        rows, order = order[:BATCH], order[BATCH:]
        yield rows


def text(loss: str, settings: dict[str, Any]) -> str:
    return f"{loss}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def show(rows: list[Row]) -> None:
    """Mean accuracies in percent over seeds and setups, and the lowest mean of any setup."""
    columns = [f"{data} {kind}" for data, kind in SETS]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for name, seeds in row["accuracy"].items():
            found[name][f"{row['data']} {row['labels']}"].append(100 * statistics.fmean(seeds))
    print(f"{'':40}" + "".join(f"{name:>12}" for name in (*columns, "mean", "worst setup")))
    for name, values in found.items():
        means = [statistics.fmean(values[each]) for each in columns if each in values]
        worst = min(min(each) for each in values.values())
        shown = "".join(f"{mean:12.1f}" for mean in (*means, statistics.fmean(means), worst))
        print(f"{name:40}{shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--show", action="store_true", help="print what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "loss_defaults.json"
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    keys = ("data", "labels", "batch_norm", "optimizer")
    known = {tuple(row[key] for key in keys): row for row in rows}
    common = environment(1)
    tried = [(loss, each) for loss, settings in CANDIDATES.items() for each in settings]
    for (name, kind), (norm, optimizer) in product(SETS, SETUPS):
        setup = (name, kind, norm, optimizer)
        row = known.get(setup, {**dict(zip(keys, setup, strict=True)), "accuracy": {}, **common})
        left = [each for each in tried if text(*each) not in row["accuracy"]]
        if options.show or not left:
            continue
        found: dict[str, list[float]] = defaultdict(list)
        for seed in range(options.seeds):
            data = split(name, kind, seed)
            for loss, settings in left:
                reached = accuracy(loss, settings, norm, optimizer, data, seed)
                found[text(loss, settings)].append(round(reached, 5))
        if setup not in known:
            rows.append(row)
        row["accuracy"] |= found
        write("loss_defaults", rows, {})
    show(rows)


if __name__ == "__main__":
    main()
