"""How fast is input-loss curvature (K = 20) of a CIFAR-size ResNet-18?

On a CPU: against 21 plain forward and backward passes over the same samples at the same batch size.
On a GPU (``--device cuda``): 10,000 images in batches against one sample at a time, which is timed
on a few samples and multiplied: the row says on how many. Before that, ways of going through the
same work (rows a pass, memory layout, cuDNN's search for the fastest algorithm) are timed on a part
of the images; the whole runs the library as it is, with the number of rows that was fastest there.
Each row says how far its values are from those in float64. Precision is "highest" (float32) and
"high" (TensorFloat-32); there is none below, because differences of gradients drown in bfloat16.

Rows go to ``results/input_curvature_<device>.json``, or to ``--out``.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rows import Row, environment, interleaved, spread_ms, verdict, write
from torch import Tensor, nn

from largemargin.geometry import input_gradients
from largemargin.measuring.input_curvature import CurvatureSettings, measure_curvature

DIRECTIONS = 20
PASSES = DIRECTIONS + 1
ALONE = {"one sample at a time": (DIRECTIONS, 200), "one row at a time": (1, 20)}
"""Rows a pass, and how many samples are timed."""

PART = 2000
"""About how many images ways of going through the work are compared on: whole batches of them."""


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


class Rearranged(nn.Module):
    """A network that is given its images with channels last in memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.contiguous(memory_format=torch.channels_last))


@dataclass(frozen=True)
class Way:
    """One way of going through the same work."""

    batch: int
    search: bool = True
    channels_last: bool = False
    precision: str = "highest"
    every: bool = False
    """Try every algorithm, not the ten that torch tries by default."""

    @contextmanager
    def set(self) -> Iterator[None]:
        cudnn = torch.backends.cudnn
        before, limit = input_gradients.SEARCHED_PASSES, cudnn.benchmark_limit
        try:
            if not self.search:
                input_gradients.SEARCHED_PASSES = math.inf  # type: ignore[assignment]
            if self.every:
                cudnn.benchmark_limit = 0
            yield
        finally:
            input_gradients.SEARCHED_PASSES, cudnn.benchmark_limit = before, limit


WAYS = (
    Way(496, search=False),
    Way(500),
    Way(504, every=True),
    Way(1000),
    Way(250),
    Way(500, channels_last=True),
    Way(1000, channels_last=True),
    Way(496, search=False, channels_last=True),
    Way(496, search=False, precision="high"),
    Way(500, precision="high"),
    Way(1000, precision="high"),
    Way(1000, channels_last=True, precision="high"),
)
"""496 rows without a search and 504 with the longest: torch keeps the first algorithm it used for a
shape."""


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

    def curvature(
        self,
        count: int,
        batch: int,
        model: nn.Module | None = None,
        *,
        rows: int | None = None,
        **how: str,
    ) -> Tensor:
        """Curvatures of the first ``count`` images, ``batch`` of them at a time."""
        settings = CurvatureSettings(num_directions=DIRECTIONS, noise={}, **how)
        pieces = zip(self.x[:count].split(batch), self.y[:count].split(batch), strict=True)
        found = measure_curvature(model or self.model, list(pieces), settings, batch_size=rows)
        return torch.tensor(found.values, dtype=torch.float64)

    def in_double(self, count: int) -> Tensor:
        """The same with the same directions, in float64."""
        settings = CurvatureSettings(num_directions=DIRECTIONS, noise={})
        model = copy.deepcopy(self.model).double()
        data = [(self.x[:count].double(), self.y[:count])]
        return torch.tensor(measure_curvature(model, data, settings).values)

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
    count, batch = len(problem.x), problem.batch
    steps: dict[str, Callable[[], object]] = {
        "curvature, differences": lambda: problem.curvature(count, batch),
        "curvature, products": lambda: problem.curvature(count, batch, method="products"),
        "21 passes, to the parameters": lambda: problem.plain(count, parameters=True),
        "21 passes, to the inputs": lambda: problem.plain(count, parameters=False),
    }
    seconds = interleaved(steps, repetitions=repetitions, warm_up=1)
    rows: list[Row] = []
    for name, times in seconds.items():
        row: Row = {"case": name, "images": count, "batch": batch, **spread_ms(times)}
        for base in ("21 passes, to the parameters", "21 passes, to the inputs"):
            pairs = zip(times, seconds[base], strict=True)
            row[f"ratio to {base}"] = round(statistics.median(a / b for a, b in pairs), 3)
        if name == "curvature, differences":
            for base in ("21 passes, to the parameters", "21 passes, to the inputs"):
                row[f"at most 1.15 of {base}"] = verdict(row[f"ratio to {base}"], 1.15)
        rows.append(row)
    return rows


def seconds_of(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class OnGpu:
    """10,000 images against one at a time, and what makes the difference."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.count = len(problem.x)
        self.part = min(PART, self.count)
        self.models = {False: problem.model, True: Rearranged(problem.model)}
        self.exact = problem.in_double(min(64, self.count))
        self.rows: list[Row] = []
        self.alone: dict[str, float] = {}
        """Seconds for all images, by way of going alone."""

    def run(self, save: Callable[[list[Row]], object]) -> None:
        """Saves after every row: a run that is cut off leaves what it has."""
        for _ in self._all():
            print(self.rows[-1], flush=True)
            save(self.rows)

    def _all(self) -> Iterator[None]:
        for name in ALONE:
            yield self._alone(name)
        for way in WAYS:
            if way.batch <= self.part:
                yield self._way(way)
        for precision in ("highest", "high"):
            yield self._whole(precision)
        yield self._plain()

    def _alone(self, name: str) -> None:
        size, some = ALONE[name]
        some = min(some, self.count)
        work = self.problem.curvature
        self._check(work(4, 1, rows=size))
        spent = seconds_of(lambda: work(some, 1, rows=size))
        self.alone[name] = spent * self.count / some
        self._add(
            f"{name}, timed on {some} and multiplied",
            rows_a_pass=size,
            timed_on=some,
            seconds_timed=round(spent, 3),
            seconds=round(self.alone[name], 2),
        )

    def _way(self, way: Way) -> None:
        part = self.part // way.batch * way.batch
        with way.set():
            found, spent = self._timed(part, way.batch, way.channels_last, way.precision)
        whole = spent * self.count / part
        self._add(
            "part of the images in batches",
            batch=way.batch,
            precision=way.precision,
            cudnn_search="all" if way.every else way.search,
            channels_last=way.channels_last,
            timed_on=part,
            seconds_timed=round(spent, 3),
            seconds=round(whole, 2),
            **self._times_faster(whole),
            **self._check(found),
        )

    def _whole(self, precision: str) -> None:
        """The library as it is, with the fastest number of rows a pass."""
        as_is = [
            row
            for row in self.rows
            if row.get("cudnn_search") is True
            and not row["channels_last"]
            and row["precision"] == precision
        ]
        batch = min(as_is, key=lambda row: row["seconds"])["batch"] if as_is else self.problem.batch
        found, spent = self._timed(self.count, batch, False, precision)
        self._add(
            "all images in batches",
            batch=batch,
            precision=precision,
            timed_on=self.count,
            seconds=round(spent, 2),
            **self._times_faster(spent),
            **{
                f"10 times faster than {name}": verdict(10, alone / spent)
                for name, alone in self.alone.items()
            },
            **self._check(found),
        )

    def _plain(self) -> None:
        some = min(self.count, 2 * self.problem.batch)
        self.problem.plain(some, parameters=True)
        spent = seconds_of(lambda: self.problem.plain(some, parameters=True))
        self._add(
            "21 passes to the parameters, torch's precision, multiplied",
            batch=self.problem.batch,
            timed_on=some,
            seconds=round(spent * self.count / some, 2),
        )

    def _timed(
        self, count: int, batch: int, channels_last: bool, precision: str
    ) -> tuple[Tensor, float]:
        work, model = self.problem.curvature, self.models[channels_last]
        work(batch, batch, model, precision=precision)
        found: list[Tensor] = []
        spent = seconds_of(lambda: found.append(work(count, batch, model, precision=precision)))
        return found[0], spent

    def _check(self, values: Tensor) -> Row:
        """How far from float64; the same directions must give the same curvature."""
        known = self.exact[: len(values)]
        apart = (values[: len(known)] - known).abs() / known
        if float(apart.median()) > 0.1:
            raise SystemExit(f"values are wrong: {values[:4].tolist()}, not {known[:4].tolist()}")
        return {
            "median_relative_difference_to_float64": float(f"{float(apart.median()):.2g}"),
            "largest_relative_difference_to_float64": float(f"{float(apart.max()):.2g}"),
        }

    def _times_faster(self, spent: float) -> Row:
        return {
            f"times faster than {name}": round(alone / spent, 1)
            for name, alone in self.alone.items()
        }

    def _add(self, case: str, **values: object) -> None:
        self.rows.append({"case": case, "images": self.count, **values})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--images", type=int, help="default 16 on a CPU, 10000 on a GPU")
    parser.add_argument("--batch", type=int, help="of plain passes; default 16 and 500")
    parser.add_argument("--repetitions", type=int, default=5, help="on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file for the rows instead of results/")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    common = environment(chosen.threads)
    gpu = chosen.device == "cuda"
    problem = Problem(
        chosen.images or (10_000 if gpu else 16),
        chosen.batch or (500 if gpu else 16),
        chosen.device,
    )

    def save(rows: list[Row]) -> Path:
        if chosen.out is None:
            return write(f"input_curvature_{chosen.device}", rows, common)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps([{**row, **common} for row in rows], indent=1) + "\n")
        return chosen.out

    if gpu:
        common["gpu"] = torch.cuda.get_device_name()
        common["cudnn"] = torch.backends.cudnn.version()
        OnGpu(problem).run(save)
    else:
        rows = on_cpu(problem, chosen.repetitions)
        for row in rows:
            print(row)
        print(save(rows))


if __name__ == "__main__":
    main()
