"""``run_missing``: runs of a queue until time is up, side by side, each written when it ends."""

import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from largemargin.app.config import RunConfig
from largemargin.app.training.parallel_runs import TrainingJob, TrainingOutcome, iter_finished
from largemargin.app.training.processes import commit, device_name, pick_device
from largemargin.app.training.runs import CONFIG
from largemargin.errors import LargeMarginError, check_number
from largemargin_papers.recipes.cells import settings_of
from largemargin_papers.recipes.images import Images
from largemargin_papers.recipes.measured import about, measure_run
from largemargin_papers.recipes.queue import (
    FAILED,
    Task,
    left_of,
    measured_already,
    measuring_seconds_of,
    seconds_of,
    tasks_of,
)
from largemargin_papers.recipes.records import append_record, read_records

COMPILED_FROM = 5_000_000
"""Images of a run from which compiling its step pays: it takes seconds, in which all others wait"""

CHECKPOINT_IMAGES = 1_000_000
"""Images between two checkpoints on a GPU, about: what is lost where the process is killed."""

BROKEN = 3
"""Runs that break off one after the other for reasons that are not theirs, before all is ended."""


@dataclass
class QueueResult:
    """What was done: names of runs."""

    finished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def run_missing(
    queue: str | Path,
    *,
    out: Sequence[str | Path],
    entries: Sequence[str] = (),
    folder: str | Path = "runs/queue",
    paths: Mapping[str, str] | None = None,
    minutes: float | None = None,
    anyway: bool = False,
    side_by_side: int = 4,
    processes: int = 1,
    device: str = "auto",
    compiled: bool | None = None,
    commit_name: str | None = None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> QueueResult:
    """Make the runs of a queue that are missing; called again it goes on.

    A run is missing where neither ``out`` nor ``measured/`` beside its recipe has its numbers. Its
    record is on the disk before the next step of the others. SIGTERM and Ctrl-C end the work after
    the step under way; runs that had a checkpoint go on from it next time. A run that diverges is
    a result.

    Args:
        queue: YAML file, as papers/queue.yaml.
        out: files of the records, one JSON line for every run; each gets all of them.
        entries: names of entries; default all.
        folder: of runs under way; the weights of a measured run are deleted.
        paths: where data lies, by name.
        minutes: begin no run that would end later, as far as can be guessed, and stop then.
        anyway: begin those too; the next call continues them.
        side_by_side: runs at a time on a GPU.
        processes: that share the GPU, this one among them: until a run has ended and shown what
            it takes, runs are taken to be so many times slower.
        device: as in ``RunConfig``.
        compiled: compile the steps; default only of long runs.
        commit_name: of the code, where there is no git to ask.
        say: where a line about every run goes.
        clock: seconds.
    """
    if minutes is not None:
        check_number("minutes", minutes, above=0)
    check_number("side_by_side", side_by_side, at_least=1)
    check_number("processes", processes, at_least=1)
    tasks = tasks_of(queue, entries)
    known = measured_already(Path(queue).parent, tasks)
    files = [Path(each) for each in out]
    for record in read_records(files):
        labels = known.setdefault(record["run"], set())
        labels.update(record["numbers"], record.get("sketches", ()))
        labels.update(() if record["status"] == "finished" else (FAILED,))
    left = left_of(tasks, known)
    worker = _Worker(
        left,
        out=files,
        folder=Path(folder),
        images=Images(paths),
        end=None if minutes is None else clock() + 60 * minutes,
        anyway=anyway,
        side_by_side=side_by_side,
        processes=processes,
        device=device,
        compiled=compiled,
        commit_name=commit_name,
        say=say,
        clock=clock,
    )
    say(f"{len(left)} of {len(tasks)} runs are missing")
    with _quick(), worker.stoppable():
        worker.work()
    done = {*worker.done.finished, *worker.done.failed}
    worker.done.left = [task.name for task in left if task.name not in done]
    return worker.done


class _Worker:
    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        out: Sequence[Path],
        folder: Path,
        images: Images,
        end: float | None,
        anyway: bool,
        side_by_side: int,
        processes: int,
        device: str,
        compiled: bool | None,
        commit_name: str | None,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.waiting = list(tasks)
        self.out, self.folder, self.images = out, folder, images
        self.end, self.anyway, self.device, self.compiled = end, anyway, device, compiled
        self.device_kind = pick_device(device)
        self.side_by_side = side_by_side if self.device_kind.type == "cuda" else 1
        self.commit_name = commit_name or commit()
        self.say, self.clock = say, clock
        self.under_way: dict[str, Task] = {}
        self.done = QueueResult()
        self.asked_to_stop = False
        self.ratio = float(processes)
        self.broken_in_a_row = 0

    def work(self) -> None:
        outcomes = iter_finished(self._next_job, side_by_side=self.side_by_side, stop=self._stop)
        for outcome in outcomes:
            task = self.under_way.pop(str(Path(outcome.job.folder or "").name))
            self._take(task, outcome)
            if self.broken_in_a_row >= BROKEN:
                raise LargeMarginError(
                    f"{BROKEN} runs broke off one after the other; the last: {outcome.error!r}."
                )

    def _stop(self) -> bool:
        return self.asked_to_stop or (self.end is not None and self.clock() > self.end)

    def _next_job(self) -> TrainingJob | None:
        """Asked whenever a lane is free: the first run that will end in time, as far as known."""
        if self._stop() or not self.waiting:
            return None
        task = next((each for each in self.waiting if self._fits(each)), None)
        if task is None:
            self.say(f"none of the {len(self.waiting)} other runs would end in time")
            return None
        self.waiting.remove(task)
        self.under_way[task.name] = task
        return self._job(task)

    def _fits(self, task: Task) -> bool:
        seconds = seconds_of(task)
        if self.end is None or self.anyway or seconds is None:
            return True
        taken = self.ratio * seconds * self.side_by_side + measuring_seconds_of(task)
        return self.clock() + taken < self.end

    def _job(self, task: Task) -> TrainingJob:
        folder = self.folder / task.name
        begun = (folder / CONFIG).is_file()
        if folder.exists() and not begun:
            shutil.rmtree(folder)  # stopped before it was a run
        data = partial(self.images.data, task.config.data, task.needed)
        return TrainingJob(self.images.placed(self._how(task)), folder, begun, data)

    def _how(self, task: Task) -> RunConfig:
        """How fast and where, which decides nothing."""
        config = replace(task.config, device=self.device, gradients_every=0, compile=False)
        if self.device_kind.type != "cuda":
            return config
        images = task.images or 0
        compiled = images >= COMPILED_FROM if self.compiled is None else self.compiled
        epochs = round(CHECKPOINT_IMAGES / max(1, images // config.epochs))
        return replace(
            config, compile=compiled, checkpoint_every=max(1, min(config.epochs, epochs))
        )

    def _take(self, task: Task, outcome: TrainingOutcome) -> None:
        if outcome.divergence is not None:
            self._failed(task, outcome, outcome.divergence.partition(". ")[0])
        elif outcome.run is not None:
            self._finished(task, outcome)
        else:
            self._broke(task, outcome.error)

    def _finished(self, task: Task, outcome: TrainingOutcome) -> None:
        run = outcome.run
        assert run is not None
        started = self.clock()
        load = partial(self.images.data, task.config.data, task.needed)
        try:
            numbers = measure_run(
                run, task.wanted, load, task.split, self.device_kind, task.sketches
            )
        except Exception as error:
            self._broke(task, error)
            return
        record = about(run, task.config, numbers, commit=self.commit_name)
        self._write(task, {**record, **self._timing(outcome, started)})
        self.done.finished.append(task.name)
        expected = seconds_of(task)
        if expected and self.device_kind.type == "cuda":
            taken = outcome.seconds / (expected * self.side_by_side)
            self.ratio = 0.5 * self.ratio + 0.5 * taken
        shown = ", ".join(f"{name} {_short(value)}" for name, (value, _) in numbers.items())
        rate = record["images_per_s"] or 0.0
        self._say(task, f"{shown}, {outcome.seconds:.0f} s, {rate:,.0f} images/s")

    def _timing(self, outcome: TrainingOutcome, started: float) -> dict[str, float]:
        return {
            "wall_seconds": round(outcome.seconds, 2),
            "measuring_seconds": round(self.clock() - started, 2),
            "side_by_side": self.side_by_side,
        }

    def _failed(self, task: Task, outcome: TrainingOutcome, why: str) -> None:
        """It diverged: that is its result."""
        record = {
            "seed": task.config.seed,
            "run": task.name,
            "status": "diverged",
            "failure": why,
            "numbers": {},
            "device": device_name(self.device_kind),
            "commit": self.commit_name,
            "torch": str(torch.__version__),
            "settings": settings_of(task.config),
        }
        self._write(task, {**record, **self._timing(outcome, self.clock())})
        self.done.failed.append(task.name)
        self._say(task, f"diverged: {why}")

    def _broke(self, task: Task, error: Exception | None) -> None:
        """Something else went wrong: it is said, and tried again next time."""
        self.broken_in_a_row += 1
        self.done.broken.append(task.name)
        self._say(task, f"broke off: {error!r}")
        if error is not None and not isinstance(error, LargeMarginError):
            self.say("".join(traceback.format_exception(error)))

    def _write(self, task: Task, record: Mapping[str, Any]) -> None:
        places = [asdict(place) for place in task.places]
        for file in self.out:
            append_record(file, {**record, "places": places})
        self.broken_in_a_row = 0
        shutil.rmtree(self.folder / task.name / "checkpoints", ignore_errors=True)

    def _say(self, task: Task, text: str) -> None:
        self.say(f"{task.entry}: {task.places[0].cell}, seed {task.config.seed}: {text}")

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the work after the step under way."""

        def stop(number: int, frame: object) -> None:
            self.asked_to_stop = True
            self.say(f"asked to stop by {signal.Signals(number).name}")

        try:
            before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may
            yield
            return
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


@contextmanager
def _quick() -> Iterator[None]:
    """The fastest kernels; as many compiled steps as there are runs: torch stops after eight."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="some images are in two parts")
        if torch.cuda.is_available():
            from torch import _dynamo

            most = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
            stack.enter_context(_dynamo.config.patch(most))
            stack.callback(
                setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark
            )
            torch.backends.cudnn.benchmark = True
        yield


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
