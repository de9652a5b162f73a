"""Center loss with its own update of the centers (Wen et al. 2016)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from largemargin.errors import (
    LargeMarginError,
    check_classifier,
    check_inputs,
    check_labels,
    check_matrix,
    check_number,
    check_same_device,
    refuse_transform,
)
from largemargin.heads.centroid_bank import NO_SOFT, Replay, class_means, load_pending, recomputing
from largemargin.losses.base.classwise import ClassWise
from largemargin.losses.base.loss import Loss, LossOptions
from largemargin.losses.base.setting_ranges import SHARE, Dimension, Limits, Range
from largemargin.ops.norms import promote, read_rows
from largemargin.shapes import Features, Labels, PerSample, Prototypes


class CenterLoss(Loss):
    r"""Center loss (BAS-CENTER), :math:`\frac\lambda2\|q_n - c_{y_n}\|^2`, gradient to q.

    Call it with ``(features, labels)``. Centers start at 0, are float32 buffers and move once per
    training forward, or with ``accumulate=k`` at every k-th, by the features of all k; never in
    evaluation (:func:`center_update`). The original sums over the batch, hence ``reduction="sum"``;
    compare learning rates accordingly.

    Args:
        num_classes: C.
        dim: D.
        strength: lambda, default 0.003 (original, which sums over the batch).
        rate: alpha of the centers' update, default 0.5 (original).
        accumulate: micro-batches per optimisation step; None to move only in :meth:`commit`.
        options: those of every :class:`Loss`.

    Example:
        The centers start at 0, and :math:`\|(3, 4)\|^2` is 25:

        >>> CenterLoss(2, 2, strength=2.0)(torch.tensor([[3.0, 4.0]]), torch.tensor([0]))
        tensor(25.)
    """

    key: ClassVar[str] = "center"
    is_penalty: ClassVar[bool] = True
    gathers_classes: ClassVar[bool] = True
    limits: ClassVar[Mapping[str, Limits]] = {"rate": SHARE}
    search_space: ClassVar[Mapping[str, Dimension]] = {
        "strength": Range(1e-4, 0.1),
        "rate": Range(0.1, 0.9, log=False),
    }
    needs: ClassVar[tuple[str, ...]] = ("features", "labels")
    refuses: ClassVar[dict[str, str]] = {
        name: ClassWise.refuses[name] for name in ("prior", "soft_targets", "label_smoothing")
    } | {"class_margin": "it has no margin.", "chunked": "it needs no (N, C) logits."}
    defaults: ClassVar[dict[str, Any]] = {"reduction": "sum", "sync": True}
    centers: Tensor
    pending_sums: Tensor
    pending_counts: Tensor
    pending_steps: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        strength: float = 0.003,
        rate: float = 0.5,
        accumulate: int | None = 1,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**{**self.defaults, **options})
        if accumulate is not None:
            check_number("accumulate", accumulate, at_least=1)
        check_number("strength", strength, at_least=0)
        check_number("rate", rate, at_least=0, at_most=1)
        self.num_classes = num_classes
        self.dim = dim
        self.strength = strength
        self.rate = rate
        self.accumulate = accumulate
        self.register_buffer("centers", torch.zeros(num_classes, dim))
        self._replay = Replay()
        if accumulate != 1:
            self._make_pending()

    def forward(  # type: ignore[override]
        self, features: Tensor, labels: Tensor, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        refuse_transform(self)
        check_matrix("features", features, "(N, D)")
        check_same_device(features=features, centers=self.centers)
        if features.shape[1] != self.dim:
            raise LargeMarginError(
                f"features must have {self.dim} columns, the dim of the centers, but their shape "
                f"is {tuple(features.shape)}. Build the loss with dim={features.shape[1]}."
            )

        batch = self._prepare((features,), labels, self.num_classes, sample_weight)
        own, outside = _own_centers(self.centers, batch.targets)
        if self.training:
            remembered = self._replay.recall(features, own.shape)
            own = own if remembered is None else remembered[0]
            if not recomputing():
                self._replay.remember(features, (own,))
        values = _half_squares(batch.inputs[0], own, outside, self.strength)
        total = self._reduce(values, batch, sample_weight)
        if self.training and not recomputing():
            labels = labels.long()
            valid = (labels >= 0) & (labels < self.num_classes)
            if self.ignore_index is not None:
                valid = valid & (labels != self.ignore_index)
            if self.accumulate == 1:
                moved = center_update(
                    features, self.centers, labels, rate=self.rate, valid=valid, sync=self.sync
                )
                self.centers.copy_(moved)
            else:
                self._collect(features, labels, valid)
        return total

    @torch.no_grad()
    def commit(self) -> None:
        """Move the centers by all micro-batches since the last time (``accumulate`` != 1)."""
        if self.accumulate == 1:
            raise LargeMarginError(
                "commit() needs a CenterLoss with accumulate=None or accumulate > 1, but "
                "accumulate is 1: its centers move at every training forward already."
            )
        self._commit(torch.ones((), dtype=torch.bool, device=self.centers.device))

    @torch.no_grad()
    def _collect(self, features: Tensor, labels: Tensor, valid: Tensor) -> None:
        slots = class_means(features, labels, self.num_classes, valid, sync=self.sync)
        counted = torch.isfinite(slots.means.abs().amax(1))
        counts = torch.where(counted, slots.counts, 0)
        sums = torch.where(counted[:, None], slots.means * slots.counts[:, None], 0)
        self.pending_sums.index_add_(0, slots.classes, sums.to(self.pending_sums.dtype))
        self.pending_counts.index_add_(0, slots.classes, counts.long())
        self.pending_steps.add_(1)
        if self.accumulate is not None:
            self._commit(self.pending_steps >= self.accumulate)

    def _commit(self, due: Tensor) -> None:
        counts = self.pending_counts[:, None]
        apart = self.pending_sums / counts.clamp_min(1) - self.centers
        step = self.rate * counts / (1 + counts) * apart
        self.centers.add_(torch.where(due, step, 0))
        for pending in (self.pending_sums, self.pending_counts, self.pending_steps):
            pending.mul_(~due)

    def _make_pending(self) -> None:
        counts = torch.zeros(self.num_classes, dtype=torch.long, device=self.centers.device)
        self.register_buffer("pending_sums", torch.zeros_like(self.centers))
        self.register_buffer("pending_counts", counts)
        self.register_buffer("pending_steps", counts.new_zeros(()))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        load_pending(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def center_loss(
    features: Features,
    centers: Prototypes,
    labels: Labels,
    *,
    strength: float = 0.003,
    validate: bool | None = None,
) -> PerSample:
    """Center loss per sample; :class:`CenterLoss` has equation, arguments and an example.

    Features (N, D), centers (C, D) held constant (they move by :func:`center_update`), labels (N,);
    returns (N,).
    """
    check_number("strength", strength, at_least=0)
    check_inputs(features, centers, labels, soft=False, reason=NO_SOFT, validate=validate)
    own, outside = _own_centers(centers, labels)
    return _half_squares(features, own, outside, strength)


def center_update(
    features: Features,
    centers: Prototypes,
    labels: Labels,
    *,
    rate: float = 0.5,
    valid: Tensor | None = None,
    sync: bool = False,
) -> Tensor:
    r"""New centers :math:`c_j - \alpha\sum_{y_n=j}(c_j - q_n)/(1 + n_j)`; absent classes stay,
    and so do those with features that are not finite.

    Args:
        rate: alpha in [0, 1], default 0.5 (original).
        valid: (N,), samples that count; default all.
        sync: sum over the ranks of a distributed run.

    Example:
        >>> center_update(torch.tensor([[4.0, 0.0]]), torch.zeros(2, 2), torch.tensor([0]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    check_number("rate", rate, at_least=0, at_most=1)
    validate = None if valid is None else False  # what does not count may be out of range
    check_classifier(features, centers, None)
    size = len(features), len(centers)
    check_labels(labels, *size, soft=False, reason=NO_SOFT, validate=validate)
    with torch.no_grad():
        valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
        slots = class_means(features, labels, centers.shape[0], valid, sync=sync)
        own = centers[slots.classes].to(slots.means.dtype)
        share = slots.counts / (1 + slots.counts)
        # One overflowing batch must not spoil a class for good: its center stays.
        counted = slots.present & torch.isfinite(slots.means.abs().amax(1))
        step = torch.where(counted[:, None], rate * share[:, None] * (slots.means - own), 0)
        return centers.index_add(0, slots.classes, step.to(centers.dtype))


def _own_centers(centers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The center of each sample's class, and which labels are out of range."""
    labels = labels.long()
    outside = (labels < 0) | (labels >= centers.shape[0])
    return promote(read_rows(centers.detach(), labels.clamp(0, centers.shape[0] - 1))), outside


def _half_squares(features: Tensor, own: Tensor, outside: Tensor, strength: float) -> Tensor:
    values = 0.5 * strength * (promote(features) - own).square().sum(1)
    return values.masked_fill(outside, torch.nan)
