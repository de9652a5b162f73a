"""What every process of a distributed evaluation runs; ``test_distributed`` starts them.

Each check yields what differs as text instead of raising, so that the ranks stay in step.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from largemargin.app.data import Batches, Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring import (
    Accuracy,
    EvaluationConfig,
    Search,
    accuracy_of,
    calibrate_temperature,
    calibrate_threshold,
    evaluate,
)

N, C, D = 23, 4, 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Linear(D, C)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(C, (N,), generator=generator)


def differing(name: str, got: Accuracy, want: Accuracy) -> Iterator[str]:
    for field in ("samples", "accuracy", "balanced", "per_class", "confusion", "counts"):
        if str(getattr(got, field)) != str(getattr(want, field)):
            yield f"{name}: {field} is {getattr(got, field)}, not {getattr(want, field)}"
    for field in ("loss", "ece"):
        if abs(getattr(got, field) - getattr(want, field)) > 1e-12:
            yield f"{name}: {field} is {getattr(got, field)}, not {getattr(want, field)}"


def check_accuracy() -> Iterator[str]:
    """Parts cut by hand, one of them empty, wrapped in DDP or not; a sampler that fills up."""
    x, y = data()
    want = accuracy_of(net(), [(x, y)], sync=False)
    for cut in (20, 23, 0):
        mine = slice(0, cut) if dist.get_rank() == 0 else slice(cut, N)
        pairs = zip(x[mine].split(7), y[mine].split(7), strict=True)
        loader = [pair for pair in pairs if len(pair[0])]
        wrapped = DistributedDataParallel(net())
        for model in (net(), wrapped, torch.compile(wrapped, backend="eager")):
            yield from differing(f"cut at {cut}", accuracy_of(model, loader), want)
    for shuffle in (False, True):
        sampler = DistributedSampler(TensorDataset(x, y), shuffle=shuffle)
        loader = DataLoader(TensorDataset(x, y), batch_size=5, sampler=sampler)
        yield from differing(f"shuffle={shuffle}", accuracy_of(net(), loader), want)


def check_failure_of_one_rank() -> Iterator[str]:
    x, y = data()
    if dist.get_rank() == 1:
        y = y + C
    try:
        accuracy_of(net(), [(x, y)])
    except LargeMarginError as error:
        wanted = "lie in [0, 4)" if dist.get_rank() == 1 else "process 1 could not"
        if wanted not in str(error):
            yield f"said: {error}"
    else:
        yield "did not raise"


def check_one_rank_alone() -> Iterator[str]:
    x, y = data()
    if dist.get_rank() == 0 and accuracy_of(net(), [(x, y)], sync=False).samples != N:
        yield "did not evaluate its own part"
    dist.barrier()


def images(n: int = 140, seed: int = 1) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(n, 1, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(1, C, (n,), generator=generator)
    extra = {"camera": torch.arange(n) % 2}
    return Samples(labels, [str(i) for i in range(n)], pixels, extra=extra)


def image_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, C))


def check_evaluation() -> Iterator[str]:
    """Perturbations, OOD scores, retrieval and cameras: the same from two ranks as from one."""
    samples, others = images(), images(30, seed=2)
    config = EvaluationConfig(
        gaussian=(0.1,), draws=2, attacks=("fgsm",), batch_size=32, attack_samples=50
    )
    search = Search(images(20, seed=3), images(40, seed=4))
    alone, shared = (
        evaluate(image_net(), samples, config=config, ood=others, search=search, sync=sync)
        for sync in (False, True)
    )
    yield from differing("evaluate", shared.clean, alone.clean)
    for part in ("interval", "perturbed", "attacked", "ood", "retrieval", "cross_camera"):
        if getattr(shared, part) != getattr(alone, part):
            yield f"{part} is {getattr(shared, part)}, not {getattr(alone, part)}"
    one, two = (
        calibrate_threshold(image_net(), samples, target=0.5, sync=sync) for sync in (False, True)
    )
    if one != two:
        yield f"threshold is {two}, not {one}"
    fitted, together = (
        calibrate_temperature(image_net(), samples, sync=sync) for sync in (False, True)
    )
    if fitted.samples != together.samples or not math.isclose(fitted.value, together.value):
        yield f"temperature is {together}, not {fitted}"


def check_fewer_samples_than_ranks() -> Iterator[str]:
    """One rank has nothing to do, and must not miss what the other does."""
    config = EvaluationConfig(gaussian=(0.1,), draws=2, attacks=("fgsm",), retrieval=False)
    alone, shared = (
        evaluate(image_net(), images(1), config=config, sync=sync) for sync in (False, True)
    )
    if (shared.clean.samples, shared.perturbed) != (1, alone.perturbed):
        yield f"{shared.clean.samples} samples, {shared.perturbed}"


def check_batches_of_the_engine() -> Iterator[str]:
    """Batches that the engine divides between ranks count each of their samples once."""
    samples = images(140)
    mine = Batches(samples, 20, shuffle=False, rank=dist.get_rank(), world=2)
    want = accuracy_of(image_net(), samples, sync=False)
    yield from differing("batches", accuracy_of(image_net(), mine), want)
    yield from differing("epoch", accuracy_of(image_net(), mine.epoch(0)), want)
