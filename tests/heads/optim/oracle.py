"""The steps of RowwiseAdam and HeadSGD in NumPy, row by row, from their equations."""

import math

import numpy as np


def adam(
    weight: np.ndarray,
    gradients: list[np.ndarray],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    lazy: bool = False,
    maximize: bool = False,
) -> np.ndarray:
    weight = weight.astype(np.float64).copy()
    first, second = np.zeros_like(weight), np.zeros(len(weight))
    for step, gradient in enumerate(gradients, start=1):
        for row in range(len(weight)):
            g = -gradient[row] if maximize else gradient[row]
            if lazy and not np.any(g):
                continue
            first[row] = betas[0] * first[row] + (1 - betas[0]) * g
            second[row] = betas[1] * second[row] + (1 - betas[1]) * np.mean(g * g)
            mean = first[row] / (1 - betas[0] ** step)
            size = math.sqrt(second[row] / (1 - betas[1] ** step)) + eps
            weight[row] = weight[row] - lr * weight_decay * weight[row] - lr * mean / size
    return weight


def sgd(
    weight: np.ndarray,
    gradients: list[np.ndarray],
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    lazy: bool = False,
    maximize: bool = False,
) -> np.ndarray:
    weight = weight.astype(np.float64).copy()
    speed = np.zeros_like(weight)
    for gradient in gradients:
        for row in range(len(weight)):
            g = -gradient[row] if maximize else gradient[row]
            if lazy and not np.any(g):
                continue
            g = g + weight_decay * weight[row]
            speed[row] = momentum * speed[row] + g
            weight[row] = weight[row] - lr * (g + momentum * speed[row] if nesterov else speed[row])
    return weight
