"""Forward and backward of a head alone on a GPU, 10 to 100,000 classes, eager and compiled.

Providers of every loss: ten lines of plain torch, pytorch-metric-learning where it is installed and
has the loss, and this library with its defaults. All get the same float32 features and prototypes,
with products in float32 or, under autocast, in bfloat16. They take turns; a row has the median
milliseconds of a call, by the wall clock around a block of calls (small heads wait for Python, and
so does training), the memory a call takes beyond inputs and gradients, and the ratio to the faster
of the other providers (eager) or to compiled plain torch (compiled).

    python benchmarks/heads_cuda.py              # results/heads_cuda.json, 6 minutes
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rows import Row, environment, write
from torch import Tensor

import largemargin as lm

SHAPES = ((128, 10), (256, 1_000), (512, 10_000), (1_024, 100_000))
DIM, SCALE, MARGIN = 512, 16.0, 0.2
LIMITS = {100_000: {"fp32": 1.0, "bf16": 0.65}}
"""Of eager calls over the faster of the others; 1.05 elsewhere."""

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def cosines(features: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.normalize(features), F.normalize(weight)).float()


def plain_cosface(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    margins = torch.full_like(labels[:, None], -MARGIN, dtype=torch.float32)
    logits = SCALE * cosines(features, weight).scatter_add(1, labels[:, None], margins)
    return F.cross_entropy(logits, labels)


def plain_arcface(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    cosine = cosines(features, weight)
    own = cosine.gather(1, labels[:, None]).clamp(-1 + 1e-7, 1 - 1e-7)
    shifted = torch.cos(torch.acos(own) + MARGIN)
    return F.cross_entropy(SCALE * cosine.scatter(1, labels[:, None], shifted), labels)


def plain_lm_softmax(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = SCALE * cosines(features, weight)
    own = logits.gather(1, labels[:, None]).squeeze(1)
    rest = logits.scatter(1, labels[:, None], -math.inf).logsumexp(1)
    return ((rest - own) / SCALE).mean()


def plain_kobayashi(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(features, weight).float()
    others = logits.scatter(1, labels[:, None], -math.inf)
    chances = others.log_softmax(1).scatter(1, labels[:, None], 0.0)
    count = logits.shape[1] - 1
    spread = (others.softmax(1) * chances).sum(1) - chances.sum(1) / count
    return F.cross_entropy(logits, labels) + 0.15 * spread.mean()


PLAIN: dict[str, Call] = {
    "CosFace": plain_cosface,
    "ArcFace": plain_arcface,
    "LMSoftmax": plain_lm_softmax,
    "Kobayashi": plain_kobayashi,
}


def ours(name: str) -> Call:
    losses: dict[str, Callable[[], lm.Loss]] = {
        "CosFace": lambda: lm.CosFace(margin=MARGIN, scale=SCALE),
        "ArcFace": lambda: lm.ArcFace(margin=MARGIN, scale=SCALE),
        "LMSoftmax": lambda: lm.LMSoftmax(scale=SCALE),
        "Kobayashi": lambda: lm.Kobayashi(strength=0.3),
    }
    loss = losses[name]()
    return lambda features, weight, labels: loss(features, weight, labels)


def peer(name: str, weight: Tensor) -> Call | None:
    """The same prototypes in pytorch-metric-learning's head; None where it has none."""
    try:
        from pytorch_metric_learning import losses as pml
    except ImportError:
        return None
    if name not in ("CosFace", "ArcFace"):
        return None
    margin = MARGIN if name == "CosFace" else math.degrees(MARGIN)
    kind = pml.CosFaceLoss if name == "CosFace" else pml.ArcFaceLoss
    head = kind(2, weight.shape[1], margin=margin, scale=SCALE)
    head.num_classes = weight.shape[0]
    head.W = torch.nn.Parameter(weight.detach().T.contiguous())
    head = head.cuda()

    def call(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return head(features, labels)

    call.weight = head.W  # type: ignore[attr-defined]
    return call


def stepper(call: Call, features: Tensor, weight: Tensor, labels: Tensor, low: bool):
    weight = getattr(call, "weight", weight)

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
            value = call(features, weight, labels)
        return torch.autograd.grad(value, (features, weight))

    return step


def extra_mib(step: Callable[[], object], features: Tensor, weight: Tensor) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    gradients = 4 * (features.numel() + weight.numel())
    return (torch.cuda.max_memory_allocated() - before - gradients) / 2**20


def measured(samples: int, classes: int, name: str, low: bool, compiled: bool) -> list[Row]:
    generator = torch.Generator("cuda").manual_seed(0)
    features = torch.randn(samples, DIM, device="cuda", generator=generator)
    weight = torch.randn(classes, DIM, device="cuda", generator=generator) * DIM**-0.5
    labels = torch.randint(classes, (samples,), device="cuda", generator=generator)
    features.requires_grad_()
    weight.requires_grad_()
    calls: dict[str, Call] = {"plain torch": PLAIN[name]}
    if not compiled and (other := peer(name, weight)) is not None:
        calls["pytorch-metric-learning"] = other
    calls["largemargin"] = ours(name)
    if compiled:
        torch._dynamo.reset()
        calls = {each: torch.compile(call, dynamic=False) for each, call in calls.items()}
    steps = {each: stepper(call, features, weight, labels, low) for each, call in calls.items()}
    memory = {}
    for each, step in steps.items():
        for _ in range(5):
            step()
        memory[each] = extra_mib(step, features, weight)
    many = 20 if classes < 100_000 else 5
    times: dict[str, list[float]] = {each: [] for each in steps}
    for turn in range(15):
        for each in list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]:
            steps[each]()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(many):
                steps[each]()
            torch.cuda.synchronize()
            times[each].append(1e3 * (time.perf_counter() - start) / many)
    found = {each: statistics.median(ms) for each, ms in times.items()}
    others = [each for each in steps if each != "largemargin"]
    fastest = min(others, key=found.__getitem__)
    kind = "bf16" if low else "fp32"
    limit = 1.05 if compiled else LIMITS.get(classes, {}).get(kind, 1.05)
    return [
        {
            "benchmark": "heads_cuda",
            "loss": name,
            "N": samples,
            "C": classes,
            "D": DIM,
            "precision": kind,
            "compiled": compiled,
            "provider": each,
            "ms": round(found[each], 4),
            "extra_mib": round(memory[each], 1),
            "ratio": round(found[each] / found[fastest], 3) if each == "largemargin" else None,
            "against": fastest if each == "largemargin" else None,
            "limit": limit if each == "largemargin" else None,
        }
        for each in steps
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", default=[*PLAIN], choices=[*PLAIN])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    options = parser.parse_args()
    common = {"device": torch.cuda.get_device_name(), **environment(torch.get_num_threads())}
    rows: list[Row] = []
    for mode in options.modes:
        for samples, classes in SHAPES:
            for name in options.losses:
                for low in (False, True):
                    rows += measured(samples, classes, name, low, mode == "compiled")
                    ms = ", ".join(
                        f"{row['provider']} {row['ms']:.3f} ms {row['extra_mib']:.0f} MiB"
                        for row in rows
                        if (row["loss"], row["N"], row["C"], row["compiled"])
                        == (name, samples, classes, mode == "compiled")
                        and (row["precision"] == "bf16") == low
                    )
                    last = rows[-1]
                    print(
                        f"{mode:8} {name:10} {samples:5} {classes:7} {last['precision']} "
                        f"x{last['ratio']:.2f} (limit {last['limit']}): {ms}",
                        flush=True,
                    )
            write("heads_cuda", rows, common)


if __name__ == "__main__":
    main()
