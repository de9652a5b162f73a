"""LM-Softmax: the target leaves the denominator (LTLM)."""

from typing import Unpack

from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.loss import Loss, LossOptions
from largemargin.losses.terms import expect, need
from largemargin.ops import ComputeOptions, class_stats
from largemargin.shapes import Features, Labels, PerSample, Prototypes


def lm_softmax(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    scale: float = 64.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    r"""Largest-margin softmax (ZHO-LM).

    .. math:: \ell_i = \frac1s \log\sum_{j\ne y} e^{s(\cos\theta_j - \cos\theta_y)}
                    = \frac{\mathrm{rest} - \mathrm{target}}{s}

    It lies in [-gamma_i, -gamma_i + log(C-1)/s] with gamma_i the cosine sample margin, so negative
    values are normal and minimising it maximises the smallest margin as s grows. It never stops
    pushing; on imbalanced data it collapses unless combined with :func:`zero_centroid` (LTLM
    Table 2).

    Args:
        features: (N, D).
        prototypes: (C, D).
        labels: (N,) or soft targets (N, C).
        scale: s > 0; LTLM uses 10, 20 and 64; default 64.

    Departures: erratum Z8 concerns an inequality about it, not the loss.

    Example:
        With two classes it is cos_other - cos_target for every s:

        >>> W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> lm_softmax(torch.tensor([[3.0, 4.0]]), W, torch.tensor([1]))
        tensor([-0.2000])
    """
    check_number("scale", scale, above=0)
    stats = class_stats(
        features,
        prototypes,
        labels,
        similarity="cosine",
        scale=scale,
        want=("target", "rest"),
        **how,
    )
    return expect((need(stats.rest) - need(stats.target)) / scale, labels)


class LMSoftmax(Loss):
    """Module form of :func:`lm_softmax`, with the options of :class:`Loss`."""

    def __init__(self, *, scale: float = 64.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        check_number("scale", scale, above=0)
        self.scale = scale

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return lm_softmax(*inputs, scale=self.scale, **self.how)
