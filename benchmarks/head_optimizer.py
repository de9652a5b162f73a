"""What does an optimizer step of a large head cost? Ours against torch's, in one run.

A head of a million classes of 512 float32 numbers on a GPU (20,000 of 128 on a CPU). All optimizers
get the same gradient and take turns; each is compared with its equation in float64 on a few rows
before anything is timed. A row says how long a step takes, how many bytes it has to move at least
(every array read or written once), how much state it keeps and what it allocates while it steps.
The ratio is to the fastest of torch's optimizers that computes the like in the same run.

    python benchmarks/head_optimizer.py              # results/head_optimizer_<device>.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rows import Row, cuda_seconds, environment, verdict, write
from torch import Tensor, nn

from largemargin.heads.optim import HeadSGD, RowwiseAdam

LR, MOMENTUM, BETAS, EPS = 1e-3, 0.9, (0.9, 0.999), 1e-8
CHECKED = 64
"""Rows that are compared with the equations."""
IN_A_ROW = 4
"""Steps on a GPU between two looks at the clock, so that it need not wait for the host."""
TARGET = 1.0
"""Ours may take at most as long as the fastest of torch's that computes the like."""

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Provider:
    kind: str
    build: Build
    arrays: float
    """Numbers of the weights' dtype (float32) read or written for each weight."""
    rule: str
    """Which equation it must follow."""
    dtype: torch.dtype = torch.float32
    touched: float = 1.0
    """Part of the rows that have a gradient."""


def providers() -> dict[str, Provider]:
    """By name. ``arrays``: weight twice, gradient, and each moment twice, halves for bfloat16."""
    adam = torch.optim.Adam
    return {
        "torch Adam, fused": Provider(
            "adam", lambda p: adam(p, LR, betas=BETAS, fused=True), 7, "adam"
        ),
        "torch AdamW, foreach": Provider(
            "adam",
            lambda p: torch.optim.AdamW(p, LR, betas=BETAS, weight_decay=0.0, foreach=True),
            7,
            "adam",
        ),
        "RowwiseAdam": Provider("adam", lambda p: RowwiseAdam(p, LR), 4, "rowwise"),
        "RowwiseAdam, no first moment": Provider(
            "adam", lambda p: RowwiseAdam(p, LR, betas=(0.0, BETAS[1])), 3, "rowwise, no first"
        ),
        "RowwiseAdam, plain torch": Provider(
            "adam", lambda p: RowwiseAdam(p, LR, fused=False), 4, "rowwise"
        ),
        "RowwiseAdam, lazy, 1 row in 10": Provider(
            "adam", lambda p: RowwiseAdam(p, LR, lazy=True), 1.3, "rowwise", touched=0.1
        ),
        "RowwiseAdam, bfloat16 weights": Provider(
            "adam", lambda p: RowwiseAdam(p, LR), 2.5, "rowwise", dtype=torch.bfloat16
        ),
        "torch SGD with momentum, fused": Provider(
            "sgd", lambda p: torch.optim.SGD(p, LR, momentum=MOMENTUM, fused=True), 5, "sgd"
        ),
        "torch SGD with momentum, foreach": Provider(
            "sgd", lambda p: torch.optim.SGD(p, LR, momentum=MOMENTUM, foreach=True), 5, "sgd"
        ),
        "HeadSGD": Provider("sgd", lambda p: HeadSGD(p, LR), 4, "sgd"),
        "torch SGD, fused": Provider(
            "plain sgd", lambda p: torch.optim.SGD(p, LR, fused=True), 3, "plain sgd"
        ),
        "HeadSGD, no momentum": Provider(
            "plain sgd", lambda p: HeadSGD(p, LR, momentum=0.0), 3, "plain sgd"
        ),
    }


def expected(rule: str, start: Tensor, grad: Tensor, steps: int) -> Tensor:
    """Some rows after some steps with one gradient, in float64."""
    weight, first = start.double(), torch.zeros_like(start, dtype=torch.float64)
    grad = grad.double()
    second = torch.zeros_like(first)
    for step in range(1, steps + 1):
        if "sgd" in rule:
            first = (MOMENTUM if rule == "sgd" else 0.0) * first + grad
            weight = weight - LR * first
            continue
        beta1 = 0.0 if "no first" in rule else BETAS[0]
        first = beta1 * first + (1 - beta1) * grad
        square = grad.square()
        square = square.mean(1, keepdim=True) if "rowwise" in rule else square
        second = BETAS[1] * second + (1 - BETAS[1]) * square
        size = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
        weight = weight - LR * first / (1 - beta1**step) / size
    return weight


@dataclass
class Case:
    """One provider on its own copy of the head."""

    provider: Provider
    weight: nn.Parameter
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        self.optimizer.step()


def prepare(provider: Provider, start: Tensor, grad: Tensor) -> Case:
    weight = nn.Parameter(start.to(provider.dtype, copy=True))
    given = grad
    if provider.touched < 1:
        generator = torch.Generator(grad.device).manual_seed(0)
        drawn = torch.rand(len(grad), 1, generator=generator, device=grad.device)
        given = grad * (drawn < provider.touched)
    weight.grad = given.to(provider.dtype)
    case = Case(provider, weight, provider.build([weight]))
    rows = torch.linspace(0, len(start) - 1, CHECKED, device=start.device).long()
    before, kept = weight.detach()[rows].clone(), weight.grad[rows].clone()
    steps = 3
    for _ in range(steps):
        case.step()
    want = expected(provider.rule, before, kept, steps)
    moved = kept.abs().amax(1) > 0 if provider.touched < 1 else slice(None)
    got = weight.detach()[rows].double()
    if provider.dtype == torch.bfloat16:
        # Rounding at random is coarser than a step, but the steps must be right on average.
        way = want - before.double()
        error, tolerance = (((got - before) * way).sum() / way.square().sum() - 1).abs(), 0.1
    else:
        # A moment in bfloat16 is right to 1 part in 256.
        error, tolerance = (got - want)[moved].abs().max(), 2**-6 * LR * steps
    assert error < tolerance, f"{provider.rule}: {error:.1e} from its equation"
    return case


def seconds(step: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    return cuda_seconds(step, IN_A_ROW)


def temporary(step: Callable[[], None], device: str) -> int | None:
    """Bytes allocated while it steps; not known on a CPU."""
    if device == "cpu":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def state_bytes(case: Case) -> int:
    state = case.optimizer.state[case.weight]
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def measure(device: str, classes: int, dim: int, repetitions: int) -> list[Row]:
    generator = torch.Generator(device).manual_seed(0)
    start = torch.randn(classes, dim, generator=generator, device=device)
    grad = torch.randn(classes, dim, generator=generator, device=device) * 1e-3
    cases = {name: prepare(provider, start, grad) for name, provider in providers().items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(repetitions + 3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = seconds(cases[name].step, device)
            if turn >= 3:
                times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rows = []
    for name, case in cases.items():
        kind, ours = case.provider.kind, not name.startswith("torch")
        rivals = [n for n, c in cases.items() if n.startswith("torch") and c.provider.kind == kind]
        best = min(rivals, key=medians.__getitem__)
        ratio = round(medians[name] / medians[best], 3)
        moved = case.provider.arrays * 4 * classes * dim
        fifths = statistics.quantiles(times[name], n=5, method="inclusive")
        judged = ours and device == "cuda" and "plain torch" not in name
        rows.append(
            {
                "benchmark": "head_optimizer",
                "provider": name,
                "C": classes,
                "D": dim,
                "dtype": str(case.provider.dtype).removeprefix("torch."),
                "median_ms": round(1e3 * medians[name], 3),
                "p20_ms": round(1e3 * fifths[0], 3),
                "p80_ms": round(1e3 * fifths[-1], 3),
                "repetitions": repetitions,
                "moved_gib": round(moved / 2**30, 3),
                "gib_per_s": round(moved / 2**30 / medians[name], 1),
                "state_mib": round(state_bytes(case) / 2**20, 1),
                "temporary_mib": _mib(temporary(case.step, device)),
                "baseline": best,
                "ratio": ratio,
                "target_ratio": TARGET if judged else None,
                "verdict": verdict(ratio, TARGET) if judged else None,
            }
        )
    return rows


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / 2**20, 1)


def report(rows: list[Row]) -> None:
    print(
        f"{'optimizer':<36}{'ms':>9}{'GiB':>8}{'GiB/s':>8}{'state':>9}{'temp MiB':>10}{'ratio':>8}"
    )
    for row in rows:
        print(
            f"{row['provider']:<36}{row['median_ms']:>9.3f}{row['moved_gib']:>8.2f}"
            f"{row['gib_per_s']:>8.0f}{row['state_mib']:>9.0f}{row['temporary_mib']!s:>10}"
            f"{row['ratio']:>8.2f} to {row['baseline']}  {row['verdict'] or ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--classes", type=int, help="default 1,000,000 on a GPU, 20,000 on a CPU")
    parser.add_argument("--dim", type=int, help="default 512 on a GPU, 128 on a CPU")
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    torch.set_num_threads(2)
    common: dict[str, Any] = environment(2)
    common["device"] = torch.cuda.get_device_name() if on_gpu else common["cpu"]
    rows = measure(
        options.device,
        options.classes or (1_000_000 if on_gpu else 20_000),
        options.dim or (512 if on_gpu else 128),
        options.repetitions,
    )
    report(rows)
    print(f"rows in {write(f'head_optimizer_{options.device}', rows, common)}")


if __name__ == "__main__":
    main()
