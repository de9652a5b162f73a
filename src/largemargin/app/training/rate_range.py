"""The learning-rate range test: which rates a run can take, found in a few steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count

from largemargin.app.config import RunConfig
from largemargin.app.data.load import Data, load_data
from largemargin.app.training.engine import rehearsed
from largemargin.app.training.processes import several_processes
from largemargin.app.training.step import set_rate
from largemargin.app.training.trainer import Trainer, seed_all
from largemargin.errors import LargeMarginError, check_number
from largemargin.measuring.batches import with_bar

SMOOTH = 0.9
"""Share of the past in the running mean of the losses."""

HIGHER = 2.0
"""Times its lowest value at which the loss has diverged."""

LEARNED = 0.8
"""Share of the whole fall of the loss after which the suggestion is taken: the rate of the lowest
loss depends on how long the test was, and training is unstable there."""

ROWS, WIDTH = 16, 40
"""Of the printed curve."""


@dataclass(frozen=True)
class RateRange:
    """What :func:`rate_range` found; ``print`` shows it as a curve.

    Args:
        rates: of the steps.
        losses: a running mean over them.
        head: times the rate, that of the head; None where it has none of its own.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    head: float | None = None

    @property
    def diverged(self) -> bool:
        """Whether the loss rose again before the highest rate."""
        return self.losses[-1] > HIGHER * min(self.losses)

    @property
    def suggestion(self) -> float:
        """The rate at which four fifths of the fall were reached, rounded to one digit.

        Example:
            >>> RateRange((0.01, 0.021, 0.5, 1.0), (2.0, 1.1, 1.0, 3.0)).suggestion
            0.02
        """
        goal = self.losses[0] - LEARNED * (self.losses[0] - min(self.losses))
        reached = next(rate for rate, loss in self._rows if loss <= goal)
        return float(f"{reached:.0e}")

    @property
    def _rows(self) -> list[tuple[float, float]]:
        return list(zip(self.rates, self.losses, strict=True))

    def __str__(self) -> str:
        lines = [f"{'rate':>9} {'loss':>9}"]
        every = max(1, math.ceil(len(self.rates) / ROWS))
        bottom, top = min(self.losses), self.losses[0]
        for rate, loss in self._rows[every - 1 :: every]:
            share = (loss - bottom) / max(top - bottom, 1e-12)
            bar = "#" * round(WIDTH * min(1.0, share))
            lines.append(f"{rate:>9.2g} {loss:>9.4g} {bar}".rstrip())
        end = f"diverges at {self.rates[-1]:.2g}" if self.diverged else "never diverges"
        words = f"--lr {self.suggestion:g}"
        if self.head is not None:
            words += f" --head_lr {self.suggestion * self.head:.2g}"
        lines += ["", f"suggestion  {words}, to begin with; the loss {end}"]
        return "\n".join(lines)


def rate_range(
    config: RunConfig,
    *,
    data: Data | None = None,
    steps: int = 200,
    lowest: float = 1e-5,
    highest: float = 10.0,
    progress: bool = False,
) -> RateRange:
    """Train with a rate that grows from step to step until the loss diverges (Smith 2017).

    The network, loss, batches, clipping and momentum are those of the run. Everything is thrown
    away afterwards: no folder is left, and a run that begins next is what it would have been.

    Args:
        config: of the run; its schedule and number of epochs do not count.
        data: loaded already.
        steps: at most.
        lowest, highest: rates of the first and the last step; those of the head are
            ``head_lr / lr`` times as high.
        progress: show a progress bar.
    """
    check_number("steps", steps, at_least=2)
    check_number("lowest", lowest, above=0)
    check_number("highest", highest, above=lowest)
    alone = replace(config, trackers=(), ema=None, graph="off", gradients_every=0)
    if several_processes():
        raise LargeMarginError("the range test runs in one process. Start it without torchrun.")
    with rehearsed(alone, load_data(alone.data) if data is None else data) as trainer:
        rates = [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]
        rows = list(_sweep(trainer, rates, progress))
    own = config.optimizer.head_lr
    head = None if own is None else own / config.optimizer.lr
    return RateRange(tuple(rate for rate, _ in rows), tuple(loss for _, loss in rows), head)


def _sweep(trainer: Trainer, rates: list[float], progress: bool) -> Iterator[tuple[float, float]]:
    """Rates and smoothed losses, until the loss diverges."""
    seed_all(trainer.config.seed, 0, 0)
    trainer.bare.train()
    batches = chain.from_iterable(map(trainer.batches.epoch, count()))
    mean, best = 0.0, math.inf
    steps = zip(rates, batches, strict=False)
    for number, (rate, batch) in enumerate(with_bar(steps, "rates", len(rates), progress), 1):
        trainer.totals.clear()
        set_rate(trainer.optimizer, rate)
        trainer.step(batch.images, batch.labels)
        trainer.criterion.step()
        totals = trainer.totals.read()
        if not totals.steps:
            if number == 1:
                raise LargeMarginError(
                    f"the loss or its gradient is not finite at a rate of {rate:g} already: look "
                    "at the images and the objective, not at the rate."
                )
            return
        mean = SMOOTH * mean + (1 - SMOOTH) * totals.loss
        smoothed = mean / (1 - SMOOTH**number)
        best = min(best, smoothed)
        yield rate, smoothed
        if smoothed > HIGHER * best:
            return
