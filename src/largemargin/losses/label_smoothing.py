"""Label smoothing as a loss: cross entropy with a share of the target for every class (LMS 13)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import SHARE, Dimension, Limits, Range
from largemargin.losses.base.terms import LogitOptions, class_count, over_targets, require, stats_of
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class LabelSmoothing(LogitLoss):
    r"""Label smoothing (KOB-13; LMS 13).

    .. math:: -(1-\lambda)\log p_y - \frac\lambda C\sum_c \log p_c

    The mass lambda/C falls on the target too, as in torch. Unlike the option of the same name it
    needs no (N, C) targets, so it runs with ``impl="chunked"``.

    Args:
        smoothing: lambda in [0, 1], default 0.1 (LMS).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: none.

    Example:
        >>> LabelSmoothing()(torch.zeros(1, 4), torch.tensor([0]))
        tensor(1.3863)
    """

    key: ClassVar[str] = "label_smoothing"
    limits: ClassVar[Mapping[str, Limits]] = {"smoothing": SHARE}
    search_space: ClassVar[Mapping[str, Dimension]] = {"smoothing": Range(0.01, 0.3)}

    def __init__(
        self,
        *,
        smoothing: float = 0.1,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("smoothing", smoothing, at_least=0, at_most=1)
        self.smoothing = smoothing

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return label_smoothing(*inputs, smoothing=self.smoothing, **logits, **self.how)


def label_smoothing(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    smoothing: float = 0.1,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Label smoothing per sample; :class:`LabelSmoothing` has equation, arguments and example."""
    check_number("smoothing", smoothing, at_least=0, at_most=1)
    num_classes = class_count(features, prototypes, labels)
    stats, labels = stats_of(features, prototypes, labels, ("target", "rest", "mean"), options)
    target = require(stats.target)
    softmax = F.softplus(require(stats.rest) - target)
    to_rivals = smoothing * (num_classes - 1) / num_classes
    return over_targets(softmax + to_rivals * (target - require(stats.mean)), labels)
