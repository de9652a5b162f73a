"""Copies of model and criterion: EMA, deepcopy, pickles, state dicts, resumed training."""

import copy
import io
import pickle
from typing import Any

import pytest
import timm
import torch
from dropin.nets import LABELS, C, ConvNet, D, images
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import largemargin as lm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:timm", "ignore::FutureWarning")


def objective(C: int = C, D: int = D) -> lm.Objective:
    return lm.Objective(cosface=lm.CosFace(scale=8.0), lmd=0.1 * lm.Discriminative(C, D, margin=2))


def train(model: nn.Module, criterion: lm.Criterion, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = criterion(model(images(step)), LABELS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh() -> tuple[nn.Module, lm.Criterion, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ConvNet()
    criterion = lm.attach(model, objective())
    return model, criterion, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}


def equal(one: nn.Module, two: nn.Module) -> bool:
    first, second = tensors(one), tensors(two)
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


def refused(criterion: lm.Criterion, outputs: Any) -> None:
    with pytest.raises(lm.LargeMarginError, match="copy of the model"):
        criterion(outputs, LABELS)


def test_a_copy_of_the_model_is_another_model() -> None:
    model, criterion, optimizer = fresh()
    train(model, criterion, optimizer, range(2))
    twin = copy.deepcopy(model)
    assert type(twin.fc) is lm.ClassHead
    assert torch.equal(twin(images()), model(images()))
    model(images())
    refused(criterion, twin(images()))
    refused(criterion, twin(images()).log_softmax(1))
    with torch.no_grad():  # the very same numbers, but another model's
        model(images())
        refused(criterion, twin(images()))
    own = lm.attach(twin, criterion.objective)
    torch.testing.assert_close(
        own(twin.eval()(images()), LABELS), criterion(model.eval()(images()), LABELS)
    )
    refused(criterion, twin(images()))
    refused(own, model(images()))


@pytest.mark.parametrize("kind", ["swa_utils", "timm"])
def test_exponential_moving_average(kind: str) -> None:
    model, criterion, optimizer = fresh()
    if kind == "timm":
        ema: Any = timm.utils.ModelEmaV3(model, decay=0.5)
        update = ema.update
    else:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        update = ema.update_parameters
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(3):
        train(model, criterion, optimizer, range(step, step + 1))
        update(model)
        first = kind == "swa_utils" and step == 0  # copies the first time
        for name, p in model.named_parameters():
            by_hand[name] = p.detach().clone() if first else (by_hand[name] + p.detach()) / 2
    for name, p in ema.module.named_parameters():
        torch.testing.assert_close(p, by_hand[name])
    # The average predicts with the trained geometry, and leaves the model's criterion alone.
    bank = criterion.banks[0].centroids.clone()
    ema.module.eval()
    cosine = nn.functional.normalize(ema.module.fc.weight)
    seen: list[Tensor] = []
    handle = ema.module.pool.register_forward_hook(lambda m, a, out: seen.append(out.flatten(1)))
    outputs = ema.module(images())
    handle.remove()
    torch.testing.assert_close(outputs, 8 * nn.functional.normalize(seen[0]) @ cosine.T)
    refused(criterion, outputs)
    # Its loss, from the same objective; evaluation does not write the shared bank.
    loss = lm.attach(ema.module, criterion.objective)(ema.module(images()), LABELS)
    assert loss > 0
    assert torch.equal(criterion.banks[0].centroids, bank)
    train(model, criterion, optimizer, range(3, 4))
    assert not torch.equal(criterion.banks[0].centroids, bank)


def test_copied_together_they_stay_together() -> None:
    model, criterion, optimizer = fresh()
    train(model, criterion, optimizer, range(2))
    twin, loss = copy.deepcopy((model, criterion))
    assert loss.layer is twin.fc
    assert loss.banks[0] is not criterion.banks[0]
    assert loss.steps == 2
    value = loss(twin(images(5)), LABELS)
    torch.testing.assert_close(value, criterion(model(images(5)), LABELS))
    refused(criterion, twin(images()))
    refused(loss, model(images()))


class Module(nn.Module):
    """As in Lightning: the criterion is an attribute beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.criterion, _ = fresh()


def test_a_module_with_both_is_copied_and_averaged_whole() -> None:
    whole = Module()
    average = AveragedModel(whole)
    average.update_parameters(whole)
    inner = average.module
    assert inner.criterion.layer is inner.model.fc
    assert inner.criterion(inner.model(images()), LABELS) > 0
    assert equal(copy.deepcopy(whole), whole)


def test_pickles() -> None:
    model, criterion, optimizer = fresh()
    train(model, criterion, optimizer, range(2))
    twin, loss = pickle.loads(pickle.dumps((model, criterion)))
    assert equal(twin, model)
    assert equal(loss, criterion)
    torch.testing.assert_close(loss(twin(images()), LABELS), criterion(model(images()), LABELS))
    refused(criterion, twin(images()))
    loss.undo()
    assert isinstance(twin.fc, nn.Linear)
    alone = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(alone(images()), model(images()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=False), model)


def test_resumed_training_is_uninterrupted_training() -> None:
    model, criterion, optimizer = fresh()
    want = train(model, criterion, optimizer, range(6))
    first = fresh()
    got = train(*first, range(3))
    file = io.BytesIO()
    torch.save([each.state_dict() for each in first], file)
    file.seek(0)
    second = fresh()
    train(*second, range(7, 9))  # it may have done something else before
    for each, state in zip(second, torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state)
    assert second[1].steps == 3
    got += train(*second, range(3, 6))
    assert got == want
    assert equal(second[0], model)
    assert equal(second[1], criterion)


def test_resumed_in_the_middle_of_an_accumulation() -> None:
    def made() -> tuple[nn.Module, lm.Criterion, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = ConvNet()
        criterion = lm.attach(model, objective(), accumulate=2)
        return model, criterion, torch.optim.SGD(model.parameters(), lr=0.0)

    straight, broken, resumed = made(), made(), made()
    want = train(*straight, range(4))
    got = train(*broken, range(1))
    for each, old in zip(resumed, broken, strict=True):
        each.load_state_dict(old.state_dict())
    got += train(*resumed, range(1, 4))
    assert got == want
    assert resumed[1].steps == straight[1].steps == 2
    assert equal(resumed[1], straight[1])


def test_state_dicts_go_between_plain_and_attached_models() -> None:
    model, criterion, optimizer = fresh()
    train(model, criterion, optimizer, range(1))
    plain = ConvNet()
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert missing.missing_keys == ["fc.bias"]  # a cosine head has none
    assert torch.equal(plain.fc.weight, model.fc.weight)
    soft = ConvNet()
    lm.attach(soft, lm.CrossEntropy())
    plain.load_state_dict(soft.state_dict())
    other = ConvNet()
    with pytest.raises(RuntimeError, match=r"cosface|lmd"):
        lm.attach(other, lm.CrossEntropy()).load_state_dict(criterion.state_dict())
