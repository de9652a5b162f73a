"""Where attacked images may lie: within epsilon of the image, and in [0, 1]."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_number

NORMS = ("linf", "l2")

LEVELS = "Pixels are in [0, 1]: 8 levels are 8 / 255."


def check_epsilon(epsilon: float, norm: str) -> None:
    """No pixel can move by more than 1: a larger linf epsilon was meant in levels of 255."""
    at_most = 1 if norm == "linf" else None
    check_number("epsilon", epsilon, at_least=0, at_most=at_most, hint=LEVELS)


Generators: TypeAlias = torch.Generator | Sequence[torch.Generator]
"""Random numbers of a batch: from one generator, or from one for each image, whose numbers then do
not depend on which others are in the batch."""


class Ball:
    """The images within ``epsilon`` of (N, ...) images, pixels in [0, 1].

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

        def draw(shape: torch.Size | tuple[int, ...], normal: bool) -> Tensor:
            make = torch.randn if normal else torch.rand
            if isinstance(generator, torch.Generator | None):
                device = images.device if generator is None else generator.device
                return make(shape, generator=generator, device=device, dtype=dtype).to(
                    images.device
                )
            rows = [
                make(shape[1:], generator=each, device=each.device, dtype=dtype)
                for each in generator
            ]
            return torch.stack(rows).to(images.device)

        if self.norm == "linf":
            shift = 2 * draw(images.shape, normal=False) - 1
            if surface:
                shift = shift / _column(shift.flatten(1).abs().amax(1), shift)
            return self.nearest(images + self.epsilon * shift)
        shift = draw(images.shape, normal=True)
        shift = shift / _lengths(shift)
        if not surface:
            radius = draw((len(images),), normal=False) ** (1 / images[0].numel())
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
