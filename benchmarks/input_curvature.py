"""How fast is input-loss curvature (K = 20) of a CIFAR-size ResNet-18?

On a CPU: against 21 plain forward and backward passes over the same samples at the same batch size.
On a GPU (``--device cuda``): 10,000 images in batches against one sample at a time. Values of both
ways are compared before anything is timed. One at a time is timed on a few samples and multiplied.
Rows go to ``results/input_curvature_<device>.json``.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rows import Row, environment, interleaved, spread_ms, verdict, write
from torch import Tensor, nn

from largemargin.measuring.curvature import CurvatureSettings, measure_curvature

DIRECTIONS = 20
PASSES = DIRECTIONS + 1
SMALL = {"one sample at a time": 64, "one row at a time": 8}
"""Samples that are timed one at a time."""


class Block(nn.Module):
    def __init__(self, before: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, wide, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != wide:
            conv = nn.Conv2d(before, wide, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 with the 3 x 3 stem for 32 x 32 images: 0.56 GFLOP (multiply-adds) an image."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for wide, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(before, wide, stride), Block(wide, wide, 1)]
        before = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Problem:
    """A network whose batch norm has seen data, and random images."""

    def __init__(self, images: int, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.batch = batch
        self.x = torch.rand(images, 3, 32, 32, device=device)
        self.y = torch.arange(images, device=device) % 10
        self.model = resnet18().to(device)
        with torch.no_grad():
            for _ in range(3):
                self.model(self.x[:64])
        self.model.eval()

    def curvature(self, count: int, batch: int, method: str = "differences", **how: str) -> Tensor:
        settings = CurvatureSettings(method=method, directions=DIRECTIONS, noise={}, **how)
        pieces = zip(self.x[:count].split(batch), self.y[:count].split(batch), strict=True)
        found = measure_curvature(self.model, list(pieces), settings)
        return torch.tensor(found.values)

    def one_at_a_time(self, count: int, rows: int) -> Tensor:
        """Each sample by itself; ``rows`` of its directions in one pass."""
        settings = CurvatureSettings(directions=DIRECTIONS, noise={})
        ones = zip(self.x[:count].split(1), self.y[:count].split(1), strict=True)
        return torch.tensor(
            measure_curvature(self.model, list(ones), settings, batch_size=rows).values
        )

    def plain(self, count: int, *, parameters: bool) -> None:
        """21 forward and backward passes, to the parameters or to the inputs alone."""
        for p in self.model.parameters():
            p.requires_grad_(parameters)
        for x, y in zip(self.x[:count].split(self.batch), self.y.split(self.batch), strict=False):
            for _ in range(PASSES):
                inputs = x if parameters else x.clone().requires_grad_()
                F.cross_entropy(self.model(inputs), y, reduction="sum").backward()
                self.model.zero_grad(set_to_none=True)
        for p in self.model.parameters():
            p.requires_grad_(True)


def on_cpu(problem: Problem, repetitions: int) -> list[Row]:
    count = len(problem.x)
    steps: dict[str, Callable[[], object]] = {
        "curvature, differences": lambda: problem.curvature(count, problem.batch),
        "curvature, products": lambda: problem.curvature(count, problem.batch, "products"),
        "21 passes, to the parameters": lambda: problem.plain(count, parameters=True),
        "21 passes, to the inputs": lambda: problem.plain(count, parameters=False),
    }
    seconds = interleaved(steps, repetitions=repetitions, warm_up=1)
    rows: list[Row] = []
    for name, times in seconds.items():
        row: Row = {"case": name, "images": count, "batch": problem.batch, **spread_ms(times)}
        for base in ("21 passes, to the parameters", "21 passes, to the inputs"):
            pairs = zip(times, seconds[base], strict=True)
            row[f"ratio to {base}"] = round(statistics.median(a / b for a, b in pairs), 3)
        if name == "curvature, differences":
            for base in ("21 passes, to the parameters", "21 passes, to the inputs"):
                row[f"at most 1.15 of {base}"] = verdict(row[f"ratio to {base}"], 1.15)
        rows.append(row)
    return rows


def on_gpu(problem: Problem) -> list[Row]:
    def seconds(work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    count, rows = len(problem.x), []
    # The same draws in batches of 20 + 1 and of one row: the values must be the same.
    together = problem.curvature(SMALL["one row at a time"], 64)
    torch.testing.assert_close(
        together, problem.one_at_a_time(SMALL["one row at a time"], 1), rtol=1e-2, atol=1e-6
    )
    apart: dict[str, float] = {}
    for name, size in (("one sample at a time", DIRECTIONS), ("one row at a time", 1)):
        problem.one_at_a_time(2, size)
        spent = seconds(lambda size=size, name=name: problem.one_at_a_time(SMALL[name], size))
        apart[name] = spent * count / SMALL[name]
        rows.append({"case": name, "timed_on": SMALL[name], "seconds": round(apart[name], 2)})
    for precision in ("highest", "high"):
        problem.curvature(2 * problem.batch, problem.batch, precision=precision)
        spent = seconds(
            lambda precision=precision: problem.curvature(count, problem.batch, precision=precision)
        )
        row: Row = {"case": f"in batches, {precision} precision", "seconds": round(spent, 2)}
        for name, alone in apart.items():
            row[f"times faster than {name}"] = round(alone / spent, 1)
            row[f"10 times faster than {name}"] = verdict(10, alone / spent)
        values = problem.curvature(256, problem.batch, precision=precision)
        exact = problem.curvature(256, problem.batch)
        row["median relative difference to highest"] = float(
            ((values - exact).abs() / exact).median()
        )
        rows.append(row)
    some = min(count, 4 * problem.batch)
    problem.plain(some, parameters=True)
    spent = seconds(lambda: problem.plain(some, parameters=True)) * count / some
    rows.append({"case": "21 passes to the parameters, torch's precision", "timed_on": some,
                 "seconds": round(spent, 2)})  # fmt: skip
    return [{"images": count, "batch": problem.batch, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--images", type=int, help="default 16 on a CPU, 10000 on a GPU")
    parser.add_argument("--batch", type=int, help="rows per pass; default 16 and 500")
    parser.add_argument("--repetitions", type=int, default=5, help="on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    common = environment(chosen.threads)
    gpu = chosen.device == "cuda"
    problem = Problem(
        chosen.images or (10_000 if gpu else 16),
        chosen.batch or (500 if gpu else 16),
        chosen.device,
    )
    if gpu:
        common["gpu"] = torch.cuda.get_device_name()
    rows = on_gpu(problem) if gpu else on_cpu(problem, chosen.repetitions)
    for row in rows:
        print(row)
    print(write(f"input_curvature_{chosen.device}", rows, common))


if __name__ == "__main__":
    main()
