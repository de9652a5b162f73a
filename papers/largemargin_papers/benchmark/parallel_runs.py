"""Runs side by side, handed out one by one as they end; one that diverges ends alone."""

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from largemargin.app.data.load import Data
from largemargin.app.training.engine import Session, begin, check_config
from largemargin.app.training.runs import Run, pick_device
from largemargin.app.training.trainer import Trainer
from largemargin.errors import LargeMarginError
from largemargin.losses.base.class_counts import balanced_weights
from largemargin.losses.base.loss import Loss
from largemargin.losses.ldam import LDAM
from largemargin_papers.benchmark.halving import Job


class Outcome(NamedTuple):
    """A run that came to its end, one way or the other."""

    job: Job
    model: nn.Module | None
    """On its device; None where the run diverged or failed."""
    facts: dict[str, Any]
    """Status (finished, diverged or failed), steps and seconds."""


def outcomes(
    next_job: Callable[[], tuple[Job, Data] | None],
    *,
    folder: Path,
    device: str,
    side_by_side: int,
) -> Iterator[Outcome]:
    """Train what ``next_job`` gives until it gives nothing and all has ended.

    A run gets the numbers it would get alone. On a GPU every run has a stream, on the CPU they
    come one after the other.

    Args:
        next_job: a run and its data, or None where none can begin now; it is asked again whenever
            a run has ended.
        folder: of runs under way; each is deleted when it has ended.
        device: as in ``RunConfig``.
        side_by_side: how many at a time.
    """
    on_gpu = pick_device(device).type == "cuda"
    lanes: list[_Lane] = []
    try:
        while True:
            while len(lanes) < (side_by_side if on_gpu else 1):
                given = next_job()
                if given is None:
                    break
                lane = _Lane(*given, folder=folder, device=device, on_gpu=on_gpu)
                lanes.append(lane)
                if not lane.begin():
                    lanes.remove(lane)
                    yield lane.outcome()
                    lane.close()
            if not lanes:
                return
            for lane in list(lanes):
                if not lane.advance():
                    lanes.remove(lane)
                    yield lane.outcome()
                    lane.close()
    finally:
        for lane in lanes:
            lane.close()


class _Lane:
    def __init__(self, job: Job, data: Data, *, folder: Path, device: str, on_gpu: bool) -> None:
        self.job, self.data = job, data
        self.folder = folder / job.key.replace("/", "-")
        self.config = replace(job.config, device=device)
        self.stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.stack = ExitStack()
        self.session: Session | None = None
        self.steps: Iterator[None] = iter(())
        self.failure, self.diverged = "", False
        self.started = time.perf_counter()

    def begin(self) -> bool:
        """False where the run cannot be made."""
        check_config(self.config)
        try:
            with torch.cuda.stream(self.stream):
                session = begin(self.config, self.folder, False, self.data, False, None, self.stack)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            return False
        assert isinstance(session, Session)
        self.session = session
        self.steps = session.trainer.steps()
        total = self.config.epochs * len(session.trainer.batches)
        share = self.job.reweight_at
        self.switch = None if share is None else round(share * total)
        return True

    def advance(self) -> bool:
        """One step; False when there is no other."""
        assert self.session is not None
        trainer = self.session.trainer
        with torch.cuda.stream(self.stream):
            if self.switch is not None and trainer.done == self.switch:
                reweight(trainer)
                self.switch = None
            try:
                if next(self.steps, "end") != "end":
                    return True
                self.diverged = self.session.finish().failure is not None
            except Exception as error:
                # One run that cannot be made must not take the others with it.
                diverged = isinstance(error, LargeMarginError) and _diverged(
                    self.folder, self.config.max_bad_steps
                )
                self.diverged = diverged
                self.failure = "" if diverged else f"{type(error).__name__}: {error}"
            if self.stream is not None:
                self.stream.synchronize()
        return False

    def outcome(self) -> Outcome:
        if self.session is None or self.failure:
            return Outcome(self.job, None, {"status": "failed", "failure": self.failure})
        trainer = self.session.trainer
        facts = {
            "status": "diverged" if self.diverged else "finished",
            "steps": trainer.done,
            "seconds": round(trainer.seconds, 3),
            "wall_seconds": round(time.perf_counter() - self.started, 3),
            "bad_steps": trainer.journal.bad_steps,
        }
        return Outcome(self.job, None if self.diverged else trainer.evaluated(), facts)

    def close(self) -> None:
        self.stack.close()
        self.session, self.steps = None, iter(())
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.stream is not None:
            gc.collect()  # models, optimizers and graphs refer to each other, and hold memory


def reweight(trainer: Trainer) -> None:
    """Give LDAM, or the only term, balanced class weights; captured steps are dropped."""
    terms = list(trainer.criterion.objective.terms.values())
    margins = [each for each in terms if isinstance(each, LDAM)]
    if margins:
        (loss,) = margins
        loss.reweight()
    else:
        (term,) = terms
        assert isinstance(term, Loss)
        counts = trainer.batches.samples.labels.bincount().tolist()
        term.weight = balanced_weights(counts).to(trainer.device)
    if trainer.graph is not None:
        trainer.graph.graphs.clear()
        trainer.graph.plain_steps.clear()


def _diverged(folder: Path, allowed: int) -> bool:
    rows = Run(folder).metrics("bad_steps")
    return bool(rows) and rows[-1]["in_a_row"] > allowed
