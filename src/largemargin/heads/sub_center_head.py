"""``SubCenterHead``: several prototypes a class, so that wrong labels can gather at their own."""

from typing import NamedTuple, Never, Self

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_count, check_labels
from largemargin.heads.class_head import ClassHead
from largemargin.heads.topk import flat_features
from largemargin.ops.matmul import without_autocast
from largemargin.ops.norms import normalize
from largemargin.ops.similarity import in_one_dtype
from largemargin.shapes import Features, Labels


class DominantCenters(NamedTuple):
    """The fullest sub-center of each class, and how far its samples are from it."""

    head: ClassHead
    """An ordinary head of the dominant sub-centers; it owns copies."""
    centers: Tensor
    """(C,), which of the K sub-centers it is."""
    angles: Tensor
    """(N,) radians between each sample and the dominant sub-center of its label."""


class SubCenterHead(ClassHead):
    r"""K prototypes a class, of which the nearest counts (Deng et al. 2020, sub-center ArcFace).

    .. math:: l_j(q) = s\,\max_{k\le K}\mathrm{sim}(q, W_{jk})

    One prototype has to please every sample of its class, also those with a wrong label. With
    several, wrong labels can gather at a sub-center of their own, and the others stay clean. Give
    it to a loss where a :class:`ClassHead` stands, or make it the last layer of a model and call
    ``attach``: every loss that is a function of the class statistics takes it (ArcFace, CosFace,
    LM-Softmax, cross entropy, ...), dense and with ``impl="chunked"``. Losses on centroids, and
    those that need the length of a class vector, refuse it. So do the fused kernels, which score
    one vector per class, and :class:`ShardedClassHead` has no sub-centers.

    After training, :meth:`own_cosines` and :meth:`dominant` find the labels to doubt and leave an
    ordinary head (:func:`largemargin.measuring.find_wrong_labels` does both for a model). The paper
    drops samples further than 75 degrees from the dominant sub-center and trains anew.

    Args:
        in_features: D.
        num_classes: C, at least 2.
        centers: K, default 3 (paper). More than the kinds of samples a class really has split it.
        similarity: default ``"cosine"`` (paper).
        scale, bias, device, dtype: as in :class:`ClassHead`; the bias is one number per class.

    Shape:
        ``weight`` (C, K, D), ``bias`` (C,) or None; features (..., D) give logits (..., C).

    Example:
        >>> head = SubCenterHead(2, 2, centers=2)
        >>> with torch.no_grad():
        ...     _ = head.weight.copy_(torch.tensor([[[1.0, 0], [0, 1]], [[-1, 0], [0, -1]]]))
        >>> head(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[ 0.8000, -0.6000]])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        centers: int = 3,
        similarity: str = "cosine",
        scale: float = 1.0,
        bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("centers", centers, at_least=1, hint="It counts the prototypes of a class.")
        super().__init__(
            in_features, num_classes, similarity=similarity, scale=scale, bias=bias, device="meta"
        )
        self.centers = centers
        rows = torch.empty((num_classes, centers, in_features), device=device, dtype=dtype)
        self.weight = nn.Parameter(rows)
        if self.bias is not None:
            self.bias = nn.Parameter(rows.new_empty(num_classes))
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        centers: int = 3,
        similarity: str = "cosine",
        scale: float = 1.0,
        bias: bool | None = None,
    ) -> Self:
        """A head whose first sub-centers are copies of the rows of ``linear``.

        The others are random, as a new head's: copies of one row would all be the nearest or none.
        """
        source = ClassHead.from_linear(linear, similarity=similarity, scale=scale, bias=bias)
        head = cls(
            *(linear.in_features, linear.out_features),
            centers=centers,
            similarity=similarity,
            scale=scale,
            bias=source.bias is not None,
            device=source.weight.device,
            dtype=source.weight.dtype,
        )
        with torch.no_grad():
            head.weight[:, 0] = source.weight
            if head.bias is not None and source.bias is not None:
                head.bias.copy_(source.bias)
        return head.train(linear.training)

    @torch.no_grad()
    def own_cosines(self, features: Features, labels: Labels) -> Tensor:
        """Cosines (N, K) of samples (N, D) to the sub-centers of their labels (N,).

        Join those of all batches, ``torch.cat``, for :meth:`dominant`.
        """
        rows = flat_features(features, self.in_features)
        self._check_labels(labels, len(rows))
        with without_autocast(rows):
            points, own = in_one_dtype(rows, self.weight[labels.long()])
            return torch.einsum("nd,nkd->nk", normalize(points), normalize(own))

    @torch.no_grad()
    def dominant(self, cosines: Tensor, labels: Labels) -> DominantCenters:
        """Of each class the sub-center that most of its samples are nearest to; drops the others.

        Takes what :meth:`own_cosines` gives of the training samples and their labels. The first of
        equally full ones counts, also for a class without samples.

        Example:
            >>> head = SubCenterHead(2, 2, centers=2)
            >>> own = torch.tensor([[0.9, 0.1], [0.8, 0.0], [0.2, 1.0]])
            >>> found = head.dominant(own, torch.tensor([0, 0, 0]))
            >>> found.centers.tolist(), found.angles.rad2deg().round().tolist()
            ([0, 0], [26.0, 37.0, 78.0])
        """
        if cosines.shape != (len(labels), self.centers):
            raise LargeMarginError(
                f"cosines must have shape (N, K) = ({len(labels)}, {self.centers}), one row per "
                f"label, but their shape is {tuple(cosines.shape)}. Pass those of own_cosines("
                "features, labels), those of several batches joined by torch.cat."
            )
        self._check_labels(labels, len(cosines))
        labels = labels.long().to(cosines.device)
        place = labels * self.centers + cosines.argmax(1)
        counts = torch.bincount(place, minlength=self.num_classes * self.centers)
        centers = counts.reshape(self.num_classes, self.centers).argmax(1)
        angles = cosines.gather(1, centers[labels, None]).squeeze(1).clamp(-1, 1).arccos()
        head = ClassHead(
            *(self.in_features, self.num_classes),
            similarity=self.similarity,
            scale=self.scale,
            bias=self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        index = torch.arange(self.num_classes, device=self.weight.device)
        head.weight.copy_(self.weight[index, centers.to(self.weight.device)])
        if head.bias is not None and self.bias is not None:
            head.bias.copy_(self.bias)
        return DominantCenters(head.train(self.training), centers, angles)

    def _check_labels(self, labels: Tensor, samples: int) -> None:
        skip = "leave their samples out"
        check_labels(labels, samples, self.num_classes, soft=False, skip=skip, validate=True)

    def to_linear(self) -> Never:
        """No linear layer takes a maximum: raises."""
        raise LargeMarginError(
            "to_linear needs one vector per class, but SubCenterHead has "
            f"{self.centers}. Keep the dominant ones: head.dominant(cosines, labels).head."
        )

    def extra_repr(self) -> str:
        first, _, rest = super().extra_repr().partition(", similarity")
        return f"{first}, centers={self.centers}, similarity{rest}"
