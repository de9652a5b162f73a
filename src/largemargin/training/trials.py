"""Trials of a search, as a CSV file and as text."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from largemargin.evaluating.prediction import harmless
from largemargin.training.config import RunConfig
from largemargin.training.files import write_text

COUNTED = ("complete", "pruned", "diverged")
"""States of trials that count towards a budget."""


@dataclass(frozen=True)
class Trial:
    """One try: what was set, how far it came, what it cost."""

    number: int
    state: str
    """complete, pruned (stopped early), diverged, interrupted or running."""
    value: float | None
    """The validation result, as ``RunConfig.select`` says."""
    epochs: int
    seconds: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class Tuning:
    """What a search found."""

    folder: Path
    select: str
    trials: tuple[Trial, ...]
    best: RunConfig | None
    """The settings of the best trial, ready for training; None while no trial is complete."""

    @property
    def finished(self) -> tuple[Trial, ...]:
        """Trials that count towards the budget."""
        return tuple(each for each in self.trials if each.state in COUNTED)

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    @property
    def best_trial(self) -> Trial | None:
        done = [each for each in self.trials if each.state == "complete" and each.value is not None]
        sign = -1 if self.select == "loss" else 1
        return max(done, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def __str__(self) -> str:
        return summary(self)


def write_csv(path: Path, tuning: Tuning) -> None:
    names = list(dict.fromkeys(name for trial in tuning.trials for name in trial.settings))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = ["trial", "state", f"validation_{tuning.select}", "epochs", "seconds"]
    writer.writerow([*heads, *map(harmless, names)])
    for trial in tuning.trials:
        settings = [_cell(trial.settings.get(name)) for name in names]
        value = "" if trial.value is None else trial.value
        seconds = f"{trial.seconds:.2f}"
        writer.writerow([trial.number, trial.state, value, trial.epochs, seconds, *settings])
    write_text(path, text.getvalue())


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return "" if value is None else value
    return harmless(str(value))


def summary(tuning: Tuning) -> str:
    """How many trials there were, and what the best one is."""
    counts = {state: sum(t.state == state for t in tuning.trials) for state in COUNTED}
    spent = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    lines = [f"{len(tuning.finished)} trials ({spent}) in {tuning.seconds:.0f} s of training"]
    best, first = tuning.best_trial, tuning.trials[0] if tuning.trials else None
    if best is None:
        return "\n".join([*lines, "No trial is complete, so there is no best one."])
    lines.append(f"best: trial {best.number}, validation {_score(tuning.select, best.value)}")
    lines += [f"  {path:<32} {shown(value)}" for path, value in best.settings.items()]
    if first is not None and first.value is not None and first is not best:
        lines.append(
            f"as given (trial {first.number}): validation {_score(tuning.select, first.value)}"
        )
    return "\n".join(lines)


def _score(select: str, value: float | None) -> str:
    if value is None:
        return "none"
    return f"{select} {value:.4f}" if select == "loss" else f"{select} {100 * value:.2f} %"


def line(trial: Trial, select: str) -> str:
    """A trial in a line: how it ended, and with what settings."""
    ends = {"complete": "", "pruned": ", stopped early", "diverged": ", diverged"}
    end = ends.get(trial.state, f", {trial.state}")
    settings = ", ".join(f"{short(path)} {shown(value)}" for path, value in trial.settings.items())
    epochs = f"{trial.epochs} epoch{'' if trial.epochs == 1 else 's'}"
    return f"{_score(select, trial.value)} after {epochs}{end} ({settings})"


def short(path: str) -> str:
    return path.removeprefix("optimizer.").removeprefix("objective.")


def shown(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
