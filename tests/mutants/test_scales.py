"""Automatic scales, penalties of prototypes of any length, and losses as text."""

import importlib
import math

import pytest
import torch

import largemargin as lm
import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.losses.base.constructor_arguments import (
    _literal,
    constructor_arguments,
    constructor_repr,
)
from largemargin.losses.base.loss import Loss

module = importlib.import_module("largemargin.losses.base.scale")


def test_the_narrowest_margin_decides_on_a_number():
    scale = module.auto_scale(10, torch.tensor([0.7, 0.9]))
    assert isinstance(scale, float)
    assert scale == pytest.approx(module.auto_scale(10, 0.7))
    elsewhere = module.auto_scale(10, torch.ones(2, device="meta"))  # not looked at
    assert isinstance(elsewhere, torch.Tensor)


def test_scales_in_compiled_code_are_tensors(monkeypatch):
    """NaN instead of an error where there is none."""
    monkeypatch.setattr(module, "values_are_checked", lambda *_: False)
    found = [module.auto_scale(2, torch.tensor(x, dtype=torch.float64)) for x in (-0.5, 1.0)]
    assert torch.stack(found).tolist() == pytest.approx([math.log(9) / 0.5, math.log(9) / 2])
    for aligned in (-1.0, -1.5):
        assert module.auto_scale(2, torch.tensor(aligned)).isnan()


def test_probabilities_and_margins_that_have_a_scale():
    assert module.auto_scale(2, probability=0.6) == pytest.approx(math.log(1.5) / 2)
    with pytest.raises(LargeMarginError, match="above 1/C"):
        module.auto_scale(2, probability=0.5)
    assert module.auto_scale(2, -0.9) == pytest.approx(math.log(9) / 0.1)
    for aligned in (-1.0, -1.1):
        with pytest.raises(LargeMarginError, match="no answer for this margin"):
            module.auto_scale(2, aligned)


@pytest.mark.parametrize("size", [1e-25, 1e-10, 0.1, 1.0, 1e10, 1e25])
def test_super_symmetry_of_prototypes_of_any_length(size):
    rows = torch.tensor([[2.0, 0.0], [-1.0, 0.5], [0.0, 1.0]])
    leaf = (size * rows).requires_grad_()
    found = LF.super_symmetry(leaf)
    (slope,) = torch.autograd.grad(found, leaf)
    wanted = (3 * torch.eye(3) - 1) / 2
    exact = rows.double().requires_grad_()
    gram = exact @ exact.T
    want = (gram / gram.diagonal().mean() - wanted).norm()
    assert found.item() == pytest.approx(want.item(), rel=1e-5)
    (want_slope,) = torch.autograd.grad(want, exact)
    assert torch.allclose(size * slope.double(), want_slope, atol=1e-5)


def test_the_text_of_a_loss_names_what_differs_from_the_defaults():
    assert constructor_repr(lm.CosFace(), Loss) == "CosFace()"
    assert constructor_repr(lm.CosFace(scale=8.0), Loss) == "CosFace(scale=8.0)"
    assert constructor_arguments(lm.CenterLoss(3, 2), Loss) == {"num_classes": 3, "dim": 2}
    assert [_literal(x) for x in (math.inf, -math.inf, 0.5)] == [
        "float('inf')",
        "float('-inf')",
        "0.5",
    ]
