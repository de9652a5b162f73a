"""The optimizer of a run, and its learning rate as a function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.config import OptimizerConfig
from largemargin.errors import LargeMarginError, check_number

ONE_CYCLE_RISE = 0.2
"""Share of the steps in which one_cycle rises, from 1/25 of the peak; it ends at 1/10000 of it."""


def make_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], *, on_device: bool = False
) -> torch.optim.Optimizer:
    """The optimizer; ``on_device`` keeps its learning rate in a tensor, as CUDA graphs need."""
    check_number("optimizer.lr", config.lr, above=0)
    check_number("optimizer.weight_decay", config.weight_decay, at_least=0)
    if config.clip_norm is not None:
        check_number("optimizer.clip_norm", config.clip_norm, above=0)
    chosen = [parameter for parameter in parameters if parameter.requires_grad]
    rate: Any = config.lr
    if on_device:
        rate = torch.tensor(config.lr, dtype=torch.float32, device=chosen[0].device)
    fused = chosen[0].device.type == "cuda"
    if config.name == "sgd":
        return torch.optim.SGD(
            chosen,
            lr=rate,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
            fused=fused,
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(
        chosen, lr=rate, weight_decay=config.weight_decay, fused=fused, capturable=on_device
    )


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
            wave = (1 + math.cos(math.pi * progress)) / 2
            return config.final_lr + (config.lr - config.final_lr) * wave
        if config.schedule == "log_linear":
            return float(config.lr * (config.final_lr / config.lr) ** progress)
        if config.schedule == "one_cycle":
            return _one_cycle(config.lr, progress)
        return config.lr

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Give the optimizer the rate of this step."""
        rate = self.at(step)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rate


def _one_cycle(peak: float, progress: float) -> float:
    def between(start: float, end: float, part: float) -> float:
        return end + (start - end) * (1 + math.cos(math.pi * part)) / 2

    if progress < ONE_CYCLE_RISE:
        return between(peak / 25, peak, progress / ONE_CYCLE_RISE)
    return between(peak, peak / 1e4, (progress - ONE_CYCLE_RISE) / (1 - ONE_CYCLE_RISE))
