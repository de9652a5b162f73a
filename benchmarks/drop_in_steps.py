"""What ``attach`` adds to a whole training step on a GPU, eager, as users run it.

Forward, loss, backward and SGD of torchvision networks under bfloat16 autocast, on random images
that lie on the GPU. All providers see the same images and begin with the same weights; they take
turns in short blocks of steps. Rows: milliseconds of a step, the lower quartile over the blocks
(what else the host does only adds to them), once of the steps from the tenth to the sixtieth and
once of those after, and the ratio to the same of cross entropy. Kernel launches are counted by
torch's profiler.

    python benchmarks/drop_in_steps.py           # results/drop_in_steps_cuda.json, 4 minutes
    python benchmarks/drop_in_steps.py --models resnet18
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from rows import Row, environment, write
from torch import nn

import largemargin as lm

CLASSES = 1000
MODELS: dict[str, tuple[Callable[..., nn.Module], int, int]] = {
    "resnet18": (torchvision.models.resnet18, 64, 512),
    "resnet50": (torchvision.models.resnet50, 64, 2048),
    "vit_b_16": (torchvision.models.vit_b_16, 32, 768),
}
LIMITS = {"resnet18": (1.08, 1.25), "resnet50": (1.03, 1.08), "vit_b_16": (1.03, 1.05)}
"""Of a step over that with cross entropy, for losses on classes and for those on centroids."""

BASELINE = "cross entropy"
CENTROIDS = ("CE + Discriminative", "CE + StableDiscriminative")
SKIPPED, FIRST, BLOCK = 10, 60, 10


def objectives(classes: int, dim: int) -> dict[str, Any]:
    return {
        "CrossEntropy": lm.CrossEntropy(),
        "CosFace": lm.CosFace(margin=0.2, scale="auto"),
        "ArcFace": lm.ArcFace(margin=0.2, scale="auto"),
        "LMSoftmax": lm.LMSoftmax(scale=16.0),
        "Kobayashi": lm.Kobayashi(),
        CENTROIDS[0]: lm.CrossEntropy() + lm.Discriminative(classes, dim),
        CENTROIDS[1]: lm.CrossEntropy() + lm.StableDiscriminative(classes, dim),
    }


def setup(provider: str, model: str, classes: int) -> Callable[[], None]:
    make, batch, dim = MODELS[model]
    torch.manual_seed(0)
    network = make(num_classes=classes).cuda().to(memory_format=torch.channels_last)
    if model.startswith("vit"):
        nn.init.normal_(network.heads.head.weight, std=dim**-0.5)  # torchvision's are 0
    images = torch.rand(batch, 3, 224, 224, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(classes, (batch,), device="cuda")
    criterion = F.cross_entropy
    if provider != BASELINE:
        criterion = lm.attach(network, objectives(classes, dim)[provider].cuda())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(network(images), labels)
        loss.backward()
        optimizer.step()

    return step


def block(step: Callable[[], None], steps: int) -> float:
    """Milliseconds of one step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def quartile(milliseconds: list[float]) -> float:
    return statistics.quantiles(milliseconds, n=4, method="inclusive")[0]


def launches(step: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kinds = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(event.name.startswith(kinds) for event in profile.events())


def measured(model: str, classes: int, rounds: int) -> list[Row]:
    providers = [BASELINE, *objectives(classes, MODELS[model][2])]
    steps = {provider: setup(provider, model, classes) for provider in providers}
    for step in steps.values():
        block(step, SKIPPED)
    blocks: dict[str, list[float]] = {provider: [] for provider in providers}
    soon = (FIRST - SKIPPED) // BLOCK
    for turn in range(soon + rounds):
        first = turn % len(providers)
        for provider in islice([*providers, *providers], first, first + len(providers)):
            if turn >= soon:
                block(steps[provider], 2)
            blocks[provider].append(block(steps[provider], BLOCK))
    early = {provider: quartile(each[:soon]) for provider, each in blocks.items()}
    late = {provider: quartile(each[soon:]) for provider, each in blocks.items()}
    rows = []
    for provider in providers:
        limit = LIMITS[model][provider in CENTROIDS]
        rows.append(
            {
                "benchmark": "drop_in_steps",
                "model": model,
                "classes": classes,
                "batch": MODELS[model][1],
                "provider": provider,
                "ms": round(late[provider], 3),
                "ms_first_60": round(early[provider], 3),
                "baseline": BASELINE,
                "ratio": round(late[provider] / late[BASELINE], 4),
                "ratio_first_60": round(early[provider] / early[BASELINE], 4),
                "limit": limit if provider != BASELINE else None,
                "launches": launches(steps[provider]),
                "rounds": rounds,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    common = {
        "device": torch.cuda.get_device_name(),
        "precision": "bfloat16 autocast",
        **environment(torch.get_num_threads()),
    }
    rows: list[Row] = []
    for model in options.models:
        rows += measured(model, options.classes, options.rounds)
        print(f"{model:28}    ms  first 60   ratio  first 60  limit  launches")
        for row in rows[-len(objectives(2, 2)) - 1 :]:
            print(
                f"  {row['provider']:26}{row['ms']:7.2f}{row['ms_first_60']:9.2f}"
                f"{row['ratio']:9.3f}{row['ratio_first_60']:9.3f}{row['limit'] or 1:8}"
                f"{row['launches']:9}",
                flush=True,
            )
        write("drop_in_steps_cuda", rows, common)


if __name__ == "__main__":
    main()
