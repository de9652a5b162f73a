"""What an attack needs of a model: logits in evaluation mode, a loss, its input gradient."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largemargin.dropin.outputs import tensors_in
from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_num_classes,
    check_same_device,
)
from largemargin.ops import class_stats_from_logits
from largemargin.ops.rows import promote

Model = Callable[[Tensor], Any]
"""Images (N, ...) in [0, 1] to logits (N, C), or to outputs that hold them; rows independent."""


class Seen(NamedTuple):
    """One look at the model, per sample."""

    losses: Tensor
    right: Tensor
    """Whether it predicts the label."""


class Victim:
    """A model under attack. Use it inside ``with victim.quiet():``."""

    def __init__(self, model: Model, images: Tensor, labels: Tensor, loss: str) -> None:
        check_choice("loss", loss, tuple(LOSSES))
        if not callable(model):
            raise LargeMarginError(
                f"model must map images to logits, but {type(model).__name__} was given. The order "
                "is model, images, labels."
            )
        check_labels(labels, len(images), 2, of="images", soft=False, validate=False)
        check_same_device(images=images, labels=labels)
        # DDP would expect a backward pass to the parameters after every forward pass.
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.labels, self.loss = labels.detach().clone().long(), loss
        self.checked = False
        new = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        self.broken = {"NaN or infinite logits": new, "NaN gradients": new.clone()}
        """For which samples the model has returned such; looked at once, in the end."""

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Evaluation mode, gradients on, whatever the caller has; all restored afterwards."""
        modules = list(self.model.modules()) if isinstance(self.model, nn.Module) else []
        modes = [module.training for module in modules]
        try:
            if isinstance(self.model, nn.Module):
                self.model.eval()
            with torch.enable_grad():
                yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
        for what, samples in self.broken.items():
            if bool(samples.any()):
                raise LargeMarginError(
                    f"the model returned {what} for sample {int(samples.int().argmax())} of the "
                    "batch: its robustness cannot be measured. Look for a diverged model or broken "
                    "images."
                )

    def look(self, images: Tensor, rows: Tensor) -> Seen:
        """Losses of images that belong to these rows of the batch."""
        with torch.no_grad():
            return self._look(images, rows)

    def gradient(self, images: Tensor, rows: Tensor) -> tuple[Seen, Tensor]:
        """The same with the gradient of each loss; parameters receive none."""
        images = images.detach().clone().requires_grad_()
        seen = self._look(images, rows)
        if not seen.losses.requires_grad:
            raise LargeMarginError(
                "the logits do not depend on the images through differentiable operations, so that "
                "there is no gradient to attack along. Look for .detach() or no_grad in the model."
            )
        (found,) = torch.autograd.grad(seen.losses.sum(), images, materialize_grads=True)
        self.broken["NaN gradients"][rows] |= found.isnan().flatten(1).any(1)
        # Infinite ones, as half precision may have, still say in which direction.
        return Seen(seen.losses.detach(), seen.right), torch.nan_to_num(found.detach())

    def _look(self, images: Tensor, rows: Tensor) -> Seen:
        logits = promote(logits_in(self.model(images)))
        labels = self.labels[rows]
        if logits.dim() != 2 or len(logits) != len(images):
            raise LargeMarginError(
                f"the model must return one row of logits per image, ({len(images)}, C), but their "
                f"shape is {tuple(logits.shape)}."
            )
        if not self.checked:  # once: reading values back from an accelerator stalls it
            check_num_classes(logits.shape[1])
            check_labels(
                labels, len(images), logits.shape[1], of="images", soft=False, validate=True
            )
            self.checked = True
        with torch.no_grad():
            broken = ~torch.isfinite(logits).all(1)
            self.broken["NaN or infinite logits"][rows] |= broken
            right = logits.argmax(1) == labels
        losses = LOSSES[self.loss](logits, labels)
        return Seen(losses.masked_fill(broken, 0), right)


def logits_in(outputs: Any) -> Tensor:
    """The logits of a model's outputs: a tensor, what is called "logits", or the first tensor."""
    if isinstance(outputs, Tensor):
        return outputs
    named = outputs.get("logits") if isinstance(outputs, Mapping) else None
    named = getattr(outputs, "logits", None) if named is None else named
    if isinstance(named, Tensor):
        return named
    found = tensors_in(outputs)
    if not found:
        raise LargeMarginError(
            f"the model must return logits, but it returned {type(outputs).__name__} without a "
            "tensor in it."
        )
    return found[0]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""log(exp(cross entropy) - 1) = :math:`\log\sum_{c \ne y} e^{f_c} - f_y`.

    It grows with the cross entropy and its gradient has the same direction, which is all that an
    attack by signs or unit vectors asks for; but it never vanishes, however sure the model is.
    """
    stats = class_stats_from_logits(logits, labels, want=("target", "rest"))
    assert stats.rest is not None
    assert stats.target is not None
    return stats.rest - stats.target


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Best other logit minus that of the label: positive where the model is wrong."""
    stats = class_stats_from_logits(logits, labels, want=("target", "rival"))
    assert stats.rival is not None
    assert stats.target is not None
    return stats.rival - stats.target


def _logit_ratio(logits: Tensor, labels: Tensor) -> Tensor:
    """The margin over the distance from the largest to the third largest logit (DLR)."""
    if logits.shape[1] < 3:
        raise LargeMarginError(
            f"loss 'dlr' divides by a difference of three logits, but the model has "
            f"{logits.shape[1]} classes. Use 'ce' or 'margin'."
        )
    largest = logits.topk(3, dim=1).values
    return _margin(logits, labels) / (largest[:, 0] - largest[:, 2] + 1e-12)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": _cross_entropy,
    "dlr": _logit_ratio,
    "margin": _margin,
}
"""What an attack makes large: (N, C) logits and (N,) labels to (N,) numbers."""
