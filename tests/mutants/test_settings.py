"""Defaults and limits of settings, of functions and modules alike."""

import inspect

import pytest
import torch

import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.losses import LOSSES
from largemargin.losses.gm_softmax import _check_theorem


def defaults(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


PAIRS = [name for name in LOSSES if hasattr(LF, name)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_module_has_the_defaults_of_its_function(name):
    function, module = defaults(getattr(LF, name)), defaults(LOSSES[name])
    shared = function.keys() & module.keys()
    # Similarity and scale of logits are None in a module: those of its head.
    assert {k: function[k] for k in shared if module[k] is not None} == {
        k: module[k] for k in shared if module[k] is not None
    }


def test_most_losses_share_settings_with_a_function():
    assert len(PAIRS) > 20
    shared = [defaults(getattr(LF, name)).keys() & defaults(LOSSES[name]) for name in PAIRS]
    assert sum(map(len, shared)) > 40


def test_every_pair_of_alphas_must_allow_the_simplex():
    half, one = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0])
    _check_theorem(half, half)
    _check_theorem(one, half)
    for bad in ((torch.tensor([0.49, 1.0]), 0.2), (one, torch.tensor([0.5, 1.01]))):
        with pytest.raises(LargeMarginError, match="alpha1 >= 1/2 and alpha2 <= alpha1"):
            _check_theorem(*bad)
    elsewhere = torch.ones(2, device="meta")  # not looked at: that would wait for a GPU
    _check_theorem(elsewhere, 2.0)
    _check_theorem(0.1, elsewhere)
