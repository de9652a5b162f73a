"""Class margins without a network: features that can be anything, as theory assumes them."""

import statistics

import torch
from torch import Tensor, nn

from largemargin.app.config import ObjectiveConfig, OptimizerConfig
from largemargin.app.training.objective import objective_of
from largemargin.app.training.step import LearningRate, make_optimizer
from largemargin.dropin.attach import attach
from largemargin.geometry.margins import class_margin

SGD = OptimizerConfig(
    lr=0.1, momentum=0.9, nesterov=False, weight_decay=1e-4, clip_norm=5.0, schedule="cosine"
)


class FreeFeatures(nn.Module):
    """A feature of its own for every class, and a linear head."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(classes, dim)
        self.head = nn.Linear(dim, classes, bias=False)

    def forward(self, index: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows(index))
        return logits


def free_class_margin(
    objective: ObjectiveConfig, *, classes: int, dim: int, steps: int, seed: int
) -> float:
    """Smallest angle of class vectors, in degrees, after so many steps on all classes at once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FreeFeatures(classes, dim)
        criterion = attach(model, objective_of(objective, [1] * classes), layer="head")
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = make_optimizer(SGD, parameters)
    rate = LearningRate(SGD, epochs=1, steps_per_epoch=steps)
    labels = torch.arange(classes)
    for step in range(steps):
        rate.set(optimizer, step)
        optimizer.zero_grad()
        criterion(model(labels), labels).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, float(SGD.clip_norm or 0))
        optimizer.step()
    return float(class_margin(model.head.weight.detach(), degrees=True))


def mean_class_margin(
    name: str, settings: dict[str, object], *, classes: int, dim: int, steps: int, starts: int
) -> tuple[float, float | None]:
    """Mean and deviation of :func:`free_class_margin` over random starts."""
    objective = ObjectiveConfig(name, {name: settings})
    values = [
        free_class_margin(objective, classes=classes, dim=dim, steps=steps, seed=seed)
        for seed in range(starts)
    ]
    return statistics.fmean(values), statistics.stdev(values) if starts > 1 else None
