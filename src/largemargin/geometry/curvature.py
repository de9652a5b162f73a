"""Curvature of the loss in input space (ROB 7.1): estimators, the exact value, and what it bounds.

:func:`curvature_bounds` ties it to the stability of the features (ROB Theorem 6.1);
:func:`low_curvature_accuracy` and :func:`curvature_by_robustness` ask whether samples of low
curvature are the robust ones (ROB 7.3).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_length,
    check_matrix,
    check_num_classes,
    check_number,
)
from largemargin.geometry.input_gradients import (
    PRECISIONS,
    Directions,
    Model,
    PerSampleLoss,
    evaluation,
    hessian_of,
    in_double,
    input_gradient,
    losses_and_gradient,
    prepare,
    repeat_rows,
    sample_chunks,
    sample_groups,
    searched,
)
from largemargin.geometry.pairs import blocks, widen
from largemargin.ops.norms import promote, safe_norm
from largemargin.shapes import Labels, PerSample, Prototypes

SMALL_STEP = 1e-3
"""Below this step a difference of float32 gradients is mostly rounding."""


class DirectionOptions(TypedDict, total=False):
    """Options of an estimate over directions; :func:`curvature` says what they mean."""

    directions: Tensor | None
    num_directions: int
    generator: torch.Generator | None
    loss: PerSampleLoss | None
    chunk_size: int
    precision: str


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
    model: Model, inputs: Tensor, labels: Labels, **options: Unpack[DirectionOptions]
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
        lambda vectors, products: products.square(), model, inputs, labels, **options
    )


def hessian_trace(
    model: Model, inputs: Tensor, labels: Labels, **options: Unpack[DirectionOptions]
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
        lambda vectors, products: vectors * products, model, inputs, labels, **options
    )


def _mean_over_products(
    terms: Callable[[Tensor, Tensor], Tensor],
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
                product_with = hessian_of(model, repeat_rows(x, times), repeat_rows(y, times), loss)
                hessian[samples, part] = product_with(vectors).view(len(x), times, size)
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
    variance = 2 / num_directions * squares.square().sum(1)
    found = (eigenvalues, squares.sum(1), eigenvalues.abs().sum(1), variance)
    return ExactCurvature(*(values.to(hessian.dtype) for values in found))


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
        lhs_upper = lhs_lower = None
        if left_sides:
            exact = exact_curvature(model, inputs, labels, chunk_size=chunk_size)
            lhs_upper = exact.sum_of_squares
            lhs_lower = 2 * lhs_upper + exact.sum_of_absolutes.square()
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
        lhs_upper=lhs_upper,
        lhs_lower=lhs_lower,
        logit_bound=largest,
    )


class LowCurvatureAccuracy(NamedTuple):
    """Accuracy on low-curvature subsets: see :func:`low_curvature_accuracy`."""

    strict: Tensor
    weak: Tensor
    size_strict: Tensor
    size_weak: Tensor


class RobustnessGroups(NamedTuple):
    """Curvature by number of correct noisy predictions: see :func:`curvature_by_robustness`."""

    mean: Tensor
    size: Tensor
    pearson: Tensor


def _check_curvature(curvature: PerSample) -> None:
    if not isinstance(curvature, Tensor) or curvature.dim() != 1 or curvature.numel() == 0:
        given = (
            tuple(curvature.shape) if isinstance(curvature, Tensor) else type(curvature).__name__
        )
        raise LargeMarginError(
            f"curvature must be a tensor of shape (N,) with N >= 1, but {given} was given."
        )


def _threshold(curvature: Tensor, share: float, rounding: float = 0.0) -> Tensor:
    """Linear interpolation quantile; equal neighbours give exactly their value.

    ``rounding`` is the relative error that a narrow dtype left in the share: a position that is a
    sample's up to that error is that sample's.
    """
    check_number("share", share, at_least=0, at_most=1)
    ordered = widen(curvature).sort().values
    position = share * (len(ordered) - 1)
    if abs(position - round(position)) <= rounding * position:
        position = round(position)
    low = min(int(position), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def low_curvature_mask(
    curvature: PerSample, share: float = 0.9, *, inclusive: bool = False
) -> Tensor:
    r"""The samples of lowest curvature, :math:`\{i: \Lambda_i < \mathrm{quantile}_p(\Lambda)\}`.

    The quantile interpolates linearly. The strict sign is the printed one; it drops the largest
    sample at p = 1 and everything when all curvatures are equal (erratum R5).

    Args:
        curvature: (N,), from :func:`curvature`.
        share: p in [0, 1]. Default 0.9, the share that ROB's box plots show.
        inclusive: use <= instead.

    Returns:
        (N,) booleans.

    Example:
        >>> low_curvature_mask(torch.tensor([3.0, 1.0, 2.0]), 0.5, inclusive=True)
        tensor([False,  True,  True])
    """
    _check_curvature(curvature)
    return _below(curvature, _threshold(curvature, share), inclusive)


def _below(curvature: PerSample, limit: Tensor, inclusive: bool) -> Tensor:
    values = widen(curvature)
    return values <= limit if inclusive else values < limit


def low_curvature_accuracy(
    curvature: PerSample, correct: Tensor, shares: Sequence[float] | Tensor
) -> LowCurvatureAccuracy:
    r"""Accuracy under noise on the samples of lowest clean curvature (ROB 7.3, NGR-7.3).

    .. math:: \mathrm{acc}(p) = \text{accuracy on } D(p) =
        \{i : \Lambda_i < \mathrm{quantile}_p(\Lambda)\}

    Both readings of the sign are returned, since they differ at p = 1 and with ties; say which one
    is reported.

    Args:
        curvature: (N,) of the clean samples.
        correct: (N,) booleans: prediction under noise was right. Numbers in [0, 1] (shares of
            right predictions) are averaged as well.
        shares: p values in [0, 1], P of them. A tensor of float32 means the same p as a list: 0.9
            of 11 samples ends at the tenth, although float32 has no 0.9.

    Returns:
        ``strict`` and ``weak`` accuracies (P,), NaN for an empty subset, with the subset sizes
        ``size_strict`` and ``size_weak`` (P,) int64.

    Example:
        >>> flat, right = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
        >>> low_curvature_accuracy(flat, right, [1.0]).weak
        tensor([0.5000])
    """
    _check_curvature(curvature)
    check_length("correct", correct, len(curvature), "one entry per curvature")
    if isinstance(shares, int | float) or (isinstance(shares, Tensor) and shares.dim() != 1):
        raise LargeMarginError(
            f"shares must be a list or a tensor of shape (P,), but {shares} was given. Put a "
            "single share into a list."
        )
    dtype = promote(curvature).dtype
    hits = correct.to(dtype)
    rounding = 0.0  # how far a narrow dtype's numbers are from the decimal ones meant
    if isinstance(shares, Tensor) and shares.dtype in (torch.float32, torch.half, torch.bfloat16):
        rounding = torch.finfo(shares.dtype).eps
    limits = [_threshold(curvature, float(p), rounding) for p in shares]
    accuracies: list[Tensor] = []
    sizes: list[Tensor] = []
    for inclusive in (False, True):
        masks = [_below(curvature, limit, inclusive) for limit in limits]
        subsets = torch.stack(masks) if masks else hits.new_empty((0, len(hits)), dtype=torch.bool)
        sizes.append(subsets.sum(1))
        accuracies.append((subsets * hits).sum(1) / sizes[-1])
    return LowCurvatureAccuracy(*accuracies, *sizes)


def curvature_by_robustness(
    curvature: PerSample, correct_counts: Tensor, *, draws: int = 10
) -> RobustnessGroups:
    r"""Mean curvature of samples by how often noise left their prediction right (ROB 7.3).

    .. math:: G(k) = \{i : \mathrm{count}(i) = k\}, \qquad
        \bar\Lambda(k) = \operatorname{mean}_{i\in G(k)} \Lambda_i, \qquad k = 0..\text{draws}

    A negative correlation says that flat samples are robust ones.

    Args:
        curvature: (N,) of the clean samples.
        correct_counts: (N,) integers, correct predictions out of ``draws`` noisy draws.
        draws: draws per sample. Default 10 (ROB 7.3).

    Returns:
        ``mean`` (draws + 1,), NaN for an empty group; ``size`` (draws + 1,) int64;
        ``pearson`` 0-dim, the correlation of k and the means over the non-empty groups, NaN when
        fewer than two groups or no spread leave it undefined.

    Example:
        >>> curvature_by_robustness(torch.tensor([4.0, 2.0]), torch.tensor([0, 1]), draws=1)[2]
        tensor(-1.)
    """
    _check_curvature(curvature)
    check_number("draws", draws, at_least=1)
    check_length("correct_counts", correct_counts, len(curvature), "one entry per curvature")
    if correct_counts.is_floating_point() or int(correct_counts.min()) < 0:
        raise LargeMarginError(
            "correct_counts must be integers >= 0, but their dtype is "
            f"{correct_counts.dtype} and their minimum {correct_counts.min().item()}."
        )
    if int(correct_counts.max()) > draws:
        raise LargeMarginError(
            f"correct_counts must be at most draws = {draws}, but their maximum is "
            f"{int(correct_counts.max())}. Pass the number of draws as draws."
        )
    dtype = promote(curvature).dtype
    groups = correct_counts.long()
    size = torch.bincount(groups, minlength=draws + 1)
    wide = widen(curvature)
    mean = wide.new_zeros(draws + 1).index_add_(0, groups, wide) / size
    present = size > 0
    pairs = torch.stack([present.nonzero().squeeze(1).to(wide.dtype), mean[present]])
    apart = pairs - pairs.mean(1, keepdim=True)
    # 0/0 is NaN, which is what a correlation without spread is.
    pearson = (apart[0] * apart[1]).sum() / apart.square().sum(1).prod().sqrt()
    return RobustnessGroups(mean.to(dtype), size, pearson.to(dtype))
