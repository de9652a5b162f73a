"""The four similarities, and the affine form that makes one kernel serve them all."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LARGEST,
    LargeMarginError,
    check_choice,
    check_classifier,
    check_number,
)
from largemargin.ops.matmul import matmul, resolve_precision, without_autocast
from largemargin.ops.norms import normalize, promote
from largemargin.shapes import Features, Logits, Prototypes

SIMILARITIES = ("dot", "cosine", "cosine_prototypes", "euclidean")


class AffineForm(NamedTuple):
    """Logits as ``rows @ columns.T + column_bias + row_bias[:, None]``.

    ``columns`` are the prototypes, to be normalised row by row when ``normalize_columns`` says so
    (kernels fold that in, so that no normalised copy of a large matrix is kept).
    """

    rows: Tensor
    columns: Tensor
    column_bias: Tensor | None
    row_bias: Tensor | None
    normalize_columns: bool
    precision: str | None
    centers: int = 1
    """Columns of a class, one after the other; the largest of their products is its logit."""


class HeadLogits(NamedTuple):
    """Logits that a head has made of the features of a call, and how."""

    logits: Tensor
    similarity: str
    scale: float | Tensor
    bias: Tensor | None

    def times(self, similarity: str, scale: Any, bias: Tensor | None) -> float | None:
        """What they have to be multiplied by to be those of another form; None if they cannot."""
        if self.similarity != similarity or self.bias is not bias:
            return None
        if isinstance(scale, Tensor) or isinstance(self.scale, Tensor):
            return 1.0 if scale is self.scale else None
        return float(scale / self.scale)


def scaled(x: Tensor, scale: float | Tensor) -> Tensor:
    """``x`` times a number, which costs nothing where that is 1."""
    return x if isinstance(scale, (float, int)) and scale == 1 else x * scale


def count_vectors(prototypes: Tensor) -> int:
    """How many a sample is compared with: C, or C K of sub-centers."""
    shape = prototypes.shape
    return shape[0] * shape[1] if len(shape) == 3 else shape[0]


def in_one_dtype(features: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes, float32 at least."""
    if features.dtype == prototypes.dtype and features.dtype in (torch.float32, torch.float64):
        return features, prototypes
    rows, columns = promote(features), promote(prototypes)
    dtype = torch.promote_types(rows.dtype, columns.dtype)
    return rows.to(dtype), columns.to(dtype)


def affine_form(
    features: Features,
    prototypes: Prototypes,
    *,
    bias: Tensor | None,
    similarity: str,
    scale: float | Tensor,
    precision: str | None,
    keep_columns: bool = False,
    relative: bool = False,
) -> AffineForm:
    """Bring ``scale * (similarity + bias)`` into affine form; call it with autocast disabled.

    ``keep_columns`` leaves the prototypes as they are: no wide copy of a half precision matrix, and
    none that is moved to the origin. ``relative`` leaves |q|^2 / 2 out of distances.
    """
    centers = 1
    if prototypes.dim() == 3:
        centers, prototypes = prototypes.shape[1], prototypes.flatten(0, 1)
        bias = None if bias is None else bias.repeat_interleave(centers)
    if keep_columns:
        rows, columns = promote(features), prototypes
    else:
        rows, columns = in_one_dtype(features, prototypes)
    column_bias = None if bias is None else scale * bias.to(rows.dtype)
    row_bias = None
    if similarity == "cosine":
        rows = normalize(rows)
    elif similarity == "euclidean":
        if not keep_columns and columns.numel():
            origin = common_origin(columns)
            rows, columns = rows - origin, columns - origin
        half_square = -0.5 * scale * promote(columns).square().sum(1)
        column_bias = half_square if column_bias is None else column_bias + half_square
        row_bias = None if relative else -0.5 * scale * rows.square().sum(1)
    rows = scaled(rows, scale)
    normalized = similarity.startswith("cosine")
    return AffineForm(rows, columns, column_bias, row_bias, normalized, precision, centers)


@torch.no_grad()
def common_origin(columns: Tensor) -> Tensor:
    """A point (D,) near class vectors that are far from 0: distances from there lose no digits.

    Of squares that are large beside their differences little is left. It is the middle of each
    dimension in steps of a power of two, not below half the widest one: taking it off is exact, and
    it is 0 and changes nothing unless class vectors are farther from 0 than from each other.
    """
    low, high = columns.amin(0), columns.amax(0)
    middle = (low + high) / 2
    widest = torch.maximum((high - low).amax() / 2, middle.abs().amax() * 2**-20)
    step = torch.exp2(torch.ceil(torch.log2(widest)))
    # Of vectors that are not finite, or all 0, it is 0.
    return torch.nan_to_num(torch.round(middle / step) * step)


def dense_logits(form: AffineForm) -> Logits:
    """The (N, C) logits of an affine form: the definition the kernels are tested against."""
    columns = normalize(form.columns) if form.normalize_columns else form.columns
    logits = matmul(form.rows, columns.T, form.precision)
    if form.column_bias is not None:
        logits = logits + form.column_bias
    logits = pooled(logits, form.centers)
    if form.row_bias is not None:
        logits = logits + form.row_bias[:, None]
    return logits


def pooled(logits: Tensor, centers: int) -> Logits:
    """(N, C) logits of (N, C K): those of the nearest sub-centers, to which the gradient goes."""
    return logits if centers == 1 else by_class(logits, centers).max(2).values


def by_class(logits: Tensor, centers: int) -> Tensor:
    """(N, C, K) of (N, C K)."""
    return logits.reshape(logits.shape[0], logits.shape[1] // centers, centers)


def check_scale(scale: float | Tensor) -> None:
    if isinstance(scale, Tensor):
        if scale.dim() != 0:
            raise LargeMarginError(
                f"scale must be a number or a 0-dim tensor, but its shape is {tuple(scale.shape)}."
            )
    elif type(scale) is not float or not 1 / LARGEST <= scale <= LARGEST:
        check_number("scale", scale, above=0)
        check_number("scale", scale, at_least=1 / LARGEST, at_most=LARGEST)


def similarity_logits(
    features: Features,
    prototypes: Prototypes,
    *,
    bias: Tensor | None = None,
    similarity: str = "dot",
    scale: float | Tensor = 1.0,
    precision: str | None = None,
    checked: bool = False,
    relative: bool = False,
) -> Logits:
    r"""Logits :math:`l_{ij} = s\,(\mathrm{sim}(q_i, W_j) + b_j)` of features for all classes.

    ========================  ====================================================
    similarity                sim(q, W_j)
    ========================  ====================================================
    ``"dot"``                 :math:`\langle W_j, q\rangle`
    ``"cosine"``              :math:`\langle W_j, q\rangle/(\|W_j\|\|q\|)`
    ``"cosine_prototypes"``   :math:`\langle W_j, q\rangle/\|W_j\|`
    ``"euclidean"``           :math:`-\tfrac12\|q - W_j\|^2`
    ========================  ====================================================

    Args:
        features: (N, D).
        prototypes: (C, D), or (C, K, D): of K sub-centers of a class the nearest counts.
        bias: (C,), added after the similarity and before the scale.
        similarity: one of the four above.
        scale: s, a number or a 0-dim tensor (which may require gradients).
        precision: of the product; ``None`` follows the inputs' dtype and autocast.
        checked: the caller has checked the other arguments.
        relative: leave out of distances what all classes of a sample have in common: of features
            far from 0 it would round away all differences.

    Returns:
        (N, C), float32 or float64.

    Example:
        >>> W = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> similarity_logits(torch.tensor([[3.0, 4.0]]), W, similarity="cosine")
        tensor([[0.6000, 0.8000]])
    """
    check_scale(scale)
    if not checked:
        check_choice("similarity", similarity, SIMILARITIES)
        check_classifier(features, prototypes, bias, sub_centers=True)
    precision = resolve_precision(precision, features, prototypes)
    with without_autocast(features):
        return dense_logits(
            affine_form(
                features,
                prototypes,
                bias=bias,
                similarity=similarity,
                scale=scale,
                precision=precision,
                relative=relative,
            )
        )
