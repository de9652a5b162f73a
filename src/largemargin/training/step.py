"""One step of training: noise, forward, loss, backward, clipping, optimizer, average."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.dropin import Criterion
from largemargin.training.averaging import Average
from largemargin.training.config import NoiseConfig
from largemargin.training.sums import Sums

Backward = Callable[[Tensor], None]
Losses = tuple[Tensor, dict[str, Tensor]]


def noisy_version(images: Tensor, noise: NoiseConfig) -> Tensor:
    """Images with the configured noise, drawn from torch's generator of their device."""
    if noise.kind == "gaussian":
        changed = images + noise.level * torch.randn_like(images)
    else:
        changed = images + noise.level * (2 * torch.rand_like(images) - 1)
    return changed.clamp(0, 1) if noise.clip else changed


class Step:
    """``step(images, labels)`` changes the model once, unless loss or gradient are not finite.

    A step whose loss or gradient is infinite or NaN leaves parameters and optimizer as they were
    and is counted in ``sums``. Buffers (batch statistics, centroids) have seen it, though: see
    :class:`Snapshot`.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        optimizer: Any,
        *,
        noise: NoiseConfig,
        clip_norm: float | None,
        sums: Sums,
        average: Average | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        backward: Backward | None = None,
        scaler: Any = None,
        compiled: bool = False,
        alone: bool = True,
    ) -> None:
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.noise = noise
        self.clip_norm = math.inf if clip_norm is None else clip_norm
        self.sums = sums
        self.average = average
        self.autocast = autocast
        self.backward: Backward = backward or (lambda loss: loss.backward())  # type: ignore[no-untyped-call]
        self.scaler = scaler
        self.alone = alone
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        # Ragged last batches take the plain function: another shape would be compiled for them.
        self.losses = torch.compile(self.plain_losses, dynamic=False) if compiled else None
        self.usual_size: int | None = None

    def plain_losses(self, images: Tensor, noisy: Tensor | None, labels: Tensor) -> Losses:
        """The loss and its terms; both kinds of images one after the other or joined (O9)."""
        use, criterion = self.noise.use, self.criterion
        with self.autocast():
            if self.noise.joined and noisy is not None:
                outputs = self.model(torch.cat([images, noisy]))
                if use == "pair":
                    total = criterion(outputs, labels, noisy="second half")
                else:
                    total = criterion(outputs, torch.cat([labels, labels]))
            elif use == "pair":
                total = criterion(self.model(images), labels, noisy=self.model(noisy))
            elif use == "clean_and_noisy":
                clean = criterion(self.model(images), labels)
                terms = criterion.terms
                both = (clean + criterion(self.model(noisy), labels)) / 2
                return both, {k: (terms[k] + v) / 2 for k, v in criterion.terms.items()}
            else:
                total = criterion(self.model(noisy if use == "noisy" else images), labels)
        return total, dict(criterion.terms)

    def __call__(self, images: Tensor, labels: Tensor, *, plain: bool = False) -> None:
        noisy = None if self.noise.use == "none" else noisy_version(images, self.noise)
        losses = self.plain_losses
        if self.losses is not None and not plain and len(labels) == self.usual_size:
            losses = self.losses
        self.optimizer.zero_grad(set_to_none=True)
        total, terms = losses(images, noisy, labels)
        self.backward(total)
        norm = self._gradient_norm()
        total = total.detach()
        finite = torch.isfinite(norm)
        if self.alone:
            # Losses of several processes differ, their gradient is one: they have to agree.
            finite = finite & torch.isfinite(total)
        self._move(norm, finite)
        self.sums.add(total, terms, norm, finite)
        if self.average is not None:
            self.average.update()

    def _gradient_norm(self) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def _move(self, norm: Tensor, finite: Tensor) -> None:
        """Clip and step, unless the step is not finite."""
        if finite.device.type == "cuda" and self.scaler is None:
            # Fused optimizers divide gradients by one number, and leave everything as it was where
            # the other is 1: clipping costs no pass over them, skipping no look at the device.
            self.optimizer.grad_scale = ((norm + 1e-6) / self.clip_norm).clamp(min=1.0)
            self.optimizer.found_inf = (~finite).float()
            self.optimizer.step()
            return
        if self.clip_norm < math.inf:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()


class Snapshot:
    """Buffers as they were when all was well: batch statistics and centroids.

    Those of ``average`` are copies of the model's, and follow them back.
    """

    def __init__(self, *modules: nn.Module | None, average: Average | None = None) -> None:
        self.average = average
        self.buffers = [
            buffer for module in modules if module is not None for buffer in module.buffers()
        ]
        self.kept = [buffer.clone() for buffer in self.buffers]

    def keep(self) -> None:
        for mine, theirs in zip(self.kept, self.buffers, strict=True):
            mine.copy_(theirs)

    def states(self) -> dict[str, Tensor]:
        """What is kept, by number."""
        return {str(number): each for number, each in enumerate(self.kept)}

    def put_back(self, states: dict[str, Tensor]) -> None:
        """Keep what :meth:`states` gave."""
        for number, mine in enumerate(self.kept):
            mine.copy_(states[str(number)])

    def restore(self) -> None:
        for mine, theirs in zip(self.kept, self.buffers, strict=True):
            theirs.copy_(mine)
        if self.average is not None:
            self.average.copy_buffers()
