"""Numbers that move: one tensor for each, where and as wide as the weights are."""

import torch
from torch import nn

from largemargin.ops.scheduled_values import ScheduledValue, followed, move, scheduled_value_of


def test_a_number_keeps_its_tensor():
    moving = ScheduledValue()
    moving.put("margin", 0.5)
    tensor = moving.tensor("margin")
    moving.put("margin", 0.25)
    assert moving.tensor("margin") is tensor
    assert tensor.item() == 0.25
    moving.put("margin", 0.75, in_place=False)
    assert moving.tensor("margin") is not tensor
    assert tensor.item() == 0.25
    module = nn.Module()
    move(module, "margin", 0.5)
    first = scheduled_value_of(module).tensor("margin")
    move(module, "margin", 0.25)
    assert scheduled_value_of(module).tensor("margin") is first
    assert (module.margin, first.item()) == (0.25, 0.25)


def test_numbers_are_as_wide_as_weights_and_float32_at_least():
    moving = ScheduledValue()
    moving.put("margin", 0.1)
    for dtype, wide in (("float64", "float64"), ("float16", "float32"), ("float32", "float32")):
        moving.follow(torch.ones(1, dtype=getattr(torch, dtype)))
        assert moving.tensor("margin").dtype == getattr(torch, wide)
    kept = moving.tensor("margin")
    moving.follow(torch.ones(1))
    assert moving.tensor("margin") is kept
    moving.double()
    assert moving.tensor("margin").item() == 0.1  # with all its digits
    moving.half()
    assert moving.tensor("margin").dtype == torch.float32


def test_numbers_come_back_from_where_there_is_no_memory():
    moving = ScheduledValue()
    with torch.device("meta"):
        moving.put("margin", 0.5)
    assert moving.tensor("margin").is_meta
    moving.to("cpu")
    assert moving.tensor("margin").item() == 0.5


def test_compiled_code_reads_tensors(monkeypatch):
    module = nn.Module()
    move(module, "margin", 0.5)
    assert followed(module, "margin") is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert followed(module, "margin") is scheduled_value_of(module).tensor("margin")
    assert followed(nn.Module(), "margin") is None
