"""Bounds that tie the curvature of the loss to the stability of the features (ROB Theorem 6.1)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_labels,
    check_matrix,
    check_num_classes,
    check_number,
)
from largemargin.geometry.curvature import exact_curvature
from largemargin.geometry.input_gradients import (
    Directions,
    Model,
    evaluation,
    input_gradient,
    prepare,
    repeat_rows,
    sample_chunks,
)
from largemargin.geometry.pairs import blocks
from largemargin.ops import safe_norm
from largemargin.ops.rows import promote
from largemargin.shapes import Labels, Prototypes


class CurvatureBounds(NamedTuple):
    """Both curvature bounds and all that enters them: see :func:`curvature_bounds`."""

    eta: Tensor
    l_out: Tensor
    loss: Tensor
    grad_sq: Tensor
    w_2inf: Tensor
    upper: Tensor
    lower: Tensor
    lhs_upper: Tensor | None
    lhs_lower: Tensor | None
    logit_bound: Tensor


def curvature_ceiling(
    eta: Tensor, w_2inf: Tensor, logit_bound: Tensor, *, sigma: float, radius: float
) -> Tensor:
    r"""Upper bound of ROB Theorem 6.1 from its parts: see :func:`curvature_bounds`.

    Example:
        >>> one = torch.ones(())
        >>> curvature_ceiling(one, one, one, sigma=1.0, radius=1.0)
        tensor(8.)
    """
    stable, unstable = eta * (w_2inf * radius).square(), 4 * (1 - eta) * logit_bound.square()
    return 8 / sigma**4 * (stable + unstable)


def curvature_bounds(
    backbone: Model,
    prototypes: Prototypes,
    inputs: Tensor,
    labels: Labels,
    *,
    sigma: float,
    radius: float,
    bias: Tensor | None = None,
    logit_bound: float | None = None,
    noise: Tensor | None = None,
    draws: int = 100,
    generator: torch.Generator | None = None,
    left_sides: bool = True,
    chunk_size: int = 256,
) -> CurvatureBounds:
    r"""Curvature of the softmax loss against stability of the features (ROB Theorem 6.1).

    With :math:`\varepsilon \sim N(0, \sigma^2 I)` and
    :math:`\eta = P(\|f(x+\varepsilon) - f(x)\| \le \delta)`:

    .. math::
        \sum\lambda_i^2 &\le \frac{8}{\sigma^4}
            \big(\eta\|W\|_{2,\infty}^2\delta^2 + 4(1-\eta)K^2\big) \\
        2\sum\lambda_i^2 + \big(\sum|\lambda_i|\big)^2 &\ge \frac{4}{\sigma^4}
            \big((1-\eta)(l_{\mathrm{out}} - l)^2 - \sigma^2\|\nabla l\|^2\big)

    :math:`\|W\|_{2,\infty} = \max_j\|W_j\|`, logits in [-K, K],
    :math:`l_{\mathrm{out}} = E[l(x+\varepsilon) \mid \text{outside}]`. Empirical :math:`\eta` and
    :math:`l_{\mathrm{out}}` are taken over the same draws. The proof treats the second-order
    expansion as exact, so neither is a theorem for a real network: a heuristic for small
    :math:`\sigma`, to be reported with it (erratum R3).

    Args:
        backbone: maps (N, ...) inputs to (N, D) features, rows independent; float32 or float64. A
            module is put in evaluation mode for the call.
        prototypes: (C, D), weight of the linear classifier on the features.
        inputs: (N, ...), in the units in which noise is injected.
        labels: (N,) class indices.
        sigma: standard deviation of the noise, > 0.
        radius: :math:`\delta > 0`, radius of the ball around the clean features.
        bias: (C,) or None.
        logit_bound: K; default the largest absolute logit met, clean or noisy.
        noise: draws from N(0, I), (K, ...) for all samples or (N, K, ...) for each, multiplied by
            ``sigma`` here; default: drawn.
        draws: number of draws per sample when they are drawn. Default 100 (our choice).
        generator: random numbers for the noise.
        left_sides: also compute the exact left sides, from the input Hessian (costly for images:
            see :func:`input_hessian`).
        chunk_size: rows per pass; memory only.

    Returns:
        ``eta``, ``l_out`` (NaN where no draw leaves the ball), ``loss``, ``grad_sq`` =
        :math:`\|\nabla l\|^2`, ``upper``, ``lower`` (often negative; its l_out term is 0 at
        :math:`\eta = 1`), ``lhs_upper``, ``lhs_lower``: (N,) each; ``w_2inf`` and ``logit_bound``
        (K as used) 0-dim. The left sides are None with ``left_sides=False``.

    Example:
        >>> x, y, W = torch.zeros(1, 2), torch.tensor([0]), torch.eye(2)
        >>> curvature_bounds(lambda x: x, W, x, y, sigma=0.1, radius=9.0).eta
        tensor([1.])
    """
    check_number("sigma", sigma, above=0)
    check_number("radius", radius, above=0)
    check_matrix("prototypes", prototypes, "(C, D)")
    check_num_classes(prototypes.shape[0])
    weight = promote(prototypes.detach())
    offset = None if bias is None else bias.detach().to(weight.dtype)

    def head(features: Tensor) -> Tensor:
        if features.dim() != 2 or features.shape[1] != weight.shape[1]:
            raise LargeMarginError(
                f"backbone must return features of shape (N, {weight.shape[1]}) to fit the "
                f"prototypes, but their shape is {tuple(features.shape)}."
            )
        return F.linear(features, weight, offset)

    def model(x: Tensor) -> Tensor:
        return head(backbone(x))

    inputs, labels = prepare(backbone, inputs, labels)
    check_labels(labels, len(inputs), len(prototypes), soft=False)
    with evaluation(backbone, inputs):
        source = Directions("noise", noise, draws, inputs, generator)
        clean = input_gradient(model, inputs, labels, chunk_size=chunk_size)
        inside, loss_outside = inputs.new_zeros(len(inputs)), inputs.new_zeros(len(inputs))
        largest = inputs.new_zeros(())
        with torch.no_grad():
            for samples in sample_chunks(len(inputs), source.count, chunk_size):
                x, y = inputs[samples], labels[samples]
                drawn = source.of(samples, x)
                here = backbone(x)
                largest = torch.maximum(largest, head(here).abs().max())
                for part in blocks(source.count, chunk_size):
                    shift = sigma * drawn[:, part].flatten(0, 1)
                    times = shift.shape[0] // len(x)
                    there = backbone(repeat_rows(x, times) + shift)
                    stays = safe_norm(there - repeat_rows(here, times)) <= radius
                    logits = head(there)
                    largest = torch.maximum(largest, logits.abs().max())
                    losses = F.cross_entropy(logits, repeat_rows(y, times), reduction="none")
                    inside[samples] += stays.view(len(x), times).sum(1)
                    leaves = torch.where(stays, 0.0, losses)
                    loss_outside[samples] += leaves.view(len(x), times).sum(1)
        exact = None
        if left_sides:
            exact = exact_curvature(model, inputs, labels, chunk_size=chunk_size)
    outside = source.count - inside
    eta = inside / source.count
    l_out = torch.where(outside > 0, loss_outside / outside.clamp_min(1), torch.nan)
    excess = torch.where(outside > 0, (1 - eta) * (l_out - clean.loss).square(), 0.0)
    grad_sq = clean.gradient.flatten(1).square().sum(1)
    w_2inf = safe_norm(weight).max()
    if logit_bound is not None:
        check_number("logit_bound", logit_bound, above=0)
        largest = largest.new_tensor(logit_bound)
    return CurvatureBounds(
        eta=eta,
        l_out=l_out,
        loss=clean.loss,
        grad_sq=grad_sq,
        w_2inf=w_2inf,
        upper=curvature_ceiling(eta, w_2inf, largest, sigma=sigma, radius=radius),
        lower=4 / sigma**4 * (excess - sigma**2 * grad_sq),
        lhs_upper=None if exact is None else exact.sum_of_squares,
        lhs_lower=None
        if exact is None
        else 2 * exact.sum_of_squares + exact.sum_of_absolutes.square(),
        logit_bound=largest,
    )
