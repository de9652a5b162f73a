"""Which runs come next: successive halving, the choice of a method, the final runs.

Everything here is a function of the protocol and of the records so far, so that a benchmark that
was interrupted anywhere goes on as if it had not been.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

from largemargin.app.config import RunConfig
from largemargin.app.training.search_space import with_values
from largemargin_papers.benchmark.draws import trials_of
from largemargin_papers.benchmark.protocol import Protocol, Situation

FINAL = "final"
ASKED = "asked-"
"""Stages of runs beside the registered ones begin with it; see ``questions``."""

Records = Mapping[str, Mapping[str, Any]]
"""What is known of every run, by its key."""


@dataclass(frozen=True)
class Job:
    """A run of the benchmark; ``key`` is its name in the records."""

    protocol: Protocol = field(repr=False, compare=False)
    task: Situation = field(repr=False, compare=False)
    method: str
    stage: str
    """rung1, rung2, ..., final, or asked- and the name of a question."""
    trial: int
    seed: int
    epochs: int
    late_weights: float | None = None
    """As ``reweight_at`` of a method; None: the method's."""
    optimizer: Mapping[str, Any] | None = field(default=None, compare=False)
    """Values of the common space by path, in place of the trial's; None: the trial's."""

    @property
    def key(self) -> str:
        return f"{self.task.name}/{self.method}/{self.stage}/trial{self.trial}/seed{self.seed}"

    @property
    def split(self) -> str:
        """What it is judged on."""
        return "test" if self.stage == FINAL or self.stage.startswith(ASKED) else "validation"

    @property
    def reweight_at(self) -> float | None:
        if self.late_weights is not None:
            return self.late_weights
        return self.protocol.methods[self.method].reweight_at

    @cached_property
    def config(self) -> RunConfig:
        """Made when it is asked for: most jobs that are listed are not run."""
        spec = self.protocol.methods[self.method]
        config = self.protocol.config(self.task, spec)
        drawn = trials_of(self.protocol, self.task, spec)[self.trial]
        values = {**drawn, **(self.optimizer or {})}
        level = values.pop("noise.level", None)
        if level is not None:
            config = replace(config, noise=replace(config.noise, level=level))
        return replace(
            with_values(config, values),
            epochs=self.epochs,
            checkpoint_every=self.epochs,
            seed=self.seed,
            name=self.method,
        )


def job(
    protocol: Protocol, situation: Situation, method: str, stage: int | None, trial: int, seed: int
) -> Job:
    """The run of a trial in a rung (by its number), or (None) a final one."""
    share = 1.0 if stage is None else protocol.rungs[stage].epochs
    epochs = max(1, round(situation.epochs * share))
    name = FINAL if stage is None else f"rung{stage + 1}"
    return Job(protocol, situation, method, name, trial, seed, epochs)


def rung_jobs(
    protocol: Protocol, situation: Situation, method: str, records: Records, stage: int
) -> list[Job] | None:
    """The runs of a rung; None while the one before is not finished."""
    if stage == 0:
        chosen: Sequence[int] = range(protocol.trials)
    else:
        before = rung_jobs(protocol, situation, method, records, stage - 1)
        if before is None or any(each.key not in records for each in before):
            return None
        scores = trial_scores(before, records)
        # The best first; of equal ones the first drawn.
        ranked = sorted(scores, key=lambda trial: (-scores[trial], trial))
        chosen = ranked[: protocol.rungs[stage].keep]
    return [
        job(protocol, situation, method, stage, trial, seed)
        for trial in chosen
        for seed in protocol.rung_seeds(situation, stage)
    ]


def optimizer_of(each: Job) -> dict[str, Any]:
    """What a run has of the space that all methods have in common, by path."""
    return {path: reduce(getattr, path.split("."), each.config) for path in each.protocol.space}


def trial_scores(jobs: Sequence[Job], records: Records) -> dict[int, float]:
    """What every trial is ranked by: the mean over its seeds; a run that diverged is the worst."""
    scores: dict[int, list[float]] = {}
    for each in jobs:
        score = records[each.key].get("score")
        if score is None or math.isnan(score):
            score = -math.inf
        scores.setdefault(each.trial, []).append(score)
    return {trial: statistics.fmean(each) for trial, each in scores.items()}


def scores_of(runs: Sequence[Mapping[str, Any]], situation: Situation) -> list[float]:
    """Of final runs; one that diverged counts as guessing."""
    return [situation.chance if each["score"] is None else float(each["score"]) for each in runs]


def finalist(
    protocol: Protocol, situation: Situation, method: str, records: Records
) -> tuple[int, float] | None:
    """The trial that is left of a method, and its validation score; None while others are."""
    last = rung_jobs(protocol, situation, method, records, len(protocol.rungs) - 1)
    if last is None or any(each.key not in records for each in last):
        return None
    ((trial, score),) = trial_scores(last, records).items()
    return trial, score


def finalists(
    protocol: Protocol, situation: Situation, records: Records
) -> dict[str, tuple[int, float]] | None:
    """Of every method; None while one is missing."""
    found = {name: finalist(protocol, situation, name, records) for name in situation.methods}
    if any(each is None for each in found.values()):
        return None
    return {name: each for name, each in found.items() if each is not None}


def chosen_method(protocol: Protocol, situation: Situation, records: Records) -> str | None:
    """The margin method with the best validation score; None while not all are tuned."""
    found = finalists(protocol, situation, records)
    if found is None:
        return None
    margins = [name for name in situation.methods if protocol.methods[name].margin]
    return max(margins, key=lambda name: found[name][1])  # the first of equal ones


def final_jobs(
    protocol: Protocol, situation: Situation, records: Records, *, everyone: bool = False
) -> list[Job] | None:
    """The final runs, seed by seed; ``everyone`` adds the methods that no test is about."""
    found, chosen = (
        finalists(protocol, situation, records),
        chosen_method(protocol, situation, records),
    )
    if found is None or chosen is None:
        return None
    registered = [situation.baseline, chosen, situation.beside]
    others = [name for name in situation.methods if name not in registered and everyone]
    return [
        job(protocol, situation, name, None, found[name][0], seed)
        for names in (registered, others)
        for seed in protocol.seeds
        for name in names
    ]


def next_jobs(
    protocol: Protocol, situation: Situation, records: Records, *, everyone: bool = False
) -> Iterator[Job]:
    """All runs that could begin now and are not recorded, in their order."""
    for stage in range(len(protocol.rungs)):
        for method in situation.methods:
            waiting = rung_jobs(protocol, situation, method, records, stage)
            yield from (each for each in waiting or () if each.key not in records)
    last = final_jobs(protocol, situation, records, everyone=everyone)
    yield from (each for each in last or () if each.key not in records)


def is_complete(protocol: Protocol, situation: Situation, records: Records) -> bool:
    """Whether the registered test can be made."""
    last = final_jobs(protocol, situation, records)
    return last is not None and all(each.key in records for each in last)
