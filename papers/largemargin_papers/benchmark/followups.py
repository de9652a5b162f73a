"""Questions that results raise: runs beside the registered ones, and what they answer."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from largemargin.app.training.config_file import read_yaml, settings_from
from largemargin.errors import LargeMarginError, check_number
from largemargin_papers.benchmark.halving import (
    ASKED,
    Job,
    Records,
    chosen_method,
    finalists,
    job,
    optimizer_of,
    scores_of,
)
from largemargin_papers.benchmark.protocol import Protocol, Situation


@dataclass(frozen=True)
class FollowUp:
    """A method with its tuned settings, or one thing changed, run with the final seeds.

    Args:
        name: its key.
        situation: where it is asked.
        asked: in words.
        method: whose tuned settings are taken.
        epochs: share of the situation's.
        reweight_at: share of the steps after which the class weights are the balanced ones.
        trial: whose settings are taken in place of those that were left of the tuning.
        optimizer_of: the method whose tuned learning rate, weight decay and clipping are taken.
    """

    name: str
    situation: str
    asked: str
    method: str
    epochs: float = 1.0
    reweight_at: float | None = None
    trial: int | None = None
    optimizer_of: str | None = None

    @property
    def changes(self) -> bool:
        """Whether anything differs from the final runs of the method."""
        others = (self.reweight_at, self.trial, self.optimizer_of)
        return self.epochs != 1 or any(each is not None for each in others)


def read_followups(path: Path, protocol: Protocol) -> dict[str, FollowUp]:
    """The questions of a YAML file, checked against the protocol; none where there is no file."""
    if not path.is_file():
        return {}
    found = {
        name: settings_from({"name": name, **entry}, FollowUp, name)
        for name, entry in read_yaml(path).items()
    }
    for each in found.values():
        situation = protocol.situation(each.situation)
        for method in (each.method, each.optimizer_of or each.method):
            if method not in situation.methods:
                raise LargeMarginError(
                    f"the question {each.name} is about {method}, but the methods of "
                    f"{situation.name} are {', '.join(situation.methods)}."
                )
        check_number("epochs", each.epochs, above=0, at_most=1)
        if each.reweight_at is not None:
            check_number("reweight_at", each.reweight_at, at_least=0, below=1)
        if each.trial is not None:
            check_number("trial", each.trial, at_least=0, at_most=protocol.trials - 1)
        if not each.changes and each.method in (situation.baseline, situation.beside):
            raise LargeMarginError(
                f"the question {each.name} changes nothing, and {each.method} has final runs: give "
                "epochs, reweight_at, trial or optimizer_of."
            )
    return found


def swaps(protocol: Protocol, situation: Situation, records: Records) -> dict[str, FollowUp]:
    """The chosen method with the optimizer settings of every baseline, and these with its own.

    Registered where a situation names its baselines. None while a method is not tuned; what was
    tuned to the same settings is left out, and what knows no optimizer.
    """
    tuned = finalists(protocol, situation, records)
    chosen = chosen_method(protocol, situation, records)
    if not situation.baselines or situation.like or tuned is None or chosen is None:
        return {}

    def settings(name: str) -> Mapping[str, Any]:
        return optimizer_of(job(protocol, situation, name, None, tuned[name][0], 0, records))

    found = {}
    for baseline in situation.baselines:
        same = settings(baseline) == settings(chosen)
        if same or protocol.methods[baseline].probe == "only":
            continue
        for method, other in ((baseline, chosen), (chosen, baseline)):
            name = f"{method}_at_{other}"
            asked = "What is left of the gain with equal optimizer settings?"
            found[name] = FollowUp(name, situation.name, asked, method, optimizer_of=other)
    return found


def followup_jobs(protocol: Protocol, question: FollowUp, records: Records) -> list[Job] | None:
    """Its runs, one for every final seed; None while the method is not tuned."""
    situation = protocol.situation(question.situation)
    tuned = finalists(protocol, situation, records)
    if tuned is None:
        return None
    trial = tuned[question.method][0] if question.trial is None else question.trial
    optimizer = None
    if (other := question.optimizer_of) is not None:
        optimizer = optimizer_of(job(protocol, situation, other, None, tuned[other][0], 0, records))
    return [
        replace(
            job(protocol, situation, question.method, None, trial, seed, records),
            stage=f"{ASKED}{question.name}",
            epochs=max(1, round(situation.epochs * question.epochs)),
            late_weights=question.reweight_at,
            optimizer=optimizer,
        )
        for seed in protocol.seeds
    ]


def answers(
    protocol: Protocol, questions: Mapping[str, FollowUp], name: str, records: Records
) -> dict[str, dict[str, Any]]:
    """What is known of the questions of a situation; ``scores`` is None where runs are missing."""
    return {
        each.name: _answer(protocol, each, records)
        for each in questions.values()
        if each.situation == name
    }


def _answer(protocol: Protocol, question: FollowUp, records: Records) -> dict[str, Any]:
    situation = protocol.situation(question.situation)
    found: dict[str, Any] = {
        "asked": question.asked,
        "method": question.method,
        "epochs": question.epochs,
        "reweight_at": question.reweight_at,
        "trial": question.trial,
        "optimizer_of": question.optimizer_of,
        "scores": None,
    }
    jobs = followup_jobs(protocol, question, records)
    if jobs is None or any(each.key not in records for each in jobs):
        return found
    scores = scores_of([records[each.key] for each in jobs], situation)
    found |= {"scores": scores, "mean": statistics.fmean(scores), "std": statistics.stdev(scores)}
    return found


def changes_text(question: Mapping[str, Any]) -> str:
    """What was changed, as words behind the method's name."""
    parts = []
    if question["epochs"] != 1:
        parts.append(f"{100 * question['epochs']:g} % of the epochs")
    if question["reweight_at"] is not None:
        late = 100 * (1 - question["reweight_at"])
        parts.append(f"balanced class weights in the last {late:.0f} % of the steps")
    if question["trial"] is not None:
        parts.append(f"the settings of trial {question['trial']}")
    if question["optimizer_of"] is not None:
        parts.append(f"the optimizer settings of {question['optimizer_of']}")
    if not parts:
        parts.append("its tuned settings")
    return f"{question['method']} with " + " and ".join(parts)
