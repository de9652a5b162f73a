"""Complexity measures and PAC-Bayes quantities of ODN, for bias-free ReLU networks.

Diagnostics to compare networks with: hidden constants are set to 1 and the resulting bounds
typically exceed 1.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_length,
    check_matrix,
    check_number,
)
from largemargin.geometry.pairs import blocks
from largemargin.ops.norms import promote, safe_norm

JACOBIAN_SAMPLES = 64
"""Samples whose Jacobians are held at a time."""


class SpectralComplexity(NamedTuple):
    """Spectral complexity and its parts: see :func:`spectral_complexity`."""

    spectral_norms: Tensor
    product: Tensor
    norms_21: Tensor
    complexity: Tensor


class NoiseCushions(NamedTuple):
    """How noise passes through a network: see :func:`noise_cushions`."""

    layer_cushion: Tensor
    minimal_interlayer_cushion: Tensor
    activation_contraction: Tensor
    stable_rank: Tensor
    width: int


class CushionComplexity(NamedTuple):
    """The complexity term of ODN Theorem 1, twice: see :func:`cushion_complexity`."""

    ratio_factor: float
    printed: Tensor
    derived: Tensor


class PacBayesQuantities(NamedTuple):
    """Everything in the PAC-Bayes step of ODN: see :func:`pac_bayes_quantities`."""

    sigma: Tensor
    perturbation_norm: Tensor
    kl: Tensor
    emp_zero_one: Tensor
    emp_margin: Tensor
    slack_pac_bayes: Tensor
    slack_lemma1: Tensor
    bound_pac_bayes: Tensor
    bound_lemma1: Tensor


def _check_network(weights: Sequence[Tensor], inputs: Tensor | None = None) -> list[Tensor]:
    if len(weights) == 0:
        raise LargeMarginError("weights must hold at least one layer, but none was given.")
    for position, weight in enumerate(weights):
        check_matrix(f"weights[{position}]", weight, "(outputs, inputs)")
    widths = [weight.shape for weight in weights]
    for position, (before, after) in enumerate(pairwise(widths)):
        if before[0] != after[1]:
            raise LargeMarginError(
                f"weights must fit together, but layer {position} has {before[0]} outputs and "
                f"layer {position + 1} takes {after[1]} inputs. Shapes are (outputs, inputs)."
            )
    if inputs is not None:
        check_matrix("inputs", inputs, "(N, D)")
        if inputs.shape[1] != widths[0][1] or inputs.shape[0] == 0:
            raise LargeMarginError(
                f"inputs must have shape (N, {widths[0][1]}) with N >= 1, to fit the first layer, "
                f"but theirs is {tuple(inputs.shape)}."
            )
    return [promote(weight.detach()) for weight in weights]


def _check_range(r: float, theta: float, delta: float, num_samples: int, least: int) -> None:
    check_number("theta", theta, at_least=0)
    check_number("r", r, above=theta, hint="The zero-loss band is [r-theta, r+theta].")
    check_number("delta", delta, above=0, below=1)
    check_number("num_samples", num_samples, at_least=least)


def spectral_complexity(
    weights: Sequence[Tensor], *, reference: str = "identity", norm: str = "rows"
) -> SpectralComplexity:
    r"""Spectral complexity of a network (ODN 3, after Bartlett et al. 2017; ODN-SPEC).

    .. math::
        R = \Big(\prod_i \|W_i\|_2\Big)
            \Big(\sum_i \big(\|W_i - M_i\|_{2,1} / \|W_i\|_2\big)^{2/3}\Big)^{3/2}

    A layer equal to its reference contributes 0. Evaluated without the division, so that a zero
    layer is harmless.

    Args:
        weights: W_1 ... W_L, each (outputs, inputs). Reshape convolutions to (outputs, -1).
        reference: "identity" (as printed; ones on the main diagonal of a rectangular matrix) or
            "zero".
        norm: "rows", the sum of the row norms (default: the original transposes, erratum D9), or
            "columns", the literal reading (O21).

    Returns:
        ``spectral_norms`` (L,), ``product`` 0-dim, ``norms_21`` (L,), ``complexity`` 0-dim.

    Example:
        >>> spectral_complexity([torch.eye(2), 3 * torch.eye(2)], reference="zero").product
        tensor(3.)
    """
    check_choice("reference", reference, ("identity", "zero"))
    check_choice("norm", norm, ("rows", "columns"))
    layers = _check_network(weights)
    spectral = torch.stack([torch.linalg.matrix_norm(layer, 2) for layer in layers])
    norms_21 = []
    for layer in layers:
        if reference == "identity":
            layer = layer - torch.eye(*layer.shape, dtype=layer.dtype, device=layer.device)
        norms_21.append(safe_norm(layer, dim=1 if norm == "rows" else 0).sum())
    lengths = torch.stack(norms_21)
    others = [torch.cat([spectral[:i], spectral[i + 1 :]]).prod() for i in range(len(layers))]
    complexity = (lengths * torch.stack(others)).pow(2 / 3).sum().pow(3 / 2)
    return SpectralComplexity(spectral, spectral.prod(), lengths, complexity)


def noise_cushions(weights: Sequence[Tensor], inputs: Tensor) -> NoiseCushions:
    r"""Cushions and contraction of a bias-free ReLU network (ODN Definitions 1-3, ODN-BOUND).

    With pre-activations :math:`f^i`, :math:`\phi(f^0) = x`, last layer linear:

    .. math::
        \mu_i = \min_x \frac{\|f^i\|}{\|W_i\|_F \|\phi(f^{i-1})\|},\qquad
        \mu_{i\to} = \min_{i\le j\le L}\ \min_x \frac{\|f^j\|}{\|J^{ij}\|_F\|f^i\|},\qquad
        c = \max_{x,\,i<L} \frac{\|f^i\|}{\|\phi(f^i)\|}

    with :math:`J^{ij} = \partial f^j/\partial f^i` (erratum D7 corrected; the term j = i is
    :math:`1/\sqrt{\text{width}}`). Large cushions mean that noise injected at a layer dies out.

    Args:
        weights: W_1 ... W_L, each (outputs, inputs).
        inputs: (N, D), the training samples.

    Returns:
        ``layer_cushion`` (L,), ``minimal_interlayer_cushion`` (L,), ``activation_contraction``
        0-dim (1 for L = 1; NaN when all units of a hidden layer are off for some sample, where it
        is not defined), ``stable_rank`` (L,) = :math:`\|W\|_F^2/\|W\|_2^2`, and ``width``, the
        largest number of outputs of a layer, as the paper defines it. (Its proof bounds square
        perturbations; where the inputs are more, that step needs their number.)
        Samples with a zero denominator are skipped in the cushions.

    Example:
        >>> noise_cushions([torch.eye(2)], torch.tensor([[3.0, 4.0]])).layer_cushion
        tensor([0.7071])
    """
    layers = _check_network(weights, inputs)
    dtype = layers[0].dtype
    rows = promote(inputs.detach()).to(dtype)
    count = len(layers)
    layer_cushion = rows.new_full((count,), torch.inf)
    interlayer = rows.new_full((count,), torch.inf)
    contraction = rows.new_ones(())
    for block in blocks(len(rows), JACOBIAN_SAMPLES):
        below = rows[block]
        outputs: list[Tensor] = []
        for i, layer in enumerate(layers):
            outputs.append(below @ layer.T)
            size = torch.linalg.matrix_norm(layer) * safe_norm(below)
            layer_cushion[i] = torch.minimum(layer_cushion[i], _smallest(outputs[i], size))
            below = outputs[i].relu()
            if i + 1 < count:
                # 0/0 and x/0 are both undefined here; NaN survives the maximum.
                ratio = safe_norm(outputs[i]) / safe_norm(below)
                ratio = torch.where(ratio.isinf(), torch.nan, ratio)
                contraction = torch.maximum(contraction, ratio.max())
        for i in range(count):
            own = safe_norm(outputs[i])
            identity = torch.full_like(own, math.sqrt(layers[i].shape[0]))
            interlayer[i] = torch.minimum(interlayer[i], _smallest(outputs[i], identity * own))
            jacobian = None
            for j in range(i + 1, count):
                active = (outputs[j - 1] > 0).to(dtype)
                if jacobian is None:
                    jacobian = layers[j] * active[:, None, :]
                else:
                    jacobian = layers[j] @ (active[:, :, None] * jacobian)
                size = torch.linalg.matrix_norm(jacobian) * own
                interlayer[i] = torch.minimum(interlayer[i], _smallest(outputs[j], size))
    stable_rank = torch.stack(
        [(torch.linalg.matrix_norm(w) / torch.linalg.matrix_norm(w, 2)).square() for w in layers]
    )
    width = max(layer.shape[0] for layer in layers)
    return NoiseCushions(layer_cushion, interlayer, contraction, stable_rank, width)


def _smallest(outputs: Tensor, size: Tensor) -> Tensor:
    """min over samples of ||output||/size, without the samples of size 0."""
    safe = torch.where(size > 0, size, 1.0)
    return torch.where(size > 0, safe_norm(outputs) / safe, torch.inf).min()


def cushion_complexity(
    cushions: NoiseCushions,
    *,
    num_samples: int,
    r: float = 1.2,
    theta: float = 0.7,
    delta: float = 0.05,
) -> CushionComplexity:
    r"""Complexity term of ODN Theorem 1 with all hidden constants 1 (ODN-BOUND).

    .. math::
        \text{printed} &= \sqrt{\frac{c^2L^2\varrho\ln(L\varrho)(r+\theta)^2
            \sum_i \frac{\|W_i\|_F^2}{\|W_i\|_2^2\mu_i\mu_{i\to}} + \ln(Lm/\delta)}
            {m(r-\theta)^2}} \\
        \text{derived} &= \sqrt{\frac{c^2\varrho\ln(4L\varrho)\big(\frac{r+\theta}{r-\theta}\big)^2
            \big(\sum_i\frac{1}{\mu_i\mu_{i\to}}\big)^2\sum_i\frac{\|W_i\|_F^2}{\|W_i\|_2^2}
            + \ln(Lm/\delta)}{m}}

    The second is the form the proof supports (erratum D8). :math:`\varrho` is the largest width.

    Args:
        cushions: from :func:`noise_cushions`.
        num_samples: m, the training set size.
        r, theta: of the margin distribution loss. Defaults 1.2 and 0.7, ODN Table 1 without batch
            norm (30 and 0.7 with it).
        delta: confidence parameter. Default 0.05 (the paper fixes none).

    Returns:
        ``ratio_factor`` :math:`((r+\theta)/(r-\theta))^2`, ``printed`` and ``derived``.

    Example:
        >>> cushions = noise_cushions([torch.eye(2)], torch.ones(1, 2))
        >>> cushion_complexity(cushions, num_samples=1000, r=3.0, theta=1.0).ratio_factor
        4.0
    """
    _check_range(r, theta, delta, num_samples, 1)
    depth, width = len(cushions.layer_cushion), cushions.width
    product = cushions.layer_cushion * cushions.minimal_interlayer_cushion
    contraction = cushions.activation_contraction.square()
    rest = math.log(depth * num_samples / delta)
    factor = ((r + theta) / (r - theta)) ** 2
    mixed = (cushions.stable_rank / product).sum()
    printed = contraction * depth**2 * width * math.log(depth * width) * (r + theta) ** 2 * mixed
    split = (1 / product).sum().square() * cushions.stable_rank.sum()
    derived = contraction * width * math.log(4 * depth * width) * factor * split
    return CushionComplexity(
        factor,
        ((printed + rest) / (num_samples * (r - theta) ** 2)).sqrt(),
        ((derived + rest) / num_samples).sqrt(),
    )


def pac_bayes_quantities(
    margins: Tensor,
    parameters: Tensor,
    layer_cushion: Tensor,
    minimal_interlayer_cushion: Tensor,
    *,
    num_samples: int,
    width: int,
    contraction: float,
    spectral_norm: float,
    r: float = 1.2,
    theta: float = 0.7,
    delta: float = 0.05,
) -> PacBayesQuantities:
    r"""The PAC-Bayes step behind ODN Theorem 1 (ODN 2, Lemma 1, ODN-PAC).

    Posterior :math:`N(w, \sigma^2 I)`, prior :math:`N(0, \sigma^2 I)`, with the largest
    :math:`\sigma` whose perturbations move the output by at most :math:`(r-\theta)/4`:

    .. math::
        \sigma = \frac{r-\theta}{4c(r+\theta)\,
            \sum_i \frac{1}{\beta\mu_i\mu_{i\to}}\,\sqrt{2\varrho\ln(4L\varrho)}},\qquad
        \mathrm{KL} = \frac{\|w\|^2}{2\sigma^2}

    .. math::
        L_0 \le \hat L_0 + \sqrt{\tfrac{\mathrm{KL} + \ln(m/\delta)}{2(m-1)}},\qquad
        L_0 \le \hat L_{r,\theta} + \sqrt{\tfrac{\mathrm{KL} + \ln(3m/\delta)}{m-1}}

    (in expectation over the posterior, and for the network itself). The printed
    :math:`\sigma` drops the 4 and the :math:`\sqrt2`. Lemma 1 controls raw logits while
    :math:`\hat L_{r,\theta}` thresholds normalised margins: valid for raw margins (erratum D6).

    Args:
        margins: (m',), of training samples.
        parameters: w, all weights, any shape.
        layer_cushion, minimal_interlayer_cushion: (L,) each, from :func:`noise_cushions`.
        num_samples: m >= 2, the training set size.
        width: :math:`\varrho`, the largest layer width.
        contraction: c, the activation contraction.
        spectral_norm: :math:`\beta`, the common spectral norm of the layers.
        r, theta: of the margin distribution loss. Defaults 1.2 and 0.7 (ODN Table 1).
        delta: the bounds hold with probability 1 - delta. Default 0.05 (the paper fixes none).

    Returns:
        0-dim tensors. ``perturbation_norm`` is :math:`\sigma\sqrt{2\varrho\ln(4L\varrho)}`, the
        spectral norm that the perturbation of every layer keeps with probability 1/2;
        ``emp_zero_one`` the share of margins <= 0; ``emp_margin`` the share <= r-theta plus the
        share >= r+theta, both ends counted.

    Example:
        >>> one = torch.ones(1)
        >>> settings = dict(num_samples=100, width=1, contraction=1.0, spectral_norm=1.0)
        >>> pac_bayes_quantities(torch.tensor([-1.0, 1.0]), one, one, one, **settings).emp_zero_one
        tensor(0.5000)
    """
    _check_range(r, theta, delta, num_samples, 2)
    check_number("width", width, at_least=1)
    check_number("contraction", contraction, above=0)
    check_number("spectral_norm", spectral_norm, above=0)
    if margins.numel() == 0:
        raise LargeMarginError("margins must hold at least one margin, but none was given.")
    depth = layer_cushion.numel()
    check_length(
        "minimal_interlayer_cushion", minimal_interlayer_cushion, depth, "one entry per layer"
    )
    margins = promote(margins)
    product = promote(layer_cushion) * promote(minimal_interlayer_cushion)
    growth = math.sqrt(2 * width * math.log(4 * depth * width))
    sensitivity = (1 / (spectral_norm * product)).sum()
    sigma = (r - theta) / (4 * contraction * (r + theta) * sensitivity * growth)
    kl = promote(parameters).square().sum() / (2 * sigma.square())
    zero_one = (margins <= 0).to(margins.dtype).mean()
    low = (margins <= r - theta).to(margins.dtype).mean()
    high = (margins >= r + theta).to(margins.dtype).mean()
    slack = ((kl + math.log(num_samples / delta)) / (2 * (num_samples - 1))).sqrt()
    slack_lemma1 = ((kl + math.log(3 * num_samples / delta)) / (num_samples - 1)).sqrt()
    return PacBayesQuantities(
        sigma=sigma,
        perturbation_norm=sigma * growth,
        kl=kl,
        emp_zero_one=zero_one,
        emp_margin=low + high,
        slack_pac_bayes=slack,
        slack_lemma1=slack_lemma1,
        bound_pac_bayes=zero_one + slack,
        bound_lemma1=low + high + slack_lemma1,
    )
