"""``train``: a configuration in, a finished run out; ``train_many`` several side by side."""

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import largemargin as lm
from largemargin.data import Data, load_data
from largemargin.errors import LargeMarginError, check_number
from largemargin.training.checkpoints import Checkpoints, model_weights
from largemargin.training.config import RunConfig
from largemargin.training.config_file import to_dict, write_config
from largemargin.training.environment import environment
from largemargin.training.files import remove_drafts, write_json
from largemargin.training.journal import Journal
from largemargin.training.processes import Processes, several_processes
from largemargin.training.progress import Progress
from largemargin.training.runs import (
    CONFIG,
    DATA,
    ENVIRONMENT,
    GEOMETRY,
    RESULT,
    Run,
    locked,
    new_folder,
    pick_device,
)
from largemargin.training.trainer import Trainer


class Interrupted(LargeMarginError):
    """Raised when a run was asked to stop (Ctrl-C, SIGTERM); it can be resumed."""


def train(
    config: RunConfig,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    data: Data | None = None,
    progress: bool = True,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train one model and leave everything about it in a folder.

    Args:
        config: of the run.
        folder: of the run; default a new one in ``config.out``.
        resume: go on where the run in ``folder`` stopped; a finished one is returned as it is. The
            result equals that of a run that was never interrupted.
        data: loaded already, for many runs on the same data; default ``load_data(config.data)``.
        progress: show a progress bar.
        on_epoch: called with the row of every epoch; an exception from it ends the run.

    Under ``torchrun`` or ``accelerate launch`` all processes call it and train one model together.

    Example:
        >>> run = train(RunConfig(epochs=1, out=str(tmp_path)), progress=False)
        >>> sorted(run.result["test"])
        ['accuracy', 'balanced_accuracy', 'ece', 'loss']
    """
    check_config(config)
    with ExitStack() as stack:
        stack.enter_context(own_stream(pick_device(config.device)))
        session = begin(config, folder, resume, data, progress, on_epoch, stack)
        if isinstance(session, Run):
            return session
        with _asked_to_stop(session.trainer):
            for _ in session.trainer.steps():
                session.pause_if_asked()
        return session.finish()


class Session:
    """A run on its way: trainer, folder, and the steps before and after training."""

    def __init__(self, config: RunConfig, trainer: Trainer, processes: Processes) -> None:
        self.config = config
        self.trainer = trainer
        self.processes = processes
        self.folder = trainer.journal.folder
        self.started = time.perf_counter()

    def pause_if_asked(self) -> None:
        if self.trainer.stop_requested:
            raise Interrupted(
                f"stopped after step {self.trainer.done}; up to the last checkpoint nothing is "
                f"lost. Continue: largemargin train --resume {self.folder}"
            )

    def finish(self) -> Run:
        """Evaluate the best model on the test images, measure its geometry, write the result."""
        trainer, folder = self.trainer, self.folder
        trainer.progress.close()
        best = Checkpoints(folder).find("best")
        assert best is not None
        model_weights(best, trainer.evaluated())
        result: dict[str, Any] = {
            "status": "finished",
            "epochs": trainer.epoch,
            "steps": trainer.done,
            "best_epoch": None if trainer.best is None else trainer.best["epoch"],
            "validation": None if trainer.best is None else _scores(trainer.best),
            "test": trainer.scores.test(trainer.evaluated()),
            "notes": list(trainer.bare.notes),
        }
        if self.config.measure:
            geometry = trainer.scores.geometry(trainer.evaluated())
            if geometry is not None:
                geometry.save(folder / GEOMETRY)
                result["geometry"] = _summary(geometry)
        result["seconds"] = trainer.seconds
        result["images_per_s"] = trainer.images_per_s()
        if self.processes.rank == 0:
            write_json(folder / RESULT, result)
        self.processes.wait()
        self.processes.end()
        return Run(folder)


def begin(
    config: RunConfig,
    folder: str | Path | None,
    resume: bool,
    data: Data | None,
    progress: bool,
    on_epoch: Callable[[dict[str, Any]], None] | None,
    stack: ExitStack,
) -> "Session | Run":
    processes = Processes(config)
    first = processes.rank == 0
    place = Path(folder) if folder is not None else None
    if resume and place is None:
        raise LargeMarginError("resume needs the folder of the run to continue.")
    if resume and place is not None and Run(place).finished:
        return Run(place)
    if first:
        place = _prepared(config, place, resume)
        stack.enter_context(locked(place))
    place = processes.agree_on(place)
    assert place is not None
    _make_deterministic(config, stack)
    try:
        loaded = data or processes.first_alone(lambda: load_data(config.data))
        track = processes.start_trackers(place, config.name, to_dict(config)) if first else None
        journal = Journal(place, writes=first, track=track)
        trainer = Trainer(config, loaded, journal, processes=processes, on_epoch=on_epoch)
    except Exception:
        if first and not resume:
            shutil.rmtree(place, ignore_errors=True)  # nothing was trained in it
        raise
    if first and not (place / ENVIRONMENT).is_file():
        _write_facts(place, loaded, processes)
    if resume:
        trainer.resume()
    total = config.epochs * len(trainer.batches)
    trainer.progress = Progress(
        total, done=trainer.done, name=config.name, shown=progress and first
    )
    stack.callback(trainer.progress.close)
    if progress and first:
        for note in trainer.bare.notes:
            print(f"{config.name}: {note}", file=sys.stderr)
    return Session(config, trainer, processes)


def _prepared(config: RunConfig, folder: Path | None, resume: bool) -> Path:
    """The folder of the run, made with its configuration, or found."""
    if folder is None:
        folder = new_folder(config)
        write_config(config, folder / CONFIG)
        return folder
    if resume:
        Run.open(folder)
        remove_drafts(folder)
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise LargeMarginError(
            f"{folder} exists already and is not empty. Choose another folder, or continue the run "
            "in it with resume."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LargeMarginError(f"cannot make the folder {folder}: {error.strerror}.") from error
    write_config(config, folder / CONFIG)
    return folder


def _write_facts(folder: Path, data: Data, processes: Processes) -> None:
    write_json(
        folder / DATA,
        {
            "name": data.name,
            "classes": list(data.classes),
            "channels": data.channels,
            "size": list(data.size),
            "mean": list(data.mean),
            "std": list(data.std),
            "licence": data.licence,
            "record": data.record,
        },
    )
    write_json(folder / ENVIRONMENT, environment(processes.device, processes=processes.world))


def _scores(best: dict[str, Any]) -> dict[str, float]:
    return {name: best[name] for name in ("accuracy", "balanced_accuracy", "loss", "ece")}


def _summary(geometry: lm.Geometry) -> dict[str, float]:
    cosine = geometry.margins["cosine"].overall
    return {
        "class_margin_degrees": geometry.prototypes.class_margin,
        "mean_cosine_margin": cosine.mean,
        "min_cosine_margin": cosine.minimum,
    }


def check_config(config: RunConfig) -> None:
    check_number("epochs", config.epochs, at_least=1)
    check_number("batch_size", config.batch_size, at_least=2)
    check_number("checkpoint_every", config.checkpoint_every, at_least=1)
    check_number("gradients_every", config.gradients_every, at_least=0)
    check_number("max_bad_steps", config.max_bad_steps, at_least=0)
    check_number("noise.level", config.noise.level, at_least=0)


def _make_deterministic(config: RunConfig, stack: ExitStack) -> None:
    """Bit-equal repetitions; put back when the run ends."""
    if config.deterministic:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        stack.callback(torch.use_deterministic_algorithms, before)


def own_stream(device: torch.device) -> AbstractContextManager[None]:
    """A stream for all work of a run: graphs cannot be captured on the default one."""
    if device.type != "cuda" or several_processes():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def _asked_to_stop(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the step that is under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if trainer.stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: now
        trainer.stop_requested = True

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
