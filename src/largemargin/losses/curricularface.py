"""CurricularFace: hard negatives count little early in training and more later (Huang 2020)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import check_number
from largemargin.losses.arcface import penalised_cosine
from largemargin.losses.base.angles import cosine_and_sine
from largemargin.losses.base.loss import Loss, LossOptions, MarginCeiling
from largemargin.losses.base.running_statistics import RunningStatistics, mean_of_kept
from largemargin.losses.base.scale import Scale, check_scale_setting, psi0_of_angular_margin
from largemargin.losses.base.schedules import Schedule, margin_warm_up
from largemargin.losses.base.setting_ranges import RADIANS, Dimension, Limits, Range
from largemargin.losses.base.terms import (
    at_target,
    check_margin,
    check_setting,
    mean_over_targets,
    over_targets,
    scale_of_cosines,
    target_of,
    whole_logits,
)
from largemargin.ops.class_stats import ComputeOptions
from largemargin.ops.scheduled_values import current
from largemargin.shapes import Features, Labels, PerSample, Prototypes

_DENSE = "each rival is weighed by its own cosine, so the (N, C) logits must exist."


class CurricularFace(Loss):
    r"""CurricularFace (BAS-CURRICULAR): ArcFace whose hard rivals are weighed by training progress.

    .. math:: z_j' = s\,N_j,\qquad N_j = \begin{cases}\cos\theta_j &
              \cos\theta_j \le \cos(\theta_y + m)\\ \cos\theta_j\,(t + \cos\theta_j) &
              \text{otherwise}\end{cases}\qquad
              t \leftarrow (1-\alpha)\,t + \alpha\,\overline{\cos\theta_y}

    and the target as in :class:`ArcFace`. t starts at 0, where a hard rival's weight is its cosine:
    easy samples come first. Weights pass 1 as the mean target cosine grows.

    Each rival has a weight of its own, which no class statistic holds: only ``impl="dense"``, and
    soft targets take an (N, C, C) array.

    Args:
        margin: m in radians in [0, pi), a number or one per class (C,); default 0.5 (paper).
        scale: s > 0, or "auto" (default): :func:`auto_scale`. Face recognition: 64 (paper).
        rate: alpha, weight of a batch in t, default 0.01 (authors' code; the paper calls 0.99 the
            momentum).
        options: those of every :class:`Loss`, with ``sync=True``: t of the joint batch.

    State: ``progress.values``, t.

    Departures: none from the authors' code, which moves t before the batch reads it.

    Example:
        t = 0 in the first evaluation, so a hard rival of cosine 1/2 enters as 1/4:

        >>> W = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]])
        >>> loss = CurricularFace(margin=math.pi / 2, scale=4.0).eval()
        >>> loss(W[:1], W, torch.tensor([0]))
        tensor(1.3133)
    """

    key: ClassVar[str] = "curricularface"
    widens_margins: ClassVar[bool] = True
    refuses: ClassVar[dict[str, str]] = {"chunked": _DENSE}
    limits: ClassVar[Mapping[str, Limits]] = {"margin": RADIANS}
    search_space: ClassVar[Mapping[str, Dimension]] = {"margin": Range(0.05, 0.8, log=False)}
    fixed: ClassVar[frozenset[str]] = frozenset({"rate"})
    defaults: ClassVar[dict[str, Any]] = {"sync": True}
    head_similarity: ClassVar[str | None] = "cosine"
    counts_rows: ClassVar[bool] = True

    margin: float | Tensor

    def __init__(
        self,
        *,
        margin: float | Tensor | Sequence[float] = 0.5,
        scale: Scale = "auto",
        rate: float = 0.01,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**{**self.defaults, **options})
        check_number("rate", rate, at_least=0, at_most=1)
        check_scale_setting(scale)
        self._keep("margin", margin)
        check_margin("margin", self.margin, RADIANS)
        self.scale = scale
        self.rate = rate
        self.progress = RunningStatistics(0.0, rate=rate)

    def aligned_cosine(self) -> float | Tensor:
        return psi0_of_angular_margin(self.margin)

    def margin_ceilings(self, angle: float) -> list[MarginCeiling]:
        return [MarginCeiling("margin (radians)", self.margin, angle)]

    def usual_schedule(self, term: str, total_steps: int) -> list[Schedule]:
        """:func:`margin_warm_up`."""
        return margin_warm_up(self, term, total_steps, margin=0.0)

    def per_sample(self, *inputs: Tensor, kept: Tensor | None = None) -> Tensor:
        def progress(own: Tensor) -> Tensor:
            def of_batch(before: Tensor) -> Tensor:
                return mean_of_kept(own, kept, self._synced)[0][None]

            t: Tensor = self.progress(inputs[0], of_batch)[0]
            return t

        margin, scale = current(self, "margin"), current(self, "scale")
        return _values(inputs, margin, scale, progress, self.how)


def curricularface(
    features: Features,
    prototypes: Prototypes,
    labels: Labels,
    *,
    margin: float | Tensor = 0.5,
    scale: Scale = "auto",
    progress: float | Tensor = 0.0,
    **how: Unpack[ComputeOptions],
) -> PerSample:
    """CurricularFace per sample; :class:`CurricularFace` has equation, arguments and an example.

    ``progress`` is t, a number or a 0-dim tensor.
    """
    check_setting("progress", progress, at_least=-1, at_most=1)
    return _values((features, prototypes, labels), margin, scale, lambda own: progress, how)


def _values(
    inputs: tuple[Tensor, ...],
    margin: float | Tensor,
    scale: float | Tensor | str,
    progress: Callable[[Tensor], float | Tensor],
    how: ComputeOptions,
) -> Tensor:
    """The loss with t as a function of the target cosines (N,)."""
    check_margin("margin", margin, RADIANS)
    features, prototypes, labels = inputs
    s = scale_of_cosines(scale, features, prototypes, how, psi0_of_angular_margin, margin)
    form: Any = {"similarity": "cosine", "scale": s, **how}
    logits, labels = whole_logits(features, prototypes, labels, form, "curricularface", _DENSE)
    m = at_target(margin, labels, logits.shape[1], "margin")
    log_prior = how.get("log_prior")
    hard = labels.dim() == 1
    if hard:
        columns, target = target_of(logits, labels)
        target = target.squeeze(1)
    else:
        columns = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
        target = logits
    cosine, sine = cosine_and_sine(target, s, features, prototypes, labels, how.get("precision"))
    t = progress(mean_over_targets(cosine.detach(), labels))
    limit = penalised_cosine(cosine, sine, m, "none")
    rivals = (logits / s)[:, None]
    is_hard = rivals > (limit[:, None, None] if hard else limit[:, :, None])
    rivals = s * torch.where(is_hard, rivals * (t + rivals), rivals)
    if log_prior is not None:
        own = log_prior[columns.squeeze(1)] if hard else log_prior
        rivals = rivals + log_prior - (own[:, None, None] if hard else own[:, None])
    rest = rivals.scatter(2, columns[..., None], -torch.inf).logsumexp(2)
    rest = rest.squeeze(1) if hard else rest
    return over_targets(F.softplus(rest - s * penalised_cosine(cosine, sine, m, "hard")), labels)
