"""Labels to doubt: samples far from the dominant sub-center of their class (Deng et al. 2020)."""

import math
from typing import NamedTuple, Unpack

from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_number
from largemargin.heads.class_head import ClassHead
from largemargin.heads.sub_center_head import SubCenterHead
from largemargin.measuring.batches import DataBatch, Source, need_labels
from largemargin.measuring.logit_model import LogitModel, ReadingOptions, columns_of


class WrongLabels(NamedTuple):
    """What :func:`find_wrong_labels` doubts."""

    rows: Tensor
    """Places of the doubted samples in the data, furthest from their class first."""
    angles: Tensor
    """(N,) radians between each sample and the dominant sub-center of its label."""
    head: ClassHead
    """An ordinary head of the dominant sub-centers, to put in place of the model's."""


def find_wrong_labels(
    model: nn.Module,
    data: Source,
    *,
    max_angle: float = math.radians(75),
    **options: Unpack[ReadingOptions],
) -> WrongLabels:
    """Training samples whose label is probably wrong, by a model that ends in a sub-center head.

    Pass the training data in a fixed order and without augmentation. The paper drops what is found
    and trains anew from scratch, with one prototype a class.

    Args:
        model: any model :func:`largemargin.attach` can read, trained with a
            :class:`~largemargin.SubCenterHead`.
        data: a split or a loader with the labels to be checked.
        max_angle: radians from the dominant sub-center; default 75 degrees (paper, on faces). Look
            at a histogram of ``angles`` before you trust it on other data.
        options: batch_size, device, workers, sync and progress as in :func:`accuracy_of`.

    Example:
        >>> from largemargin import SubCenterHead
        >>> head = SubCenterHead(2, 2, centers=2)
        >>> with torch.no_grad():
        ...     _ = head.weight.copy_(torch.tensor([[[1.0, 0], [0, 1]], [[-1, 0], [0, -1]]]))
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.2], [0.0, 1.0], [-1.0, 0.0]])
        >>> find_wrong_labels(nn.Sequential(head), [(x, torch.tensor([0, 0, 0, 1]))]).rows
        tensor([2])
    """
    check_number("max_angle", max_angle, above=0, at_most=math.pi, hint="It is in radians.")
    reader = LogitModel(model)
    head = reader.head
    if not isinstance(head, SubCenterHead):
        raise LargeMarginError(
            "find_wrong_labels needs a model that ends in an lm.SubCenterHead, but its head is a "
            f"{type(head).__name__}. Train one: model.fc = lm.SubCenterHead(dim, classes). With "
            "one prototype a class wrong labels have no place of their own."
        )

    def columns(batch: DataBatch) -> tuple[Tensor, Tensor, Tensor]:
        labels = need_labels(batch.labels)
        features = reader.read(batch.inputs)[1]
        return head.own_cosines(features, labels), labels, batch.indices

    empty = "there are no labels to check: the data is empty."
    cosines, labels, index = columns_of(reader, data, columns, "labels", empty, **options)
    order = index.argsort(stable=True)
    dominant = head.dominant(cosines[order], labels[order])
    angles = dominant.angles
    rows = angles.argsort(descending=True)
    return WrongLabels(rows[angles[rows] > max_angle], angles, dominant.head)
