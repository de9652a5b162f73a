"""What every process of a distributed test runs; ``test_distributed`` starts them.

Each check returns what differs as text instead of raising, so that the ranks stay in step.
The reference is the same loss with ``sync=False`` on the joined batch, in the same process.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import largemargin as lm
from largemargin.heads import centroid_bank

D, TOLERANCE = 4, 1e-6


class Differences:
    """Collects, by name, what is not equal to 1e-6."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def compare(self, name: str, got: Tensor | None, want: Tensor | None) -> None:
        try:
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
        except (AssertionError, TypeError) as error:
            self.found.append(f"{name}: {error}")


def shard(x: Tensor, sizes: tuple[int, int], rank: int) -> Tensor:
    return x.split(sizes)[rank].detach().clone()


def averaged(gradient: Tensor) -> Tensor:
    """What DistributedDataParallel makes of a parameter's gradient."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(value: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def compare_steps(
    name: str,
    make: Callable[[bool], lm.Loss],
    labels: list[int],
    sizes: tuple[int, int],
    num_classes: int,
    *,
    call: dict[str, Tensor] | None = None,
    steps: int = 3,
) -> list[str]:
    """Several steps of a loss on two shards against the joined batch: value, gradients, state."""
    rank, total, differences = dist.get_rank(), sum(sizes), Differences()
    shared, single = make(True), make(False)
    for step in range(steps):
        everyone = torch.tensor(labels).roll(step)
        whole: dict[str, Tensor] = {
            "features": normal(step, total, D).requires_grad_(),
            "noisy": normal(100 + step, total, D).requires_grad_(),
            "prototypes": normal(200 + step, num_classes, D).requires_grad_(),
            "bias": normal(300 + step, num_classes).requires_grad_(),
            "labels": everyone,
        }
        part = dict(whole)
        for key in ("features", "noisy"):
            part[key] = shard(whole[key], sizes, rank).requires_grad_()
        part["labels"] = shard(everyone, sizes, rank)
        results = []
        for loss, given, cut in ((single, whole, False), (shared, part, True)):
            options = {"bias": given["bias"]} if loss.uses_bias else {}
            for key, tensor in (call or {}).items():
                options[key] = shard(tensor, sizes, rank) if cut else tensor
            value = loss(*(given[key] for key in loss.needs), **options)
            leaves = {key: x for key, x in given.items() if x.requires_grad}
            results.append(
                (value.detach(), gradients(value, leaves | dict(loss.named_parameters())))
            )
        (want, want_gradients), (got, got_gradients) = results
        label = f"{name}, step {step}, rank {rank}"
        differences.compare(f"{label}: value", got, want)
        for key, gradient in want_gradients.items():
            if key in ("features", "noisy"):
                # Features are no parameters: what DDP would divide by is divided by here.
                own = shard(gradient, sizes, rank)
                mine = got_gradients[key] / dist.get_world_size()
                differences.compare(f"{label}: gradient of {key}", mine, own)
            else:
                mean = averaged(got_gradients[key])
                differences.compare(f"{label}: gradient of {key}", mean, gradient)
        for key, state in single.state_dict().items():
            differences.compare(f"{label}: {key}", shared.state_dict()[key], state)
    return differences.found


SHARDS: dict[str, tuple[list[int], tuple[int, int]]] = {
    "even": ([0, 1, 2, 0, 4, 1, 2, 2], (4, 4)),
    "a class on one rank": ([0, 0, 1, 1, 2, 2, 4, 4], (4, 4)),
    "ragged": ([0, 1, 1, 4, 2, 0, 1, 1], (3, 5)),
    "empty": ([0, 1, 1, 4, 2], (0, 5)),
    "ignored on one rank": ([-100, -100, 1, 4, 2, 0, 1, 1], (3, 5)),
    "all ignored": ([-100] * 5, (2, 3)),
}


def classwise(num_classes: int) -> dict[str, Callable[[bool], lm.Loss]]:
    weight = torch.linspace(0.5, 2.0, num_classes)

    def discriminative(**options: Any) -> Callable[[bool], lm.Loss]:
        return lambda sync: lm.Discriminative(num_classes, D, momentum=0.5, sync=sync, **options)

    def momentum_bank(sync: bool) -> lm.CentroidBank:
        return lm.CentroidBank(num_classes, D, momentum=0.5, strategy="both", sync=sync)

    return {
        "Discriminative": discriminative(),
        "Discriminative both": discriminative(strategy="both", first_seen="full"),
        "Discriminative weighted": discriminative(strategy="none", weight=weight),
        "Stable": lambda sync: lm.StableDiscriminative(
            num_classes, D, momentum=0.5, sync=sync, detach_classifier=False
        ),
        "Stable exact": lambda sync: lm.StableDiscriminative(
            num_classes, D, momentum=0.5, sync=sync, gradient="exact", weight=weight
        ),
        "Discriminative sum": discriminative(reduction="sum", accumulate=2),
        "Robust": lambda sync: lm.RobustDiscriminative(
            num_classes, D, weight=weight, momentum=0.5, sync=sync
        ),
        "Compactness": lambda sync: lm.Compactness(bank=momentum_bank(sync), sync=sync),
        "CentroidMargin": lambda sync: lm.CentroidMargin(weight=weight, sync=sync),
        "CentroidNorm": lambda sync: lm.CentroidNorm(sync=sync),
        "Center": lambda sync: lm.CenterLoss(num_classes, D, sync=sync),
        "Center mean": lambda sync: lm.CenterLoss(
            num_classes, D, reduction="mean", weight=weight, sync=sync
        ),
    }


def check_classwise() -> Iterator[str]:
    for name, make in classwise(5).items():
        for case, (labels, sizes) in SHARDS.items():
            yield from compare_steps(f"{name}, {case}", make, labels, sizes, 5)


def check_many_classes() -> Iterator[str]:
    """More classes than one row each is sent for: rows are the samples of all ranks."""
    C = centroid_bank.SHARED_SLOTS + 4
    cases = {
        "ragged": ([C - 1, 0, 7, 7, C - 1, 2000, 0, 3], (3, 5)),
        "empty": ([C - 1, 0, 7, 7], (0, 4)),
        "ignored": ([C - 1, -100, 7, 7, -100, 3], (3, 3)),
    }
    losses = classwise(C)
    for name in ("Discriminative", "Discriminative both", "Robust", "Stable", "Center"):
        for case, (labels, sizes) in cases.items():
            yield from compare_steps(f"{name}, C={C}, {case}", losses[name], labels, sizes, C)


def check_as_many_rows_as_classes() -> Iterator[str]:
    """The gathered batch has exactly C rows, which are still samples and not classes."""
    with mock.patch.object(centroid_bank, "SHARED_SLOTS", 4):
        losses = classwise(8)
        for name in ("Discriminative", "Discriminative sum", "Center"):
            labels = [7, 3, 3, 0, 1, 7, 7, 5]
            yield from compare_steps(f"{name}, C=R*N", losses[name], labels, (4, 4), 8)


def check_per_sample() -> Iterator[str]:
    weight = torch.tensor([1.0, 2.0, 0.5, 0.25, 3.0])
    makers: dict[str, Callable[[bool], lm.Loss]] = {
        "CrossEntropy": lambda sync: lm.CrossEntropy(sync=sync),
        "CrossEntropy weighted": lambda sync: lm.CrossEntropy(weight=weight, sync=sync),
        "CosFace smoothed": lambda sync: lm.CosFace(
            scale=8.0, weight=weight, label_smoothing=0.1, sync=sync
        ),
        "Kobayashi sum": lambda sync: lm.Kobayashi(reduction="sum", sync=sync),
        "LMSoftmax chunked": lambda sync: lm.LMSoftmax(scale=8.0, impl="chunked", sync=sync),
        "GaussianMixture": lambda sync: lm.GaussianMixture(5, D, learn_variances=True, sync=sync),
        "Stability": lambda sync: lm.Stability(sync=sync),
        "AdaFace": lambda sync: lm.AdaFace(
            scale=8.0, rate=0.5, norm_mean=2.0, norm_std=0.5, sync=sync
        ),
        "CurricularFace": lambda sync: lm.CurricularFace(scale=8.0, rate=0.5, sync=sync),
        "AdaCos": lambda sync: lm.AdaCos(5, sync=sync),
    }
    for name, make in makers.items():
        for case, (labels, sizes) in SHARDS.items():
            rows = torch.linspace(0.5, 1.5, len(labels))
            for call in ({}, {"sample_weight": rows}):
                label = f"{name}, {case}, {sorted(call)}"
                yield from compare_steps(label, make, labels, sizes, 5, call=call, steps=1)


def check_local_centroids() -> Iterator[str]:
    rank, differences = dist.get_rank(), Differences()
    loss = lm.Discriminative(5, D, sync=False)
    own = normal(rank, 4, D)
    labels = torch.tensor([rank, rank, 2, 2])
    with no_communication():
        loss(own, normal(9, 5, D), labels)
    differences.compare("own class", loss.bank.centroids[rank], own[:2].mean(0))
    differences.compare("shared class", loss.bank.centroids[2], own[2:].mean(0))
    differences.compare("seen", loss.bank.seen[1 - rank], torch.tensor(False))
    yield from differences.found


@contextmanager
def no_communication() -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("communicated")

    with mock.patch.multiple(dist, all_reduce=refuse, all_gather=refuse, broadcast=refuse):
        yield


def check_evaluation_by_one_rank() -> Iterator[str]:
    losses = [lm.Discriminative(5, D), lm.CenterLoss(5, D), lm.CrossEntropy(sync=True)]
    losses += [lm.AdaFace(), lm.CurricularFace(), lm.AdaCos(5)]
    wide = lm.Discriminative(centroid_bank.SHARED_SLOTS + 4, D)
    for loss in (*losses, wide):
        loss.eval()
        state = copy.deepcopy(loss.state_dict())
        C = wide.num_classes if loss is wide else 5
        if dist.get_rank() == 0:
            features, labels = normal(0, 3, D).requires_grad_(), torch.tensor([0, 1, 1])
            given = {"features": features, "prototypes": normal(1, C, D), "labels": labels}
            with no_communication():
                loss(*(given[name] for name in loss.needs)).backward()
        for name, value in loss.state_dict().items():
            if not torch.equal(value, state[name]):
                yield f"{type(loss).__name__} wrote {name} in evaluation"
    dist.barrier()


class Model(nn.Module):
    """Everything that is trained or synchronised, in the module that DDP wraps."""

    def __init__(self, sync: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, D))
        self.head = nn.Linear(D, 5)
        self.objective = lm.Objective(
            softmax=lm.CrossEntropy(sync=sync),
            lmd=lm.Discriminative(5, D, margin=2.0, momentum=0.5, strategy="both", sync=sync),
        )

    def forward(self, x: Tensor, labels: Tensor, again: bool = False) -> Tensor:
        features = self.body(x)
        total = lambda f: self.objective(f, self.head, labels).total  # noqa: E731
        return checkpoint(total, features, use_reentrant=False) if again else total(features)


def train(again: bool, micro: int) -> Iterator[str]:
    rank, sizes, differences = dist.get_rank(), (3, 5), Differences()
    single, shared = Model(sync=False), Model(sync=True)
    parallel = DistributedDataParallel(shared)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (single, shared)]
    if micro > 1:
        for model, optimizer in zip((single, shared), optimizers, strict=True):
            model.objective.terms["lmd"].bank.commit_with(optimizer)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(micro):
            seed = 10 * step + part
            x, labels = normal(seed, 8, 6), normal(50 + seed, 8).argsort() % 5
            want = single(x, labels)
            want.backward()
            x, labels = shard(x, sizes, rank), shard(labels, sizes, rank)
            if part < micro - 1:
                with parallel.no_sync():
                    got = parallel(x, labels, again)
                    got.backward()
            else:
                got = parallel(x, labels, again)
                got.backward()
            differences.compare(f"step {step}: value", got.detach(), want.detach())
        for optimizer in optimizers:
            optimizer.step()
        for name, value in single.state_dict().items():
            differences.compare(f"step {step}: {name}", shared.state_dict()[name], value)
    yield from differences.found


def check_ddp() -> Iterator[str]:
    yield from train(again=False, micro=1)


def check_ddp_with_accumulation() -> Iterator[str]:
    yield from train(again=False, micro=2)


def check_ddp_with_checkpointing() -> Iterator[str]:
    yield from train(again=True, micro=1)


def check_measured_band() -> Iterator[str]:
    """The band of a margin distribution comes from the margins of all ranks, in training alone."""
    rank, differences = dist.get_rank(), Differences()
    shared = lm.MarginDistribution(r="auto", measured_steps=4, sync=True)
    single = copy.deepcopy(shared)
    weight = normal(0, 5, D)
    for step, sizes in enumerate([(4, 4), (3, 5), (0, 8), (6, 2), (4, 4)]):
        x, labels = normal(1 + step, 8, D), torch.tensor([0, 1, -100, 3, 4, 0, 1, 2])
        single.sync = False
        with mock.patch("largemargin.losses.input_margin.world_size", return_value=1):
            everyone = x.clone().requires_grad_()
            want = single(everyone @ weight.T, labels, everyone)
        own = shard(x, sizes, rank).requires_grad_()
        got = shared(own @ weight.T, shard(labels, sizes, rank), own)
        differences.compare(f"step {step}: value", got.detach(), want.detach())
        differences.compare(f"step {step}: measured", shared.measured, single.measured)
        if rank == 0:  # the other rank does not call it
            shared.eval()(own @ weight.T, shard(labels, sizes, rank), own)
            shared.train()
    yield from differences.found
