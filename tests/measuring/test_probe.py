"""The reader of models: one per measurement, hooks for one pass, modes put back."""

import contextlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.dropin import find_head
from largemargin.errors import LargeMarginError
from largemargin.geometry.evaluation_mode import evaluation_mode
from largemargin.measuring.probe import Probe


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


DATA = [(torch.randn(6, 4), torch.arange(6) % 3)] * 2
PARTS: list[dict[str, Any]] = [
    {},
    {"layers": ["0"], "pairwise": True},
    {"input_margins": True, "layer_margins": ["0"], "curvature": True, "bounds": True},
]


@pytest.mark.parametrize("parts", PARTS, ids=["plain", "layers", "inputs"])
def test_a_measurement_reads_through_one_probe(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"find_layer": 0, "Probe": 0}
    find_layer, construct = find_head.find_layer, Probe.__init__

    def finding(*given: Any) -> Any:
        calls["find_layer"] += 1
        return find_layer(*given)

    def constructing(self: Probe, *given: Any, **named: Any) -> None:
        calls["Probe"] += 1
        construct(self, *given, **named)

    for name, module in list(sys.modules.items()):
        if name.startswith("largemargin") and vars(module).get("find_layer") is find_layer:
            monkeypatch.setattr(module, "find_layer", finding)
    monkeypatch.setattr(Probe, "__init__", constructing)
    assert lm.measure(network(), DATA, **parts).samples == 12
    assert calls == {"find_layer": 1, "Probe": 1}


def test_hooks_stay_for_one_pass() -> None:
    model = network()
    probe, seen = Probe(model), []

    def take(module: nn.Module, output: torch.Tensor) -> None:
        seen.append(output.shape)

    reading = probe.read(torch.zeros(2, 4), {"0": take})
    model(torch.zeros(2, 4))
    assert seen == [(2, 5)]
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(reading.outputs, reading.logits)

    def refuse(module: nn.Module, output: torch.Tensor) -> None:
        raise LargeMarginError("no")

    with pytest.raises(LargeMarginError, match="no"):
        probe.read(torch.zeros(2, 4), {"0": refuse})
    assert not any(module._forward_hooks for module in model.modules())


def test_what_a_hook_returns_goes_on() -> None:
    model = network().eval()
    x = torch.randn(2, 4)
    reading = Probe(model).read(x, {"0": lambda module, output: output + 1})
    assert torch.allclose(reading.logits, model[1:](model[0](x) + 1))


@pytest.mark.parametrize("imported", [False, True])
def test_compiled_code_is_kept_from_running(
    imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler, which takes seconds to import, is asked only where it is in use."""
    stances = []
    if imported:
        monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(
        torch.compiler, "set_stance", lambda word: contextlib.nullcontext(stances.append(word))
    )
    with Probe(network()).evaluating():
        assert stances == (["force_eager"] if imported else [])


@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_mode_puts_back_every_mode(frozen: bool) -> None:
    model = network().train()
    model[2].eval()
    model[0].bias.requires_grad_(False)
    with evaluation_mode(model, frozen=frozen):
        assert not any(module.training for module in model.modules())
        assert model[0].weight.requires_grad is not frozen
    with contextlib.suppress(ZeroDivisionError), evaluation_mode(model, frozen=frozen):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
