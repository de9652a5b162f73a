"""A head that is a logistic regression on the features that the network gives as it is."""

import torch
from torch import Tensor

from largemargin.app.training.trainer import Trainer
from largemargin.integrations.linear_solver import Problems, axes, minimise, squared_lengths
from largemargin.measuring.retrieval import head_inputs_of

ITERATIONS, TOLERANCE = 300, 1e-4


def logistic_head(
    features: Tensor, labels: Tensor, classes: int, penalty: float
) -> tuple[Tensor, Tensor]:
    """Weight (C, D) and bias (C,); the penalty is a part of the features' mean squared length.

    Example:
        >>> features, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])
        >>> weight, bias = logistic_head(features, labels, 2, 1e-3)
        >>> round(float(-(bias[1] - bias[0]) / (weight[1] - weight[0])), 3)
        2.0
    """
    weights = torch.full((len(labels),), 1 / len(labels)).to(features)
    rotated = axes(features, weights)
    problems = Problems(rotated, labels, weights[:, None])
    width = len(rotated.curvature) + 1
    start = torch.zeros(1, classes, width).to(features)
    size = penalty * float(squared_lengths(features).mean())
    (head,), _ = minimise(problems, start, size, TOLERANCE, ITERATIONS)
    bias = head[:, -1]
    if isinstance(rotated.centre, Tensor):
        bias = bias - head[:, :-1] @ rotated.centre
    return rotated.back(head[:, :-1]), bias


@torch.no_grad()
def fit_head(penalty: float, trainer: Trainer) -> None:
    """Set the head of a run to the logistic regression on its training samples, unchanged."""
    features, labels = head_inputs_of(trainer.bare, trainer.batches.samples, batch_size=1000)
    head = trainer.criterion.layer
    assert isinstance(head.weight, Tensor)
    features, labels = features.double().to(trainer.device), labels.to(trainer.device)
    weight, bias = logistic_head(features, labels, len(head.weight), penalty)
    head.weight.copy_(weight)
    if isinstance(head.bias, Tensor):
        head.bias.copy_(bias)
