"""Activation checkpointing around model and criterion together: both run again, backwards."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from dropin.nets import LABELS, C, D, Mlp, vectors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import largemargin as lm

OBJECTIVES: dict[str, Any] = {
    "cosface": lambda C, D: lm.CosFace(scale=8.0, margin=0.2),
    "banks": lambda C, D: lm.Objective(
        softmax=lm.CrossEntropy(), lmd=0.3 * lm.Discriminative(C, D, margin=2.0, momentum=0.5)
    ),
    "robust": lambda C, D: lm.RobustDiscriminative(C, D, margin=2.0, momentum=0.5),
    "inputs": lambda C, D: lm.Objective(softmax=lm.CrossEntropy(), odn=lm.MarginDistribution()),
    "measured inputs": lambda C, D: lm.Objective(
        softmax=lm.CrossEntropy(), odn=lm.MarginDistribution(r="auto", measured_steps=2)
    ),
    "logits": lambda C, D: lm.Kobayashi(),
}


def backwards(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs that are neither the head's own nor in its order."""
    return model(x).flip(0)


@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("run", [lambda model, x: model(x), backwards], ids=["as it is", "flipped"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_as_without_it(name: str, run: Any, early: bool) -> None:
    if "inputs" in name and run is backwards:
        pytest.skip("losses on input gradients take outputs as they are")
    plain = Mlp()
    model = copy.deepcopy(plain)
    direct, checked = (lm.attach(each, OBJECTIVES[name]) for each in (plain, model))

    def loss(criterion: lm.Criterion, net: nn.Module, x: Tensor) -> Tensor:
        noisy = run(net, x + 0.1) if name == "robust" else None
        return criterion(run(net, x), LABELS, noisy=noisy)

    for step in range(3):
        x = vectors(step)
        plain.zero_grad()
        model.zero_grad()
        want = loss(direct, plain, x)
        want.backward()
        with set_checkpoint_early_stop(early):
            got = checkpoint(loss, checked, model, x, use_reentrant=False)
            got.backward()
        torch.testing.assert_close(got, want)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert checked.steps == direct.steps == 3
    for p, q in zip(checked.buffers(), direct.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def test_schedules_that_moved_on_are_refused() -> None:
    model, x = Mlp(), vectors()
    ramp = {"schedule": "preset", "total_steps": 10}
    criterion = lm.attach(model, lm.CosFace(scale=8.0, margin=0.2), **ramp)
    value = checkpoint(lambda: criterion(model(x), LABELS), use_reentrant=False)
    with pytest.raises(lm.LargeMarginError, match="outside of the checkpoint"):
        value.backward()
    criterion.undo()
    criterion = lm.attach(model, lm.CosFace(scale=8.0, margin=0.2), stepping="manual", **ramp)
    checkpoint(lambda: criterion(model(x), LABELS), use_reentrant=False).backward()
    criterion.step()
    assert criterion.steps == 1


def bent(logits: Tensor, features: Tensor) -> Tensor:
    """Something after the head that keeps tensors."""
    return logits.log_softmax(-1).exp().log()


@pytest.mark.parametrize("named", [False, True], ids=["after the head", "before the head"])
def test_nothing_is_kept_of_the_second_run(named: bool) -> None:
    """It stops as soon as what was dropped is there again, and does not come to its end."""
    model = Mlp() if named else Mlp(bent)
    alive: list[weakref.ref[Any]] = []

    class Token:
        pass

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        token = Token()
        out.grad_fn.metadata["token"] = token
        alive.append(weakref.ref(token))

    model.body.register_forward_hook(watch)
    objective = lm.Objective(softmax=lm.CrossEntropy(), center=lm.CenterLoss(C, D))
    criterion = lm.attach(model, objective, features={"center": "body"} if named else None)
    for step in range(3):
        outputs = checkpoint(model, vectors(step), use_reentrant=False)
        criterion(outputs, LABELS).backward()
        del outputs
        gc.collect()
        assert len(alive) == 2 * (step + 1)
        assert not any(each() is not None for each in alive)
