"""Copies that wait in the array of the gradients, on a GPU: bit by bit, and in no more memory."""

from typing import Any

import pytest
import torch
from ops.tile_problems import made
from torch import Tensor

from largemargin import ArcFace, Kobayashi
from largemargin.ops.triton import chunks, op

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("classes", [2, 1000, 3_001, 100_003])
@pytest.mark.parametrize("kind", [ArcFace, Kobayashi])
def test_the_same_numbers_bit_by_bit(
    classes: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = made(200, classes, 256, device="cuda")
    given = problem.features.requires_grad_(), problem.prototypes.requires_grad_(), problem.labels
    given[2][:2] = torch.tensor([0, classes - 1])
    loss = kind(impl="triton", precision="bf16").to("cuda")
    # Several chunks backward; one forward either way, or sums would have another order.
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**20)
    monkeypatch.setattr(chunks, "COPY_BYTES", 2**30)
    found: list[tuple[Tensor, ...]] = []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(op, "leaves_room", lambda *_: False)
        value = loss(*given)
        first = torch.autograd.grad(value, given[:2], retain_graph=True)
        found += [first, torch.autograd.grad(value, given[:2])]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_what_was_kept_becomes_the_gradient() -> None:
    """A training step holds weights, gradients and a workspace: no second array of that size."""
    problem = made(256, 200_000, 256, device="cuda")
    weight = problem.prototypes.requires_grad_()
    loss = ArcFace(impl="triton", precision="bf16")

    def step() -> None:
        weight.grad = None
        loss(problem.features, weight, problem.labels).backward()
        torch.cuda.synchronize()

    step()
    weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    extra = torch.cuda.max_memory_allocated() - before - weight.nbytes
    assert extra < 128 * 2**20 < weight.nbytes, f"{extra / 2**20:.0f} MiB"
