"""What does a loss cost where the arithmetic is next to nothing?

A training step of a small model, forward and backward, without optimizer: the time is that of
Python and of handing operators to the device, as it is for a small network on a large GPU. Two
numbers of every provider:

* microseconds of one CPU thread (its own time, so that other programs matter little), medians of
  interleaved repetitions;
* operators that are handed to a device that is not the CPU, forward and backward, views left out.
  They are counted on torch's device "meta", where the code takes the way that it takes on a GPU.

Rows go to ``results/small_steps.json``.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from rows import Row, environment, write
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import largemargin as lm

N, C, D = 64, 10, 64
SCALE, COS_MARGIN, ARC_MARGIN = 16.0, 0.2, 0.3
BASELINE = "linear + CE"

Step = Callable[[], Tensor]

ATTACHED: dict[str, Callable[[], lm.Loss | lm.Objective]] = {
    "attach: CrossEntropy": lm.CrossEntropy,
    "attach: Kobayashi": lm.Kobayashi,
    "attach: LMSoftmax": lambda: lm.LMSoftmax(scale=SCALE),
    "attach: CosFace": lambda: lm.CosFace(margin=COS_MARGIN, scale=SCALE),
    "attach: ArcFace": lambda: lm.ArcFace(margin=ARC_MARGIN, scale=SCALE),
    "attach: CosFace + SampleMargin": lambda: (
        lm.CosFace(margin=COS_MARGIN, scale=SCALE) + 0.5 * lm.SampleMargin()
    ),
    "attach: CrossEntropy + Discriminative": lambda: lm.CrossEntropy() + lm.Discriminative(C, D),
}
PLAIN = (
    BASELINE,
    "CE with empty hooks",
    "CosFace by hand",
    "PML CosFace",
    "PML ArcFace",
    "CosFace",
    "ArcFace",
)
PROVIDERS = (*PLAIN, *ATTACHED)


def setup(provider: str, device: str) -> Step:
    """The same hidden layer and class vectors for everyone."""
    torch.manual_seed(0)
    hidden, head = nn.Linear(D, D).to(device), nn.Linear(D, C).to(device)
    inputs = torch.randn(N, D).to(device)
    labels = torch.randint(C, (N,)).to(device)
    if provider in ATTACHED:
        model = nn.Sequential(hidden, head)
        criterion = lm.attach(model, ATTACHED[provider]().to(device), warn=False)
        return lambda: criterion(model(inputs), labels)
    if provider == BASELINE:
        return lambda: F.cross_entropy(head(hidden(inputs)), labels)
    if provider == "CE with empty hooks":
        return _with_hooks(nn.Sequential(hidden, head), inputs, labels)
    if provider == "CosFace by hand":
        return lambda: _by_hand(hidden(inputs), head.weight, labels)
    if provider.startswith("PML"):
        peer = (
            pml.CosFaceLoss(C, D, margin=COS_MARGIN, scale=SCALE)
            if provider == "PML CosFace"
            else pml.ArcFaceLoss(C, D, margin=ARC_MARGIN * 57.29578, scale=SCALE)
        ).to(device)
        return lambda: peer(hidden(inputs), labels)
    ours: dict[str, lm.Loss] = {
        "CosFace": lm.CosFace(margin=COS_MARGIN, scale=SCALE),
        "ArcFace": lm.ArcFace(margin=ARC_MARGIN, scale=SCALE),
    }
    loss = ours[provider]
    return lambda: loss(hidden(inputs), head, labels)


def _with_hooks(model: nn.Sequential, inputs: Tensor, labels: Tensor) -> Step:
    """The least that a criterion on hooks does which checks labels and has values per sample."""
    model.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    model[1].register_forward_hook(lambda _, given, output: setattr(output, "given", given[0]))
    model.register_forward_hook(lambda *_: None)

    def step() -> Tensor:
        outputs = model(inputs)
        if labels.is_cpu:
            low, high = labels.aminmax()
            assert 0 <= low.item() <= high.item() < C
        return F.cross_entropy(outputs, labels, reduction="none").mean()

    return step


def _by_hand(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    cosine = F.normalize(features) @ F.normalize(weight).T
    return F.cross_entropy(SCALE * (cosine - COS_MARGIN * F.one_hot(labels, C)), labels)


class Operators(TorchDispatchMode):
    """Counts what would be a launch: operators that return no view of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        there = any(isinstance(each, Tensor) and each.is_meta for each in made)
        self.count += there and not func.is_view
        return result


def operators(provider: str) -> int | None:
    """None of PML's losses, which index by masks: there is no telling how many rows that gives."""
    if provider.startswith("PML"):
        return None
    step = setup(provider, "meta")
    step()
    with Operators() as forward:
        value = step()
    with Operators() as backward:
        value.backward()
    return forward.count + backward.count


def microseconds(repetitions: int) -> dict[str, tuple[float, float, float]]:
    """Median, 20th and 80th percentile of every provider, forward and backward."""
    steps = {provider: setup(provider, "cpu") for provider in PROVIDERS}
    taken: dict[str, list[float]] = {provider: [] for provider in PROVIDERS}
    for repetition in range(repetitions + 20):
        first = repetition % len(PROVIDERS)
        for provider in PROVIDERS[first:] + PROVIDERS[:first]:
            start = time.thread_time()
            steps[provider]().backward()
            if repetition >= 20:
                taken[provider].append(1e6 * (time.thread_time() - start))
    found = {}
    for provider, each in taken.items():
        quantiles = torch.tensor(each).quantile(torch.tensor([0.5, 0.2, 0.8]))
        found[provider] = tuple(round(float(q), 1) for q in quantiles)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--dry", action="store_true", help="write no rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    common = environment(1)
    times = microseconds(options.repetitions)
    rows: list[Row] = []
    for provider in PROVIDERS:
        median, low, high = times[provider]
        rows.append(
            {
                "benchmark": "small_steps",
                "shape": {"N": N, "C": C, "D": D},
                "provider": provider,
                "median_us": median,
                "p20_us": low,
                "p80_us": high,
                "repetitions": options.repetitions,
                "baseline": BASELINE,
                "ratio": round(median / times[BASELINE][0], 3),
                "operators_off_cpu": operators(provider),
            }
        )
    print(f"{'provider':<40}{'us':>8}{'p20':>8}{'p80':>8}{'ratio':>8}{'operators':>11}")
    for row in rows:
        print(
            f"{row['provider']:<40}{row['median_us']:>8.0f}{row['p20_us']:>8.0f}"
            f"{row['p80_us']:>8.0f}{row['ratio']:>8.2f}{row['operators_off_cpu'] or '-':>11}"
        )
    if not options.dry:
        print(f"rows in {write('small_steps', rows, common)}")


if __name__ == "__main__":
    main()
