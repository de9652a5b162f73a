"""Logits shifted and stretched by how frequent the classes are (Menon et al. 2021; Kini 2021)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_length, check_matrix, check_number
from largemargin.losses.base.class_counts import check_counts
from largemargin.losses.base.loss import LogitLoss, LossOptions
from largemargin.losses.base.setting_ranges import Dimension, Range
from largemargin.losses.base.terms import (
    HOW_MADE,
    LogitOptions,
    check_call,
    check_setting,
    class_count,
    require,
)
from largemargin.losses.cross_entropy import cross_entropy
from largemargin.ops.matmul import resolve_precision, without_autocast
from largemargin.ops.norms import normalize, promote
from largemargin.ops.scheduled_values import current
from largemargin.ops.shards import is_shared
from largemargin.ops.similarity import affine_form, check_scale
from largemargin.shapes import Features, Labels, Logits, PerSample, Prototypes


class LogitAdjustment(LogitLoss):
    r"""Logit-adjusted cross entropy for long-tailed data (BAS-LOGITADJ; Menon et al. 2021, eq. 10).

    .. math:: \ell = -\log\frac{e^{f_y + \tau\log\pi_y}}{\sum_j e^{f_j + \tau\log\pi_j}},\qquad
              \pi_j = \frac{n_j}{\sum_k n_k}

    The model predicts with f itself, whose largest entry minimises the error averaged over
    classes. tau = 1 is Balanced Softmax (Ren et al. 2020). Every other loss on logits takes the
    same shift as ``prior=``, beside its margin: ``CosFace(margin=0.2, prior=counts)``. Of a model
    trained with plain cross entropy the post-hoc form is
    :func:`largemargin.functional.logit_adjusted`.

    Args:
        class_counts: training samples per class, all positive.
        tau: >= 0, default 1 (original, where it is Bayes optimal; it gains from tuning).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: none.

    Example:
        Equal logits of a class that one sample in four has cost log 4:

        >>> LogitAdjustment([3, 1])(torch.zeros(1, 2), torch.tensor([1]))
        tensor(1.3863)
    """

    key: ClassVar[str] = "logit_adjustment"
    reads_head_logits: ClassVar[bool] = True
    search_space: ClassVar[Mapping[str, Dimension]] = {"tau": Range(0.25, 3.0)}
    refuses: ClassVar[dict[str, str]] = {"prior": "its prior is made from class_counts."}

    def __init__(
        self,
        class_counts: Sequence[float] | Tensor,
        *,
        tau: float = 1.0,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(similarity=similarity, scale=scale, **options)
        check_number("tau", tau, at_least=0)
        self._keep_prior(check_counts(class_counts))
        self.tau = tau

    @property
    def class_counts(self) -> list[float]:  # type: ignore[override]
        assert self.prior is not None
        return self.prior.tolist()

    def log_prior(self) -> Tensor:
        tau: float | Tensor = current(self, "tau")
        return tau * super().log_prior()

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        return cross_entropy(*inputs, **logits, **self.how)


def logit_adjustment(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    class_counts: Sequence[float] | Tensor,
    tau: float = 1.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """Adjusted cross entropy; :class:`LogitAdjustment` has equation, arguments and an example."""
    _take_counts(features, prototypes, labels, class_counts, tau, options)
    return cross_entropy(features, prototypes, labels, **options)


def logit_adjusted(
    logits: Logits, class_counts: Sequence[float] | Tensor, *, tau: float = 1.0
) -> Logits:
    r"""Post-hoc logit adjustment, :math:`f_j - \tau\log\pi_j` (Menon et al. 2021, eq. 9).

    For prediction by a model that was trained without any adjustment.

    Example:
        >>> logit_adjusted(torch.zeros(1, 2), [3, 1]).softmax(1)
        tensor([[0.2500, 0.7500]])
    """
    if not isinstance(logits, Tensor) or not logits.dim():
        check_matrix("logits", logits, "(N, C)")
    log_prior = _log_prior(class_counts, tau, logits)
    check_length("class_counts", log_prior, logits.shape[-1], "one number per class")
    return promote(logits) - log_prior


def _take_counts(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor | None,
    class_counts: Sequence[float] | Tensor,
    tau: float,
    options: LogitOptions,
) -> Tensor:
    """The counts (C,), after checks of the whole call; the options get the prior of them."""
    check_call(features, prototypes, labels, options)
    num_classes = class_count(features, prototypes, labels)
    counts = check_counts(class_counts)
    check_length("class_counts", counts, num_classes, "one number per class")
    options["log_prior"] = _log_prior(counts, tau, features)
    options["checked"] = True
    return counts


def _log_prior(class_counts: Sequence[float] | Tensor, tau: float, like: Tensor) -> Tensor:
    check_setting("tau", tau, at_least=0)
    counts = check_counts(class_counts)
    return (tau * torch.log(counts / counts.sum())).to(like.device, promote(like[:0]).dtype)


class VSLoss(LogitAdjustment):
    r"""Vector scaling loss for long-tailed data (BAS-VS; Kini et al. 2021, eq. 2 and section 5).

    .. math:: \ell = -\log\frac{e^{\Delta_y f_y + \iota_y}}{\sum_j e^{\Delta_j f_j + \iota_j}},
              \qquad \Delta_j = \Bigl(\frac{n_j}{\max_k n_k}\Bigr)^\gamma,
              \quad \iota_j = \tau\log\pi_j

    The additive part acts early in training, the factors at its end: rare classes need larger
    logits. The model predicts with f. gamma = 0 is :class:`LogitAdjustment`. Public code for
    long-tailed CIFAR, ratio 100, has (gamma, tau) = (0.15, 1.25) for 10 classes and (0.05, 0.75)
    for 100 (later papers'; the authors' code has the defaults alone).

    Args:
        class_counts: training samples per class, all positive.
        gamma: >= 0 of the factors, default 0.3 (authors' code, losses.py).
        tau: >= 0 of the shift, default 1 (there, too).
        similarity, scale, options: those of every :class:`LogitLoss`.

    Departures: none.

    Example:
        The factors are 1 and 1/2, the logits 0 and 1 with a shift of log 4 between them:

        >>> VSLoss([4, 1], gamma=0.5)(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
        tensor(0.9048)
    """

    key: ClassVar[str] = "vs_loss"
    reads_head_logits: ClassVar[bool] = False
    search_space: ClassVar[Mapping[str, Dimension]] = {"gamma": Range(0.02, 0.5)}

    def __init__(
        self,
        class_counts: Sequence[float] | Tensor,
        *,
        gamma: float = 0.3,
        tau: float = 1.0,
        similarity: str | None = None,
        scale: float | None = None,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(class_counts, tau=tau, similarity=similarity, scale=scale, **options)
        check_number("gamma", gamma, at_least=0)
        self.gamma = gamma

    def per_sample(self, *inputs: Tensor, **logits: Any) -> Tensor:
        assert self.prior is not None
        factors = (self.prior / self.prior.max()) ** current(self, "gamma")
        return _stretched(*inputs, factors=factors, **logits, **self.how)


def vs_loss(
    features: Features,
    prototypes: Prototypes,
    labels: Labels | None = None,
    *,
    class_counts: Sequence[float] | Tensor,
    gamma: float = 0.3,
    tau: float = 1.0,
    **options: Unpack[LogitOptions],
) -> PerSample:
    """VS loss per sample; :class:`VSLoss` has equation, arguments and an example."""
    check_setting("gamma", gamma, at_least=0)
    counts = _take_counts(features, prototypes, labels, class_counts, tau, options)
    factors = ((counts / counts.max()) ** gamma).to(require(options["log_prior"]))
    return _stretched(features, prototypes, labels, factors=factors, **options)


def _stretched(
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor | None = None,
    *,
    factors: Tensor,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """Cross entropy of logits times one factor per class."""
    if labels is None:
        return cross_entropy(promote(features) * factors, prototypes, **options)
    if is_shared(prototypes):
        raise LargeMarginError(
            "VSLoss needs all class vectors in one place: its factors change their lengths. With "
            "sharded or sampled class vectors use LogitAdjustment."
        )
    scale = options.get("scale", 1.0)
    check_scale(scale)
    precision: Any = resolve_precision(options.get("precision"), features, prototypes)
    with without_autocast(features):
        form = affine_form(
            features,
            prototypes,
            bias=options.get("bias"),
            similarity=options.get("similarity", "dot"),
            scale=scale,
            precision=precision,
        )
        rows, factors = form.rows, factors.to(form.rows.dtype).repeat_interleave(form.centers)
        columns = normalize(form.columns) if form.normalize_columns else form.columns
        columns = columns * factors[:, None]
        if form.row_bias is not None:  # of Euclidean logits: a column of its own
            rows = torch.cat([rows, form.row_bias[:, None]], dim=1)
            columns = torch.cat([columns, factors[:, None]], dim=1)
        shift = None if form.column_bias is None else form.column_bias * factors
        if form.centers > 1:
            if shift is not None:  # one per sub-center: a column, too
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
                columns, shift = torch.cat([columns, shift[:, None]], dim=1), None
            columns = columns.reshape(-1, form.centers, columns.shape[1])
    how: Any = {key: value for key, value in options.items() if key not in HOW_MADE}
    return cross_entropy(rows, columns, labels, bias=shift, precision=precision, **how)
