"""Which runs come next: successive halving, the choice of a method, the final runs.

Everything here is a function of the protocol and of the records so far, so that a benchmark that
was interrupted anywhere goes on as if it had not been.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any

from largemargin.app.config import RunConfig
from largemargin.app.training.tuning import with_values
from largemargin_papers.benchmark.draws import own_trials, trials_of
from largemargin_papers.benchmark.protocol import Protocol, Situation

FINAL = "final"
ASKED = "asked-"
"""Stages of runs beside the registered ones begin with it; see ``questions``."""

Records = Mapping[str, Mapping[str, Any]]
"""What is known of every run, by its key."""

PENALTY, USUAL = "probe.penalty", 1e-4
"""Of logistic regressions, as a part of the features' mean squared length; where none is drawn."""


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
    optimizer_from: "Job | None" = field(default=None, compare=False, repr=False)
    """The run whose optimizer settings a trial of own parameters alone takes."""

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
        config = self.protocol.config(self.task, self.protocol.methods[self.method])
        source = self.optimizer_from
        common = self.optimizer or (optimizer_of(source) if source else {})
        values = {**self._drawn, **common}
        for group in ("noise", "model"):
            inside = {
                path.partition(".")[2]: values.pop(path)
                for path in list(values)
                if path.startswith(f"{group}.")
            }
            config = replace(config, **{group: replace(getattr(config, group), **inside)})
        values.pop(PENALTY, None)
        return replace(
            with_values(config, values),
            epochs=self.epochs,
            checkpoint_every=self.epochs,
            seed=self.seed,
            name=self.method,
        )

    @property
    def _drawn(self) -> dict[str, Any]:
        tuned_in = self.protocol.tuned_in(self.task)
        return trials_of(self.protocol, tuned_in, self.protocol.methods[self.method])[self.trial]

    @property
    def penalty(self) -> float:
        """Of a head that is, or begins as, a logistic regression."""
        return float(self._drawn.get(PENALTY, USUAL))


def job(
    protocol: Protocol,
    situation: Situation,
    method: str,
    stage: int | None,
    trial: int,
    seed: int,
    records: Records = MappingProxyType({}),
) -> Job:
    """The run of a trial in a rung (by its number), or (None) a final one.

    A trial of own parameters alone takes its optimizer settings from the trials in ``records``.
    """
    share = 1.0 if stage is None else protocol.rungs[stage].epochs
    epochs = max(1, round(situation.epochs * share))
    if protocol.methods[method].probe == "only":
        epochs = 1
    name = FINAL if stage is None else f"rung{stage + 1}"
    found = Job(protocol, situation, method, name, trial, seed, epochs)
    tuned_in, spec = protocol.tuned_in(situation), protocol.methods[method]
    before = _optimizer_trials(protocol, tuned_in, method)
    if trial < before or not own_trials(protocol, tuned_in, spec):
        return found
    tried = _first_rung(protocol, tuned_in, method, range(before), records)
    if any(each.key not in records for each in tried):
        return found
    scores = trial_scores(tried, records)
    best = max(scores, key=lambda each: (scores[each], -each))
    source = next(each for each in tried if each.trial == best)
    return replace(found, optimizer_from=source)


def _optimizer_trials(protocol: Protocol, situation: Situation, method: str) -> int:
    """How many trials, the first ones, have optimizer settings of their own."""
    return protocol.trials - own_trials(protocol, situation, protocol.methods[method])


def _first_rung(
    protocol: Protocol, situation: Situation, method: str, trials: range, records: Records
) -> list[Job]:
    return [
        job(protocol, situation, method, 0, trial, seed, records)
        for trial in trials
        for seed in protocol.rung_seeds(situation, 0)
    ]


def rung_jobs(
    protocol: Protocol, situation: Situation, method: str, records: Records, stage: int
) -> list[Job] | None:
    """The runs of a rung; None while the one before is not finished."""
    if stage == 0:
        count = _optimizer_trials(protocol, situation, method)
        found = _first_rung(protocol, situation, method, range(count), records)
        if all(each.key in records for each in found):
            rest = range(count, protocol.trials)
            found += _first_rung(protocol, situation, method, rest, records)
        return found
    before = rung_jobs(protocol, situation, method, records, stage - 1)
    if before is None or any(each.key not in records for each in before):
        return None
    scores = trial_scores(before, records)
    # The best first; of equal ones the first drawn.
    ranked = sorted(scores, key=lambda trial: (-scores[trial], trial))
    chosen = ranked[: protocol.rungs[stage].keep]
    return [
        job(protocol, situation, method, stage, trial, seed, records)
        for trial in chosen
        for seed in protocol.rung_seeds(situation, stage)
    ]


def optimizer_of(each: Job) -> dict[str, Any]:
    """What a run has of the space that all methods have in common, by path."""
    space = each.protocol.common_space(each.protocol.tuned_in(each.task))
    return {path: reduce(getattr, path.split("."), each.config) for path in space}


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
    situation = protocol.tuned_in(situation)
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


def opponents(protocol: Protocol, situation: Situation, records: Records) -> tuple[str, ...]:
    """What the chosen method has to be better than.

    Where settings are tried that were tuned elsewhere: the baseline, the method beside, and of the
    baselines there the one that was best on validation images.
    """
    if situation.like is None:
        return situation.against
    source = protocol.tuned_in(situation)
    found = finalists(protocol, source, records)
    if found is None:
        return ()
    best = max(source.against, key=lambda name: found[name][1])
    return tuple(dict.fromkeys((situation.baseline, situation.beside, best)))


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
    against = opponents(protocol, situation, records)
    registered = list(dict.fromkeys([situation.baseline, chosen, situation.beside, *against]))
    others = [name for name in situation.methods if name not in registered and everyone]
    return [
        job(protocol, situation, name, None, found[name][0], seed, records)
        for names in (registered, others)
        for seed in protocol.seeds
        for name in names
    ]


def next_jobs(
    protocol: Protocol, situation: Situation, records: Records, *, everyone: bool = False
) -> Iterator[Job]:
    """All runs that could begin now and are not recorded, in their order."""
    for stage in range(len(protocol.rungs) if situation.like is None else 0):
        for method in situation.methods:
            waiting = rung_jobs(protocol, situation, method, records, stage)
            yield from (each for each in waiting or () if each.key not in records)
    last = final_jobs(protocol, situation, records, everyone=everyone)
    yield from (each for each in last or () if each.key not in records)


def is_complete(protocol: Protocol, situation: Situation, records: Records) -> bool:
    """Whether the registered test can be made."""
    last = final_jobs(protocol, situation, records)
    return last is not None and all(each.key in records for each in last)
