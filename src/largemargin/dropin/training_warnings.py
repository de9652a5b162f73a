"""Warnings about training that cannot work, each given once."""

from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import warn_user
from largemargin.heads.class_head import ClassHead
from largemargin.heads.head_spec import HeadView
from largemargin.heads.packing import packing_bound
from largemargin.losses.base.loss import Loss
from largemargin.losses.base.objective import Objective
from largemargin.ops.matmul import without_autocast
from largemargin.ops.norms import promote
from largemargin.tracing import plain_eager

ENTRIES = 4096
"""A parameter is watched at this many places, not as a whole."""
WINDOW = 20
"""Training calls that one look at the angles covers."""
VIEWS_PER_CLASS = 20
"""No verdict on the angles before every class has been seen so often, on average."""


class Watch:
    """Looks at training every now and then; called once per training call, in eager mode.

    It counts on the device and reads a number back at a few fixed calls only. It changes nothing.

    Args:
        patience: training calls before the first verdict on angles and banks; where it is too
            early for one, the next comes after 2, 4, 8 ... times as many.
        stuck_after: training calls in which a parameter that gets gradients has to change. Both
            are multiplied by the criterion's ``accumulate``.
        views_per_class: samples per class, on average, after which a class that a centroid bank
            has not seen counts as missing. Rare classes of long-tailed data need many.
        labels_after: training calls before the first verdict on the range of the labels.
        bands_after: the same for where margins lie beside the band of a margin distribution.
    """

    def __init__(
        self,
        *,
        patience: int = 500,
        stuck_after: int = 200,
        views_per_class: int = 500,
        labels_after: int = 20,
        bands_after: int = 100,
    ) -> None:
        self.patience = patience
        self.labels_after = labels_after
        self.bands_after = bands_after
        self.stuck_after = stuck_after
        self.views_per_class = views_per_class
        self.calls = 0
        self.samples = 0
        self._parameters: dict[str, _Traces] = {}
        self._angles: Tensor | None = None
        self._looks_at_angles = True
        self._looks_at_banks = True
        self._looks_at_labels = True
        self._highest: Tensor | None = None
        self._highest_known = -1.0
        self._branches: dict[str, Tensor] = {}

    def __call__(self, criterion: Any, features: Tensor, labels: Tensor, head: HeadView) -> None:
        if not (torch.is_grad_enabled() and plain_eager()):
            return
        self.calls += 1
        if self.calls == 1 and head.similarity.startswith("cosine"):
            _look_at_zeros(head)
        self.samples += labels.shape[0]
        stuck_after = self.stuck_after * criterion.accumulate
        if (self.calls - 1) % stuck_after <= 2:
            self._look_at_parameters(criterion, head, stuck_after)
        patience = self.patience * criterion.accumulate
        if -self.calls % patience < WINDOW and _soon_due(self.calls, patience):
            self._look_at_training(criterion, features, labels, head, patience)
        patience = self.labels_after * criterion.accumulate
        soon = self._looks_at_labels and -self.calls % patience < WINDOW
        if soon and labels.dim() == 1 and _soon_due(self.calls, patience):
            self._look_at_labels(labels, head, patience)
        patience = self.bands_after * criterion.accumulate
        if -self.calls % patience < WINDOW and _soon_due(self.calls, patience):
            self._look_at_branches(criterion.objective, self.calls % patience == 0)

    def _look_at_training(
        self, criterion: Any, features: Tensor, labels: Tensor, head: HeadView, patience: int
    ) -> None:
        due = self.calls % patience == 0
        if self._looks_at_angles and head.similarity.startswith("cosine"):
            self._look_at_angles(criterion.objective, features, labels, head, due)
        if self._looks_at_banks and due:
            self._look_at_banks(criterion)

    def _look_at_parameters(self, criterion: Any, head: HeadView, patience: int) -> None:
        """Snapshot at the first call, gradients at the first few, verdict after ``patience``."""
        watched = {"the weight of the head": head.weight, "the bias of the head": head.bias}
        watched |= {f"{n} of the loss": p for n, p in criterion.objective.named_parameters()}
        for name, tensor in watched.items():
            if tensor is None or not tensor.requires_grad or tensor.numel() == 0:
                continue
            traces = self._parameters.get(name)
            if traces is None:
                traces = self._parameters[name] = _Traces(tensor, self.calls)
            if traces.done:
                continue
            if self.calls - traces.since < patience:
                traces.listen(tensor)
            elif traces.stuck(tensor):
                warn_user(
                    f"{name} gets gradients but has not changed in {self.calls - traces.since} "
                    "training calls: it is probably not in the optimizer. Make the optimizer from "
                    "criterion.param_groups(model), or freeze it on purpose with "
                    "requires_grad_(False)."
                )

    def _look_at_angles(
        self,
        objective: Objective,
        features: Tensor,
        labels: Tensor,
        head: HeadView,
        due: bool,
    ) -> None:
        counted = _behind(objective, features.detach(), labels, head)
        self._angles = counted if self._angles is None else self._angles + counted
        if not due:
            return
        behind, valid = self._angles.tolist()
        self._angles = None
        if self.samples < VIEWS_PER_CLASS * head.weight.shape[0] or not valid:
            return
        self._looks_at_angles = False
        if behind > 0.5 * valid:
            warn_user(
                f"after {self.calls} training calls {behind / valid:.0%} of the samples are more "
                "than 90 degrees away from the prototype of their class: training does not take "
                'hold. Start without the margin (schedule="preset" and total_steps=..., or '
                'lm.schedules.Ramp("margin", 0.0, steps=...)), lower margin or learning rate, or '
                'take scale="auto".'
            )

    def _look_at_branches(self, objective: Objective, due: bool) -> None:
        """Where the margins of a margin distribution lie: of a few calls, once for each term."""
        for name, loss in objective.terms.items():
            shares = getattr(loss, "observed", None)
            if not shares or (name in self._branches and self._branches[name].numel() == 0):
                continue
            found = torch.stack(list(shares.values()))
            self._branches[name] = found.maximum(self._branches.get(name, found))
            if not due:
                continue
            held = [
                branch
                for branch, most in zip(shares, self._branches.pop(name).tolist(), strict=True)
                if most > 0
            ]
            if "inside" in held and len(held) > 1:
                continue
            self._branches[name] = found.new_empty(0)  # said once
            warn_user(
                f"after {self.calls} training calls every margin that {type(loss).__name__} (term "
                f"{name!r}) has seen lately lies {' or '.join(held)} its band from r - theta to "
                'r + theta. Below it the loss is linear and inside it is 0. Take r="auto", or '
                "r - theta of one to two times the median training margin of a network trained by "
                "cross entropy."
            )

    def _look_at_labels(self, labels: Tensor, head: HeadView, patience: int) -> None:
        """The highest label of a few calls: an embedding network may have been given as a model."""
        if labels.numel() == 0:
            return
        rows = head.weight.shape[0]
        if head.label_range is not None:
            self._highest_known = max(self._highest_known, head.label_range[1])
        else:
            highest = labels.max()
            self._highest = highest if self._highest is None else self._highest.maximum(highest)
        if self.calls % patience or self.samples < VIEWS_PER_CLASS * rows:
            return
        self._looks_at_labels = False
        highest_read = -1 if self._highest is None else int(self._highest)
        classes = 1 + max(highest_read, int(self._highest_known))
        if 0 < 2 * classes <= rows:
            warn_user(
                f"the head has {rows} rows, one per class, but of the labels looked at in "
                f"{self.calls} training calls none is above {classes - 1}. If the model gives "
                f"embeddings of width {rows}, it has no head yet: nn.Sequential(model, lm.ClassHead"
                f"({rows}, num_classes={classes})). If it is a head for more classes than there "
                "are, give it as many rows as classes."
            )

    def _look_at_banks(self, criterion: Any) -> None:
        banks = criterion.banks
        if any(self.samples < self.views_per_class * bank.num_classes for bank in banks):
            return
        self._looks_at_banks = False
        for bank in banks:
            missing = torch.nonzero(~bank.seen).flatten().tolist()
            if not missing:
                continue
            if len(missing) == bank.num_classes:
                cause = (
                    "Its centroids are never written: call bank.commit() once per step, or "
                    "bank.commit_with(optimizer)."
                )
            else:
                cause = (
                    "Are these labels in the training data? Labels that count from 1, a subset "
                    "of the classes, or num_classes too large do this."
                )
            listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            warn_user(
                f"a centroid bank has never seen {len(missing)} of its {bank.num_classes} classes "
                f"({listed}) in {self.samples} samples. {cause}"
            )


class _Traces:
    """A few entries of a parameter as they were, and whether they got a gradient since."""

    def __init__(self, tensor: Tensor, call: int) -> None:
        self.since = call
        self.done = False
        size, count = tensor.numel(), min(tensor.numel(), ENTRIES)
        # Made on the device: copying them there would wait for it.
        self._places = torch.arange(count, device=tensor.device) * (size - 1) // max(count - 1, 1)
        self._values = self._at(tensor).clone()
        self._pulled = torch.zeros((), dtype=torch.bool, device=tensor.device)

    def _at(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).index_select(0, self._places)

    def listen(self, tensor: Tensor) -> None:
        """Notice the next gradient, once, without reading it back."""

        def notice(gradient: Tensor) -> None:
            handle.remove()
            if gradient.device == self._pulled.device and gradient.layout == torch.strided:
                self._pulled = self._pulled | (self._at(gradient) != 0).any()

        handle = tensor.register_hook(notice)  # type: ignore[no-untyped-call]

    def stuck(self, tensor: Tensor) -> bool:
        self.done = True
        if tensor.device != self._values.device or tensor.numel() < self._places.numel():
            return False
        return bool(self._pulled & (self._at(tensor) == self._values).all())


def _look_at_zeros(head: HeadView) -> None:
    """A head whose rows ``attach`` has looked at, and that were all set to zero since."""
    if head.weight.requires_grad and not head.weight.detach().any():
        warn_user(
            "all rows of the head are zero, where a cosine has no gradient: neither they nor the "
            "model below will ever move. Set the weights before attach, which gives such rows "
            "values that train, or draw them: torch.nn.init.normal_(criterion.layer.weight)."
        )


def _soon_due(calls: int, patience: int) -> bool:
    """Whether a call is among the last before a verdict: after 1, 2, 4, 8 ... times patience."""
    remaining = -calls % patience
    return remaining < WINDOW and ((calls + remaining) // patience).bit_count() == 1


def _behind(objective: Objective, features: Tensor, labels: Tensor, head: HeadView) -> Tensor:
    """How many samples are more than 90 degrees from their prototype, and how many there are."""
    index = labels.argmax(1) if labels.dim() == 2 else labels.long()
    counts = (index >= 0) & (index < head.weight.shape[0])
    for loss in objective.terms.values():
        if isinstance(loss, Loss) and loss.ignore_index is not None and labels.dim() == 1:
            counts = counts & (index != loss.ignore_index)
    own = head.weight.detach().index_select(0, torch.where(counts, index, 0))
    own = own[:, None] if own.dim() == 2 else own
    with without_autocast(features):
        products = (promote(features)[:, None] * promote(own)).sum(2).amax(1)
    return torch.stack([((products < 0) & counts).sum(), counts.sum()])


def check_ceiling(objective: Objective, num_classes: int, dim: int) -> None:
    r"""Warn when a margin is wider than any arrangement of C classes in D dimensions allows.

    No C prototypes have all angles above :math:`\varphi` = ``packing_bound(C, D)``. An angular
    margin is at most the angle to the nearest other prototype (triangle inequality), so at most
    :math:`\varphi`; a cosine margin is at most :math:`1-\cos\varphi`, reached by features on their
    prototypes. Of margins per class the smallest counts: a single class may have more room.
    """
    angle = packing_bound(num_classes, dim)
    for name, loss in objective.terms.items():
        assert isinstance(loss, Loss)
        for what, margin, widest in loss.margin_ceilings(angle):
            least = float(margin.min()) if isinstance(margin, Tensor) else float(margin)
            if least > widest * (1 + 1e-6):
                warn_user(
                    f"the {what} of {type(loss).__name__} (term {name!r}) is {least:.4g}, but no "
                    f"arrangement of {num_classes} classes in {dim} dimensions has more than "
                    f"{widest:.4g}, so the loss pulls on every sample for ever. Lower the margin "
                    "below that, or give the model wider features."
                )


def check_shape_left(objective: Objective, head: nn.Module | None) -> None:
    """Warn where a loss that takes any head gets one that an earlier ``attach`` has shaped."""
    if isinstance(head, ClassHead) and head.shaped_by_attach:
        names = " + ".join(type(loss).__name__ for loss in objective.terms.values())
        warn_user(
            f"the head still has the form that an earlier attach gave it (similarity="
            f"{head.similarity!r}, scale={head.scale:g}), and {names} trains it as it is. For the "
            "plain layer call undo() of that criterion before this attach."
        )
