"""Accelerate: mixed precision, gradient accumulation and checkpoints with an attached criterion."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import largemargin as lm

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.arange(rows) % 3


def discriminative(classes: int, dim: int) -> lm.Objective:
    return lm.Objective(
        softmax=lm.CrossEntropy(), lmd=0.1 * lm.Discriminative(classes, dim, margin=2.0)
    )


def test_outputs_converted_to_float32_are_still_recognised() -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = network()
    criterion = lm.attach(model, lm.CrossEntropy())
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output))
    prepared = accelerator.prepare(model)
    (first, labels), (second, _) = batch(), batch()
    outputs, others = prepared(first), prepared(second)
    # The premise: the head computed in bfloat16, and what comes out is another tensor.
    assert seen[0].dtype == torch.bfloat16
    assert outputs.dtype == torch.float32
    assert outputs is not seen[0]
    for given, index in ((outputs, 0), (others, 1)):
        assert criterion.read(given).logits is seen[index]
    loss = criterion(outputs, labels)
    torch.testing.assert_close(
        loss, nn.functional.cross_entropy(seen[0].float(), labels), rtol=1e-2, atol=1e-2
    )
    accelerator.backward(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_cosine_head_is_float32_under_mixed_precision() -> None:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model = network()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    prepared = accelerator.prepare(model)
    inputs, labels = batch()
    model.eval()
    with torch.no_grad():  # no graph to follow either
        outputs = prepared(inputs)
        assert outputs.dtype == torch.float32
        assert torch.isfinite(criterion(outputs, labels))


@pytest.mark.parametrize("objective", [lm.CosFace(scale=8.0), lm.Kobayashi()])
def test_accumulated_gradients_equal_those_of_one_batch(objective: lm.Loss) -> None:
    parts = 3
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=parts, cpu=True)
    model, inputs, labels = network(), *batch()
    whole = copy.deepcopy(model)
    lm.attach(whole, copy.deepcopy(objective))(whole(inputs), labels).backward()
    criterion = lm.attach(model, objective, accumulate=parts)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=len(labels) // parts)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for x, y in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(criterion(prepared(x), y))
            optimizer.step()
        steps += accelerator.sync_gradients
    assert steps == criterion.steps == 1
    for got, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def train(
    accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, criterion: lm.Criterion
) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(criterion(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            criterion.step()


def state(*parts: Any) -> list[Any]:
    return copy.deepcopy([part.state_dict() for part in parts])


@pytest.mark.parametrize("objective", [discriminative, lambda classes, dim: lm.CosFace(scale=8.0)])
def test_save_state_and_load_state_bring_everything_back(
    objective: Callable[[int, int], Any], tmp_path: Path
) -> None:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = network()
    criterion = lm.attach(model, objective, accumulate=2, stepping="manual")
    optimizer = torch.optim.SGD(criterion.param_groups(model), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*batch(20)), batch_size=4)  # 5 micro-batches: a ragged end
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(criterion)

    train(accelerator, model, optimizer, loader, criterion)
    assert criterion.steps == 3
    for bank in criterion.banks:
        assert int(bank.counts.sum()) == 20  # also those of the ragged step
        assert int(bank.pending_steps) == 0
    accelerator.save_state(str(tmp_path))
    saved = state(model, criterion)
    train(accelerator, model, optimizer, loader, criterion)
    once = state(model, criterion)
    assert str(once) != str(saved)

    accelerator.load_state(str(tmp_path))
    assert str(state(model, criterion)) == str(saved)
    train(accelerator, model, optimizer, loader, criterion)
    torch.testing.assert_close(state(model, criterion), once, rtol=0, atol=0)
