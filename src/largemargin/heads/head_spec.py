"""How a head makes logits, as plain data: what a loss asks for, and what a loss is handed."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from largemargin.ops.norms import normalize, promote
from largemargin.ops.similarity import HeadLogits, similarity_logits
from largemargin.shapes import Logits


class HeadSpec(NamedTuple):
    """How a head must make its logits to predict with the geometry a loss trains."""

    similarity: str
    scale: float = 1.0
    bias: bool = False
    """Whether a bias may take part; a head without one is fine either way."""


@dataclass(eq=False, repr=False, slots=True)
class HeadView:
    """Class vectors and how logits are made from them; stands wherever a head may stand.

    A loss reads ``weight``, ``bias``, ``similarity`` and ``scale`` of whatever holds prototypes.
    This one holds tensors, so that a sharded weight can be gathered first.
    """

    weight: Tensor
    bias: Tensor | None = None
    similarity: str = "dot"
    scale: float = 1.0
    made: HeadLogits | None = None
    """The logits of the features that a loss is called with, where the head has made them."""
    label_range: tuple[float, float] | None = None
    """The smallest and the largest of the labels of that call, where they were looked at."""

    def __repr__(self) -> str:
        num_classes, dim = self.weight.shape[0], self.weight.shape[-1]
        return (
            f"HeadView(in_features={dim}, num_classes={num_classes}, "
            f"similarity={self.similarity!r}, scale={self.scale}, bias={self.bias is not None})"
        )

    def __call__(self, features: Tensor) -> Logits:
        return similarity_logits(
            features, self.weight, bias=self.bias, similarity=self.similarity, scale=self.scale
        )


def boundary_form(
    prototypes: object, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    r"""Weight and bias of a linear classifier with the same decision boundaries.

    A cosine head decides by :math:`\langle\hat W_j, q\rangle` (the feature norm does not matter), a
    Euclidean one by :math:`\langle W_j, q\rangle - \tfrac12\|W_j\|^2`. Distances to boundaries are
    distances to those of this classifier.
    """
    similarity = getattr(prototypes, "similarity", "dot")
    if similarity in ("cosine", "cosine_prototypes"):
        return normalize(weight), bias if similarity == "cosine_prototypes" else None
    if similarity == "euclidean":
        half = -0.5 * promote(weight).square().sum(1)
        return weight, half if bias is None else half + bias
    return weight, bias
