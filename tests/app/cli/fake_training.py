"""A stand-in for ``train`` that writes a run's files and learns as it is told: for tests."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largemargin.app.config import RunConfig
from largemargin.app.training.config_file import write_config
from largemargin.app.training.files import write_json
from largemargin.app.training.run_scores import Diverged
from largemargin.app.training.runs import CONFIG, RESULT, Run


@dataclass
class FakeTraining:
    """``accuracy(config)`` is reached in steps over the epochs; NaN diverges.

    Args:
        accuracy: final accuracy of a configuration.
        stop_at: raise this after so many epochs over all calls, as a kill would.
    """

    accuracy: Callable[[RunConfig], float]
    stop_at: int | None = None
    stop_with: BaseException = field(default_factory=KeyboardInterrupt)
    calls: list[tuple[RunConfig, bool]] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)
    epochs: int = 0

    def __call__(
        self,
        config: RunConfig,
        *,
        folder: Path,
        resume: bool = False,
        data: Any = None,
        progress: bool = True,
        on_epoch: Callable[[dict[str, Any]], None] | None = None,
    ) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        if resume and Run(folder).finished:
            return Run(folder)
        self.calls.append((config, resume))
        self.data.append(data)
        write_config(config, folder / CONFIG)
        final = self.accuracy(config)
        if math.isnan(final):
            raise Diverged("99 steps in a row were not finite")
        for epoch in range(config.epochs):
            self.epochs += 1
            if self.stop_at is not None and self.epochs > self.stop_at:
                raise self.stop_with
            reached = final * (epoch + 1) / config.epochs
            scores = {"accuracy": reached, "balanced_accuracy": reached, "loss": 1 - reached}
            if on_epoch is not None:
                on_epoch({"epoch": epoch, "validation": scores})
        result = {"validation": scores, "seconds": 1.0}
        result["test"] = None if data.test is None else scores
        write_json(folder / RESULT, result)
        return Run(folder)
