"""The target-logit curve psi(theta) of a loss: what a margin does to the logit of the own class."""

import inspect
import math

import torch

import largemargin as lm
from largemargin.integrations.objectives import build_loss
from largemargin.training import RunConfig
from largemargin.training.objective import parse_objective

SCALE = 8.0
"""psi does not depend on it; a small one keeps the inversion exact."""

CLASSES = 3


def target_curve(config: RunConfig, points: int = 91) -> tuple[list[float], list[float]] | None:
    """(theta in degrees, psi) of the cosine loss of a run; None where it has no such curve.

    Read off the loss itself: with rivals at right angles a softmax over cosines is
    log(1 + (C - 1) exp(-s psi)), which is solved for psi.
    """
    names = ("cosface", "arcface", "normface", "sphereface")
    term = next((each for each in parse_objective(config.objective) if each.name in names), None)
    if term is None:
        return None
    kind = lm.LOSSES[term.name]
    if "scale" not in inspect.signature(kind).parameters:
        return None
    settings = {**term.settings, "scale": SCALE}
    if isinstance(settings.get("margin"), str):
        return None
    loss = build_loss(kind, settings, CLASSES, CLASSES + 1, [1] * CLASSES).eval()
    theta = torch.linspace(0, math.pi, points, dtype=torch.float64)
    prototypes = torch.eye(CLASSES, CLASSES + 1, dtype=torch.float64)
    labels = torch.zeros(1, dtype=torch.long)
    curve = []
    with torch.no_grad():
        for angle in theta:
            feature = torch.zeros(1, CLASSES + 1, dtype=torch.float64)
            feature[0, 0], feature[0, -1] = torch.cos(angle), torch.sin(angle)
            value = loss(feature, prototypes, labels)
            curve.append(-math.log(math.expm1(float(value)) / (CLASSES - 1)) / SCALE)
    return torch.rad2deg(theta).tolist(), curve
