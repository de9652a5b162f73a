"""One step of training: noise, forward, loss, backward, clipping, optimizer, averaged weights.

:class:`Step` runs it plainly, :class:`GraphStep` replays it as a CUDA graph, with the augmentation.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.config import NoiseConfig
from largemargin.app.data.augment import Draws
from largemargin.app.data.samples import Batches, as_float
from largemargin.app.training.epoch_totals import EpochTotals
from largemargin.dropin.criterion import Criterion
from largemargin.errors import check_number

Backward = Callable[[Tensor], None]
Losses = tuple[Tensor, dict[str, Tensor]]


def noisy_images(images: Tensor, noise: NoiseConfig) -> Tensor:
    """Images with the configured noise, drawn from torch's generator of their device."""
    if noise.kind == "gaussian":
        changed = images + noise.level * torch.randn_like(images)
    else:
        changed = images + noise.level * (2 * torch.rand_like(images) - 1)
    return changed.clamp(0, 1) if noise.clip else changed


class Step:
    """``step(images, labels)`` changes the model once, unless loss or gradient are not finite.

    A step whose loss or gradient is infinite or NaN leaves parameters and optimizer as they were
    and is counted in ``totals``. Buffers (batch statistics, centroids) have seen it, though: see
    :class:`BufferSnapshot`.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        optimizer: Any,
        *,
        noise: NoiseConfig,
        clip_norm: float | None,
        totals: EpochTotals,
        average: "AveragedModel | None" = None,
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
        self.totals = totals
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
        noisy = None if self.noise.use == "none" else noisy_images(images, self.noise)
        losses = self.plain_losses
        if self.losses is not None and not plain and len(labels) == self.usual_size:
            losses = self.losses
        self.optimizer.zero_grad(set_to_none=True)
        loss, terms = losses(images, noisy, labels)
        self.backward(loss)
        norm = self._gradient_norm()
        loss = loss.detach()
        finite = torch.isfinite(norm)
        if self.alone:
            # Losses of several processes differ, their gradient is one: they have to agree.
            finite = finite & torch.isfinite(loss)
        self._update(norm, finite)
        self.totals.add(loss, terms, norm, finite)
        if self.average is not None:
            self.average.update()

    def _gradient_norm(self) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def _update(self, norm: Tensor, finite: Tensor) -> None:
        """Clip and change the parameters, unless the step is not finite."""
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


WARM_UP = 3
"""Steps of a size that run before it is captured, as they would have run anyway."""


class GraphStep:
    """Runs the steps of an epoch by replaying captured ones, one graph for every batch size.

    The images lie on the device; a step finds its rows by a counter that lies there too, so
    that nothing is sent from the host. The first steps of a size run plainly (libraries
    initialise, the compiler compiles), then one is captured. All of it happens on one stream that
    is not the default one: gradients belong to the stream they were first made on.
    """

    def __init__(self, step: Step, batches: Batches) -> None:
        assert batches.pixels is not None
        self.step = step
        self.batches = batches
        self.device = batches.device
        count = len(batches.samples)
        self.order = torch.zeros(count, dtype=torch.long, device=self.device)
        self.draws = batches.augment.draw(count).to(self.device)
        self.start = torch.zeros((), dtype=torch.long, device=self.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.plain_steps: dict[int, int] = {}
        self._within: dict[int, Tensor] = {}
        compiled = step.losses is not None
        self._compiled = torch.compile(self._gather, dynamic=False) if compiled else self._gather

    def begin(self, epoch: int) -> None:
        """Make this epoch's order and draws the ones that steps read."""
        plan = self.batches.plan(epoch)
        self.order.copy_(plan.order)
        for mine, new in zip(self.draws, plan.draws, strict=True):
            mine.copy_(new)

    def _gather(self, within: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of the step that begins at ``start``, augmented."""
        pixels = self.batches.pixels
        assert pixels is not None
        rows = self.start + within
        index = self.order[rows]
        draws = Draws(*(each[rows] for each in self.draws))
        images = as_float(self.batches.augment.take(pixels, index, draws))
        return images.contiguous(memory_format=torch.channels_last), self.batches.labels[index]

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        if size not in self._within:
            self._within[size] = torch.arange(size, device=self.device)
        gather = self._compiled if size == self.step.usual_size else self._gather
        return gather(self._within[size])

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a step of the epoch, for one that is not replayed."""
        first, end = self.batches.rows(number)
        self.start.fill_(first)
        return self._batch(end - first)

    def __call__(self, number: int) -> int:
        """Step ``number`` of the epoch; returns its number of images."""
        first, end = self.batches.rows(number)
        size = end - first
        self.start.fill_(first)
        if size in self.graphs:
            self.graphs[size].replay()
        elif self.plain_steps.setdefault(size, 0) < WARM_UP:
            self.plain_steps[size] += 1
            self.step(*self._batch(size))
        else:
            self._capture(size)
            self.graphs[size].replay()
        return size

    def _capture(self, size: int) -> None:
        # Gradients made while capturing live in the graph's own memory.
        self.step.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        with _no_garbage_collection(), torch.cuda.graph(graph, stream=stream):
            self.step(*self._batch(size))
        self.graphs[size] = graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Garbage goes before, none goes inside: freeing another run's graph ends a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class AveragedModel:
    """An exponential moving average of a model, updated without asking the device anything.

    Parameters follow as ``average += (1 - decay) * (model - average)``; buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        check_number("ema", decay, at_least=0, below=1)
        self.decay = decay
        self.model = deepcopy(model).eval().requires_grad_(False)
        self._mine: list[Tensor] = list(self.model.parameters())
        self._theirs: list[Tensor] = list(model.parameters())
        self._copied = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._mine, self._theirs, 1 - self.decay)
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Those of the model, as they are now."""
        for mine, theirs in self._copied:
            mine.copy_(theirs)


class BufferSnapshot:
    """Buffers (batch statistics, centroids) as they were after the last good step.

    Those of ``average`` are copies of the model's, and follow them back.
    """

    def __init__(self, *modules: nn.Module | None, average: AveragedModel | None = None) -> None:
        self.average = average
        self.buffers = [
            buffer for module in modules if module is not None for buffer in module.buffers()
        ]
        self.kept = [buffer.clone() for buffer in self.buffers]

    def keep(self) -> None:
        for mine, theirs in zip(self.kept, self.buffers, strict=True):
            mine.copy_(theirs)

    def states(self) -> dict[str, Tensor]:
        """The buffers that are kept, by number."""
        return {str(number): each for number, each in enumerate(self.kept)}

    def load(self, states: dict[str, Tensor]) -> None:
        """Keep the buffers that :meth:`states` gave."""
        for number, mine in enumerate(self.kept):
            mine.copy_(states[str(number)])

    def restore(self) -> None:
        for mine, theirs in zip(self.kept, self.buffers, strict=True):
            theirs.copy_(mine)
        if self.average is not None:
            self.average.copy_buffers()
