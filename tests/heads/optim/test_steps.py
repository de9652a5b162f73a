"""Steps of the head optimizers: their equations, torch's where they must agree, and rounding."""

from typing import Any

import numpy as np
import pytest
import torch
from heads.optim import oracle
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from largemargin.errors import LargeMarginError
from largemargin.heads.optim import HeadSGD, RowwiseAdam, row_optimizer
from largemargin.heads.optim.row_optimizer import round_at_random, seed_of

SHAPE = (23, 5)


def gradients(steps: int = 6, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """Of rows that differ in size by orders of magnitude, some of them 0."""
    sizes = 10.0 ** torch.linspace(-6, 3, shape[0], dtype=torch.float64)
    made = []
    for step in range(steps):
        gradient = torch.randn(shape, dtype=torch.float64) * sizes.view(-1, *[1] * (len(shape) - 1))
        gradient[step::4] = 0
        made.append(gradient)
    return made


def stepped(optimizer_class: Any, start: Tensor, given: list[Tensor], **options: Any) -> Tensor:
    weight = nn.Parameter(start.clone())
    optimizer = optimizer_class([weight], **options)
    for gradient in given:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("block", [5, 2**20])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.0, 0.9), "weight_decay": 0.3},
        {"betas": (0.8, 0.0), "eps": 1e-3},
        {"lazy": True, "weight_decay": 0.1},
        {"maximize": True},
    ],
    ids=str,
)
def test_rowwise_adam_is_its_equation(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], block: int
) -> None:
    monkeypatch.setitem(row_optimizer.BLOCK_NUMBERS, "cpu", block)
    start, given = torch.randn(SHAPE, dtype=torch.float64), gradients()
    want = oracle.adam(start.numpy(), [g.numpy() for g in given], lr=0.1, **options)
    got = stepped(RowwiseAdam, start, given, lr=0.1, moment_dtype=None, **options)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block", [5, 2**20])
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"momentum": 0.0},
        {"nesterov": True, "weight_decay": 0.1},
        {"lazy": True, "weight_decay": 0.1},
        {"maximize": True},
    ],
    ids=str,
)
def test_head_sgd_is_its_equation(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], block: int
) -> None:
    monkeypatch.setitem(row_optimizer.BLOCK_NUMBERS, "cpu", block)
    start, given = torch.randn(SHAPE, dtype=torch.float64), gradients()
    want = oracle.sgd(start.numpy(), [g.numpy() for g in given], lr=0.1, **options)
    got = stepped(HeadSGD, start, given, lr=0.1, moment_dtype=None, **options)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(7,), (7, 1), ()], ids=str)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_rows_of_one_entry_are_adamw(shape: tuple[int, ...], lr: float | Tensor) -> None:
    start = torch.randn(shape, dtype=torch.float64)
    given = [torch.randn(shape, dtype=torch.float64) for _ in range(5)]
    options: dict[str, Any] = {"lr": lr, "betas": (0.8, 0.95), "weight_decay": 0.2}
    want = stepped(torch.optim.AdamW, start, given, **options)
    got = stepped(RowwiseAdam, start, given, moment_dtype=None, **options)
    assert_close(got, want, rtol=1e-10, atol=1e-6 if isinstance(lr, Tensor) else 0)


def test_rows_of_equal_entries_are_adam() -> None:
    """Where all gradients of a row have one size, so have Adam's second moments."""
    start = torch.randn(SHAPE, dtype=torch.float64)
    given = [g[:, :1] * torch.randn(SHAPE).sign() for g in gradients()]
    want = stepped(torch.optim.Adam, start, given, lr=0.1)
    assert_close(stepped(RowwiseAdam, start, given, lr=0.1, moment_dtype=None), want)


@pytest.mark.parametrize("nesterov", [True, False])
def test_full_precision_is_torch_sgd(nesterov: bool) -> None:
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    options["nesterov"] = nesterov
    shape = (3, 4, 2, 2)
    start, given = torch.randn(shape, dtype=torch.float64), gradients(shape=shape)
    want = stepped(torch.optim.SGD, start, given, **options)
    assert_close(stepped(HeadSGD, start, given, moment_dtype=None, **options), want)


def test_strided_parameters() -> None:
    start, given = torch.randn(9, 4, dtype=torch.float64), gradients(shape=(9, 4))
    want = stepped(RowwiseAdam, start, given)
    assert_close(stepped(RowwiseAdam, start.T.contiguous().T, given), want)


def test_rotated_features_rotate_the_step() -> None:
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    start, given = torch.randn(SHAPE, dtype=torch.float64), gradients()
    options: dict[str, Any] = {"lr": 0.1, "moment_dtype": None}
    got = stepped(RowwiseAdam, start @ rotation, [g @ rotation for g in given], **options)
    assert_close(got, stepped(RowwiseAdam, start, given, **options) @ rotation)


def test_random_rounding_is_right_on_average() -> None:
    x = torch.tensor([1.0, 1 + 2**-9, -3.14159, 1e-30, 0.0]).repeat(20_000, 1)
    rounded = round_at_random(x, seed_of(torch.tensor(3.0), 1), 0).float()
    assert_close(rounded.mean(0), x[0], rtol=1e-4, atol=0)
    up = (rounded[:, 1] > 1).float().mean()
    assert 0.24 < up < 0.26  # a quarter of the way from 1 to 1 + 2^-7
    assert_close(rounded[:, 0], x[:, 0], rtol=0, atol=0)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3e38]).repeat(9)
    kept = round_at_random(special, seed_of(torch.tensor(1.0), 1), 0).float()
    assert_close(kept.isnan(), special.isnan())
    assert torch.equal(kept[special.isinf()], special[special.isinf()])


@pytest.mark.parametrize("optimizer", [RowwiseAdam, HeadSGD])
def test_blocks_do_not_change_what_is_rounded_at_random(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any
) -> None:
    start, given = torch.randn(SHAPE).bfloat16(), gradients()
    whole = stepped(optimizer, start, given, lr=0.1)
    monkeypatch.setitem(row_optimizer.BLOCK_NUMBERS, "cpu", 2 * SHAPE[1])
    assert torch.equal(stepped(optimizer, start, given, lr=0.1), whole)


def test_bfloat16_weights_learn_only_when_rounded_at_random() -> None:
    """A step of 1/1000 of a weight is below what bfloat16 can tell."""
    start, given = torch.ones(64, 64, dtype=torch.bfloat16), [torch.ones(64, 64)] * 50
    options: dict[str, Any] = {"lr": 1e-3, "momentum": 0.0}
    assert torch.equal(stepped(HeadSGD, start, given, stochastic_rounding=False, **options), start)
    moved = stepped(HeadSGD, start, given, **options).float().mean()
    assert moved == pytest.approx(0.95, abs=2e-3)


def test_a_moment_in_bfloat16_stays_close() -> None:
    start, given = torch.randn(40, 30), gradients(30, (40, 30))
    for optimizer, lr in ((RowwiseAdam, 0.01), (HeadSGD, 1e-4)):
        want = stepped(optimizer, start, given, lr=lr, moment_dtype=None)
        got = stepped(optimizer, start, given, lr=lr)
        assert (got - want).norm() < 1e-2 * (want - start).norm()
        assert not torch.equal(got, want)


@pytest.mark.parametrize("optimizer_class", [RowwiseAdam, HeadSGD])
def test_a_step_makes_no_array_of_the_weights_size(
    monkeypatch: pytest.MonkeyPatch, optimizer_class: Any
) -> None:
    monkeypatch.setitem(row_optimizer.BLOCK_NUMBERS, "cpu", 2**10)
    weight = nn.Parameter(torch.randn(512, 64))
    weight.grad = torch.randn(512, 64)
    optimizer = optimizer_class([weight], lazy=True)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    events = seen.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert largest <= 8 * 2**10  # weight.nbytes is 128 KiB


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: RowwiseAdam(p, lr=-1.0), "lr must be a finite number >= 0"),
        (lambda p: RowwiseAdam(p, lr=torch.ones(2)), "lr must be a number or a tensor of one"),
        (lambda p: RowwiseAdam(p, betas=(0.9, 1.0)), r"betas\[1\] must be"),
        (lambda p: RowwiseAdam(p, betas=0.9), "betas must be two numbers"),
        (lambda p: RowwiseAdam(p, moment_dtype=torch.int8), "moment_dtype must be"),
        (lambda p: HeadSGD(p, momentum=0.0, nesterov=True), "nesterov=True needs a momentum"),
        (lambda p: HeadSGD(p, weight_decay=-0.1), "weight_decay must be"),
    ],
)
def test_wrong_settings(build: Any, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        build([nn.Parameter(torch.ones(2, 2))])


def test_what_cannot_be_stepped_says_so() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(LargeMarginError, match="gradients must be dense"):
        RowwiseAdam(embedding.parameters()).step()
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    with pytest.raises(LargeMarginError, match="on cpu, not on a CUDA device"):
        HeadSGD([weight], fused=True).step()
