"""Attacks: images within epsilon of given ones that a model gets wrong, if it can be made to.

Images lie in [0, 1] and the model normalises them itself. It is run in evaluation mode, every
module's mode is restored, and its parameters receive no gradients. Random numbers come from the
generator that the caller passes. A sample's result depends on its own image and random numbers
only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from largemargin.dropin.model_outputs import named_logits, tensors_in
from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_num_classes,
    check_number,
    check_same_device,
)
from largemargin.geometry.evaluation_mode import evaluation_mode
from largemargin.ops.class_stats import class_stats_from_logits
from largemargin.ops.norms import promote

__all__ = ["KINDS", "Attack", "apgd", "fgsm", "pgd"]

KINDS = ("fgsm", "pgd", "apgd")

NORMS = ("linf", "l2")

LEVELS = "Pixels are in [0, 1]: 8 levels are 8 / 255."

MOMENTUM = 0.75
"""Share of the new step in a move; the rest is the move before it."""

Model = Callable[[Tensor], Any]
"""Images (N, ...) in [0, 1] to logits (N, C), or to outputs that hold them; rows independent."""

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator]
"""Random numbers of a batch: from one generator, or from one for each image, whose numbers then do
not depend on which others are in the batch."""


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
        levels = self.epsilon * 255
        whole = round(levels)  # of an 8-bit image
        size = f"{whole}/255" if whole and abs(levels - whole) < 1e-6 else f"{self.epsilon:g}"
        steps = "" if self.kind == "fgsm" else f"-{self.steps}"
        times = f"x{self.restarts}" if self.restarts > 1 and self.kind != "fgsm" else ""
        loss = "" if self.loss == "ce" else f" {self.loss}"
        return f"{self.kind}{steps}{times}{loss} {self.norm} {size}"

    def __call__(
        self, model: Model, images: Tensor, labels: Tensor, generator: Generators | None = None
    ) -> Tensor:
        options: dict[str, Any] = {"epsilon": self.epsilon, "norm": self.norm, "loss": self.loss}
        if self.kind == "fgsm":
            return fgsm(model, images, labels, **options)
        options |= {"steps": self.steps, "restarts": self.restarts, "generator": generator}
        if self.kind == "apgd":
            return apgd(model, images, labels, **options)
        return pgd(model, images, labels, step_size=self.step_size, **options)


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
        target = AttackTarget(model, ball.images, labels, loss)
        size = 2.5 * epsilon / steps if step_size is None else step_size
        check_number("step_size", size, at_least=0)
        points = ball.images
        everyone = torch.arange(len(points), device=points.device)
        best: _Best | None = None
        if len(points) == 0:
            return points
        with target.evaluating():
            for _ in range(restarts):
                points = ball.random(generator) if random_start else ball.images
                points = _climb(target, ball, points, steps, size)
                if restarts > 1:
                    found = _Best(points, *target.read(points, everyone))
                    best = found if best is None else best.or_else(found)
    return points if best is None else best.points


def _climb(target: "AttackTarget", ball: "Ball", points: Tensor, steps: int, size: float) -> Tensor:
    """One run of projected steps."""
    everyone = torch.arange(len(points), device=points.device)
    for _ in range(steps):
        _, gradient = target.gradient(points, everyone)
        points = ball.nearest(points + size * ball.direction(gradient))
    return points


class _Best(NamedTuple):
    """The best of several runs, per sample."""

    points: Tensor
    losses: Tensor
    right: Tensor

    def or_else(self, other: "_Best") -> "_Best":
        """Wrong predictions before right ones, then the larger loss."""
        ahead = self.right & ~other.right
        ahead |= (self.right == other.right) & (other.losses > self.losses)
        return _Best(
            torch.where(_column(ahead, self.points), other.points, self.points),
            torch.where(ahead, other.losses, self.losses),
            torch.where(ahead, other.right, self.right),
        )


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
        model, images, labels, epsilon, norm, generator: as in :func:`pgd`.
        steps: of each run. Default 100 (the paper's).
        restarts: runs from random points, for the samples that no run before has changed the
            prediction of.
        loss: "ce", "dlr" (of the paper: does not change with the scale of logits; three classes
            at least) or "margin".
        rho: default 0.75 (the paper's).

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
        target = AttackTarget(model, ball.images, labels, loss)
        result = ball.images.clone()
        if len(result) == 0:
            return result
        with target.evaluating():
            everyone = torch.arange(len(result), device=result.device)
            standing = target.read(result, everyone).right
            highest = result.new_full((len(result),), -torch.inf, dtype=torch.float64)
            for _ in range(restarts):
                # Drawn for all, so that a start does not depend on which others still stand.
                starts = ball.random(generator, surface=True)
                rows = standing.nonzero()[:, 0]
                if len(rows) == 0:
                    break
                run = _Run(target, ball[rows], rows, starts[rows], steps, rho)
                run.go()
                better = run.fooled | (run.best_losses.double() > highest[rows])
                changed = rows[better]
                result[changed] = run.result[better]
                highest[changed] = run.best_losses[better].double()
                standing[rows[run.fooled]] = False
    return result


def check_epsilon(epsilon: float, norm: str) -> None:
    """No pixel can move by more than 1: a larger linf epsilon was meant in levels of 255."""
    at_most = 1 if norm == "linf" else None
    check_number("epsilon", epsilon, at_least=0, at_most=at_most, hint=LEVELS)


class Ball:
    """Where attacked images may lie: within ``epsilon`` of (N, ...) images, pixels in [0, 1].

    A difference of float32 numbers is exact in float64, so a point of the ball is within epsilon
    to the last bit if it is there.
    """

    def __init__(self, images: Tensor, epsilon: float, norm: str) -> None:
        check_choice("norm", norm, NORMS)
        check_epsilon(epsilon, norm)
        check_images(images)
        self.images, self.epsilon, self.norm = images.detach().clone(), epsilon, norm
        self.lower, self.upper = torch.zeros_like(images), torch.ones_like(images)
        if norm == "linf":
            self.lower, self.upper = self._bound(-epsilon), self._bound(epsilon)

    def __getitem__(self, rows: Tensor) -> "Ball":
        """The balls of some of the images."""
        made = object.__new__(Ball)
        made.images, made.epsilon, made.norm = self.images[rows], self.epsilon, self.norm
        made.lower, made.upper = self.lower[rows], self.upper[rows]
        return made

    def nearest(self, points: Tensor) -> Tensor:
        """Points of the ball, in the type of the images, next to these."""
        if self.norm == "linf":
            return self._boxed(points)
        wide = points.dtype if points.dtype == torch.float64 else torch.float32
        shift = points.to(wide) - self.images.to(wide)
        length = _lengths(shift)
        inside = self._boxed(self.images.to(wide) + shift * (self.epsilon / length).clamp_max(1))
        # Rounding may have left some outside, by a little: a little shorter, then.
        for short in (1e-7, 1e-6, 1e-5, 1e-3):
            over = self._distance(inside) > self.epsilon
            if not bool(over.any()):
                return inside
            factor = (self.epsilon / length).clamp_max(1) * (1 - short)
            nearer = self._boxed(self.images.to(wide) + shift * factor)
            inside = torch.where(_column(over, inside), nearer, inside)
        return torch.where(
            _column(self._distance(inside) > self.epsilon, inside), self.images, inside
        )

    def direction(self, gradient: Tensor) -> Tensor:
        """The step of size 1 along which a loss with this gradient grows most."""
        if self.norm == "linf":
            return gradient.sign()
        wide = gradient if gradient.dtype == torch.float64 else gradient.float()
        largest = wide.flatten(1).abs().amax(1).clamp_min(torch.finfo(wide.dtype).tiny)
        unit = wide / _column(largest, wide)  # no square of it leaves the range of its type
        return unit / _lengths(unit)

    def random(self, generator: Generators | None, *, surface: bool = False) -> Tensor:
        """Points drawn uniformly from the ball around each image, or as far out as it goes."""
        images = self.images
        dtype = images.dtype if images.dtype == torch.float64 else torch.float32

        def draw(make: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
            if isinstance(generator, Sequence):
                own = [
                    make(shape[1:], generator=g, device=g.device, dtype=dtype) for g in generator
                ]
                return torch.stack(own).to(images.device)
            device = images.device if generator is None else generator.device
            drawn = make(shape, generator=generator, device=device, dtype=dtype)
            return drawn.to(images.device)

        if self.norm == "linf":
            shift = 2 * draw(torch.rand, images.shape) - 1
            if surface:
                shift = shift / _column(shift.flatten(1).abs().amax(1), shift)
            return self.nearest(images + self.epsilon * shift)
        shift = draw(torch.randn, images.shape)
        shift = shift / _lengths(shift)
        if not surface:
            radius = draw(torch.rand, (len(images),)) ** (1 / images[0].numel())
            shift = shift * _column(radius, shift)
        return self.nearest(images + self.epsilon * shift)

    def _bound(self, shift: float) -> Tensor:
        """Images moved by ``shift`` and cut to [0, 1], rounded towards the images."""
        exact = self.images.double() + shift
        moved = exact.to(self.images.dtype)
        beyond = (moved.double() - self.images.double()).abs() > self.epsilon
        moved = torch.where(beyond, torch.nextafter(moved, self.images), moved)
        return moved.clamp(0, 1)

    def _boxed(self, points: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(points.to(self.images.dtype), self.lower), self.upper)

    def _distance(self, points: Tensor) -> Tensor:
        apart = (points.double() - self.images.double()).flatten(1)
        length: Tensor = torch.linalg.vector_norm(apart, dim=1)
        return length


def check_images(images: Tensor) -> None:
    """Attacks move pixels, so they have to know which values a pixel may have."""
    if not isinstance(images, Tensor):
        raise LargeMarginError(
            f"images must be a tensor of shape (N, ...), but {type(images).__name__} was given. "
            "The order is model, images, labels."
        )
    if images.dim() < 2 or not images.is_floating_point():
        raise LargeMarginError(
            f"images must be a floating point batch of shape (N, ...), but {tuple(images.shape)} "
            f"of {images.dtype} was given. Add a batch dimension with x[None]; divide bytes by 255."
        )
    if images.numel() and not bool(((images >= 0) & (images <= 1)).all()):
        low, high = float(images.min()), float(images.max())
        raise LargeMarginError(
            f"images must lie in [0, 1], but they range from {low:g} to {high:g}. Attack images as "
            "they are before normalisation, and let the model normalise: "
            "nn.Sequential(Normalize(mean, std), model)."
        )


def check_generators(generator: object, images: Tensor) -> None:
    if generator is None or isinstance(generator, torch.Generator):
        return
    given = type(generator).__name__
    if isinstance(generator, Sequence):
        if len(generator) == len(images) and all(
            isinstance(each, torch.Generator) for each in generator
        ):
            return
        given = f"a {given} of {len(generator)}"
    raise LargeMarginError(
        f"generator must be a torch.Generator, or a list of {len(images)}, one for each image, but "
        f"{given} was given."
    )


def _column(values: Tensor, like: Tensor) -> Tensor:
    """(N,) values to stand beside (N, ...) images."""
    return values.view(-1, *[1] * (like.dim() - 1))


def _lengths(shift: Tensor) -> Tensor:
    """(N, 1, ...) lengths, never 0."""
    length = torch.linalg.vector_norm(shift.flatten(1), dim=1)
    return _column(length.clamp_min(torch.finfo(shift.dtype).tiny), shift)


class LogitReading(NamedTuple):
    """One look at the model, per sample."""

    losses: Tensor
    right: Tensor
    """Whether it predicts the label."""


class AttackTarget:
    """A model under attack. Use it inside ``with target.evaluating():``."""

    def __init__(self, model: Model, images: Tensor, labels: Tensor, loss: str) -> None:
        check_choice("loss", loss, tuple(LOSSES))
        if not callable(model):
            raise LargeMarginError(
                f"model must map images to logits, but {type(model).__name__} was given. The order "
                "is model, images, labels."
            )
        check_labels(labels, len(images), 2, of="images", soft=False, validate=False)
        check_same_device(images=images, labels=labels)
        # DDP would expect a backward pass to the parameters after every forward pass.
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.labels, self.loss = labels.detach().clone().long(), loss
        self.checked = False
        new = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        self.broken = {"NaN or infinite logits": new, "NaN gradients": new.clone()}
        """For which samples the model has returned such; looked at once, in the end."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, gradients on, whatever the caller has; all restored afterwards."""
        with evaluation_mode(self.model), torch.enable_grad():
            yield
        for what, samples in self.broken.items():
            if bool(samples.any()):
                raise LargeMarginError(
                    f"the model returned {what} for sample {int(samples.int().argmax())} of the "
                    "batch: its robustness cannot be measured. Look for a diverged model or broken "
                    "images."
                )

    def read(self, images: Tensor, rows: Tensor) -> LogitReading:
        """Losses of images that belong to these rows of the batch."""
        with torch.no_grad():
            return self._read(images, rows)

    def gradient(self, images: Tensor, rows: Tensor) -> tuple[LogitReading, Tensor]:
        """The same with the gradient of each loss; parameters receive none."""
        images = images.detach().clone().requires_grad_()
        seen = self._read(images, rows)
        if not seen.losses.requires_grad:
            raise LargeMarginError(
                "the logits do not depend on the images through differentiable operations, so that "
                "there is no gradient to attack along. Look for .detach() or no_grad in the model."
            )
        (found,) = torch.autograd.grad(seen.losses.sum(), images, materialize_grads=True)
        self.broken["NaN gradients"][rows] |= found.isnan().flatten(1).any(1)
        # Infinite ones, as half precision may have, still say in which direction.
        return LogitReading(seen.losses.detach(), seen.right), torch.nan_to_num(found.detach())

    def _read(self, images: Tensor, rows: Tensor) -> LogitReading:
        logits = promote(logits_in(self.model(images)))
        labels = self.labels[rows]
        if logits.dim() != 2 or len(logits) != len(images):
            raise LargeMarginError(
                f"the model must return one row of logits per image, ({len(images)}, C), but their "
                f"shape is {tuple(logits.shape)}."
            )
        if not self.checked:  # once: reading values back from an accelerator stalls it
            check_num_classes(logits.shape[1])
            check_labels(
                labels, len(images), logits.shape[1], of="images", soft=False, validate=True
            )
            self.checked = True
        with torch.no_grad():
            broken = ~torch.isfinite(logits).all(1)
            self.broken["NaN or infinite logits"][rows] |= broken
            right = logits.argmax(1) == labels
        losses = LOSSES[self.loss](logits, labels)
        return LogitReading(losses.masked_fill(broken, 0), right)


class _Run:
    """One run of APGD for some samples of the batch; everything is per sample."""

    def __init__(
        self, target: AttackTarget, ball: Ball, rows: Tensor, points: Tensor, steps: int, rho: float
    ) -> None:
        self.target, self.ball, self.rows, self.steps, self.rho = target, ball, rows, steps, rho
        seen, gradients = target.gradient(points, rows)
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
        sizes = _column(self.sizes, self.points).to(self.points.dtype)
        ahead = self.ball.nearest(self.points + sizes * self.ball.direction(self.gradients))
        moved = share * (ahead - self.points) + (1 - share) * (self.points - self.before)
        self.before, self.points = self.points, self.ball.nearest(self.points + moved)

    def _see(self) -> None:
        seen, self.gradients = self.target.gradient(self.points, self.rows)
        self.growths += seen.losses > self.losses
        self.losses = seen.losses
        better, wrong = seen.losses > self.best_losses, ~seen.right
        beside = _column(better, self.points)
        self.best = torch.where(beside, self.points, self.best)
        self.best_gradients = torch.where(beside, self.gradients, self.best_gradients)
        self.best_losses = torch.where(better, seen.losses, self.best_losses)
        keep = wrong | (better & ~self.fooled)
        self.result = torch.where(_column(keep, self.points), self.points, self.result)
        self.fooled = self.fooled | wrong

    def _checkpoint(self, passed: int) -> None:
        """Halve steps that lead nowhere, and go on from the best point with them."""
        seldom = self.growths <= self.rho * passed
        stuck = ~self.halved & (self.best_losses <= self.losses_at_check)
        self.halved = seldom | stuck
        self.losses_at_check = self.best_losses
        self.growths = torch.zeros_like(self.growths)
        self.sizes = torch.where(self.halved, self.sizes / 2, self.sizes)
        beside = _column(self.halved, self.points)
        self.points = torch.where(beside, self.best, self.points)
        self.gradients = torch.where(beside, self.best_gradients, self.gradients)


def logits_in(outputs: Any) -> Tensor:
    """The logits of a model's outputs: a tensor, what is called "logits", or the first tensor."""
    named = named_logits(outputs)
    if named is not None:
        return named
    found = tensors_in(outputs)
    if not found:
        raise LargeMarginError(
            f"the model must return logits, but it returned {type(outputs).__name__} without a "
            "tensor in it."
        )
    return found[0]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""log(exp(cross entropy) - 1) = :math:`\log\sum_{c \ne y} e^{f_c} - f_y`.

    It grows with the cross entropy and its gradient has the same direction, which is all that an
    attack by signs or unit vectors asks for; but it never vanishes, however sure the model is.
    """
    stats = class_stats_from_logits(logits, labels, want=("target", "rest"))
    assert stats.rest is not None
    assert stats.target is not None
    return stats.rest - stats.target


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Best other logit minus that of the label: positive where the model is wrong."""
    stats = class_stats_from_logits(logits, labels, want=("target", "rival"))
    assert stats.rival is not None
    assert stats.target is not None
    return stats.rival - stats.target


def _logit_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """The margin over the distance from the largest to the third largest logit (DLR)."""
    if logits.shape[1] < 3:
        raise LargeMarginError(
            f"loss 'dlr' divides by a difference of three logits, but the model has "
            f"{logits.shape[1]} classes. Use 'ce' or 'margin'."
        )
    largest = logits.topk(3, dim=1).values
    return _margin(logits, labels) / (largest[:, 0] - largest[:, 2] + 1e-12)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": _cross_entropy,
    "dlr": _logit_ratio,
    "margin": _margin,
}
"""What an attack makes large: (N, C) logits and (N,) labels to (N,) numbers."""
