"""The head optimizers as torch optimizers: groups, state, scalers, compilers, backward steps."""

import copy
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.testing import assert_close

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.heads.optim import HeadSGD, RowwiseAdam, apply_in_backward

BOTH = pytest.mark.parametrize("optimizer_class", [RowwiseAdam, HeadSGD])


def train(weight: Tensor, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_and_loaded_it_goes_on(optimizer_class: Any, dtype: torch.dtype, tmp_path) -> None:
    start = torch.randn(6, 4).to(dtype)
    whole, part = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    straight, before = optimizer_class([whole]), optimizer_class([part])
    train(whole, straight, range(6))
    train(part, before, range(3))
    torch.save(before.state_dict(), tmp_path / "state.pt")
    after = optimizer_class([part])
    after.load_state_dict(torch.load(tmp_path / "state.pt"))
    for name, value in before.state[part].items():
        assert after.state[part][name].dtype == value.dtype
        assert after.state[part][name] is not value
    train(part, after, range(3, 6))
    assert torch.equal(part, whole)
    assert straight.state[whole]["step"] == 6


def test_state_is_what_it_says() -> None:
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    optimizer = RowwiseAdam([weight])
    train(weight, optimizer, range(1))
    state = optimizer.state[weight]
    assert state["second"].dtype == torch.float32
    assert state["second"].shape == (6,)
    assert state["first"].dtype == torch.bfloat16
    bare = RowwiseAdam([weight], betas=(0.0, 0.9))
    train(weight, bare, range(1))
    assert set(bare.state[weight]) == {"step", "second"}
    assert copy.deepcopy(optimizer).state_dict()["param_groups"][0]["lazy"] is False


@BOTH
def test_groups_closures_and_schedules(optimizer_class: Any) -> None:
    head = lm.ClassHead(4, 3)
    optimizer = optimizer_class(head.param_groups(lr=0.01, weight_decay=0.1), lr=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    x = torch.randn(5, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = head(x).square().sum()
        value.backward()
        return value

    first = optimizer.step(closure)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert optimizer.step(closure) < first


@BOTH
def test_a_scaler_divides_and_skips(optimizer_class: Any) -> None:
    """What GradScaler hands over: a scale, and 1 where a gradient is not finite."""
    start = torch.randn(6, 4)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    plain, scaled = (optimizer_class([weight], weight_decay=0.1) for weight in weights)
    gradient = torch.randn(6, 4)
    for step in range(3):
        weights[0].grad, weights[1].grad = gradient, 1024 * gradient
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.zeros(1)
        plain.step()
        scaled.step()
        assert torch.equal(*weights)
        kept = copy.deepcopy(scaled.state[weights[1]])
        weights[1].grad = torch.full_like(gradient, torch.nan)
        scaled.found_inf = torch.ones(1)
        scaled.step()
        assert torch.equal(*weights), step
        assert all(torch.equal(kept[name], scaled.state[weights[1]][name]) for name in kept)


@BOTH
def test_torch_scaler_steps_it(optimizer_class: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = optimizer_class([weight], lr=0.1)
    for value, moved in ((1.0, True), (torch.inf, False)):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((value * weight).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) is not moved
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize(
    "optimizer_class", [RowwiseAdam, pytest.param(HeadSGD, marks=pytest.mark.slow)]
)
def test_compiled_it_is_the_same(optimizer_class: Any) -> None:
    start = torch.randn(12, 4)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    eager, compiled = (optimizer_class([weight], lr=0.1, weight_decay=0.1) for weight in weights)
    step = torch.compile(compiled.step, backend="aot_eager")
    for turn in range(3):
        for weight in weights:
            weight.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(turn))
        eager.step()
        step()
    assert_close(weights[1], weights[0])


@pytest.mark.parametrize("optimizer_class", [RowwiseAdam, HeadSGD, torch.optim.AdamW])
def test_steps_inside_the_backward_pass(optimizer_class: Any) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), lm.ClassHead(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optimizer_class(model[2].parameters(), lr=0.1) for model in models]
    handle = apply_in_backward(optimizers[1])
    for _ in range(3):
        x = torch.randn(5, 4)
        for model in models:
            model(x).square().sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        assert models[1][2].weight.grad is None
        optimizers[1].step()  # as a loop that knows nothing of it does
        assert_close(models[1][2].weight, models[0][2].weight)
        assert models[1][0].weight.grad is not None
    handle.remove()
    models[1](x).sum().backward()
    assert models[1][2].weight.grad is not None


@BOTH
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_parameters_without_an_entry_count_their_steps(optimizer_class: Any, shape: Any) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = optimizer_class([weight])
    train(weight, optimizer, range(2))
    assert optimizer.state[weight]["step"] == 2


def test_betas_may_be_a_list() -> None:
    """As in files of settings."""
    weight = nn.Parameter(torch.ones(3, 2))
    assert RowwiseAdam([weight], betas=[0.5, 0.25]).param_groups[0]["betas"] == (0.5, 0.25)  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match="betas must be two numbers"):
        RowwiseAdam([weight], betas=[0.5])  # type: ignore[arg-type]


def test_wrong_arguments_of_backward_steps() -> None:
    with pytest.raises(LargeMarginError, match=r"must be a torch\.optim\.Optimizer"):
        apply_in_backward(nn.Linear(2, 2))  # type: ignore[arg-type]
    weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    with pytest.raises(LargeMarginError, match="is frozen"):
        apply_in_backward(HeadSGD([weight]))


@pytest.mark.parametrize(
    "build",
    [
        lambda groups: RowwiseAdam(groups, lr=0.02),
        lambda groups: RowwiseAdam(groups, lr=0.02, betas=(0.0, 0.99)),
        lambda groups: HeadSGD(groups, lr=0.3),
    ],
    ids=["rowwise_adam", "no first moment", "head_sgd"],
)
def test_it_learns_digits(build: Any) -> None:
    digits = load_digits()
    x = torch.as_tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.as_tensor(digits.target)
    head = lm.ClassHead(64, 10, similarity="cosine")
    optimizer, loss = build(head.parameters()), lm.CosFace(margin=0.1, scale=16.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss(x[:1300], head, labels[:1300]).backward()
        optimizer.step()
    accuracy = (head.predict(x[1300:]).classes[:, 0] == labels[1300:]).float().mean()
    assert accuracy > 0.85
