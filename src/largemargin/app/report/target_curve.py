"""The target-logit curve psi(theta) of a loss: what a margin does to the logit of the own class."""

import inspect
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from largemargin.app.config import RunConfig
from largemargin.app.training.objective import parse_objective
from largemargin.integrations.objective_text import build_loss, needs_counts
from largemargin.losses import LOSSES

SCALE = 8.0
"""psi does not depend on it; a small one keeps the inversion exact."""

CLASSES = 3
MOST_CLASSES = 2000


class TargetCurve(NamedTuple):
    """psi at angles from 0 to 180 degrees, for vectors of length 1."""

    degrees: list[float]
    psi: list[float]
    about: str = ""
    """The class it is of, where classes differ."""


def target_curve(
    config: RunConfig, counts: Sequence[int] = (), points: int = 91
) -> TargetCurve | None:
    """The curve of the loss of a run; None where it has none (``Loss.has_target_curve``).

    Read off the loss itself: with rivals at right angles a softmax over cosines is
    log(1 + (C - 1) exp(-s psi)), which is solved for psi. ``counts`` are the training samples of
    each class, on which the margins of LDAM depend: its curve is that of the rarest class.
    """
    terms = parse_objective(config.objective)
    term = next((each for each in terms if LOSSES[each.name].has_target_curve), None)
    if term is None or isinstance(term.settings.get("margin"), str):
        return None
    kind = LOSSES[term.name]
    by_class = needs_counts(kind)
    if by_class and not 2 <= len(counts) <= MOST_CLASSES:
        return None
    sizes = list(counts) if by_class else [1] * CLASSES
    settings, scale = dict(term.settings), 1.0
    if "scale" in inspect.signature(kind).parameters:
        settings["scale"] = scale = SCALE
    classes, rarest = len(sizes), min(range(len(sizes)), key=sizes.__getitem__)
    loss = build_loss(kind, settings, classes, classes + 1, sizes).eval()
    theta = torch.linspace(0, math.pi, points, dtype=torch.float64)
    prototypes = torch.eye(classes, classes + 1, dtype=torch.float64)
    curve = []
    with torch.no_grad():
        for angle in theta:
            feature = torch.zeros(1, classes + 1, dtype=torch.float64)
            feature[0, rarest], feature[0, -1] = torch.cos(angle), torch.sin(angle)
            value = loss(feature, prototypes, torch.tensor([rarest]))
            curve.append(-math.log(math.expm1(float(value)) / (classes - 1)) / scale)
    return TargetCurve(torch.rad2deg(theta).tolist(), curve, "rarest class" if by_class else "")
