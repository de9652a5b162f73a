"""Penalties on the prototypes alone: zero centroid (LTLM) and super-symmetry (LMS)."""

from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from largemargin.errors import check_matrix, check_num_classes, check_number
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.terms import matrix_of
from largemargin.ops.matmul import without_autocast
from largemargin.ops.norms import SQUARABLE, promote, safe_norm
from largemargin.ops.norms import normalize as normalize_rows
from largemargin.ops.shards import refuse_sharded, shard_of, sum_of_shards
from largemargin.shapes import Prototypes

_ONE_VALUE = "the penalty is one number for the whole prototype matrix, without samples."
_NOT_PER_SAMPLE = {
    "weight": _ONE_VALUE,
    "prior": "it has no logits.",
    "sample_weight": _ONE_VALUE,
    "ignore_index": _ONE_VALUE,
    "soft_targets": _ONE_VALUE,
    "label_smoothing": _ONE_VALUE,
    "class_margin": _ONE_VALUE,
    "reduction": _ONE_VALUE,
    "chunked": "it costs O(CD) or a (C, C) matrix, not (N, C).",
}


class ZeroCentroid(Loss):
    r"""Zero-centroid regularizer (ZHO-RW), :math:`R_W = \|\frac1C\sum_j w_j\|^2`.

    With the centroid at zero, GM-Softmax keeps its optimum at the simplex on imbalanced data too
    (LTLM Thm 8), and LM-Softmax recovers from its collapse (Table 2). Call it with the prototypes
    alone: ``ZeroCentroid()(head)``.

    Args:
        strength: factor of R_W; the paper prints none, default 1 (O12). A public script uses 5
            times the squared norm of the *sum*: 5 C^2 here.
        normalize: use unit rows (default: the theorem assumes them) or the raw rows.
        options: those of every :class:`Loss` that a number without samples can have.

    Example:
        >>> ZeroCentroid()(torch.tensor([[3.0, 0.0], [-1.0, 0.0]]))
        tensor(0.)
    """

    key: ClassVar[str] = "zero_centroid"
    is_penalty: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("prototypes",)
    refuses: ClassVar[dict[str, str]] = _NOT_PER_SAMPLE

    def __init__(
        self, *, strength: float = 1.0, normalize: bool = True, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        check_number("strength", strength, at_least=0)
        self.strength = strength
        self.normalize = normalize

    def forward(  # type: ignore[override]
        self, prototypes: Tensor | nn.Module, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        self._refuse("sample_weight", sample_weight is not None)
        return self.strength * zero_centroid(matrix_of(prototypes), normalize=self.normalize)


def zero_centroid(prototypes: Prototypes, *, normalize: bool = True) -> Tensor:
    """Squared length of the mean of prototypes (C, D), 0-dim; the equation: :class:`ZeroCentroid`.

    ``normalize`` takes unit rows (default: the theorem assumes them) or the raw ones. Of class
    vectors that several processes hold every process has to call.
    """
    check_matrix("prototypes", prototypes, "(C, D)")
    check_num_classes(prototypes.shape[0])
    shard = shard_of(prototypes, None)
    rows = normalize_rows(shard.columns) if normalize else promote(shard.columns)
    return (sum_of_shards(rows.sum(0), shard) / shard.num_classes).square().sum()


class SuperSymmetry(Loss):
    r"""``strength`` times the squared distance from super-symmetry (KOB-SS; LMS section 3).

    .. math:: \alpha\,\Bigl\|\frac{G}{v} - \frac{C I - 11^\top}{C-1}\Bigr\|_F^2,\quad
              G = WW^\top,\ v = \tfrac1C\,\mathrm{tr}\,G

    0 with zero gradient exactly at a simplex of any size, scale-free. Call it with the prototypes
    alone; it costs a (C, C) matrix. ``SimplexHead`` is the exact alternative: super-symmetric at
    every step.

    Args:
        strength: alpha, default 1, our choice (O20).
        options: those of every :class:`Loss` that a number without samples can have.

    Departures: LMS gives the constraint in a supplement that is not public; this residual is our
    reading.

    Example:
        >>> SuperSymmetry()(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]))
        tensor(0.)
    """

    key: ClassVar[str] = "super_symmetry"
    is_penalty: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("prototypes",)
    refuses: ClassVar[dict[str, str]] = _NOT_PER_SAMPLE

    def __init__(self, *, strength: float = 1.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        check_number("strength", strength, at_least=0)
        self.strength = strength

    def forward(  # type: ignore[override]
        self, prototypes: Tensor | nn.Module, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        self._refuse("sample_weight", sample_weight is not None)
        return self.strength * super_symmetry_penalty(matrix_of(prototypes))


def super_symmetry_penalty(prototypes: Prototypes) -> Tensor:
    """:func:`super_symmetry` squared, 0-dim: the penalty of :class:`SuperSymmetry`."""
    return super_symmetry(prototypes).square()


def super_symmetry(prototypes: Prototypes) -> Tensor:
    """Distance of prototypes (C, D) from super-symmetry, 0-dim: the norm in :class:`SuperSymmetry`.

    Example:
        >>> super_symmetry(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]))
        tensor(0.)
    """
    check_matrix("prototypes", prototypes, "(C, D)")
    check_num_classes(prototypes.shape[0])
    refuse_sharded(prototypes, "super_symmetry", "it compares all pairs of class vectors.")
    rows = promote(prototypes)
    num_classes = rows.shape[0]
    # Scale-free, so that rows whose squares leave the range of their dtype are divided first.
    largest = rows.detach().abs().amax()
    far = (largest > SQUARABLE[1]) | ((largest < SQUARABLE[0]) & (largest > 0))
    rows = rows / torch.where(far, largest, 1)
    with without_autocast(rows):
        gram = rows @ rows.T
    size = torch.diagonal(gram).mean()
    wanted = torch.eye(num_classes, dtype=rows.dtype, device=rows.device) * num_classes - 1
    # All-zero prototypes have no direction: the residual is then that of the zero matrix.
    scaled = gram / torch.where(size > 0, size, 1)
    # By rows: one float32 sum over all C^2 squares would lose three digits at 1000 classes.
    return safe_norm(safe_norm(scaled - wanted / (num_classes - 1)))
