"""Several runs in one process, side by side on a GPU: ``train_many``, and ``iter_finished``."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from largemargin.app.config import DataConfig, RunConfig
from largemargin.app.data.load import Data, load_data
from largemargin.app.training.engine import Session, begin, check_config
from largemargin.app.training.processes import pick_device
from largemargin.app.training.run_scores import Diverged
from largemargin.app.training.runs import Run
from largemargin.app.training.trainer import Trainer
from largemargin.errors import LargeMarginError, check_number


@dataclass(frozen=True)
class TrainingJob:
    """A run to be made.

    Args:
        config: of the run.
        folder: of the run; default a new one.
        resume: go on where the run in ``folder`` stopped.
        data: gives the images when the run begins; default ``load_data(config.data)``.
        before_step: called with the trainer before every step.
    """

    config: RunConfig
    folder: str | Path | None = None
    resume: bool = False
    data: Callable[[], Data] | None = None
    before_step: Callable[[Trainer], None] | None = None


@dataclass
class TrainingOutcome:
    """A job that came to its end: with a run, or with the error that broke it off."""

    job: TrainingJob
    run: Run | None
    error: Exception | None
    trainer: Trainer | None
    """With the model that is judged, on its device; dropped when the next outcome is asked for.
    None where nothing was trained: the run could not begin, or was finished before."""
    seconds: float
    """From its beginning, with the time that others took beside it."""

    @property
    def divergence(self) -> str | None:
        """Why the run diverged; None where it did not, also where another error broke it off."""
        if self.run is not None:
            return self.run.failure
        return str(self.error) if isinstance(self.error, Diverged) else None


def train_many(
    configs: Sequence[RunConfig],
    *,
    folders: Sequence[str | Path] | None = None,
    resume: bool = False,
    data: Data | None = None,
    side_by_side: int = 3,
    progress: bool = True,
) -> list[Run]:
    """Train several models in one process, on a GPU ``side_by_side`` at a time.

    Small networks leave much of a GPU idle; steps of several runs, each on its own CUDA stream,
    fill it. Every run gets the numbers it would get alone. On the CPU they run one after the other.
    Data with the same settings is loaded once. The first error ends all.

    Args:
        configs: the runs.
        folders: one for each run; default new ones.
        resume: go on where the runs stopped.
        data: for all runs; default each configuration's own.
        side_by_side: how many at a time.
        progress: show a progress bar for every run.
    """
    check_number("side_by_side", side_by_side, at_least=1)
    if folders is not None and len(folders) != len(configs):
        raise LargeMarginError(
            f"there must be one folder for each of the {len(configs)} runs, but {len(folders)} "
            "were given."
        )
    for config in configs:
        check_config(config)
    loaded = {} if data is None else {repr(config.data): data for config in configs}
    places: Sequence[str | Path | None] = folders or [None] * len(configs)
    jobs = [
        TrainingJob(config, folder, resume, partial(_load_once, config.data, loaded))
        for config, folder in zip(configs, places, strict=True)
    ]
    finished: dict[int, Run] = {}
    for outcome in iter_finished(jobs, side_by_side=side_by_side, progress=progress):
        if outcome.run is None:
            assert outcome.error is not None
            raise outcome.error
        finished[id(outcome.job)] = outcome.run
    return [finished[id(job)] for job in jobs]


def _load_once(config: DataConfig, loaded: dict[str, Data]) -> Data:
    """Data that was loaded before, or is now."""
    key = repr(config)
    if key not in loaded:
        loaded[key] = load_data(config)
    return loaded[key]


def iter_finished(
    jobs: Iterable[TrainingJob] | Callable[[], TrainingJob | None],
    *,
    side_by_side: int = 3,
    progress: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[TrainingOutcome]:
    """Train side by side and hand out each run when it ends; one that fails ends alone.

    Args:
        jobs: the runs, or a function that gives the next one, None where none can begin now. The
            next one is asked for whenever a place is free, so that it can depend on the clock and
            on the outcomes so far; after None, when a run has ended.
        side_by_side: how many at a time on a GPU; on the CPU there is one.
        progress: show a progress bar for every run.
        stop: asked before every round of steps; where it says so nothing more is done. Runs under
            way can be resumed from their last checkpoint.
    """
    next_job = jobs if callable(jobs) else partial(next, iter(jobs), None)
    lanes: list[_Lane] = []
    try:
        ask = True
        while not stop():
            while ask and len(lanes) < (side_by_side if all(lane.stream for lane in lanes) else 1):
                job = next_job()
                ask = job is not None
                if job is None or stop():
                    break
                lanes.append(_Lane(job))
                lanes[-1].begin(progress)
            if not lanes:
                return
            for lane in list(lanes):
                if lane.advance():
                    continue
                outcome = lane.outcome()
                yield outcome
                outcome.trainer = None
                lanes.remove(lane)
                lane.close()
                ask = True
    finally:
        for lane in lanes:
            lane.close()


class _Lane:
    """A run under way, on a CUDA stream of its own."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        on_gpu = pick_device(job.config.device).type == "cuda"
        self.stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.stack = ExitStack()
        self.session: Session | None = None
        self.steps: Iterator[None] = iter(())
        self.run: Run | None = None
        self.error: Exception | None = None
        self.started = time.perf_counter()

    def begin(self, progress: bool) -> None:
        """Build the run; what fails here is known at the first :meth:`advance`."""
        job = self.job
        try:
            check_config(job.config)
            data = load_data(job.config.data) if job.data is None else job.data()
            with torch.cuda.stream(self.stream):
                session = begin(
                    job.config, job.folder, job.resume, data, stack=self.stack, progress=progress
                )
        except Exception as error:
            self.error = error
            return
        if isinstance(session, Run):
            self.run = session
        else:
            self.session, self.steps = session, session.trainer.steps()

    def advance(self) -> bool:
        """One step; False when there is no other."""
        if self.session is None:
            return False
        try:
            with torch.cuda.stream(self.stream):
                if self.job.before_step is not None:
                    self.job.before_step(self.session.trainer)
                if next(self.steps, "end") != "end":
                    return True
                self.run = self.session.finish()
        except Exception as error:
            self.error = error
        return False

    def outcome(self) -> TrainingOutcome:
        """What became of it. Its folder is free for others; its model is still there."""
        self.stack.close()
        if self.stream is not None:
            self.stream.synchronize()
        trainer = None if self.session is None else self.session.trainer
        seconds = time.perf_counter() - self.started
        return TrainingOutcome(self.job, self.run, self.error, trainer, seconds)

    def close(self) -> None:
        self.stack.close()
        self.steps = iter(())
        self.session = None
        if self.stream is not None:
            self.stream.synchronize()
            gc.collect()  # models, optimizers and graphs refer to each other
