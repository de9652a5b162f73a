"""Losses where the forward code runs twice, without gradient, in pieces, or in half precision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from matrix.loss_calls import arguments, build, problem
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from largemargin import (
    LOSSES,
    AdaCos,
    AdaFace,
    CenterLoss,
    CrossEntropy,
    CurricularFace,
    Discriminative,
    ElasticFace,
    LargeMarginError,
    Objective,
    RobustDiscriminative,
)

C, D, INPUTS = 5, 4, 6
DISCRIMINATIVE = {
    "partial": partial(Discriminative, C, D, momentum=0.5),
    "both": partial(Discriminative, C, D, momentum=0.5, strategy="both"),
    "full": partial(Discriminative, C, D, momentum=0.5, strategy="both", first_seen="full"),
    "accumulate": partial(Discriminative, C, D, momentum=0.5, strategy="both", accumulate=2),
    "robust": partial(RobustDiscriminative, C, D, momentum=0.5),
    "center": partial(CenterLoss, C, D, strength=1.0),
    "adaface": partial(AdaFace, scale=8.0, rate=0.5, norm_mean=3.0, norm_std=1.0),
    "curricularface": partial(CurricularFace, scale=8.0, rate=0.5),
    "adacos": partial(AdaCos, C),
}


class Network(nn.Module):
    """A body, a head and a loss in one module, so that one checkpoint covers all three."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, D)
        self.head = nn.Linear(D, C)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        features = torch.tanh(self.body(x)) * 3
        if isinstance(self.loss, CenterLoss):
            return self.loss(features, labels)
        if isinstance(self.loss, RobustDiscriminative):
            noisy = torch.tanh(self.body(x + 0.1)) * 3
            return self.loss(features, self.head, labels, noisy)
        return self.loss(features, self.head, labels)


def network(make: Callable[[], nn.Module]) -> Network:
    torch.manual_seed(0)
    return Network(make()).double()


def batch(seed: int, num: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, INPUTS, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.randint(C, (num,), generator=generator)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "x": x.grad}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("num", [8, 3])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", DISCRIMINATIVE)
def test_a_checkpointed_step_is_the_plain_step(kind: str, reentrant: bool, num: int) -> None:
    plain, again = network(DISCRIMINATIVE[kind]), network(DISCRIMINATIVE[kind])
    for step in range(4):
        x, labels = batch(step, num)
        y = x.detach().clone().requires_grad_()
        want = plain(x, labels)
        got = checkpoint(again, y, labels, use_reentrant=reentrant)
        torch.testing.assert_close(got, want)
        written = {name: value.clone() for name, value in again.named_buffers()}
        want.backward()
        got.backward()
        assert_same(gradients(again, y), gradients(plain, x))
        assert_same(dict(again.named_buffers()), written)  # the backward pass wrote nothing
        assert_same(dict(again.named_buffers()), dict(plain.named_buffers()))
        with torch.no_grad():
            for model in (plain, again):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.05 * p.grad
                        p.grad = None


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_draws_the_margins_of_the_first_run(reentrant: bool, plus: bool) -> None:
    plain, again = (network(partial(ElasticFace, std=0.5, plus=plus, scale=8.0)) for _ in range(2))
    for step in range(2):
        x, labels = batch(step)
        y = x.detach().clone().requires_grad_()
        torch.manual_seed(step)
        want = plain(x, labels)
        after = torch.get_rng_state()
        want.backward()
        torch.manual_seed(step)
        checkpoint(again, y, labels, use_reentrant=reentrant).backward()
        assert torch.equal(torch.get_rng_state(), after)
        assert_same(gradients(again, y), gradients(plain, x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["both", "center", "adaface", "adacos"])
def test_two_checkpointed_forwards_before_one_backward(kind: str, reentrant: bool) -> None:
    plain, again = network(DISCRIMINATIVE[kind]), network(DISCRIMINATIVE[kind])
    for start in (0, 2):
        xs = [batch(start + i) for i in range(2)]
        ys = [(x.detach().clone().requires_grad_(), labels) for x, labels in xs]
        sum(plain(*x) for x in xs).backward()
        sum(checkpoint(again, *y, use_reentrant=reentrant) for y in ys).backward()
        for (x, _), (y, _) in zip(xs, ys, strict=True):
            torch.testing.assert_close(y.grad, x.grad)
        assert_same(gradients(again, ys[0][0]), gradients(plain, xs[0][0]))
        assert_same(dict(again.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["both", "center", "adaface", "curricularface"])
def test_a_checkpointed_evaluation_sees_the_bank_as_it_is(kind: str, reentrant: bool) -> None:
    plain, again = network(DISCRIMINATIVE[kind]), network(DISCRIMINATIVE[kind])
    for model in (plain, again):
        for step in range(2):
            model(*batch(step))
        model.eval()
    before = {name: value.clone() for name, value in again.named_buffers()}
    x, labels = batch(2)
    y = x.detach().clone().requires_grad_()
    plain(x, labels).backward()
    checkpoint(again, y, labels, use_reentrant=reentrant).backward()
    assert_same(gradients(again, y), gradients(plain, x))
    assert_same(dict(again.named_buffers()), before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_body_alone_changes_nothing(reentrant: bool) -> None:
    plain, again = network(DISCRIMINATIVE["both"]), network(DISCRIMINATIVE["both"])
    for step in range(2):
        x, labels = batch(step)
        y = x.detach().clone().requires_grad_()
        plain(x, labels).backward()
        features = checkpoint(lambda t: torch.tanh(again.body(t)) * 3, y, use_reentrant=reentrant)
        again.loss(features, again.head, labels).backward()
        assert_same(gradients(again, y), gradients(plain, x))
        assert_same(dict(again.named_buffers()), dict(plain.named_buffers()))


def test_gradients_and_bank_of_accumulated_micro_batches() -> None:
    # The bank of accumulate=k and of commit_with(optimizer) is that of the joined batch; within
    # the step every micro-batch is blended with the bank as the step found it.
    counted = network(partial(Discriminative, C, D, momentum=0.5, strategy="both", accumulate=3))
    hooked, joined = network(DISCRIMINATIVE["both"]), network(DISCRIMINATIVE["both"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (counted, hooked, joined)]
    hooked.loss.bank.commit_with(optimizers[1])
    for step in range(2):
        parts = [batch(10 * step + i) for i in range(3)]
        for model in (counted, hooked):
            for x, labels in parts:
                model(x.detach(), labels).backward()
        joined(torch.cat([x.detach() for x, _ in parts]), torch.cat([y for _, y in parts]))
        for optimizer in optimizers:
            optimizer.step()
        for name in ("centroids", "seen", "counts"):
            want = getattr(joined.loss.bank, name)
            torch.testing.assert_close(getattr(counted.loss.bank, name), want)
            torch.testing.assert_close(getattr(hooked.loss.bank, name), want)
    for (name, p), q in zip(counted.named_parameters(), hooked.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def input_margin(name: str) -> bool:
    return "compile" in LOSSES[name].refuses


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LOSSES)
def test_values_without_gradient(name: str, mode: Any) -> None:
    loss, other, given = build(name), build(name), problem()
    positional, options = arguments(loss, given)
    if input_margin(name):
        with mode():
            hidden, options = arguments(loss, given)
            with pytest.raises(LargeMarginError, match=r"requires_grad_"):
                loss(*hidden, **options)
        return
    for _ in range(2):
        want = other(*positional, **options)
        with mode():
            got = loss(*positional, **options)
        assert not got.requires_grad
        torch.testing.assert_close(got, want.detach())
    # What such a forward wrote must not get in the way of training afterwards.
    loss(*positional, **options).backward()
    assert all(not buffer.is_inference() for buffer in loss.buffers())


def test_a_training_step_in_float16_under_autocast_with_a_scaler() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(INPUTS, D), nn.Linear(D, C)
    objective = Objective(softmax=CrossEntropy(), lmd=Discriminative(C, D, momentum=0.5))
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        x, labels = batch(step)
        x = x.detach().float()
        optimizer.zero_grad()
        exact = Objective(softmax=CrossEntropy(), lmd=Discriminative(C, D, momentum=0.5))
        exact.load_state_dict(objective.state_dict())
        reference = exact(torch.tanh(body(x)), head, labels).total
        wanted = torch.autograd.grad(reference, parameters)
        with torch.autocast("cpu", dtype=torch.float16):
            features = torch.tanh(body(x))
            assert features.dtype == torch.float16
            value = objective(features, head, labels).total
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, reference, rtol=1e-2, atol=1e-2)
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        for got, want in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(got.grad, want, rtol=2e-2, atol=2e-2)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 256.0
        for buffer in objective.buffers():
            assert buffer.dtype != torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_features_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    loss, exact, given = build(name), build(name), problem()
    positional, options = arguments(exact, given)
    want = exact(*positional, **options)
    low = {
        k: v.detach().to(dtype).requires_grad_() if v.is_floating_point() else v
        for k, v in given.items()
    }
    with torch.autocast("cpu", dtype=dtype):
        positional, options = arguments(loss, low)
        value = loss(*positional, **options)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, want, rtol=3e-2, atol=3e-2)
    value.backward()
    for leaf in low.values():
        assert leaf.grad is None or torch.isfinite(leaf.grad).all()
    for buffer in loss.buffers():
        assert buffer.dtype not in (torch.float16, torch.bfloat16)
