"""What editors and type checkers are told: a call returns a tensor, where torch says Any."""

from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm


@pytest.mark.parametrize(
    "kind", [lm.Criterion, lm.Loss, lm.CosFace, lm.ClassHead, lm.ShardedClassHead, lm.SimplexHead]
)
def test_a_call_returns_a_tensor(kind: type[nn.Module]) -> None:
    assert get_args(get_type_hints(kind)["__call__"])[1] is Tensor


def test_a_call_of_an_objective_returns_a_value_with_terms() -> None:
    assert get_args(get_type_hints(lm.Objective)["__call__"])[1] is lm.LossValue


def test_heads_are_printed_without_their_vectors() -> None:
    criterion = lm.attach(nn.Sequential(nn.Linear(8, 3)), lm.CosFace(scale=8.0))
    heads = [criterion.head, lm.ClassHead(8, 3), lm.SimplexHead(8, 3), lm.ShardedClassHead(8, 3)]
    for head in heads:
        assert "num_classes=3" in repr(head)
        assert "tensor" not in repr(head)
        assert len(repr(head)) < 120
    assert torch.equal(heads[0].weight, criterion.layer.weight)
