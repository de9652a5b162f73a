"""Attacks: images within epsilon of given ones that a model gets wrong, if it can be made to.

Images lie in [0, 1] and the model normalises them itself. It is run in evaluation mode, every
module's mode is restored, and its parameters receive no gradients. Random numbers come from the
generator that the caller passes. A sample's result depends on its own image and random numbers
only.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.robust.auto_pgd import apgd
from largemargin.robust.balls import NORMS, Ball, Generators, check_epsilon, check_generators
from largemargin.robust.victims import LOSSES, Model, Victim

__all__ = ["KINDS", "Attack", "apgd", "fgsm", "pgd"]

KINDS = ("fgsm", "pgd", "apgd")


def fgsm(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    loss: str = "ce",
) -> Tensor:
    r"""One step along the gradient (Goodfellow et al. 2015), :math:`x + \epsilon\,
    \operatorname{sign}\nabla_x l`, cut to [0, 1].

    With ``norm="l2"`` the step is :math:`\epsilon\nabla l/\|\nabla l\|`.

    Args and returns as in :func:`pgd`.

    Example:
        >>> model = lambda x: torch.cat([x, 1 - x], 1)
        >>> fgsm(model, torch.tensor([[0.75]]), torch.tensor([0]), epsilon=0.5)
        tensor([[0.2500]])
    """
    return pgd(
        model, images, labels, epsilon=epsilon, norm=norm, steps=1, step_size=epsilon,
        random_start=False, loss=loss,
    )  # fmt: skip


def pgd(
    model: Model,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    steps: int = 10,
    step_size: float | None = None,
    random_start: bool = True,
    restarts: int = 1,
    loss: str = "ce",
    generator: Generators | None = None,
) -> Tensor:
    r"""Projected gradient steps (Madry et al. 2018).

    .. math:: x \leftarrow \Pi\big(x + \alpha\,\operatorname{sign}\nabla_x l\big), \qquad
        \text{l2: } x \leftarrow \Pi\big(x + \alpha\nabla_x l / \|\nabla_x l\|\big)

    The last point is the result; of several restarts that at which the model is wrong, otherwise
    that of the largest loss.

    Args:
        model: maps images in [0, 1] to logits (N, C), or to outputs that hold them (a mapping or
            object with ``logits``, otherwise the first tensor); rows independent.
        images: (N, ...) in [0, 1].
        labels: (N,) class indices.
        epsilon: largest change, in the units of the images: 8/255 (linf) and 0.5 (l2) are usual.
        norm: "linf" or "l2".
        steps: default 10.
        step_size: alpha. Default 2.5 epsilon / steps (Madry et al.).
        random_start: start from a point drawn uniformly from the ball, otherwise at the image.
        restarts: runs with a random start each.
        loss: "ce" (cross entropy; written so that its gradient does not vanish where the model is
            sure), "dlr" (difference of logits ratio, three classes at least) or "margin" (best
            other logit minus that of the label).
        generator: random numbers of the starts; default torch's global ones. A list of one for
            each image makes a start independent of the batch the image is in.

    Returns:
        (N, ...) images, detached, within epsilon and [0, 1] to the last bit.

    Example:
        >>> model = lambda x: torch.cat([x, 1 - x], 1)
        >>> pgd(model, torch.tensor([[0.75]]), torch.tensor([0]), epsilon=0.5)
        tensor([[0.2500]])
    """
    check_number("steps", steps, at_least=1)
    check_number("restarts", restarts, at_least=1)
    if restarts > 1 and not random_start:
        raise LargeMarginError(
            f"restarts={restarts} would all start at the image. Pass random_start=True, or "
            "restarts=1."
        )
    # Copies made outside inference mode can take part in gradients, whatever made the originals.
    with torch.inference_mode(False):
        ball = Ball(images, epsilon, norm)
        check_generators(generator, images)
        victim = Victim(model, ball.images, labels, loss)
        size = 2.5 * epsilon / steps if step_size is None else step_size
        check_number("step_size", size, at_least=0)
        points = ball.images
        everyone = torch.arange(len(points), device=points.device)
        best: _Best | None = None
        if len(points) == 0:
            return points
        with victim.quiet():
            for _ in range(restarts):
                points = ball.random(generator) if random_start else ball.images
                for _ in range(steps):
                    _, gradient = victim.gradient(points, everyone)
                    points = ball.nearest(points + size * ball.direction(gradient))
                if restarts > 1:
                    found = _Best(points, *victim.look(points, everyone))
                    best = found if best is None else best.or_else(found)
    return points if best is None else best.points


class _Best(NamedTuple):
    """The best of several runs, per sample."""

    points: Tensor
    losses: Tensor
    right: Tensor

    def or_else(self, other: "_Best") -> "_Best":
        """Wrong predictions before right ones, then the larger loss."""
        ahead = self.right & ~other.right
        ahead |= (self.right == other.right) & (other.losses > self.losses)
        beside = ahead.view(-1, *[1] * (self.points.dim() - 1))
        return _Best(
            torch.where(beside, other.points, self.points),
            torch.where(ahead, other.losses, self.losses),
            torch.where(ahead, other.right, self.right),
        )


@dataclass(frozen=True)
class Attack:
    """An attack with its settings: ``attack(model, images, labels, generator=generator)``.

    Args:
        kind: "fgsm", "pgd" (random start) or "apgd".
        norm: "linf" or "l2".
        epsilon: largest change, in units of [0, 1] pixels.
        steps: of pgd and apgd; fgsm takes one.
        restarts: of pgd and apgd.
        loss: "ce", "dlr" or "margin": see :func:`pgd`.
        step_size: of pgd; default 2.5 epsilon / steps.

    Example:
        >>> attack = Attack("pgd", epsilon=8 / 255, steps=20)
        >>> attack.name
        'pgd-20 linf 8/255'
    """

    kind: str = "pgd"
    norm: str = "linf"
    epsilon: float = 8 / 255
    steps: int = 20
    restarts: int = 1
    loss: str = "ce"
    step_size: float | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_choice("norm", self.norm, NORMS)
        check_choice("loss", self.loss, tuple(LOSSES))
        check_epsilon(self.epsilon, self.norm)
        check_number("steps", self.steps, at_least=1)
        check_number("restarts", self.restarts, at_least=1)

    @property
    def name(self) -> str:
        """Kind with steps, restarts and loss where they are not the usual ones; norm; epsilon."""
        steps = "" if self.kind == "fgsm" else f"-{self.steps}"
        times = f"x{self.restarts}" if self.restarts > 1 and self.kind != "fgsm" else ""
        loss = "" if self.loss == "ce" else f" {self.loss}"
        return f"{self.kind}{steps}{times}{loss} {self.norm} {_fraction(self.epsilon)}"

    def __call__(
        self,
        model: Model,
        images: Tensor,
        labels: Tensor,
        generator: Generators | None = None,
    ) -> Tensor:
        if self.kind == "fgsm":
            return fgsm(model, images, labels, epsilon=self.epsilon, norm=self.norm, loss=self.loss)
        if self.kind == "apgd":
            return apgd(
                model, images, labels, epsilon=self.epsilon, norm=self.norm, steps=self.steps,
                restarts=self.restarts, loss=self.loss, generator=generator,
            )  # fmt: skip
        return pgd(
            model, images, labels, epsilon=self.epsilon, norm=self.norm, steps=self.steps,
            step_size=self.step_size, restarts=self.restarts, loss=self.loss, generator=generator,
        )  # fmt: skip


def _fraction(epsilon: float) -> str:
    """In levels of an 8-bit image where it is a whole number of them."""
    levels = epsilon * 255
    whole = round(levels)
    return f"{whole}/255" if whole and abs(levels - whole) < 1e-6 else f"{epsilon:g}"
