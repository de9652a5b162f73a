"""AdaCos: softmax on cosines with a scale that follows the training (Zhang et al. 2019)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from largemargin.losses.base.angles import clipped
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.running_statistics import RunningStatistics
from largemargin.losses.base.scale import adacos_scale
from largemargin.losses.base.terms import mean_over_targets, scaled_cosines
from largemargin.losses.cosface import cosface
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.distributed import gather_numbers, gather_ragged


class AdaCos(Loss):
    r"""AdaCos (BAS-ADACOS), dynamic form: :class:`NormFace` with a scale from the batches.

    .. math:: s \leftarrow \frac{\log B}{\cos\min(\frac\pi4, \theta_{med})},\qquad
              B = \frac1N\sum_i\sum_{j\ne y_i} e^{s\cos\theta_{ij}},\qquad
              s_0 = \sqrt2\,\log(C-1)

    with the median of the target angles. The scale starts at that of the fixed form
    (:func:`adacos_scale`, for the ``scale`` of any other loss) and shrinks as the angles do, so
    that samples go on getting gradient. It has no margin. The statistics of a training batch are
    taken twice, at the old and at the new scale.

    ``attach`` gives the head the scale of the fixed form, whatever this one has become.

    Args:
        num_classes: C, at least 3: the logarithm is 0 for two.
        options: those of every :class:`Loss`, with ``sync=True``: B and median of the joint batch.

    State: ``running.values``, s.

    Departures: a batch whose log B is not positive leaves the scale as it was.

    Example:
        Before the first batch, with rivals at 90 degrees: log(1 + (C-1)/exp(s)), and exp(s) is the
        sqrt(2)-th power of C - 1

        >>> AdaCos(4).eval()(torch.eye(4)[:1], torch.eye(4), torch.tensor([0]))
        tensor(0.4913)
    """

    key: ClassVar[str] = "adacos"
    refuses: ClassVar[dict[str, str]] = {"class_margin": "it has no margin."}
    not_tuned: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[dict[str, Any]] = {"sync": True}
    head_similarity: ClassVar[str | None] = "cosine"
    counts_rows: ClassVar[bool] = True

    def __init__(self, num_classes: int, **options: Unpack[LossOptions]) -> None:
        super().__init__(**{**self.defaults, **options})
        self.num_classes = num_classes
        self.running = RunningStatistics(adacos_scale(num_classes), rate=1.0)

    def scale_for(self, num_classes: int) -> float:
        return adacos_scale(num_classes)

    def per_sample(self, *inputs: Tensor, kept: Tensor | None = None) -> Tensor:
        features, prototypes, labels = inputs

        def of_batch(before: Tensor) -> Tensor:
            rows = features, prototypes, labels
            how: ComputeOptions = {**self.how, "log_prior": None}
            _, target, rest = scaled_cosines(*rows, before[0], how)
            rest = mean_over_targets(rest.exp(), labels).log() if labels.dim() == 2 else rest
            angles = mean_over_targets(clipped(target / before[0]).arccos(), labels)
            counted = torch.ones_like(angles, dtype=torch.bool) if kept is None else kept
            mass = torch.where(counted, rest, -torch.inf).logsumexp(0)
            angles = torch.where(counted, angles, torch.nan)
            count = counted.sum().to(rest.dtype)
            if self._synced:
                mass, count = gather_numbers(mass).logsumexp(0), gather_numbers(count).sum()
                angles = gather_ragged(angles, torch.nan)
            scale = (mass - count.log()) / angles.nanmedian().clamp_max(math.pi / 4).cos()
            return torch.where(scale > 0, scale, torch.nan)[None]

        scale: Any = self.running(features, of_batch)[0]
        return cosface(features, prototypes, labels, margin=0.0, scale=scale, **self.how)
