"""How tight classes are, how far they stay from their boundaries, and what scaling does to both."""

from typing import NamedTuple

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_inputs,
    check_labels,
    check_matrix,
    check_number,
)
from largemargin.geometry.margins import class_minimum
from largemargin.geometry.pairs import (
    blocks,
    closest_pair,
    diameters,
    distances,
    row_distance,
    widen,
)
from largemargin.ops.boundary import DEGENERATE
from largemargin.ops.norms import promote
from largemargin.shapes import Features, Labels, Prototypes


class BoundaryMargins(NamedTuple):
    """Distance of each class to its closest boundary: see :func:`boundary_margins`."""

    unsigned: Tensor
    signed: Tensor

    @property
    def smallest(self) -> Tensor:
        """Smallest unsigned margin over the classes that have samples, 0-dim."""
        return _skip_nan(self.unsigned, torch.inf).min()

    @property
    def smallest_signed(self) -> Tensor:
        """Smallest signed margin over the classes that have samples, 0-dim."""
        return _skip_nan(self.signed, torch.inf).min()


class IdealFeatureRatio(NamedTuple):
    """Widest class over closest classes: see :func:`ideal_feature_ratio`."""

    ratio: Tensor
    dispersion: Tensor
    separation: Tensor


class VarianceSplit(NamedTuple):
    """Variance inside and between classes: see :func:`variance_split`."""

    within: Tensor
    between: Tensor
    total: Tensor
    ratio: Tensor


class RescaledNetwork(NamedTuple):
    """Parameters after :func:`rescale_network`."""

    weight: Tensor
    bias: Tensor | None
    head_bias: Tensor | None


def _skip_nan(values: Tensor, filler: float) -> Tensor:
    return torch.where(values.isnan(), filler, values)


def _check_labelled(features: Features, labels: Labels, num_classes: int) -> None:
    check_matrix("features", features, "(N, D)")
    check_number("num_classes", num_classes, at_least=1)
    check_labels(labels, features.shape[0], num_classes, soft=False)
    check_all_finite(features=features)


def class_dispersion(features: Features, labels: Labels, num_classes: int) -> Tensor:
    r"""Diameter of each class in feature space (LMD Definition 4.1, NGY-D4).

    .. math:: \operatorname{dispersion}(c) = \max_{n, n': y_n = y_{n'} = c} \|q_n - q_{n'}\|

    Exact: all pairs are visited, in tiles, so no N x N buffer is formed. A compactness loss of 0
    bounds it by twice the radius :math:`\delta_v` (LMD Proposition 4.1). Carries no gradient.

    Args:
        features: (N, D), of the whole set the statement is about, not of one batch.
        labels: (N,) class indices.
        num_classes: C.

    Returns:
        (C,); 0 for a class with one sample, NaN for a class with none.

    Example:
        >>> class_dispersion(torch.tensor([[0.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]), 3)
        tensor([3., 0., nan])
    """
    _check_labelled(features, labels, num_classes)
    found = diameters(features.detach(), labels, num_classes)
    return found.to(promote(features).dtype).to(features.device)


def largest_dispersion(features: Features, labels: Labels, num_classes: int) -> Tensor:
    """Largest :func:`class_dispersion` over the classes that have samples, 0-dim.

    Example:
        >>> largest_dispersion(torch.tensor([[0.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]), 3)
        tensor(3.)
    """
    return _skip_nan(class_dispersion(features, labels, num_classes), -torch.inf).max()


def boundary_margins(
    features: Features, prototypes: Prototypes, labels: Labels, *, bias: Tensor | None = None
) -> BoundaryMargins:
    r"""Distance of each class to its closest decision boundary (LMD Definition 4.2, NGY-D4).

    .. math::
        \operatorname{margin}(c) = \min_{n: y_n = c}\ \min_{i\ne c}
            \frac{|z_c - z_i|}{\|W_c - W_i\|}, \qquad
        \operatorname{signed}(c) = \min_{n: y_n = c}\ \min_{i\ne c}
            \frac{z_c - z_i}{\|W_c - W_i\|}

    The definition of the paper is unsigned: a misclassified sample counts with a positive
    distance. The signed form is negative as soon as one sample of the class is misclassified, and
    is the one to read. Two prototypes within 1e-12 have no boundary; the pair counts as distance 0
    (O17). Computed in tiles of samples and classes. Carries no gradient.

    Args:
        features: (N, D), of the whole set.
        prototypes: (C, D), C >= 2.
        labels: (N,) class indices.
        bias: (C,) or None.

    Returns:
        ``unsigned`` and ``signed``, each (C,), NaN for a class without samples. Their minima over
        the classes present are ``.smallest`` and ``.smallest_signed``.

    Example:
        >>> W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> boundary_margins(torch.tensor([[3.0, 1.0]]), W, torch.tensor([0])).signed
        tensor([3., nan])
    """
    check_inputs(features, prototypes, labels, bias=bias, soft=False, check_finite=True)
    dtype = torch.promote_types(promote(features).dtype, promote(prototypes).dtype)
    q, W, labels = widen(features), widen(prototypes), labels.long()
    b = W.new_zeros(W.shape[0]) if bias is None else widen(bias).to(W.dtype)
    # Samples of one class stand together, so that ||W_c - W_i|| is computed about once per class.
    order = labels.argsort(stable=True)
    signed = q.new_full((len(q),), torch.inf)
    unsigned = signed.clone()
    for rows in blocks(len(q)):
        members = order[rows]
        classes, position = torch.unique(labels[members], return_inverse=True)
        own = (q[members] * W[labels[members]]).sum(1) + b[labels[members]]
        for columns in blocks(len(W)):
            length = distances(W[classes], W[columns])
            gap = own[:, None] - (q[members] @ W[columns].T + b[columns])
            inverse = torch.where(length <= DEGENERATE, 0.0, 1 / length)
            gap *= inverse[position]
            others = torch.arange(columns.start, columns.stop, device=labels.device)
            gap.masked_fill_(labels[members, None] == others, torch.inf)
            signed[members] = torch.minimum(signed[members], gap.amin(1))
            unsigned[members] = torch.minimum(unsigned[members], gap.abs_().amin(1))
    per_class = [class_minimum(values, labels, len(W)) for values in (unsigned, signed)]
    return BoundaryMargins(
        *(torch.where(values == torch.inf, torch.nan, values).to(dtype) for values in per_class)
    )


def ideal_feature_ratio(features: Features, labels: Labels, num_classes: int) -> IdealFeatureRatio:
    r"""Widest class relative to the closest two classes (LMD Proposition 4.2).

    .. math:: \frac{\max_c \operatorname{dispersion}(c)}
        {\min_{y_n \ne y_{n'}} \|q_n - q_{n'}\|}

    Below 1 the features are ideal in the sense of LMD: every distance inside a class is smaller
    than every distance between classes. Zero compactness and margin losses with
    :math:`\delta_d > 2\delta_v` imply a ratio of at most
    :math:`\delta_v/(\delta_d - \delta_v) < 1`. Carries no gradient.

    Args as in :func:`class_dispersion`.

    Returns:
        ``ratio``, ``dispersion`` (the numerator) and ``separation`` (the denominator), 0-dim. With
        a single class present the separation is +inf and the ratio 0; samples of two classes at
        the same place give separation 0 and ratio +inf.

    Example:
        >>> ideal_feature_ratio(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), 2)[0]
        tensor(0.2500)
    """
    _check_labelled(features, labels, num_classes)
    if features.shape[0] == 0:
        raise LargeMarginError("features must hold at least one sample, but N = 0 was given.")
    dispersion = largest_dispersion(features, labels, num_classes)
    pair = closest_pair(features, labels)
    separation = torch.full_like(dispersion, torch.inf)
    if pair is not None:
        separation = row_distance(features, pair).to(dispersion.dtype)
    ratio = torch.where(separation == 0, torch.inf, dispersion / separation)
    return IdealFeatureRatio(ratio, dispersion, separation)


def variance_split(embedding: Features, labels: Labels) -> VarianceSplit:
    r"""Variance within and between classes of an embedding (ODN Tables 2 and 3, ODN-VAR).

    .. math::
        \mathrm{within} = \frac1N\sum_n \|e_n - \bar e_{y_n}\|^2,\qquad
        \mathrm{between} = \sum_c \frac{N_c}{N}\|\bar e_c - \bar e\|^2,\qquad
        \mathrm{within} + \mathrm{between} = \mathrm{total}

    The ratio between/within is what the tables print and what grows with compactness; their row
    labels "inter" and "intra" are exchanged (erratum D3). Classes weigh by their size (O15). The
    paper uses 2-D t-SNE embeddings of the last hidden layer; any embedding will do.

    Args:
        embedding: (N, D), N >= 1.
        labels: (N,) integers; each distinct value is a class.

    Returns:
        ``within``, ``between``, ``total``, ``ratio``, 0-dim. The ratio is +inf when every class
        has collapsed to a point: within is then exactly 0.

    Example:
        >>> embedding = torch.tensor([[0.0], [2.0], [9.0], [11.0]])
        >>> variance_split(embedding, torch.tensor([0, 0, 1, 1])).ratio
        tensor(20.2500)
    """
    check_matrix("embedding", embedding, "(N, D)")
    if embedding.shape[0] == 0:
        raise LargeMarginError("embedding must hold at least one sample, but N = 0 was given.")
    # Classes are the distinct labels, whatever their values, so none is out of range.
    check_labels(labels, embedding.shape[0], 1, soft=False, validate=False)
    rows = widen(embedding)
    classes, inverse = torch.unique(labels, return_inverse=True)
    sizes = torch.bincount(inverse, minlength=len(classes)).to(rows.dtype)[:, None]
    # Each class is measured from one of its own samples, so that a collapsed class is exactly so.
    anchors = rows.new_empty(len(classes), rows.shape[1])
    anchors[inverse] = rows
    relative = rows - anchors[inverse]
    offsets = torch.zeros_like(anchors).index_add_(0, inverse, relative) / sizes
    center = rows.mean(0)
    within = (relative - offsets[inverse]).square().sum() / len(rows)
    between = ((anchors + offsets - center).square() * sizes).sum() / len(rows)
    total = (rows - center).square().sum() / len(rows)
    ratio = torch.where(within == 0, torch.inf, between / within)
    dtype = promote(embedding).dtype
    return VarianceSplit(*(value.to(dtype) for value in (within, between, total, ratio)))


def rescale_network(
    weight: Tensor, bias: Tensor | None, head_bias: Tensor | None, *, factor: float
) -> RescaledNetwork:
    r"""The transform :math:`T_\alpha` of the last layers (LMD Proposition 4.4, NGY-P4.4).

    .. math:: T_\alpha: (W^-, b^-, b) \mapsto \alpha\,(W^-, b^-, b), \qquad \alpha > 0

    :math:`W^-, b^-` is the (ReLU or linear) layer that produces the features and b the bias of the
    classifier; the prototypes W stay. Features, margins and dispersions are multiplied by
    :math:`\alpha`, predictions do not change, probabilities and the softmax loss do (erratum N10).
    So margins can only be compared relative to dispersions, and only
    :math:`\delta_d/\delta_v` matters up to rescaling.

    Args:
        weight: :math:`W^-`, any shape.
        bias: :math:`b^-`, or None for a layer without one.
        head_bias: b, or None.
        factor: :math:`\alpha > 0`.

    Returns:
        New tensors ``weight``, ``bias``, ``head_bias``; the arguments are left alone.

    Example:
        >>> rescale_network(torch.eye(2), None, torch.tensor([1.0, 0.0]), factor=2.0).head_bias
        tensor([2., 0.])
    """
    hint = "A ReLU layer commutes with positive factors only."
    check_number("factor", factor, above=0, hint=hint)
    biases = (None if each is None else factor * each for each in (bias, head_bias))
    return RescaledNetwork(factor * weight, *biases)
