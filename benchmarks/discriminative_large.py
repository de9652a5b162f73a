"""The discriminative loss with 100,000 classes, most of them absent from the batch.

Its centroid margin looks for the nearest decision boundary of each class present among all classes,
which takes two products of the size of the logits: one with centroids, one with class vectors. No
C x C array may appear, and forward and backward together may take three times as long as one
product, N x C x D, in the same precision. Without a CUDA graph the CPU that launches is what is
measured. The rivals found are compared with a search in float64 on a few classes before anything
is timed. Rows go to ``results/discriminative_large_<device>.json``.

    python benchmarks/discriminative_large.py     # C = 100,000 on a GPU, 20,000 on a CPU
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rows import Row, captured, cuda_seconds, environment, verdict, write
from torch import Tensor, nn

import largemargin as lm
from largemargin.ops.boundary import nearest_rival

TARGET = 3.0
CHECKED = 8


class Problem:
    """Features of a batch in which most classes are absent, class vectors and a bias."""

    def __init__(self, samples: int, classes: int, dim: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        made: dict[str, Any] = {"generator": generator, "device": device}
        self.features = 2 * torch.randn(samples, dim, **made)
        self.weight = nn.Parameter(torch.randn(classes, dim, **made) / dim**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(classes, **made))
        self.labels = torch.randint(classes, (samples,), **made)
        self.features.requires_grad_()
        self.loss = lm.Discriminative(classes, dim).to(device)

    def step(self) -> Tensor:
        for tensor in (self.features, self.weight, self.bias):
            tensor.grad = None
        value = self.loss(self.features, self.weight, self.labels, bias=self.bias)
        value.backward()
        return value

    @torch.no_grad()
    def search(self) -> Tensor:
        return nearest_rival(self.features, self.weight, self.labels, self.bias)

    @torch.no_grad()
    def product(self) -> Tensor:
        return self.features @ self.weight.T


@torch.no_grad()
def check(problem: Problem) -> None:
    """The rivals of a few samples lie as near as any, in float64."""
    found = problem.search()[:CHECKED]
    weight, bias = problem.weight.double(), problem.bias.double()
    for row in range(CHECKED):
        own = problem.labels[row]
        normals = weight - weight[own]
        gap = normals @ problem.features[row].double() + bias - bias[own]
        distance = (gap / normals.norm(dim=1).clamp_min(1e-12)).index_fill(0, own, -torch.inf)
        assert distance[found[row]] >= distance.max() - 1e-5, f"sample {row}: not the nearest"


def seconds(step: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    return cuda_seconds(step)


def extra_mib(problem: Problem, device: str) -> float | None:
    """What a step allocates beyond the gradients it leaves; not known on a CPU."""
    if device == "cpu":
        return None
    problem.step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    problem.step()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - after) / 2**20, 1)


def measure(problem: Problem, device: str, precision: str, repetitions: int) -> list[Row]:
    torch.set_float32_matmul_precision(precision)
    if precision == "highest":
        check(problem)
    steps: dict[str, Callable[[], object]] = {
        "one product": problem.product,
        "search for rivals": problem.search,
        "forward and backward": problem.step,
    }
    if device == "cuda":
        problem.step()
        steps["forward and backward, CUDA graph"] = captured(problem.step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repetitions + 3):
        for name, step in steps.items():
            taken = seconds(step, device)
            if turn >= 3:
                times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rows = []
    for name in steps:
        ratio = round(medians[name] / medians["one product"], 3)
        judged = name.startswith("forward and backward") and device == "cuda"
        rows.append(
            {
                "benchmark": "discriminative_large",
                "what": name,
                "N": len(problem.labels),
                "C": len(problem.weight),
                "D": problem.weight.shape[1],
                "classes_present": len(problem.labels.unique()),
                "precision": precision,
                "median_ms": round(1e3 * medians[name], 3),
                "ratio_to_product": ratio,
                "target_ratio": TARGET if judged else None,
                "verdict": verdict(ratio, TARGET) if judged else None,
                "extra_mib": extra_mib(problem, device) if name == "forward and backward" else None,
                "c_x_c_mib": round(4 * len(problem.weight) ** 2 / 2**20),
                "repetitions": repetitions,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    torch.set_num_threads(2)
    common = environment(2)
    common["device"] = torch.cuda.get_device_name() if on_gpu else common["cpu"]
    sizes = (1024, 100_000, 512) if on_gpu else (256, 20_000, 128)
    problem = Problem(*sizes, options.device)
    rows = []
    for precision in ("highest", "high") if on_gpu else ("highest",):
        rows += measure(problem, options.device, precision, options.repetitions)
    for row in rows:
        print(
            f"{row['precision']:<9}{row['what']:<34}{row['median_ms']:>9.3f} ms "
            f"{row['ratio_to_product']:>7.2f} x one product  extra MiB {row['extra_mib']}  "
            f"{row['verdict'] or ''}"
        )
    print(f"rows in {write(f'discriminative_large_{options.device}', rows, common)}")


if __name__ == "__main__":
    main()
