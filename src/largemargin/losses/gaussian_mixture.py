"""Large-margin Gaussian mixture loss (Wan et al. 2018)."""

from collections.abc import Mapping
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_all_finite,
    check_classifier,
    check_number,
    has_sub_centers,
)
from largemargin.heads.head_spec import HeadSpec
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.schedules import Ramp, Schedule, share_of
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.base.settings import size_as_built
from largemargin.losses.base.terms import at_target, check_setting, over_targets, target_and_rest
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.norms import promote
from largemargin.ops.scheduled_values import current
from largemargin.ops.shards import is_shared, refuse_sharded
from largemargin.ops.similarity import common_origin, in_one_dtype
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class GaussianMixture(Loss):
    r"""Large-margin Gaussian mixture loss (BAS-LGM).

    .. math:: d_k = \tfrac12\sum_l (q_l-\mu_{kl})^2 e^{-v_{kl}},\quad
              g_k = \tfrac12\sum_l v_{kl},\quad
              \ell = \mathrm{CE}\bigl(-d - g,\ \text{target lowered by } \alpha d_y\bigr)
                   + \lambda(d_y + g_y)

    The prototypes are the means mu; the log-variances v belong to the loss. The distances are one
    matrix product of (q, q^2) with per-class coefficients, so the chunked operator serves here too.
    Predict with alpha = 0.

    Args:
        num_classes: C.
        dim: D.
        alpha: margin >= 0; 1 for small problems, 0.3 CIFAR size (default), 0.01 ImageNet
            (original); raised gradually in training.
        likelihood_weight: lambda >= 0, default 0.1 (original). Public ports use 0.01.
        learn_variances: learn (C, D) log-variances (start 0), or keep unit variances (default).
        options: those of every :class:`Loss`.

    Departures: none.

    Example:
        Halfway between two means:

        >>> loss = GaussianMixture(2, 2, alpha=0.0, likelihood_weight=0.0)
        >>> loss(torch.zeros(1, 2), torch.eye(2), torch.tensor([0]))
        tensor(0.6931)
    """

    key: ClassVar[str] = "gaussian_mixture"
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "alpha": Range(0.01, 1.0),
        "likelihood_weight": Range(0.01, 1.0),
    }
    head_similarity: ClassVar[str | None] = "euclidean"
    refuses: ClassVar[dict[str, str]] = {
        "class_margin": "alpha is a factor of the distance, one number in the original."
    }
    log_variances: nn.Parameter | None

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        alpha: float = 0.3,
        likelihood_weight: float = 0.1,
        learn_variances: bool = False,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        check_number("alpha", alpha, at_least=0)
        check_number("likelihood_weight", likelihood_weight, at_least=0)
        self.num_classes = num_classes
        self.dim = dim
        self.alpha = alpha
        self.likelihood_weight = likelihood_weight
        self.learn_variances = learn_variances
        self.log_variances = (
            nn.Parameter(torch.zeros(num_classes, dim)) if learn_variances else None
        )

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """alpha from a third of its value, over the first 10,000 of 120,000 steps.

        The authors' CIFAR-100 example: 0.1, 0.2 from step 5,000, 0.3 from 10,000; here smoothly.
        """
        alpha, steps = size_as_built(self, "alpha"), share_of(total_steps, 10_000 / 120_000)
        if alpha <= 0:
            return []
        return [Ramp(f"{term}.alpha", alpha / 3, steps=steps, curve="exponential")]

    def head_form(self, num_classes: int) -> HeadSpec | None:
        if self.learn_variances:
            raise LargeMarginError(
                "learn_variances=True classifies by distances in units of learned variances, which "
                "no head here has. Attach with learn_variances=False, or call the loss yourself."
            )
        return super().head_form(num_classes)

    def per_sample(self, *inputs: Tensor) -> Tensor:
        return gaussian_mixture(
            *inputs,
            log_variances=self.log_variances,
            alpha=current(self, "alpha"),
            likelihood_weight=current(self, "likelihood_weight"),
            **self.how,
        )


def gaussian_mixture(
    features: Features,
    means: Prototypes,
    labels: Labels,
    *,
    log_variances: Tensor | None = None,
    alpha: float = 0.3,
    likelihood_weight: float = 0.1,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """Gaussian mixture per sample; :class:`GaussianMixture` has equation, arguments and example.

    Features (N, D), means (C, D), labels (N,) or soft targets (N, C); ``log_variances`` (C, D), or
    None for unit variances. Returns (N,).
    """
    check_setting("alpha", alpha, at_least=0)
    check_setting("likelihood_weight", likelihood_weight, at_least=0)
    if log_variances is None and (is_shared(means) or has_sub_centers(means)):
        target, rest = target_and_rest(features, means, labels, similarity="euclidean", **how)
        common: float | Tensor = 0.0
        normaliser = common
    else:
        refuse_sharded(means, "gaussian_mixture", "its variances would have to be sharded too.")
        check_classifier(features, means, None)
        if how.get("check_finite"):  # below they go by other names
            check_all_finite(features=features, means=means, log_variances=log_variances)
            how = {**how, "check_finite": False}
        q, mu = in_one_dtype(features, means)
        origin = common_origin(mu)
        q, mu = q - origin, mu - origin
        if log_variances is None:
            normaliser, columns, rows = 0.0, mu, q
            bias, half_squares = -0.5 * mu.square().sum(1), 0.5 * q.square().sum(1)
        else:
            if log_variances.shape != means.shape:
                raise LargeMarginError(
                    f"log_variances must have the shape of means, {tuple(means.shape)}, but "
                    f"theirs is {tuple(log_variances.shape)}."
                )
            v = promote(log_variances)
            inverse, half_logdet = torch.exp(-v), 0.5 * v.sum(1)
            normaliser = at_target(half_logdet, labels, len(means), "log_variances")
            # Squares of features that all classes weigh alike would round away what differs.
            alike = common_origin(inverse)
            half_squares = 0.5 * (q.square() * alike).sum(1)
            rows = torch.cat([q.square(), q], dim=1)
            columns = torch.cat([-0.5 * (inverse - alike), mu * inverse], dim=1)
            bias = -0.5 * (mu.square() * inverse).sum(1) - half_logdet
        target, rest = target_and_rest(rows, columns, labels, bias=bias, similarity="dot", **how)
        common = half_squares if labels.dim() == 1 else half_squares[:, None]
    likelihood = target - common
    distance = -likelihood - normaliser
    values = F.softplus(rest - target + alpha * distance) - likelihood_weight * likelihood
    return over_targets(values, labels)
