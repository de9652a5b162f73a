"""How long a step of the drop-in is: calls of the library, and looks at the labels."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import largemargin as lm


def attached() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    criterion = lm.attach(model, lm.CosFace(margin=0.2, scale="auto"))
    inputs, labels = torch.randn(6, 8), torch.arange(6) % 4

    def step() -> None:
        criterion(model(inputs), labels).backward()

    return step


def test_a_step_makes_few_and_shallow_calls() -> None:
    step = attached()
    for _ in range(5):
        step()  # the first ones also snapshot parameters, to see whether they are trained
    calls = level = deepest = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, level, deepest
        if "largemargin" not in frame.f_code.co_filename:
            return
        level += {"call": 1, "return": -1}.get(event, 0)
        calls += event == "call"
        deepest = max(deepest, level)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    assert 0 < calls <= 150
    assert deepest <= 11


class Looks(TorchDispatchMode):
    """Counts looks at the range of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.aminmax.default:
            self.count += not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_labels_are_looked_at_once() -> None:
    step = attached()
    with Looks() as looks:
        step()
    assert looks.count == 1
