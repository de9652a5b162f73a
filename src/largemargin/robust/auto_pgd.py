"""APGD: projected gradient steps whose size follows from how the loss grows."""

import torch
from torch import Tensor

from largemargin.errors import check_number
from largemargin.robust.balls import Ball, Generators, check_generators
from largemargin.robust.victims import Model, Victim

MOMENTUM = 0.75
"""Share of the new step in a move; the rest is the move before it."""


def apgd(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    steps: int = 100,
    restarts: int = 1,
    loss: str = "ce",
    rho: float = 0.75,
    generator: Generators | None = None,
) -> Tensor:
    r"""Auto-PGD of Croce and Hein 2020 (Algorithm 1): no step size to choose.

    Steps start at :math:`2\epsilon`. At checkpoints, which come closer and closer together, a
    sample whose loss grew in less than a share ``rho`` of the steps, or not at all since the last
    checkpoint, goes back to its best point and halves its step.

    A sample comes back as the last point at which the model was wrong, otherwise as that of the
    largest loss; one that the model gets wrong already comes back as it is.

    Args:
        model: maps images in [0, 1] to logits (N, C), rows independent: see :func:`pgd`.
        images: (N, ...) in [0, 1].
        labels: (N,) class indices.
        epsilon: largest change, in the units of the images.
        norm: "linf" or "l2".
        steps: of each run. Default 100 (the paper's).
        restarts: runs from random points, for the samples that no run before has changed the
            prediction of.
        loss: "ce", "dlr" (of the paper: does not change with the scale of logits; three classes
            at least) or "margin".
        rho: default 0.75 (the paper's).
        generator: random numbers of the starts; default torch's global ones. A list of one for
            each image makes a start independent of the batch the image is in.

    Returns:
        (N, ...) images, detached, within epsilon and [0, 1] to the last bit.

    Example:
        >>> model = lambda x: torch.cat([x, 1 - x], 1)
        >>> apgd(model, torch.tensor([[0.75]]), torch.tensor([0]), epsilon=0.5, steps=5)
        tensor([[0.2500]])
    """
    check_number("steps", steps, at_least=1)
    check_number("restarts", restarts, at_least=1)
    check_number("rho", rho, above=0, below=1)
    # Copies made outside inference mode can take part in gradients, whatever made the originals.
    with torch.inference_mode(False):
        ball = Ball(images, epsilon, norm)
        check_generators(generator, images)
        victim = Victim(model, ball.images, labels, loss)
        result = ball.images.clone()
        if len(result) == 0:
            return result
        with victim.quiet():
            everyone = torch.arange(len(result), device=result.device)
            standing = victim.look(result, everyone).right
            highest = result.new_full((len(result),), -torch.inf, dtype=torch.float64)
            for _ in range(restarts):
                # Drawn for all, so that a start does not depend on which others still stand.
                starts = ball.random(generator, surface=True)
                rows = standing.nonzero()[:, 0]
                if len(rows) == 0:
                    break
                run = _Run(victim, ball[rows], rows, starts[rows], steps, rho)
                run.go()
                better = run.fooled | (run.best_losses.double() > highest[rows])
                changed = rows[better]
                result[changed] = run.result[better]
                highest[changed] = run.best_losses[better].double()
                standing[rows[run.fooled]] = False
    return result


class _Run:
    """One run of APGD for some samples of the batch; everything is per sample."""

    def __init__(
        self, victim: Victim, ball: Ball, rows: Tensor, points: Tensor, steps: int, rho: float
    ) -> None:
        self.victim, self.ball, self.rows, self.steps, self.rho = victim, ball, rows, steps, rho
        seen, gradients = victim.gradient(points, rows)
        self.points = self.before = self.best = self.result = points
        self.gradients = self.best_gradients = gradients
        self.losses = self.best_losses = self.losses_at_check = seen.losses
        self.fooled = ~seen.right
        self.sizes = torch.full_like(seen.losses, 2 * ball.epsilon)
        self.halved = torch.ones_like(self.fooled)
        self.growths = torch.zeros_like(rows)

    def go(self) -> None:
        wait, least, less = (max(int(share * self.steps), 1) for share in (0.22, 0.06, 0.03))
        passed = 0
        for step in range(self.steps):
            self._move(MOMENTUM if step > 0 else 1.0)
            self._see()
            passed += 1
            if passed == wait:
                self._checkpoint(passed)
                wait, passed = max(wait - less, least), 0

    def _move(self, share: float) -> None:
        sizes = self._beside(self.sizes).to(self.points.dtype)
        ahead = self.ball.nearest(self.points + sizes * self.ball.direction(self.gradients))
        moved = share * (ahead - self.points) + (1 - share) * (self.points - self.before)
        self.before, self.points = self.points, self.ball.nearest(self.points + moved)

    def _see(self) -> None:
        seen, self.gradients = self.victim.gradient(self.points, self.rows)
        self.growths += seen.losses > self.losses
        self.losses = seen.losses
        better, wrong = seen.losses > self.best_losses, ~seen.right
        beside = self._beside(better)
        self.best = torch.where(beside, self.points, self.best)
        self.best_gradients = torch.where(beside, self.gradients, self.best_gradients)
        self.best_losses = torch.where(better, seen.losses, self.best_losses)
        keep = wrong | (better & ~self.fooled)
        self.result = torch.where(self._beside(keep), self.points, self.result)
        self.fooled = self.fooled | wrong

    def _checkpoint(self, passed: int) -> None:
        """Halve steps that lead nowhere, and go on from the best point with them."""
        seldom = self.growths <= self.rho * passed
        stuck = ~self.halved & (self.best_losses <= self.losses_at_check)
        self.halved = seldom | stuck
        self.losses_at_check = self.best_losses
        self.growths = torch.zeros_like(self.growths)
        self.sizes = torch.where(self.halved, self.sizes / 2, self.sizes)
        beside = self._beside(self.halved)
        self.points = torch.where(beside, self.best, self.points)
        self.gradients = torch.where(beside, self.best_gradients, self.gradients)

    def _beside(self, values: Tensor) -> Tensor:
        return values.view(-1, *[1] * (self.ball.images.dim() - 1))
