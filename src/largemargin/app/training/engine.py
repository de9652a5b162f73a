"""``train``: a configuration in, a finished run out.

Below it: how a run begins and ends, messages about failures from outside (disks, folders,
processes, devices), and the checks of a configuration.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from largemargin.app.config import RunConfig
from largemargin.app.data.load import Data, check_text, load_data
from largemargin.app.training.checkpoints import DATA, Checkpoints, model_weights
from largemargin.app.training.config_file import flat, to_dict, write_config
from largemargin.app.training.files import RESULT as RESULT_KIND
from largemargin.app.training.files import made_folder, remove_drafts, stamp, write_json
from largemargin.app.training.journal import Journal, Progress
from largemargin.app.training.processes import (
    Processes,
    StopAgreement,
    environment,
    pick_device,
    several_processes,
)
from largemargin.app.training.run_scores import TOLD, in_short, left_out
from largemargin.app.training.runs import (
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    GEOMETRY,
    LOCK,
    RESULT,
    Run,
    check_same_data,
    load_again,
    locked,
    new_folder,
    resume_command,
)
from largemargin.app.training.trainer import Trainer
from largemargin.errors import LargeMarginError, MarginWarning, check_number
from largemargin.measuring.robust.attacks import LEVELS

DETERMINISTIC = (
    "deterministic: repetitions are equal to the last bit on the same machine, with the same torch "
    "and number of threads. It costs 0 to 4 % on a CPU; on a GPU some operations get slower, and "
    "those without a deterministic form are refused."
)

ONE_REQUEST_S = 1.0
"""Signals within this time are one request to stop."""


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
    on_begin: Callable[[str], None] | None = None,
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
        on_begin: called with a line about images, network and device before the first step.

    Under ``torchrun`` or ``accelerate launch`` all processes call it and train one model together.

    Returns:
        The run. One that diverged has a result too: ``failure`` says why, and so does a warning.

    Raises:
        LargeMarginError: where it cannot begin or go on, as after ``max_bad_steps``.

    Example:
        >>> run = train(RunConfig(epochs=1, out=str(tmp_path)), progress=False)
        >>> sorted(run.result["test"])
        ['accuracy', 'balanced_accuracy', 'ece', 'loss']
    """
    check_config(config)
    place = RunPlace()
    with failure_messages(place, timeout=config.timeout), ExitStack() as stack:
        stack.enter_context(own_stream(pick_device(config.device)))
        session = begin(
            config,
            folder,
            resume,
            data,
            stack=stack,
            progress=progress,
            on_epoch=on_epoch,
            place=place,
        )
        if isinstance(session, Run):
            run, first = session, True
        else:
            if on_begin is not None:
                on_begin(session.about)
            with _stop_signals(session):
                for _ in session.trainer.steps():
                    session.pause_if_asked()
                run, first = session.finish(), session.processes.rank == 0
    if first and run.failure is not None:
        warnings.warn(f"{TOLD}: {run.failure}", MarginWarning, stacklevel=2)
    return run


@dataclass(eq=False, repr=False)
class Session:
    """A run on its way: trainer, folder, and the steps before and after training."""

    config: RunConfig
    trainer: Trainer
    processes: Processes
    training: bool = True

    def __post_init__(self) -> None:
        self.folder = self.trainer.journal.folder
        self.agreement = StopAgreement(self.processes)

    @property
    def about(self) -> str:
        """What is trained on what, in a line."""
        name, data = self.config.model.name, self.trainer.data
        return f"training {name} on {data.about}, device {self.processes.device}"

    def pause_if_asked(self) -> None:
        """Write a checkpoint and stop, if somebody asked any of the processes to."""
        trainer = self.trainer
        if self.agreement.any(trainer.stop_requested, trainer.done):
            trainer.pause()
            raise Interrupted(
                f"stopped after step {trainer.done}, with a checkpoint. Continue: "
                f"{resume_command(self.folder)}"
            )

    def finish(self) -> Run:
        """Evaluate the best model on the test images, measure its geometry, write the result."""
        self.training = False
        trainer, folder = self.trainer, self.folder
        trainer.progress.close()
        weights = Checkpoints(folder).find("best")
        assert weights is not None
        model_weights(weights, trainer.evaluated())
        result = self._result()
        if self.processes.rank == 0:
            write_json(folder / RESULT, {**stamp(RESULT_KIND), **result})
        self.processes.wait()
        self.processes.end()
        return Run(folder)

    def _result(self) -> dict[str, Any]:
        """What result.json says; ``test`` and ``correct`` are those of the test images."""
        trainer, best = self.trainer, self.trainer.best
        failure = trainer.scores.failure(trainer.evaluated())
        test = trainer.scores.test(trainer.evaluated())
        result: dict[str, Any] = {
            "status": "finished" if failure is None else "diverged",
            "epochs": trainer.epoch,
            "steps": trainer.done,
            "best_epoch": best and best["epoch"],
            "validation": best and {k: best[k] for k in best if k not in ("score", "epoch")},
            "test": None if test is None else in_short(test),
            "notes": [
                *_notes(self.config, trainer),
                *left_out(Run(self.folder).metrics("epoch"), self.config),
            ],
        }
        if failure is not None:
            result["failure"] = failure
        elif self.config.measure:
            self._measure(result)
        result |= {"seconds": trainer.seconds, "images_per_s": trainer.images_per_s()}
        if test is not None and test.correct is not None:
            result["correct"] = test.correct.to_dict()
        return result

    def _measure(self, result: dict[str, Any]) -> None:
        """Write the geometry, and put it in short into the result; or why there is none."""
        try:
            geometry = self.trainer.scores.geometry(self.trainer.evaluated())
        except Interrupted:
            raise
        except LargeMarginError as error:
            result["notes"].append(f"the geometry could not be measured: {error}")
            return
        if geometry is not None:
            geometry.save(self.folder / GEOMETRY)
            cosine = geometry.margins["cosine"].overall
            result["geometry"] = {
                "class_margin_degrees": geometry.prototypes.class_margin,
                "mean_cosine_margin": cosine.mean,
                "min_cosine_margin": cosine.minimum,
            }


def begin(
    config: RunConfig,
    folder: str | Path | None,
    resume: bool,
    data: Data | None,
    *,
    stack: ExitStack,
    progress: bool,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    place: "RunPlace | None" = None,
) -> "Session | Run":
    """Build a run, or find the finished one in ``folder``; ``stack`` closes what was opened."""
    processes = Processes(config)
    first = processes.rank == 0
    given = None if folder is None else Path(folder)
    if resume and (done := _finished(given)) is not None:
        return done
    if first:
        given = _prepared_folder(config, given, resume, stack)
    home = processes.agree_on(given)
    if place is not None:
        place.folder = home
    make_deterministic(config, stack)
    trainer = _make_trainer(config, home, resume, data, processes, on_epoch)
    if resume:
        _resume(trainer, home, first)
    if first and not (home / ENVIRONMENT).is_file():
        _write_facts(home, config, trainer.data, processes)
    _show(config, trainer, stack, shown=progress and first)
    return Session(config, trainer, processes)


def _finished(folder: Path | None) -> Run | None:
    """The run to resume, where nothing is left to do."""
    if folder is None:
        raise LargeMarginError("resume needs the folder of the run to continue.")
    return Run(folder) if Run(folder).finished else None


def _show(config: RunConfig, trainer: Trainer, stack: ExitStack, *, shown: bool) -> None:
    """The progress bar of a run, and what is to be noted about it."""
    total = config.epochs * len(trainer.batches)
    trainer.progress = Progress(total, done=trainer.done, name=config.name, shown=shown)
    stack.callback(trainer.progress.close)
    for note in _notes(config, trainer) if shown else ():
        print(f"{config.name}: {note}", file=sys.stderr)


ANYWHERE = {"name", "out", "device", "timeout", "trackers", "data.path", "data.download"}
"""Settings of where a run is trained, not of what is trained."""


def _refuse_other_settings(home: Path, config: RunConfig) -> None:
    """Refuse settings that are not those of the run to resume."""
    there, given = flat(to_dict(Run(home).config)), flat(to_dict(config))
    said = [
        f"{name} is {there.get(name)} there and {given.get(name)} here"
        for name in {**there, **given}
        if name not in ANYWHERE and there.get(name) != given.get(name)
    ]
    if said:
        raise LargeMarginError(
            f"{home} is a run of other settings: {', '.join(said)[:300]}. Resume with those of its "
            f"{CONFIG}, Run.open(folder).config; to go on with others, edit that file."
        )


def _resume(trainer: Trainer, home: Path, first: bool) -> None:
    _refuse_other_settings(home, trainer.config)
    if (home / DATA).is_file():
        check_same_data(home, Run(home).facts, trainer.data, instead="start a new run")
    trainer.resume()
    if first:
        remove_drafts(home)
        evaluation = home / EVALUATION
        if evaluation.is_file():  # of a model from the middle of the run, no result of its end
            evaluation.replace(evaluation.with_name(f"{evaluation.stem}-before-resume.json"))


def _make_trainer(
    config: RunConfig,
    folder: Path,
    resume: bool,
    data: Data | None,
    processes: Processes,
    on_epoch: Callable[[dict[str, Any]], None] | None,
) -> Trainer:
    """The trainer with its data; where it cannot be made, a new folder is removed again."""
    first = processes.rank == 0
    try:
        if first and not resume:
            write_config(config, folder / CONFIG)
        load = partial(load_again, folder) if resume else load_data
        loaded = data or processes.first_alone(lambda: load(config.data))
        track = processes.start_trackers(folder, config.name, to_dict(config)) if first else None
        journal = Journal(folder, writes=first, track=track)
        return Trainer(config, loaded, journal, processes=processes, on_epoch=on_epoch)
    except BaseException:
        if first and not resume:
            shutil.rmtree(folder, ignore_errors=True)  # nothing was trained in it
        raise


def _prepared_folder(
    config: RunConfig, folder: Path | None, resume: bool, stack: ExitStack
) -> Path:
    """The folder of the run, made or found, and locked before anything is written into it."""
    if resume and folder is not None:
        Run.open(folder)
        stack.enter_context(locked(folder))
        return folder
    if folder is None:
        folder = new_folder(config)
    else:
        refuse_used(folder)
        made_folder(folder)
    stack.enter_context(locked(folder))
    refuse_used(folder)  # by a run that began in between
    return folder


def refuse_used(folder: Path) -> None:
    if folder.exists() and any(each.name != LOCK for each in folder.iterdir()):
        raise LargeMarginError(
            f"{folder} exists already and is not empty. Choose another folder, or continue the run "
            "in it with resume."
        )


def _notes(config: RunConfig, trainer: Trainer) -> list[str]:
    return [*trainer.bare.notes, *([DETERMINISTIC] if config.deterministic else [])]


def _write_facts(folder: Path, config: RunConfig, data: Data, processes: Processes) -> None:
    if not (folder / DATA).is_file():  # one of an older release goes on without its entry run
        names = ("name", "classes", "channels", "size", "mean", "std", "licence", "record")
        facts = {name: getattr(data, name) for name in names}
        own = {**to_dict(config), **dict.fromkeys(("name", "out", "device"))}
        run = hashlib.sha256(json.dumps([own, facts], sort_keys=True).encode()).hexdigest()
        write_json(folder / DATA, {**stamp(RESULT_KIND), "run": run, **facts})
    write_json(folder / ENVIRONMENT, environment(processes.device, processes=processes.world))


def make_deterministic(config: RunConfig, stack: ExitStack) -> None:
    """Deterministic algorithms where the run asks for them; put back when it ends."""
    if not config.deterministic:
        return
    # cuBLAS reads it when it starts, and is not deterministic without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    searches = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it picks whatever is fastest this time
    stack.callback(torch.use_deterministic_algorithms, before)
    stack.callback(setattr, torch.backends.cudnn, "benchmark", searches)


def own_stream(device: torch.device) -> AbstractContextManager[None]:
    """A stream for all work of a run: graphs cannot be captured on the default one."""
    if device.type != "cuda" or several_processes():
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def _stop_signals(session: Session) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the step that is under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    trainer, asked, command = session.trainer, [math.inf], resume_command(session.folder)

    def stop(number: int, frame: object) -> None:
        if not session.training:
            raise Interrupted(
                f"training is done, its result is not written yet. Continue: {command}"
            )
        # Asked twice: now. Launchers pass on what the terminal has sent to everybody already.
        if number == signal.SIGINT and time.monotonic() - asked[0] > ONE_REQUEST_S:
            raise KeyboardInterrupt(command)
        asked[0] = min(asked[0], time.monotonic())
        trainer.stop_requested = True

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def failure_messages(place: "RunPlace", *, timeout: float) -> Iterator[None]:
    """Turn errors of the system and of libraries into errors that name the folder of the run."""
    try:
        yield
    except LargeMarginError:
        raise
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        file = "" if error.filename is None else f" ({error.filename})"
        raise LargeMarginError(f"the run stopped: {why}{file}. {place.hint()}") from error
    except Exception as error:
        said = _explanation(error, int(os.environ.get("WORLD_SIZE", "1")), timeout)
        if said is None:
            raise
        raise LargeMarginError(f"the run stopped: {said}. {place.hint()}") from error


@dataclass
class RunPlace:
    """The folder of a run, which is known only after it was made."""

    folder: Path | None = None

    def hint(self) -> str:
        """What is still there, and how to go on."""
        if self.folder is None or not self.folder.is_dir():
            return "Nothing was trained yet."
        return (
            "Checkpoints written before are whole. When the cause is gone, continue: "
            f"{resume_command(self.folder)}"
        )


def _explanation(error: Exception, processes: int, timeout: float) -> str | None:
    text = " ".join(str(error).split())
    if type(error).__name__ == "SafetensorError":
        return f"a checkpoint could not be written: {text}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text:
        return f"the memory does not suffice ({text}). Use a smaller batch_size, network or size"
    if not isinstance(error, RuntimeError):
        return None
    if "deterministic implementation" in text or "CUBLAS_WORKSPACE_CONFIG" in text:
        return (
            f"deterministic is true, but a part of this model cannot be computed so here: {text} "
            "Use another network, or deterministic: false"
        )
    named = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    marks = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "peer")
    if processes > 1 and (named or any(mark in text.lower() for mark in marks)):
        return (
            f"another of the {processes} processes ended, or did not answer for {timeout:g} s "
            f"(timeout): {text}"
        )
    return None


@contextmanager
def rehearsed(config: RunConfig, data: Data) -> Iterator[Trainer]:
    """What a run would train, without a folder: nothing is written, nothing is left."""
    check_config(config)
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder), writes=False)
        yield Trainer(config, data, journal, processes=Processes(config))


def check_config(config: RunConfig) -> None:
    _check_groups(config)
    check_number("epochs", config.epochs, at_least=1)
    check_number("batch_size", config.batch_size, at_least=2)
    check_number("checkpoint_every", config.checkpoint_every, at_least=1)
    check_number("gradients_every", config.gradients_every, at_least=0)
    check_number("geometry_samples", config.geometry_samples, at_least=0)
    check_number("max_bad_steps", config.max_bad_steps, at_least=0)
    if config.patience is not None:
        check_number("patience", config.patience, at_least=1)
    check_number("noise.level", config.noise.level, at_least=0, at_most=1, hint=LEVELS)
    check_number("timeout", config.timeout, above=0)
    for name, set_ in (("joined", config.noise.joined), ("crop", config.noise.crop == "own")):
        if set_ and config.noise.use not in ("clean_and_noisy", "pair"):
            raise LargeMarginError(
                f"noise.{name} speaks of clean and noisy images of a batch, but noise.use is "
                f"{config.noise.use}, which has no two kinds of images. Leave {name} out, or set "
                "noise.use to clean_and_noisy or pair."
            )
    if config.name in ("", ".", "..") or not re.fullmatch(r"[^/\\\x00-\x1f]*", config.name):
        raise LargeMarginError(
            f"name must be a name, not a path: it becomes part of the run's folder, but "
            f"{config.name!r} was given. Choose where runs lie with out."
        )
    given = {"objective.settings": config.objective.settings, "model.options": config.model.options}
    _check_values({**to_dict(config), **given})


def _check_values(value: Any, place: str = "") -> None:
    """Refuse what files of a run cannot hold: numbers beyond 64 bits, text that is none."""
    if isinstance(value, dict):
        for name, each in value.items():
            if not isinstance(name, str):
                raise LargeMarginError(f"{place} must have names, but one of them is {name!r}.")
            _check_values(each, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for each in value:
            _check_values(each, place)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise LargeMarginError(f"{place} must be below 2**63, but a longer number was given.")
    elif isinstance(value, str):
        check_text(place, value)


def _check_groups(config: RunConfig) -> None:
    """A name alone, as on the command line, is no group of settings."""
    if not isinstance(config, RunConfig):
        raise LargeMarginError(
            f"config must be a RunConfig, but {config!r} was given. Pass RunConfig(...), or what "
            "read_config gave for a file."
        )
    for each in fields(RunConfig):
        kind, value = each.default_factory, getattr(config, each.name)
        if isinstance(kind, type) and not isinstance(value, kind):
            is_name = isinstance(value, str) and "/" not in value
            inside = repr(value) if is_name else "..."
            raise LargeMarginError(
                f"{each.name} must be a group of settings, but {value!r} was given. Pass "
                f"{each.name}={kind.__name__}({inside}), of {kind.__module__}."
            )
