"""What does measuring cost on two CPU threads?

Pairs: diameters of the classes and all sample margins of 50,000 x 128 features, against
``scipy.spatial.distance.pdist`` for each class and a loop over classes for the margins; both must
find the same numbers before anything is timed. Evaluation: ``measure`` without pairs against one
evaluation pass over the same images that only counts right answers, also with four layers beside
the head (no pairs, no features kept). Rows go to
``results/measure.json``: medians over interleaved repetitions, ratios to a provider of the same
run, and the memory beyond the features themselves, as a fresh process sees it.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rows import Row, environment, interleaved, spread_ms, verdict, write
from scipy.spatial.distance import pdist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from largemargin.geometry import class_dispersion
from largemargin.heads.head_spec import HeadView
from largemargin.measuring import measure, measure_arrays
from largemargin.measuring.layers import block_names
from largemargin.measuring.stream import Stream

THREADS = 2
SAMPLES, DIM, CLASSES = 50_000, 128, 10
MEMORY_LIMIT_MIB = 1024
Pairs = tuple[np.ndarray, np.ndarray]


def arrays(apart: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features in Gaussian clouds, their labels, and a head with the centers as class vectors."""
    generator = torch.Generator().manual_seed(0)
    weight = apart * torch.randn(CLASSES, DIM, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    features = weight[labels] + torch.randn(SAMPLES, DIM, generator=generator)
    return features, labels, weight, torch.randn(CLASSES, generator=generator)


def by_scipy(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> Pairs:
    """Diameters by pdist, signed distances to the nearest boundary by a loop over classes."""
    q, y = features.numpy(), labels.numpy()
    W, b = weight.double().numpy(), bias.double().numpy()
    diameters = np.array([pdist(q[y == c]).max() for c in range(CLASSES)])
    logits = q @ W.T + b
    own = logits[np.arange(len(q)), y]
    margins = np.full(len(q), np.inf)
    for c in range(CLASSES):
        others = y != c
        lengths = np.linalg.norm(W[y[others]] - W[c], axis=1)
        margins[others] = np.minimum(margins[others], (own - logits[:, c])[others] / lengths)
    return diameters, margins


def by_us(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> Pairs:
    """Diameters, and margins of logits, cosines and distances with everything else of a stream."""
    stream = Stream(HeadView(weight, bias))
    stream.add(features, labels)
    diameters = class_dispersion(features, labels, CLASSES)
    return diameters.numpy(), stream.column("distance").numpy()


def by_measure(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> object:
    """The whole result, the closest pair of different classes among all of them too."""
    return measure_arrays(features, labels, weight, bias, pairwise=True)


def extra_memory(apart: float, function: Callable[..., object]) -> float:
    """MiB that a call adds to the largest size of a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_grown, (apart, function))


def _grown(apart: float, function: Callable[..., object]) -> float:
    torch.set_num_threads(THREADS)
    given = arrays(apart)
    before = _largest()
    function(*given)
    return round(_largest() - before, 1)


def _largest() -> float:
    """Largest size of this process so far in MiB. (getrusage counts the parent's, kept by exec.)"""
    status = Path("/proc/self/status").read_text()
    (line,) = [each for each in status.splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def pair_rows(repetitions: int) -> list[Row]:
    found = []
    for name, apart in (("overlapping classes", 0.5), ("separate classes", 3.0)):
        given = arrays(apart)
        for got, want in zip(by_us(*given), by_scipy(*given), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
        providers = {"pdist + loop": by_scipy, "ours": by_us, "measure, separation too": by_measure}
        seconds = interleaved(
            {key: partial(function, *given) for key, function in providers.items()},
            repetitions=repetitions,
            warm_up=0,
        )
        times = {key: spread_ms(values) for key, values in seconds.items()}
        for key, function in providers.items():
            ratio = round(times[key]["median_ms"] / times["pdist + loop"]["median_ms"], 4)
            memory = None if key == "pdist + loop" else extra_memory(apart, function)
            met = None
            if key == "ours":
                both = verdict(ratio, 0.2), verdict(memory, MEMORY_LIMIT_MIB, strict=True)
                met = "met" if both == ("met", "met") else "MISSED"
            found.append(
                {
                    "benchmark": "measure pairs",
                    "case": name,
                    "shape": {"N": SAMPLES, "D": DIM, "C": CLASSES},
                    "provider": key,
                    **times[key],
                    "baseline": "pdist + loop",
                    "ratio": ratio,
                    "target_ratio": 0.2 if key == "ours" else None,
                    "extra_memory_mib": memory,
                    "target_memory_mib": MEMORY_LIMIT_MIB if key == "ours" else None,
                    "verdict": met,
                }
            )
    return found


class Block(nn.Module):
    def __init__(self, before: int, wide: int) -> None:
        super().__init__()
        stride = wide // before if wide > before else 1
        self.first = nn.Conv2d(before, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)])
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(before, wide, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (inner + self.short(x)).relu()


def resnet20() -> nn.Module:
    """He et al. 2015 for CIFAR: 64 features, 0.27 million parameters."""
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(a, b) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


def resnet10() -> nn.Module:
    """torchvision's, one block a stage, with the 3 x 3 stem for small images: 512 features."""
    model = ResNet(BasicBlock, [1] * 4, num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = total = 0
    for x, y in loader:
        right += int((model(x).argmax(1) == y).sum())
        total += len(y)
    return right / total


def evaluation_rows(repetitions: int) -> list[Row]:
    cases = {"ResNet-20": (resnet20(), 2048), "ResNet-10": (resnet10(), 384)}
    found = []
    for name, (model, count) in cases.items():
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(count, 3, 32, 32, generator=generator)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        loader = DataLoader(TensorDataset(images, labels), batch_size=128)
        assert abs(measure(model, loader).accuracy - evaluate(model, loader)) < 1e-3
        seconds = interleaved(
            {
                "evaluation pass": partial(evaluate, model, loader),
                "measure": partial(measure, model, loader),
                "measure, 4 layers": partial(measure, model, loader, layers=four_layers(model)),
            },
            repetitions=repetitions,
            warm_up=1,
        )
        times = {key: spread_ms(values) for key, values in seconds.items()}
        for key in times:
            ratio = round(times[key]["median_ms"] / times["evaluation pass"]["median_ms"], 4)
            target = 1.3 if key.startswith("measure") else None
            found.append(
                {
                    "benchmark": "measure evaluation",
                    "case": name,
                    "shape": {"N": count, "D": model_dim(model), "C": CLASSES},
                    "provider": key,
                    **times[key],
                    "baseline": "evaluation pass",
                    "ratio": ratio,
                    "target_ratio": target,
                    "verdict": None if target is None else verdict(ratio, target),
                }
            )
    return found


def four_layers(model: nn.Module) -> list[str]:
    """Four blocks, spread over the network, the last among them."""
    head = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    names = block_names(model, head)
    return [names[round((i + 1) * len(names) / 4) - 1] for i in range(4)]


def model_dim(model: nn.Module) -> int:
    return [each for each in model.modules() if isinstance(each, nn.Linear)][-1].in_features


def report(rows: list[Row]) -> None:
    print(f"{'case':<22}{'provider':<26}{'median ms':>11}{'ratio':>8}{'target':>9}{'MiB':>8}")
    for row in rows:
        target = "" if row["target_ratio"] is None else f"<= {row['target_ratio']}"
        memory = row.get("extra_memory_mib")
        print(
            f"{row['case']:<22}{row['provider']:<26}{row['median_ms']:>11.1f}{row['ratio']:>8.3f}"
            f"{target:>9}{'' if memory is None else f'{memory:.0f}':>8}  {row['verdict'] or ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=("pairs", "evaluation"))
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    common = environment(THREADS)
    rows: list[Row] = []
    if options.only != "pairs":
        rows += evaluation_rows(options.repetitions)
    if options.only != "evaluation":
        rows += pair_rows(options.repetitions)
    report(rows)
    if options.only is None:
        print(f"{common['cpu']}, {THREADS} threads; rows in {write('measure', rows, common)}")


if __name__ == "__main__":
    main()
