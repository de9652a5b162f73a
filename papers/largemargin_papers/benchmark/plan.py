"""What a benchmark costs before it is run: runs, images, seconds."""

from collections.abc import Sequence
from dataclasses import dataclass

from largemargin_papers.benchmark.followups import followup_jobs, swaps
from largemargin_papers.benchmark.halving import Job, Records, final_jobs, job, rung_jobs
from largemargin_papers.benchmark.protocol import Protocol, Situation

EFFICIENTNET = "largemargin_papers.networks.efficientnet_lite.EfficientNetLite0"
MINILM = "largemargin_papers.networks.minilm.MiniLM"
IMAGES_PER_S = {
    "resnet18": 56_000.0,
    "mnist_cnn": 150_000.0,
    "mlp": 300_000.0,
    EFFICIENTNET: 8_000.0,
    MINILM: 15_000.0,
}
"""Training on one H200, captured steps without compilation, several runs side by side. That of
ResNet-18 was seen in the benchmark's runs; 39,400 of one alone were measured
(benchmarks/results/training_speed_cuda.json). The pretrained networks' are guesses from their
operations."""

OTHER_IMAGES_PER_S = 20_000.0
START_S, LARGE_START_S = 0.5, {MINILM: 1.5}
"""Build, warm up, capture, write and read the weights, judge: per run, several processes sharing
the GPU. A guess."""

PASSES = {"none": 1, "noisy": 1, "clean_and_noisy": 2, "pair": 2}
"""Through the network for every image."""


@dataclass(frozen=True)
class Cost:
    """Of one situation, what is recorded already left out."""

    situation: str
    runs: int
    images: int
    """Passes of an image through forward and backward."""
    seconds: float


def images_of(each: Job, train_images: int) -> int:
    use = each.protocol.methods[each.method].noise.get("use", "none")
    return each.epochs * train_images * PASSES[use]


def seconds_of(situation: Situation, each: Job, train_images: int) -> float:
    """A guess of what a run costs when others run beside it."""
    rate = IMAGES_PER_S.get(situation.model["name"], OTHER_IMAGES_PER_S)
    # The linearised margin takes a backward pass to the images.
    objective = each.protocol.methods[each.method].objective
    slower = 2.0 if "margin_distribution" in objective else 1.0
    start = LARGE_START_S.get(situation.model["name"], START_S)
    return slower * images_of(each, train_images) / rate + start


TRAIN_IMAGES = {
    "cifar10_long_tail": 11_165,
    "cifar10_lt": 11_165,
    "cifar100_lt": 9_754,
    "fashion_mnist_tail": 13_399,
    "svhn_tail": 2_319,
    "minilm_imbalanced": 10_525,
    "omniglot": 15_400,
}
"""Where the protocol does not say it: 4500 images of the largest class, ratio 100; four fifths of
the background characters."""


def train_images(situation: Situation) -> int:
    return situation.images or TRAIN_IMAGES.get(situation.name, 10_000)


def jobs_left(protocol: Protocol, situation: Situation, records: Records) -> list[Job]:
    """All runs that are not recorded; those that depend on results as they would cost."""
    left: list[Job] = []
    for stage, rung in enumerate(protocol.rungs if situation.like is None else ()):
        for method in situation.methods:
            known = rung_jobs(protocol, situation, method, records, stage) or [
                job(protocol, situation, method, stage, trial, seed)
                for trial in range(rung.keep)
                for seed in protocol.rung_seeds(situation, stage)
            ]
            left += [each for each in known if each.key not in records]
    final = final_jobs(protocol, situation, records)
    if final is None:
        # The chosen method is not known: count the last one, as dear as any.
        last = situation.methods[-1]
        names = [situation.baseline, last, situation.beside, *situation.baselines]
        # Its runs with the settings of every baseline, and theirs with its own.
        swapped = [*situation.baselines, *[last] * len(situation.baselines)]
        final = [
            job(protocol, situation, name, None, 0, seed)
            for seed in protocol.seeds
            for name in [*dict.fromkeys(names), *swapped]
        ]
    else:
        for each in swaps(protocol, situation, records).values():
            final += followup_jobs(protocol, each, records) or ()
    return left + [each for each in final if each.key not in records]


def plan(protocol: Protocol, records: Records) -> list[Cost]:
    """What every situation still costs."""
    costs = []
    for situation in protocol.situations.values():
        left, count = jobs_left(protocol, situation, records), train_images(situation)
        costs.append(
            Cost(
                situation.name,
                len(left),
                sum(images_of(each, count) for each in left),
                sum(seconds_of(situation, each, count) for each in left),
            )
        )
    return costs


def by_value(protocol: Protocol, costs: Sequence[Cost]) -> list[Cost]:
    """What is left, the most valuable per minute first; tries on other data in their order last."""

    def rank(cost: Cost) -> tuple[bool, float]:
        situation = protocol.situations[cost.situation]
        return situation.like is not None, -situation.value / max(cost.seconds, 1e-9)

    return sorted((each for each in costs if each.runs), key=rank)


def table(costs: Sequence[Cost]) -> str:
    """As text, with a sum."""
    lines = [f"{'situation':<20} {'runs':>6} {'images':>14} {'minutes':>8}"]
    total = Cost(
        "all",
        sum(each.runs for each in costs),
        sum(each.images for each in costs),
        sum(each.seconds for each in costs),
    )
    for each in [*costs, total]:
        lines.append(
            f"{each.situation:<20} {each.runs:>6} {each.images:>14,} {each.seconds / 60:>8.1f}"
        )
    lines.append(
        f"(one H200, several runs side by side; {START_S} s and more per run for its start)"
    )
    return "\n".join(lines)
