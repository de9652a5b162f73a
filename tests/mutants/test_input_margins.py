"""Margins by gradients at inputs and layers: what is constant, what is a default or a limit."""

import inspect
import sys

import pytest
import torch

import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.losses.input_margin import _InputMarginLoss

LABELS = torch.tensor([0, 1])


def cubes():
    """Logits whose gradients at the inputs depend on these."""
    inputs = torch.tensor([[2.0, 1.0, 0.5], [1.5, 2.0, 3.0]], dtype=torch.float64)
    inputs.requires_grad_()
    return inputs**3, inputs


@pytest.mark.parametrize("of", ["inputs", "layers"])
def test_the_norm_of_a_gradient_is_a_constant_unless_told_otherwise(of):
    def slope(**how):
        logits, inputs = cubes()
        if of == "inputs":
            value = LF.linearized_margins(logits, LABELS, inputs, **how).margins
        else:
            value = LF.layer_margin(logits, LABELS, [inputs], gamma=9.0, **how)
        return torch.autograd.grad(value.sum(), inputs)[0]

    assert torch.equal(slope(), slope(differentiable_norm=False))
    assert not torch.allclose(slope(), slope(differentiable_norm=True))


def test_losses_on_input_margins_have_the_defaults_of_the_margins():
    own = inspect.signature(_InputMarginLoss.__init__).parameters
    margins = inspect.signature(LF.linearized_margins).parameters
    assert own["differentiable_norm"].default == margins["differentiable_norm"].default
    assert own["per_sample_gradients"].default == margins["per_sample_gradients"].default
    assert margins["eps"].default == 1e-6
    assert _InputMarginLoss().eps is None
    assert _InputMarginLoss().differentiable_norm is False


def test_one_backward_pass_for_all_rivals_and_layers(monkeypatch):
    logits, inputs = cubes()
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *given, **how: calls.append(given) or grad(*given, **how)
    )
    LF.layer_margin(logits, LABELS, [inputs])
    assert len(calls) == 1


@pytest.mark.parametrize("how", [{}, {"aggregate": "sum", "p": 1, "differentiable_norm": True}])
def test_many_rivals_are_worked_on_in_blocks(monkeypatch, how):
    """All at once they are N x C x C numbers, 2 GB of 8,000 classes."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(3, 5), torch.randn(40, 5, requires_grad=True)
    inputs.requires_grad_()
    labels = torch.tensor([0, 7, 39])

    def found():
        value = LF.layer_margin(inputs**2 @ weight.T, labels, [inputs], gamma=3.0, **how)
        return [value.detach(), *torch.autograd.grad(value.sum(), [inputs, weight])]

    whole, sizes, grad = found(), [], torch.autograd.grad

    def seen(outputs, of, grad_outputs=None, **options):
        sizes.append(0 if grad_outputs is None else grad_outputs.numel())
        return grad(outputs, of, grad_outputs, **options)

    monkeypatch.setattr(sys.modules["largemargin.losses.layer_margin"], "BLOCK_NUMBERS", 600)
    monkeypatch.setattr(torch.autograd, "grad", seen)
    for part, want in zip(found(), whole, strict=True):
        torch.testing.assert_close(part, want)
    assert max(sizes) <= 600 < 39 * 3 * 40
    assert len(sizes) == 1 + -(-39 // (600 // (3 * 40 + 3 * 5)))


def test_margins_at_layers_are_one_unless_told_otherwise():
    logits, inputs = cubes()
    by_default, one, two = (
        LF.layer_margin(logits, LABELS, [inputs], aggregate="sum", **how)
        for how in ({}, {"gamma": 1.0}, {"gamma": 2.0})
    )
    assert torch.equal(by_default, one)
    assert not torch.equal(by_default, two)


def test_at_least_one_rival_competes():
    logits, inputs = cubes()
    assert LF.layer_margin(logits, LABELS, [inputs], topk=1).isfinite().all()
    with pytest.raises(LargeMarginError, match="topk"):
        LF.layer_margin(logits, LABELS, [inputs], topk=0)
