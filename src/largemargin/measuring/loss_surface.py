"""The loss around an input, on a plane: along its gradient and a random direction across it."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_labels, check_number
from largemargin.geometry.input_gradients import evaluation, input_gradient
from largemargin.geometry.pairs import blocks
from largemargin.measuring.batches import device_of
from largemargin.measuring.input_space import InputSpace, Normalization, need_tensor
from largemargin.measuring.probe import Probe
from largemargin.measuring.records import Record
from largemargin.measuring.sample_draws import SampleDraws

CIFAR_NOISE = 0.06
"""Standard deviation of the noise of ROB on CIFAR-10, which sets the default extent."""


@dataclass(frozen=True)
class LossSurface(Record):
    """Loss at x + a u + b v: u along the gradient, v random and orthogonal to it, both of length 1.

    ``losses[i][j]`` and ``predicted[i][j]`` belong to ``along[i]`` and ``across[j]``.
    """

    index: int
    label: int
    units: str
    loss: float
    """At the input itself."""
    gradient_norm: float
    """0 where the loss is flat: u is then random too."""
    along: tuple[float, ...]
    across: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    predicted: tuple[tuple[int, ...], ...]
    seed: int


def measure_surface(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    extent: float | None = None,
    points: int = 21,
    seed: int = 0,
    layer: str | None = None,
    normalization: Normalization | None = None,
    batch_size: int = 256,
) -> tuple[LossSurface, ...]:
    """Cross entropy on a square grid of the input space around each input (ROB Fig. 11).

    Args:
        model: any model :func:`largemargin.attach` can read, of one floating point input tensor.
        inputs: (N, ...); each gets a surface of its own.
        labels: (N,).
        extent: half the side of the square, in units of the inputs. Default the length of Gaussian
            noise of standard deviation 0.06, 3.3 for CIFAR images.
        points: per side, odd, so that the input itself is the middle one.
        seed: of the random directions; the n-th input's do not depend on the others.
        layer: name of the head; default the last linear layer.
        normalization: (mean, std) of the inputs, per channel, to move in units before it.
        batch_size: rows per pass; memory only.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> (surface,) = measure_surface(model, torch.rand(1, 2), torch.tensor([0]), points=3)
        >>> surface.losses[1][1] == surface.loss
        True
    """
    check_number("points", points, at_least=3)
    if points % 2 == 0:
        raise LargeMarginError(f"points must be odd, but {points} was given.")
    if extent is not None:
        check_number("extent", extent, above=0)
    space = InputSpace(Probe(model, layer=layer), normalization)
    inputs = need_tensor(inputs, "a loss surface").to(device_of(model))
    labels = labels.to(inputs.device)
    check_labels(
        labels, len(inputs), space.num_classes, soft=False, skip="leave them out", validate=True
    )
    raw = space.raw(inputs.detach())
    size = extent or CIFAR_NOISE * math.sqrt(raw.shape[1:].numel())
    steps = torch.linspace(-size, size, points, dtype=torch.float64)
    steps[points // 2] = 0
    random = SampleDraws(seed, "surface")
    found = input_gradient(space, raw, labels, chunk_size=batch_size)
    surfaces = []
    for number, (x, gradient) in enumerate(zip(raw, found.gradient, strict=True)):
        draws = random.normal(torch.tensor([number]), 2, x[None])[0].double().flatten(1)
        u, v = _axes(gradient.double().flatten(), draws)
        a, b = (each.to(x.device).flatten() for each in torch.meshgrid(steps, steps, indexing="ij"))
        moves = a[:, None] * u + b[:, None] * v
        losses, classes = [], []
        with evaluation(space, raw), torch.no_grad():
            for part in blocks(len(moves), batch_size):
                logits = space((x + moves[part].view(-1, *x.shape)).to(x.dtype))
                target = labels[number].long().expand(len(logits))
                losses.append(F.cross_entropy(logits, target, reduction="none"))
                classes.append(logits.argmax(1))
        grid = torch.cat(losses).view(points, points).tolist()
        predicted = torch.cat(classes).view(points, points).tolist()
        surfaces.append(
            LossSurface(
                number,
                int(labels[number]),
                space.units,
                grid[points // 2][points // 2],
                float(gradient.double().norm()),
                tuple(steps.tolist()),
                tuple(steps.tolist()),
                tuple(tuple(row) for row in grid),
                tuple(tuple(row) for row in predicted),
                seed,
            )
        )
    return tuple(surfaces)


def _axes(gradient: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors along the gradient (random where it is 0) and across it."""
    length = gradient.norm()
    first = gradient / length if float(length) > 0 else draws[1] / draws[1].norm()
    second = draws[0]
    for _ in range(2):  # once more, for what rounding left of the first
        second = second - (second @ first) * first
    if float(second.norm()) == 0:
        raise LargeMarginError(
            "a loss surface needs inputs of two numbers at least: there is no direction across "
            "the gradient."
        )
    return first, second / second.norm()
