"""Attached models through torch.fx, torch.jit.trace and torch.export: as they predict."""

import io
from typing import Any

import pytest
import torch
from dropin.nets import LABELS, ConvNet, D, Mlp, images, vectors
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

import largemargin as lm

OBJECTIVES: dict[str, Any] = {
    "linear head": lambda C, D: lm.CrossEntropy(),
    "cosine head": lambda C, D: lm.CosFace(scale=8.0, margin=0.2),
    "euclidean head": lambda C, D: lm.GaussianMixture(C, D),
    "inputs": lambda C, D: lm.MarginDistribution(),
}
jit_warns = pytest.mark.filterwarnings(
    "ignore:.torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning"
)


def by_fx(model: nn.Module, x: Tensor) -> Any:
    return torch.fx.symbolic_trace(model)


def by_jit(model: nn.Module, x: Tensor) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, x), file)
    file.seek(0)
    return torch.jit.load(file)


def by_export(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


@jit_warns
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside another"])
@pytest.mark.parametrize("trace", [by_fx, by_jit, by_export])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_traced_model_predicts_as_the_model(name: str, trace: Any, inside: bool) -> None:
    model = Mlp()
    criterion = lm.attach(model, OBJECTIVES[name])
    outer = nn.Sequential(nn.Identity(), model) if inside else model
    before = criterion(outer(vectors()), LABELS).detach()
    traced = trace(outer.eval(), vectors())
    other = vectors(5) if trace is by_export else vectors(5, 3, 4)
    torch.testing.assert_close(traced(other), model(other))
    model.train()
    torch.testing.assert_close(criterion(outer(vectors()), LABELS).detach(), before)


@jit_warns
@pytest.mark.parametrize("trace", [by_fx, by_jit])
@pytest.mark.parametrize(
    "head",
    [
        lambda: lm.SimplexHead(D, 5),
        lambda: lm.ClassHead(D, 5, similarity="cosine_prototypes", scale=3.0, bias=True),
    ],
)
def test_heads_by_themselves(head: Any, trace: Any) -> None:
    model = nn.Sequential(nn.Linear(4, D), head())
    traced = trace(model, vectors())
    other = vectors(5, 3, 4)
    torch.testing.assert_close(traced(other), model(other))


def test_a_zero_vector_in_a_traced_cosine_head() -> None:
    head = torch.fx.symbolic_trace(nn.Sequential(lm.ClassHead(4, 3, similarity="cosine")))
    assert torch.equal(head(torch.zeros(2, 4)), torch.zeros(2, 3))


def test_features_by_torchvision() -> None:
    model = ConvNet().eval()
    lm.attach(model, lm.CosFace(scale=8.0, margin=0.2))
    found = create_feature_extractor(model, ["body", "fc"])(images())
    torch.testing.assert_close(found["fc"], model(images()))
