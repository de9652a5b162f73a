"""One step of training, and the optimizer and the learning rate it takes.

A step is noise, forward, loss, backward, clipping, optimizer and averaged weights. :class:`Step`
runs it plainly, :class:`GraphStep` replays it as a CUDA graph, with the augmentation.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.config import NoiseConfig, OptimizerConfig
from largemargin.app.data.augment import Draws
from largemargin.app.data.samples import Batches
from largemargin.app.training.journal import EpochTotals
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError, check_number

Losses = tuple[Tensor, dict[str, Tensor]]


def noisy_images(images: Tensor, noise: NoiseConfig) -> Tensor:
    """Images with the configured noise, drawn from torch's generator of their device."""
    gaussian = noise.kind == "gaussian"
    drawn = torch.randn_like(images) if gaussian else 2 * torch.rand_like(images) - 1
    changed = images + noise.level * drawn
    return changed.clamp(0, 1) if noise.clip else changed


@dataclass(eq=False, repr=False)
class Step:
    """``step(images, labels)`` changes the model once, unless loss or gradient are not finite.

    A step whose loss or gradient is infinite or NaN leaves parameters and optimizer as they were
    and is counted in ``totals``. Buffers (batch statistics, centroids) have seen it, though: see
    :class:`BufferSnapshot`.
    """

    model: nn.Module
    criterion: Criterion
    optimizer: Any
    _: KW_ONLY
    noise: NoiseConfig
    clip_norm: float | None
    totals: EpochTotals
    average: "AveragedModel | None" = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: Callable[[Tensor], None] = Tensor.backward
    scaler: Any = None
    compiled: bool = False
    alone: bool = True
    usual_size: int | None = None

    def __post_init__(self) -> None:
        groups = self.optimizer.param_groups
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        # Ragged last batches take the plain function: another shape would be compiled for them.
        self.losses = torch.compile(self.plain_losses, dynamic=False) if self.compiled else None

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
        copies = images
        if self.noise.crop == "own":
            images, copies = images.chunk(2)
        noisy = None if self.noise.use == "none" else noisy_images(copies, self.noise)
        losses = self.plain_losses
        if self.losses is not None and not plain and len(labels) == self.usual_size:
            losses = self.losses
        self.optimizer.zero_grad(set_to_none=True)
        loss, terms = losses(images, noisy, labels)
        self.backward(loss)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        loss = loss.detach()
        finite = torch.isfinite(norm)
        if self.alone:
            # Losses of several processes differ, their gradient is one: they have to agree.
            finite = finite & torch.isfinite(loss)
        self._update(norm, finite)
        self.totals.add(loss, terms, norm, finite)
        if self.average is not None:
            self.average.update()

    def _update(self, norm: Tensor, finite: Tensor) -> None:
        """Clip and change the parameters, unless the step is not finite."""
        if finite.device.type == "cuda" and self.scaler is None:
            # Fused optimizers divide gradients by one number, and leave everything as it was where
            # the other is 1: clipping costs no pass over them, skipping no look at the device.
            largest = math.inf if self.clip_norm is None else self.clip_norm
            self.optimizer.grad_scale = ((norm + 1e-6) / largest).clamp(min=1.0)
            self.optimizer.found_inf = (~finite).float()
            self.optimizer.step()
            return
        if self.clip_norm is not None:
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
        self.draws = [batches.augment.draw(count).to(self.device) for _ in range(1 + batches.twice)]
        self.start = torch.zeros((), dtype=torch.long, device=self.device)
        self.mixtures = batches.mixtures(0)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.plain_steps: dict[int, int] = {}
        self._within: dict[int, Tensor] = {}
        compiled = step.losses is not None
        self._compiled = torch.compile(self._gather, dynamic=False) if compiled else self._gather

    def begin(self, epoch: int) -> None:
        """Make this epoch's order and draws the ones that steps read."""
        plan = self.batches.plan(epoch)
        self.order.copy_(plan.order)
        for mine, new in zip(self.draws, plan[1:], strict=False):  # there may be no others
            for each, drawn in zip(mine, new or (), strict=True):
                each.copy_(drawn)
        self.mixtures.copy_(self.batches.mixtures(epoch))

    def _gather(self, within: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of the step that begins at ``start``, augmented."""
        pixels = self.batches.pixels
        assert pixels is not None
        rows = self.start + within
        index = self.order[rows]
        draws = [Draws(*(each[rows] for each in one)) for one in self.draws]
        images, labels = self.batches.take(pixels, index, draws), self.batches.labels[index]
        if self.batches.mix is not None:
            # Looked up by a tensor: a number would be read back from the device.
            number = (self.start // self.batches.batch_size).view(1)
            mixture = self.mixtures.index_select(0, number)[0]
            images, labels = self.batches.mix.apply(images, labels, mixture)
        return images.contiguous(memory_format=torch.channels_last), labels

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
            # Gradients made while capturing live in the graph's own memory.
            self.step.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(self.device)
            with _no_garbage_collection(), torch.cuda.graph(graph, stream=stream):
                self.step(*self._batch(size))
            graph.replay()
            self.graphs[size] = graph
        return size


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


ONE_CYCLE_RISE = 0.2
"""Share of the steps in which one_cycle rises, from 1/25 of the peak; it ends at 1/10000 of it."""


def make_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    *,
    head: Iterable[nn.Parameter] = (),
    on_device: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of all that may be trained, with the rate ``head_lr`` for ``head``.

    ``on_device`` keeps its learning rate in a tensor, as CUDA graphs need.
    """
    check_number("optimizer.lr", config.lr, above=0)
    check_number("optimizer.weight_decay", config.weight_decay, at_least=0)
    check_number("optimizer.momentum", config.momentum, at_least=0, below=1)
    if config.clip_norm is not None:
        check_number("optimizer.clip_norm", config.clip_norm, above=0)
    chosen = [parameter for parameter in parameters if parameter.requires_grad]
    if not chosen:
        raise LargeMarginError(
            "there is nothing to train: model.freeze leaves no parameter. Freeze less."
        )
    device = chosen[0].device
    groups, fused = _with_rates(config, chosen, head), device.type == "cuda"
    for group in groups if on_device else ():  # a tensor for each, or they would share one
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
    if config.name == "sgd":
        return torch.optim.SGD(
            groups,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
            fused=fused,
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, weight_decay=config.weight_decay, fused=fused, capturable=on_device)


def _with_rates(
    config: OptimizerConfig, parameters: list[nn.Parameter], head: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    """Groups of parameters with their rate, and its factor to the rate of the backbone."""
    if config.head_lr is None:
        return [{"params": parameters, "lr": config.lr, "factor": 1.0}]
    check_number("optimizer.head_lr", config.head_lr, above=0)
    above = {id(parameter) for parameter in head}
    parts = (
        ([each for each in parameters if id(each) not in above], config.lr),
        ([each for each in parameters if id(each) in above], config.head_lr),
    )
    return [{"params": own, "lr": lr, "factor": lr / config.lr} for own, lr in parts if own]


class LearningRate:
    """The learning rate at every step: a pure function, so resuming needs no state."""

    def __init__(self, config: OptimizerConfig, *, epochs: int, steps_per_epoch: int) -> None:
        if config.schedule == "steps" and not config.milestones:
            raise LargeMarginError(
                "optimizer.schedule is steps, but optimizer.milestones is empty. Give the epochs "
                "at which the rate falls, as [60, 120, 160], or choose another schedule."
            )
        if config.schedule == "log_linear" and config.final_lr <= 0:
            raise LargeMarginError(
                "optimizer.schedule log_linear needs optimizer.final_lr above 0, but "
                f"{config.final_lr} was given."
            )
        check_number("optimizer.final_lr", config.final_lr, at_least=0)
        check_number("optimizer.factor", config.factor, above=0)
        check_number("optimizer.warmup_epochs", config.warmup_epochs, at_least=0)
        self.config = config
        self.steps_per_epoch = steps_per_epoch
        self.total = epochs * steps_per_epoch

    def at(self, step: int) -> float:
        """The rate of the step with this number, counted from 0."""
        config, warmup = self.config, self.config.warmup_epochs * self.steps_per_epoch
        if step < warmup:
            return config.lr * (step + 1) / (warmup + 1)
        if config.by == "epoch":
            step = step // self.steps_per_epoch * self.steps_per_epoch
            warmup = math.ceil(config.warmup_epochs) * self.steps_per_epoch
            last = self.total - self.steps_per_epoch
        else:
            last = self.total - 1
        progress = min(1.0, max(0.0, (step - warmup) / max(1, last - warmup)))
        return self._after_warmup(progress, step // self.steps_per_epoch)

    def _after_warmup(self, progress: float, epoch: int) -> float:
        config = self.config
        if config.schedule == "steps":
            passed = sum(epoch >= milestone for milestone in config.milestones)
            return config.lr * config.factor**passed
        if config.schedule == "cosine":
            return _wave(config.lr, config.final_lr, progress)
        if config.schedule == "log_linear":
            return float(config.lr * (config.final_lr / config.lr) ** progress)
        if config.schedule == "one_cycle":
            rise, peak = ONE_CYCLE_RISE, config.lr
            if progress < rise:
                return _wave(peak / 25, peak, progress / rise)
            return _wave(peak, peak / 1e4, (progress - rise) / (1 - rise))
        return config.lr

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Give the optimizer the rate of this step."""
        rate = self.at(step)
        set_rate(optimizer, rate)
        return rate


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its rate where the first has this one."""
    for group in optimizer.param_groups:
        own = rate * group.get("factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def _wave(start: float, end: float, part: float) -> float:
    """Half a cosine from ``start`` to ``end``."""
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2
