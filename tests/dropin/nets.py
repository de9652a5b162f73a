"""Small models and the loss by hand that ``attach`` is compared with."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import largemargin as lm

C, D, N = 5, 8, 6
LABELS = torch.tensor([0, 1, 2, 3, 4, 1])


class ConvNet(nn.Module):
    """Images (N, 3, 8, 8) to logits; no batch statistics, so samples do not meet."""

    def __init__(self, classes: int = C, dim: int = D) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, dim, 3, stride=2, padding=1), nn.Tanh())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.body(self.stem(x))).flatten(1))


class Mlp(nn.Module):
    """Vectors (..., 4) to logits, with what it returns made by ``wrap``."""

    def __init__(self, wrap: Any = lambda logits, features: logits) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, D), nn.Tanh())
        self.fc = nn.Linear(D, C)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        return self.wrap(self.fc(features), features)


@dataclass
class Result:
    value: Tensor
    gradients: dict[str, Tensor]
    terms: dict[str, Tensor]


def images(seed: int = 0, n: int = N, size: int = 8) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def vectors(seed: int = 0, *shape: int) -> Tensor:
    shape = shape or (N, 4)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def through_attach(model: nn.Module, objective: Any, x: Any, labels: Tensor, **how: Any) -> Result:
    """Value and gradients of a copy of the model with the objective attached."""
    model, objective = copy.deepcopy((model, objective))
    criterion = lm.attach(model, objective, **how)
    value = criterion(model(**x) if isinstance(x, dict) else model(x), labels)
    value.backward()
    return Result(value.detach(), gradients(model), criterion.terms)


def by_hand(model: nn.Module, objective: Any, x: Any, labels: Tensor, head: str) -> Result:
    """The same without ``attach``: features from a hook, the loss called with the head."""
    model, objective = copy.deepcopy((model, objective))
    layer = model.get_submodule(head)
    if not isinstance(objective, lm.Objective):
        objective = lm.Objective(loss=objective)
    form = objective.head_form(layer.out_features)
    prototypes: Any = layer
    if form is not None:
        prototypes = lm.ClassHead.from_linear(
            layer, similarity=form.similarity, scale=form.scale, bias=form.bias
        )
    seen: list[Tensor] = []
    layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    model(**x) if isinstance(x, dict) else model(x)
    features = seen[0].flatten(0, -2)
    value = objective(features, prototypes, labels.flatten())
    value.total.backward()
    return Result(value.total.detach(), gradients(model), value.terms)


def same(got: Result, want: Result, **close: Any) -> None:
    torch.testing.assert_close(got.value, want.value, **close)
    assert {n for n, g in want.gradients.items() if g.abs().sum()} <= set(got.gradients)
    for name, gradient in got.gradients.items():
        torch.testing.assert_close(
            gradient, want.gradients.get(name, torch.zeros_like(gradient)), **close
        )
