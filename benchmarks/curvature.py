"""Gradient norm and largest curvature of each term of an objective, over all parameters."""

import math

import torch
from rows import Row
from torch import Tensor, nn

import largemargin as lm


def shown(number: float, digits: int = 5) -> float | None:
    """Rounded to significant digits; None, which JSON has, for what is not finite."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


class Probe:
    """Gradient norm and largest curvature of every weighted term, and of their sum, on one batch.

    The curvature is the largest eigenvalue, in size, of the Jacobian of the term's gradient, by
    power iteration from where the probe before ended. Products with the Jacobian are central
    differences of two gradients: they also hold for a gradient that is scaled on purpose, where
    differentiating twice would apply the scaling twice.
    """

    def __init__(
        self, model: nn.Module, criterion: lm.Criterion, x: Tensor, y: Tensor, iterations: int
    ) -> None:
        self.model, self.criterion, self.iterations = model, criterion, iterations
        self.x, self.y = x, y
        self.parameters = list(model.parameters())
        self.directions: dict[str, Tensor] = {}

    def __call__(self) -> dict[str, Row]:
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.criterion.objective.eval()  # the bank is read, not written
        found = {name: self._measure(name) for name in self.terms()}
        self.criterion.objective.train()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        return found

    def terms(self) -> dict[str, Tensor]:
        """Every term times its weight, with gradient."""
        criterion = self.criterion
        seen = criterion.read(self.model(self.x))
        value = criterion.objective(seen.features, criterion.head, self.y, logits=seen.logits)
        parts = {}
        for name, term in value.terms.items():
            loss, _, part = name.partition(".")
            module = criterion.objective.terms[loss]
            weights = {"compact": "alpha", "margin": "beta", "reg": "gamma_reg"}
            parts[part or loss] = getattr(module, weights.get(part, ""), 1.0) * term
        return {**parts, "total": value.total}

    def gradient(self, name: str) -> Tensor:
        """All parameters' gradient of one term, as one vector."""
        found = torch.autograd.grad(self.terms()[name], self.parameters, allow_unused=True)
        rows = zip(self.parameters, found, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in rows])

    def product(self, direction: Tensor, name: str) -> Tensor:
        """Jacobian of a term's gradient times a unit vector, by central differences."""
        size = math.sqrt(sum(float(p.detach().square().sum()) for p in self.parameters))
        distance = 1e-3 * max(size, 1e-3)
        saved = [p.detach().clone() for p in self.parameters]
        moves = direction.split([p.numel() for p in self.parameters])
        sides = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, old, move in zip(self.parameters, saved, moves, strict=True):
                    p.copy_(old + sign * distance * move.view_as(p))
            sides.append(self.gradient(name))
        with torch.no_grad():
            for p, old in zip(self.parameters, saved, strict=True):
                p.copy_(old)
        return (sides[0] - sides[1]) / (2 * distance)

    def _measure(self, name: str) -> Row:
        gradient = self.gradient(name)
        direction, curvature = self.directions.get(name, gradient), 0.0
        for _ in range(self.iterations):
            size = float(direction.norm())
            if size == 0 or not math.isfinite(size):
                curvature = 0.0 if size == 0 else math.nan
                break
            direction = direction / size
            image = self.product(direction, name)
            curvature, direction = float(direction @ image), image
        self.directions[name] = direction if bool(direction.any()) else gradient
        return {"gradient_norm": shown(float(gradient.norm())), "curvature": shown(curvature)}
