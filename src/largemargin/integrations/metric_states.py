"""What the torchmetrics of this package share: reading batches, keeping states, joining ranks."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from largemargin.dropin import Criterion
from largemargin.dropin.outputs import flat_beside, rows
from largemargin.errors import LargeMarginError, MissingPackage, check_labels, check_matrix
from largemargin.geometry.pairs import blocks, widen
from largemargin.measuring.batches import IGNORED, SKIP
from largemargin.measuring.reading import head_view
from largemargin.measuring.scores import Scores
from largemargin.measuring.stream import check_norms
from largemargin.prototypes.form import HeadView

if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    try:
        from torchmetrics import Metric
    except ImportError as error:
        raise MissingPackage(
            "largemargin.integrations.torchmetrics needs torchmetrics. Install it: "
            "pip install 'largemargin[torchmetrics]'"
        ) from error

Head = HeadView | Criterion | nn.Module | Tensor
"""A head, in any form in which a user holds one."""


class Batch(NamedTuple):
    """Rows of features (or logits) in float64 and their labels, without those labelled -100."""

    rows: Tensor
    labels: Tensor


class GeometryMetric(Metric):
    """A metric whose states are lists of flat tensors, joined over updates and processes.

    Flat, because a process without samples does not know how wide features are, and torchmetrics
    can join an empty vector with a vector only.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._dtypes: dict[str, torch.dtype] = {}

    def sync(self, *args: Any, **options: Any) -> None:
        # torchmetrics would send an empty float32 tensor for a state without entries, whatever the
        # type of what other processes send: they would not understand each other.
        for name, dtype in self._dtypes.items():
            if isinstance(getattr(self, name), list) and not getattr(self, name):
                setattr(self, name, [torch.zeros(0, dtype=dtype, device=self.device)])
        super().sync(*args, **options)

    def forward(self, *args: Any, **options: Any) -> Any:
        value = super().forward(*args, **options)
        self._fold()
        return value

    def plot(self, *args: Any, **options: Any) -> Any:
        """A single value or a list of them, by torchmetrics."""
        return self._plot(*args, **options)

    def _add_column(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        self.add_state(name, default=[], dist_reduce_fx="cat")
        self._dtypes[name] = dtype

    def _column(self, name: str) -> Tensor:
        """All of a state, however many parts it is in."""
        found: Tensor | list[Tensor] = getattr(self, name)
        if isinstance(found, Tensor):
            return found
        if not found:
            return torch.zeros(0, dtype=self._dtypes[name], device=self.device)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _fold(self) -> None:
        """Make one part of those that torchmetrics has put side by side, where that is possible."""

    def _number(self, value: float) -> Tensor:
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.tensor(value, dtype=dtype, device=self.device)

    def _batch(
        self, given: Tensor | None, labels: Tensor | None, num_classes: int, name: str = "features"
    ) -> Batch:
        """Check rows with their labels; (N, T, D) of a sequence head become rows too."""
        if given is None or labels is None:
            raise LargeMarginError(
                f"{type(self).__name__} needs {name} and labels. Call "
                f"update({name}={name}, labels=labels, ...)."
            )
        if isinstance(given, Tensor) and isinstance(labels, Tensor):
            labels, given = flat_beside(labels, given), rows(given)
        check_matrix(name, given, "(N, D)" if name == "features" else "(N, C)")
        if isinstance(labels, Tensor) and labels.dim() == 1 and len(labels) == len(given):
            keep = labels.long() != IGNORED  # torch takes 156 of uint8 for -100
            given, labels = given[keep.to(given.device)], labels[keep]
        check_labels(labels, len(given), num_classes, of=name, soft=False, skip=SKIP, validate=True)
        return Batch(widen(given.to(self.device)), labels.to(self.device).long())


class HeadMetric(GeometryMetric):
    """A metric of what a head says about features."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._last: Scores | None = None

    def _labelled(
        self,
        features: Tensor | None,
        labels: Tensor | None,
        head: Head | None,
        bias: Tensor | None,
    ) -> dict[str, Tensor]:
        """What is known of each sample: see ``measuring.stream.PER_SAMPLE``."""
        scores = self._scores(as_head(head, bias, type(self).__name__))
        batch = self._batch(features, labels, scores.num_classes)
        check_width(batch.rows, scores.dim, "the head's weight has")
        parts = [
            {"label": batch.labels[part], **scores.labelled(batch.rows[part], batch.labels[part])}
            for part in blocks(max(len(batch.labels), 1), scores.rows_at_once)
        ]
        found = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        check_norms(found["norm"])
        return found

    def _scores(self, head: HeadView) -> Scores:
        """The head, ready to be asked: that of the last batch where it is still the same."""
        weight = head.weight.to(self.device, copy=True)
        bias = None if head.bias is None else head.bias.to(self.device, copy=True)
        head = HeadView(weight, bias, head.similarity, head.scale)
        if self._last is None or not _same(self._last.head, head):
            self._last = Scores(head)
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_last": None}


def as_head(head: Head | None, bias: Tensor | None, metric: str) -> HeadView:
    """Class vectors and how logits are made from them, detached."""
    if head is None:
        raise LargeMarginError(
            f"{metric} needs the head: pass the classification layer, its (C, D) weight (and "
            "bias=... where it has one) or the criterion that attach returned as head=..."
        )
    if isinstance(head, Criterion):
        head = head.head
    if isinstance(head, HeadView):
        own = None if head.bias is None else head.bias.detach()
        return HeadView(head.weight.detach(), own, head.similarity, float(head.scale))
    if isinstance(head, Tensor):
        if bias is not None and tuple(bias.shape) != tuple(head.shape[:1]):
            raise LargeMarginError(
                f"bias must have one number per row of the head, {tuple(head.shape[:1])}, but its "
                f"shape is {tuple(bias.shape)}."
            )
        return HeadView(head.detach(), None if bias is None else bias.detach())
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise LargeMarginError(
            f"head must be the classification layer itself, its weight or a criterion, but "
            f"{type(head).__name__} has no weight. Pass the layer: head=model.fc."
        )
    return head_view(head)


def check_width(features: Tensor, dim: int, reason: str) -> None:
    if features.shape[1] != dim:
        raise LargeMarginError(
            f"features must have {dim} columns, as {reason}, but their shape is "
            f"{tuple(features.shape)}."
        )


def _same(one: HeadView, other: HeadView) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)

    return (
        (one.similarity, one.scale) == (other.similarity, other.scale)
        and equal(one.weight, other.weight)
        and equal(one.bias, other.bias)
    )
