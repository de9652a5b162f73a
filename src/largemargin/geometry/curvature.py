"""Curvature of the loss in input space (ROB 7.1): estimators and the exact value."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from largemargin.errors import check_choice, check_number
from largemargin.geometry.input_gradients import (
    PRECISIONS,
    Directions,
    Model,
    PerSampleLoss,
    evaluation,
    hessian_of,
    hessian_products,
    in_double,
    losses_and_gradient,
    prepare,
    repeat_rows,
    sample_chunks,
    sample_groups,
    searched,
)
from largemargin.geometry.pairs import blocks, widen
from largemargin.shapes import Labels, PerSample

SMALL_STEP = 1e-3
"""Below this step a difference of float32 gradients is mostly rounding."""


class ExactCurvature(NamedTuple):
    """Spectrum of the input Hessian of each sample: see :func:`exact_curvature`."""

    eigenvalues: Tensor
    sum_of_squares: Tensor
    sum_of_absolutes: Tensor
    estimator_variance: Tensor


def curvature(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    directions: Tensor | None = None,
    step: float = 1e-2,
    num_directions: int = 20,
    generator: torch.Generator | None = None,
    loss: PerSampleLoss | None = None,
    chunk_size: int = 256,
    precision: str = "highest",
) -> PerSample:
    r"""Input curvature of each sample by finite differences (ROB 21, NGR-21).

    .. math:: \hat\Lambda(x) = \frac1K\sum_{j=1}^K
        \frac{\|\nabla l(x + t\varepsilon_j) - \nabla l(x)\|^2}{t^2},
        \qquad \varepsilon_j \sim N(0, I)

    Estimates :math:`\sum_i\lambda_i^2 = \|H\|_F^2` of the input Hessian H. As t tends to 0 it is
    unbiased with variance :math:`2\sum\lambda_i^4/K`, a relative standard deviation of at most
    :math:`\sqrt{2/K}` (0.32 at K = 20). For a quadratic loss it does not depend on t. The
    displacement is finite, :math:`t\sqrt k` = 0.55 for 32 x 32 x 3 inputs: for ReLU networks the
    kinks it crosses are what is measured; :func:`curvature_limit` sees none of them.

    A module is put in evaluation mode for the call and every submodule's mode restored after it;
    no parameter receives a ``.grad``. Samples and directions are batched together.

    Args:
        model: maps (N, ...) inputs to (N, C) outputs, rows independent; float32 or float64.
        inputs: (N, ...), in the units in which noise is injected, before normalisation (O6).
        labels: (N,) class indices, or whatever ``loss`` takes.
        directions: (K, ...) for all samples or (N, K, ...) for each; default: drawn from N(0, I)
            for each sample, independently of ``chunk_size``.
        step: t. Default 1e-2 (ROB 7.1). Rounding grows as 1/t, so below 1e-3 a float32 module is
            evaluated in float64; a plain function is not: do not go below 1e-3 with one.
        num_directions: K when directions are drawn. Default 20 (ROB 7.1).
        generator: random numbers for the directions; default torch's global ones.
        loss: maps (outputs, labels) to (N,); default cross entropy.
        chunk_size: (sample, direction) rows per pass; memory only.
        precision: of float32 products on NVIDIA GPUs: "highest" (default), or "high" for
            TensorFloat-32: several times faster, with an error of about 1e-3 of a gradient,
            divided by the step. That is far below what 20 directions leave open where gradients
            change much within a step, as those of image classifiers do; check it on a few samples.

    Returns:
        (N,), detached.

    Example:
        >>> half_square = lambda outputs, labels: outputs.square().sum(1) / 2
        >>> axes = torch.eye(2)  # H is the identity: ||H e||^2 = 1 along every axis
        >>> x, y = torch.zeros(1, 2), torch.tensor([0])
        >>> curvature(torch.nn.Identity(), x, y, directions=axes, step=1.0, loss=half_square)
        tensor([1.])
    """
    check_number("step", step, above=0)
    inputs, labels = prepare(model, inputs, labels)
    dtype = inputs.dtype
    check_choice("precision", precision, tuple(PRECISIONS))
    with evaluation(model, inputs, precision):
        if step < SMALL_STEP and dtype == torch.float32 and isinstance(model, nn.Module):
            inputs = widen(inputs)
            directions = None if directions is None else directions.to(inputs.dtype)
            model = in_double(model) if inputs.dtype == torch.float64 else model
        source = Directions("directions", directions, num_directions, inputs, generator)
        total = inputs.new_zeros(len(inputs))
        for samples in sample_groups(inputs, source.count, chunk_size):
            x, y = inputs[samples], labels[samples]
            shifts = source.of(samples, x).flatten(0, 1)
            full = len(shifts) // chunk_size
            with searched(x.device, full if len(x) == chunk_size else 1):
                _, here = losses_and_gradient(model, x.clone().requires_grad_(), y, loss)
            squares = x.new_empty(len(shifts))
            for part in blocks(len(shifts), chunk_size):
                # Row r of the group is direction r % K of sample r // K.
                row = torch.arange(part.start, part.stop, device=x.device) // source.count
                there = torch.add(x[row], shifts[part], alpha=step).requires_grad_()
                with searched(x.device, full if len(row) == chunk_size else 1):
                    _, gradient = losses_and_gradient(model, there, y[row], loss)
                change = (gradient - here[row]).flatten(1).div_(step)
                squares[part] = change.square_().sum(1)
            total[samples] = squares.view(len(x), source.count).sum(1)
    return (total / source.count).to(dtype)


def curvature_limit(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    directions: Tensor | None = None,
    num_directions: int = 20,
    generator: torch.Generator | None = None,
    loss: PerSampleLoss | None = None,
    chunk_size: int = 256,
    precision: str = "highest",
) -> PerSample:
    r"""The limit t -> 0 of :func:`curvature`, by Hessian-vector products (NGR-21).

    .. math:: \frac1K\sum_{j=1}^K \|H\varepsilon_j\|^2

    Double backpropagation: no step, no rounding, and no kinks. The piecewise linear part of a ReLU
    network contributes nothing, only the softmax does. The model must be twice differentiable;
    fused attention kernels are not (choose torch's "math" backend for them).

    Args and returns as in :func:`curvature`, without ``step``.

    Example:
        >>> half_square = lambda outputs, labels: outputs.square().sum(1) / 2
        >>> x, y, axes = torch.zeros(1, 2), torch.tensor([0]), torch.eye(2)
        >>> curvature_limit(torch.nn.Identity(), x, y, directions=3 * axes, loss=half_square)
        tensor([9.])
    """
    return _mean_over_products(
        lambda vectors, products: products.square(),
        *(model, inputs, labels, directions, num_directions, generator, loss),
        *(chunk_size, precision),
    )


def hessian_trace(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    directions: Tensor | None = None,
    num_directions: int = 20,
    generator: torch.Generator | None = None,
    loss: PerSampleLoss | None = None,
    chunk_size: int = 256,
    precision: str = "highest",
) -> PerSample:
    r"""Trace of the input Hessian of each sample, by Hutchinson's estimator.

    .. math:: \frac1K\sum_{j=1}^K \varepsilon_j^\top H\varepsilon_j, \qquad
        \operatorname{E} = \operatorname{tr} H = \sum_i\lambda_i

    Unbiased, with variance :math:`2\sum\lambda_i^2/K` for normal directions; with directions of
    random signs only the entries of H beside its diagonal vary,
    :math:`\tfrac2K\sum_{i\ne j}H_{ij}^2`: pass such ``directions`` where the trace itself is
    wanted. Its square is the other half of :math:`\operatorname{E}(\varepsilon^\top
    H\varepsilon)^2 = 2\sum\lambda_i^2 + (\operatorname{tr} H)^2`.

    Args and returns as in :func:`curvature_limit`.

    Example:
        >>> signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> x, y = torch.zeros(1, 2), torch.tensor([0])
        >>> hessian_trace(lambda x: x, x, y, directions=signs)
        tensor([0.5000])
    """
    return _mean_over_products(
        lambda vectors, products: vectors * products,
        *(model, inputs, labels, directions, num_directions, generator, loss),
        *(chunk_size, precision),
    )


def _mean_over_products(
    terms: Callable[[Tensor, Tensor], Tensor],
    model: Model,
    inputs: Tensor,
    labels: Labels,
    directions: Tensor | None,
    num_directions: int,
    generator: torch.Generator | None,
    loss: PerSampleLoss | None,
    chunk_size: int,
    precision: str,
) -> PerSample:
    """Mean over directions v of the sum of ``terms(v, H v)``, which must be 0 where v is."""
    inputs, labels = prepare(model, inputs, labels)
    check_choice("precision", precision, tuple(PRECISIONS))
    with evaluation(model, inputs, precision):
        source = Directions("directions", directions, num_directions, inputs, generator)
        total = inputs.new_zeros(len(inputs))
        for samples in sample_groups(inputs, source.count, chunk_size):
            x, y = inputs[samples], labels[samples]
            vectors = source.of(samples, x)
            # One graph serves all directions; few samples stand in it several times.
            times = min(source.count, max(1, chunk_size // len(x)))
            product_with = hessian_of(model, repeat_rows(x, times), repeat_rows(y, times), loss)
            for part in blocks(source.count, times):
                v = x.new_zeros(len(x), times, *x.shape[1:])
                v[:, : part.stop - part.start] = vectors[:, part]
                v = v.flatten(0, 1)
                found = terms(v, product_with(v)).flatten(1).sum(1)
                total[samples] += found.view(len(x), times).sum(1)
    return total / source.count


def input_hessian(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    loss: PerSampleLoss | None = None,
    chunk_size: int = 256,
) -> Tensor:
    r"""Input Hessian :math:`H = \nabla_x^2 l` of each sample.

    One Hessian-vector product per input number: k of them for k-dimensional inputs, so meant for
    small inputs or few samples (3072 products and 36 MiB per CIFAR image in float32).

    Args:
        model, inputs, labels, loss, chunk_size: as in :func:`curvature`.

    Returns:
        (N, k, k), symmetric, detached; k numbers per sample, in the order of ``flatten``.

    Example:
        >>> input_hessian(lambda x: x, torch.zeros(1, 2), torch.tensor([0]))
        tensor([[[ 0.2500, -0.2500],
                 [-0.2500,  0.2500]]])
    """
    check_number("chunk_size", chunk_size, at_least=1)
    inputs, labels = prepare(model, inputs, labels)
    with evaluation(model, inputs):
        shape = inputs.shape[1:]
        size = shape.numel()
        hessian = inputs.new_empty(len(inputs), size, size)
        for samples in sample_chunks(len(inputs), size, chunk_size):
            x, y = inputs[samples], labels[samples]
            for part in blocks(size, chunk_size):
                times = part.stop - part.start
                axes = x.new_zeros(times, size)
                axes[:, part].fill_diagonal_(1)
                vectors = axes.view(times, *shape).repeat(len(x), *[1] * len(shape))
                product = hessian_products(
                    model, repeat_rows(x, times), repeat_rows(y, times), vectors, loss
                )
                hessian[samples, part] = product.view(len(x), times, size)
    return (hessian + hessian.mT) / 2


def exact_curvature(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    num_directions: int = 20,
    loss: PerSampleLoss | None = None,
    chunk_size: int = 256,
) -> ExactCurvature:
    r"""Eigenvalues of the input Hessian and the sums made of them (ROB 7.1, Theorem 6.1).

    .. math:: \sum_i \lambda_i^2, \qquad \sum_i |\lambda_i|, \qquad
        \operatorname{Var}\hat\Lambda = \frac2K\sum_i\lambda_i^4

    The first is what :func:`curvature` estimates, the last the variance of that estimate as its
    step tends to 0.

    Args:
        model, inputs, labels, loss, chunk_size: as in :func:`curvature`; see
            :func:`input_hessian` for the cost.
        num_directions: K of the estimator whose variance is given. Default 20 (ROB 7.1).

    Returns:
        ``eigenvalues`` (N, k) ascending, ``sum_of_squares``, ``sum_of_absolutes`` and
        ``estimator_variance`` (N,), detached.

    Example:
        >>> exact_curvature(lambda x: x, torch.zeros(1, 2), torch.tensor([0])).sum_of_squares
        tensor([0.2500])
    """
    check_number("num_directions", num_directions, at_least=1)
    hessian = input_hessian(model, inputs, labels, loss=loss, chunk_size=chunk_size)
    eigenvalues = torch.linalg.eigvalsh(widen(hessian))
    squares = eigenvalues.square()
    return ExactCurvature(
        *(
            values.to(hessian.dtype)
            for values in (
                eigenvalues,
                squares.sum(1),
                eigenvalues.abs().sum(1),
                2 / num_directions * squares.square().sum(1),
            )
        )
    )
