"""Heads as linear classifiers with the same boundaries."""

import types

import pytest
import torch

from largemargin.heads import ClassHead
from largemargin.heads.head_spec import boundary_form

WEIGHT = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 1.0]])
BIAS = torch.tensor([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("similarity", "bias", "want"),
    [
        ("dot", BIAS, BIAS),
        ("dot", None, None),
        ("cosine", BIAS, None),
        ("cosine_prototypes", BIAS, BIAS),
        ("cosine_prototypes", None, None),
        ("euclidean", None, torch.tensor([-12.5, -2.0, -1.0])),
        ("euclidean", BIAS, torch.tensor([-11.5, 0.0, 3.0])),
    ],
)
def test_linear_classifiers_with_the_boundaries_of_a_head(similarity, bias, want):
    head = types.SimpleNamespace(similarity=similarity)
    weight, found = boundary_form(head, WEIGHT, bias)
    lengths = WEIGHT.norm(dim=1, keepdim=True) if similarity.startswith("cosine") else 1
    assert torch.allclose(weight, WEIGHT / lengths)
    assert (found is None) == (want is None)
    assert want is None or torch.allclose(found, want)
    assert boundary_form(object(), WEIGHT, bias) == (WEIGHT, bias)


def test_heads_on_a_linear_layer_do_not_scale_unless_told_to():
    linear = torch.nn.Linear(2, 3)
    assert ClassHead.from_linear(linear).scale == 1
    assert ClassHead.from_linear(linear, scale=4.0).scale == 4
