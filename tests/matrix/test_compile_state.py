"""Compiled losses that read a state, use it in the backward pass, and overwrite it in between.

A compiler may recompute in the backward pass what it did not save in the forward pass. Recomputed
from a bank that has been written meanwhile, gradients are silently wrong while every value is
right. ``aot_eager_decomp_partition`` makes inductor's choice of what to save without its code
generation, so it needs no C++ compiler.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from largemargin import (
    AdaCos,
    AdaFace,
    CenterLoss,
    CentroidBank,
    Compactness,
    CurricularFace,
    Discriminative,
    Loss,
)

PARTITIONED = "aot_eager_decomp_partition"
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.needs_cxx, pytest.mark.slow])

LOSSES: dict[str, Callable[[int, int], Loss]] = {
    "center": lambda C, D: CenterLoss(C, D, strength=1.0),
    "partial": lambda C, D: Discriminative(C, D, momentum=0.5, gamma_reg=1.0),
    "both": lambda C, D: Discriminative(C, D, momentum=0.5, gamma_reg=1.0, strategy="both"),
    "accumulate": lambda C, D: Discriminative(
        C, D, momentum=0.5, gamma_reg=1.0, strategy="both", first_seen="full", accumulate=2
    ),
    "compactness": lambda C, D: Compactness(
        bank=CentroidBank(C, D, momentum=0.5, strategy="both", first_seen="full")
    ),
    "adaface": lambda C, D: AdaFace(scale=8.0, rate=0.5, norm_mean=6.0, norm_std=2.0),
    "curricularface": lambda C, D: CurricularFace(scale=8.0, rate=0.5),
    "adacos": lambda C, D: AdaCos(C),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(loss: Loss, function: Any, sizes: tuple[int, int, int], steps: int = 4) -> list[Tensor]:
    """Values, gradients and states of some steps."""
    N, C, D = sizes
    results = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        given = {
            "features": torch.randn(N, D, generator=generator).requires_grad_(),
            "prototypes": torch.randn(C, D, generator=generator).requires_grad_(),
            "labels": torch.randint(C, (N,), generator=generator),
        }
        value = function(*(given[name] for name in loss.needs))
        value.backward()
        results += [value.detach(), given["features"].grad]
        results += [buffer.clone() for buffer in loss.buffers()]
    return results


MANY, FEW = (64, 10, 64), (8, 12, 32)  # N, C, D with more and with fewer samples than classes
QUICK = [("center", MANY), ("both", MANY), ("both", FEW)]
REST = [(name, sizes) for name in LOSSES for sizes in (MANY, FEW) if (name, sizes) not in QUICK]


@pytest.mark.parametrize("backend", [PARTITIONED, INDUCTOR])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_gradients_are_those_of_the_state_before_the_write(
    name: str, backend: str, sizes: tuple[int, int, int]
) -> None:
    eager, traced = (LOSSES[name](*sizes[1:]) for _ in range(2))
    want = run(eager, eager, sizes)
    got = run(traced, torch.compile(traced, backend=backend, fullgraph=True), sizes)
    for each, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, i=each: f"{i}: {m}")


def test_compiled_checkpointing_with_a_bank_that_the_optimizer_commits() -> None:
    # Inside a compiled checkpoint everything is recomputed, reads of the bank too; a bank that is
    # written by the optimizer's step, after the backward pass, is the same then.
    results = []
    for compiling in (False, True):
        torch.manual_seed(0)
        body, head = nn.Linear(6, 4), nn.Linear(4, 5)
        loss = Discriminative(5, 4, momentum=0.5, strategy="both")
        parameters = [*body.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        loss.bank.commit_with(optimizer)

        def whole(x: Tensor, y: Tensor, b=body, h=head, f=loss) -> Tensor:
            return checkpoint(lambda t: f(b(t), h, y), x, use_reentrant=False)

        function = torch.compile(whole, backend=PARTITIONED, fullgraph=True) if compiling else whole
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 6, generator=generator)
            y = torch.randint(5, (8,), generator=generator)
            optimizer.zero_grad()
            function(x, y).backward()
            optimizer.step()
        results.append([*(p.detach() for p in parameters), loss.bank.centroids, loss.bank.counts])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
