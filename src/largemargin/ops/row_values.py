"""Losses that the statistics of a row of logits determine, in plain eager mode.

``RowLoss`` says what a loss is of them. Backward passes are by hand: one kernel each way where
those of ``ops.triton.rows`` serve; otherwise torch's own operators.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.ops.dense import dense_stats
from largemargin.ops.eager_gradients import class_index, kernels, launches, target_and_rival
from largemargin.ops.norms import batched_gradient, promote, row_products

KINDS = ("softplus", "rest", "rival")

ANYWHERE = sys.float_info.max
"""The reach of cosines to which something of any size was added."""


class Angle(NamedTuple):
    """A margin on the angle of cosines times ``scale``: the target is s cos(theta + m)."""

    scale: float
    margin: float
    mode: str
    """Where theta + m leaves [0, pi]: "hard" goes on along a line, "easy" leaves the cosine."""
    near: float
    """Cosines beyond it are taken from chords between the unit vectors."""
    least: float
    """A sine below it is a rounding error."""
    definition: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """The same of (N,) targets s cos(theta), features, prototypes and labels, differentiable."""


class RowLoss(NamedTuple):
    """softplus(rest - target + required), (rest - target) factor or (rival - target) factor.

    With ``strength`` times (spread - mean) added.
    """

    kind: str = "softplus"
    required: float = 0.0
    strength: float = 0.0
    factor: float = 1.0
    reach: float = math.inf
    """Of cosines times a scale: how far the target and a rival can be apart, at most."""
    angle: Angle | None = None


EXPONENT = 60.0
"""Up to this exponentials, and sums of any number of them, are ordinary float32 numbers."""


def row_values(
    logits: Tensor,
    labels: Tensor,
    known: bool,
    loss: RowLoss,
    vectors: tuple[Tensor, Tensor] | None = None,
    *,
    mean: bool = False,
    ignore: int | None = None,
) -> Tensor:
    """The loss (N,) of logits and hard labels; ``known`` labels are classes, others get NaN.

    Or its ``mean`` over labels that are known but one to ``ignore``, which kernels look for.
    ``vectors`` are features and prototypes, for a loss with an angle.
    """
    if launches(logits):
        found = kernel_values(logits, labels, loss, vectors, mean=mean, ignore=ignore)
        return found.sum() if mean else found
    logits = promote(logits)
    if mean and loss == PLAIN:
        return F.cross_entropy(logits, labels)
    if loss.reach <= EXPONENT and loss.angle is None:
        near: Tensor = _RivalsOverTarget.apply(logits, labels, loss, known, mean)
        return near
    values = _by_operators(logits, labels, loss, known, vectors)
    return values.mean() if mean else values


def _by_operators(
    logits: Tensor,
    labels: Tensor,
    loss: RowLoss,
    known: bool,
    vectors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The loss (N,) by torch's operators; NaN where a label is no class."""
    if loss.kind == "softplus" and loss.reach == math.inf:
        if not loss.strength and not loss.required:
            return _cross_entropy(logits, labels, known)
        how = labels, loss.required, loss.strength, known
        values: Tensor = _SoftmaxAndDivergence.apply(logits, *how)
        return values
    target, second, _ = target_and_rival(logits, labels, loss.kind != "rival", known)
    if loss.angle is not None:
        assert vectors is not None
        target = loss.angle.definition(target, *vectors, labels)
    gap = second - target
    if loss.kind == "softplus":
        return F.softplus(gap + loss.required if loss.required else gap)
    return gap if loss.factor == 1 else gap * loss.factor


def _cross_entropy(logits: Tensor, labels: Tensor, known: bool) -> Tensor:
    index, outside = (labels[:, None], None) if known else class_index(labels, logits.shape[1])
    values = F.cross_entropy(logits, index.squeeze(1), reduction="none")
    return values if outside is None else values.masked_fill(outside, torch.nan)


PLAIN = RowLoss()
"""Cross entropy."""


def kernel_values(
    logits: Tensor,
    labels: Tensor,
    loss: RowLoss,
    vectors: tuple[Tensor, Tensor] | None = None,
    *,
    mean: bool = False,
    ignore: int | None = None,
) -> Tensor:
    """The loss (N,) by a kernel each way, or parts that add up to the mean of what is kept."""
    features, prototypes = vectors if loss.angle and vectors else (None, None)
    found: Tensor = _KernelValues.apply(logits, labels, features, prototypes, loss, mean, ignore)
    return found


class _KernelValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        features: Tensor | None,
        prototypes: Tensor | None,
        loss: RowLoss,
        mean: bool,
        ignore: int | None,
    ) -> Tensor:
        labels = labels.contiguous()
        values, kept, chosen = kernels().row_values(
            logits, labels, loss, ignore, mean, features, prototypes
        )
        ctx.save_for_backward(logits, labels, features, prototypes, kept, chosen)
        ctx.loss = loss
        made: Tensor = values
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, features, prototypes, kept, chosen = ctx.saved_tensors
        if torch.is_grad_enabled() or batched_gradient(grad):
            with torch.enable_grad():
                values = _definition(logits, labels, features, prototypes, ctx.loss)
                share = kept[5]  # of the mean, 0 where ignored
                parts = torch.where(share == 0, 0.0, values * share)
                again = torch.autograd.grad(parts, logits, grad, create_graph=True)
            return *again, *(None,) * 6
        found = kernels().row_values_gradient(grad, logits, labels, ctx.loss, kept, chosen)
        return found, *(None,) * 6


def _definition(
    logits: Tensor,
    labels: Tensor,
    features: Tensor | None,
    prototypes: Tensor | None,
    loss: RowLoss,
) -> Tensor:
    """The loss from the dense statistics, which can be differentiated again."""
    want = ("target", "rival", "rest", *(("spread", "mean") if loss.strength else ()))
    absolute = loss.angle is not None
    stats = dense_stats(promote(logits), labels, want, relative=not absolute)
    target, rival, _, rest, spread, mean = stats
    second = rival if loss.kind == "rival" else rest
    if loss.angle is not None:
        assert target is not None and features is not None and prototypes is not None  # noqa: PT018
        target = loss.angle.definition(target, features.detach(), prototypes.detach(), labels)
    values = second - target  # type: ignore[operator]
    if loss.kind != "softplus":
        return values * loss.factor
    values = F.softplus(values + loss.required)
    return values + loss.strength * (spread - mean) if loss.strength else values  # type: ignore[operator]


class _SoftmaxAndDivergence(torch.autograd.Function):
    """Cross entropy with the target's logit lowered, + strength (spread - mean), none rounded.

    Spread and mean are taken less ``rest``, so that they are those of log-probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, required: float, strength: float, known: bool
    ) -> Tensor:
        count = logits.shape[1] - 1
        index, outside = (labels[:, None], None) if known else class_index(labels, count + 1)
        chances = logits.scatter(1, index, -torch.inf).log_softmax(1)
        lowered = logits.scatter(1, index, -required, reduce="add") if required else logits
        own = lowered.log_softmax(1).gather(1, index).squeeze(1)
        chances.scatter_(1, index, 0.0)
        spread = row_products(chances.exp(), chances).squeeze(1)
        apart = torch.add(spread, chances.sum(1), alpha=-1 / count)
        ctx.save_for_backward(logits, labels, index, outside, chances, spread, own)
        ctx.required, ctx.strength = required, strength
        values = torch.sub(own, apart, alpha=strength).neg_()
        return values if outside is None else values.masked_fill_(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, index, outside, chances, spread, own = ctx.saved_tensors
        strength, count = ctx.strength, logits.shape[1] - 1
        if torch.is_grad_enabled() or batched_gradient(grad):
            with torch.enable_grad():
                want = ("target", "rest", "spread", "mean")
                target, _, _, rest, wide, mean = dense_stats(logits, labels, want, relative=True)
                assert target is not None and rest is not None  # noqa: PT018
                assert wide is not None and mean is not None  # noqa: PT018
                values = F.softplus(rest - target + ctx.required) + strength * (wide - mean)
                again = torch.autograd.grad(values, logits, grad, create_graph=True)
            return *again, None, None, None, None
        if outside is not None:
            grad = grad.masked_fill(outside, 0.0)
        lost = own.expm1()  # minus the probability of the rivals together
        level = torch.rsub(torch.add(lost, spread, alpha=strength), strength)
        each = torch.add(level[:, None], chances, alpha=strength).mul_(chances.exp())
        each.sub_(strength / count).scatter_(1, index, lost[:, None])
        return each.mul_(grad[:, None]), None, None, None, None


class _RivalsOverTarget(torch.autograd.Function):
    """log(1 + S), or log(S) times a factor, of S = sum over the rivals of exp(logit - target).

    The target less what is ``required``; of logits so near each other that no exponential
    overflows. All digits are kept, however small the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, loss: RowLoss, known: bool, mean: bool
    ) -> Tensor:
        index, outside = (labels[:, None], None) if known else class_index(labels, logits.shape[1])
        level = logits.gather(1, index)
        level = level.sub_(loss.required) if loss.required else level
        ratios = torch.sub(logits, level).exp_().scatter_(1, index, 0.0)
        total = ratios.sum(1, keepdim=True)
        ratios.scatter_(1, index, total.neg())
        ctx.save_for_backward(logits, labels, outside, ratios, total)
        ctx.loss, ctx.known, ctx.mean = loss, known, mean
        values = total.log1p() if loss.kind == "softplus" else total.log().mul_(loss.factor)
        if mean:
            return values.mean()
        values = values.squeeze(1)
        return values if outside is None else values.masked_fill_(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, outside, ratios, total = ctx.saved_tensors
        loss = ctx.loss
        if torch.is_grad_enabled() or batched_gradient(grad):
            with torch.enable_grad():
                values = _by_operators(logits, labels, loss, ctx.known)
                values = values.mean() if ctx.mean else values
                again = torch.autograd.grad(values, logits, grad, create_graph=True)
            return *again, *(None,) * 4
        grad = grad if outside is None else grad.masked_fill(outside, 0.0)
        each = grad * (loss.factor / len(logits)) if ctx.mean else grad[:, None] * loss.factor
        each = each / (total + 1 if loss.kind == "softplus" else total)
        return ratios * each, *(None,) * 4
