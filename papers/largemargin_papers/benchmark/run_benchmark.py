"""``run_situations``: runs of the benchmark until time is up, each recorded when it ends."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from largemargin.app.models.library_networks import trust
from largemargin.app.training.parallel_runs import TrainingJob, TrainingOutcome, iter_finished
from largemargin.app.training.processes import commit, device_name, pick_device
from largemargin.app.training.trainer import Trainer
from largemargin.losses.base.class_counts import balanced_weights
from largemargin.losses.base.loss import Loss
from largemargin.losses.ldam import LDAM
from largemargin_papers.benchmark.assess import assess
from largemargin_papers.benchmark.followups import FollowUp, followup_jobs, swaps
from largemargin_papers.benchmark.halving import Job, is_complete, next_jobs, optimizer_of
from largemargin_papers.benchmark.images import Images
from largemargin_papers.benchmark.linear_probe import fit_head
from largemargin_papers.benchmark.plan import seconds_of, train_images
from largemargin_papers.benchmark.protocol import Protocol, Situation
from largemargin_papers.benchmark.records import read_records
from largemargin_papers.record_lines import append_record

MEMORY = Path("/dev/shm")
"""Where runs under way are kept if there is one: their weights are read once and thrown away."""

RECENT, SAFETY = 15, 1.3
"""The time a run will take is guessed from the last ones, with some air."""


def run_situations(
    protocol: Protocol,
    situations: Sequence[str],
    *,
    out: Path,
    known: Sequence[Path] = (),
    minutes: float | None = None,
    device: str = "auto",
    side_by_side: int = 5,
    paths: Mapping[str, str] | None = None,
    everyone: bool = False,
    questions: Sequence[FollowUp] = (),
    commit_name: str | None = None,
    most_judged: int | None = None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, bool]:
    """Do what is left of some situations; called again it goes on.

    Args:
        protocol: what to do.
        situations: names, in the order in which they are done.
        out: folder of the new lines, one file for each situation.
        known: folders with lines of earlier calls, which are only read.
        minutes: begin no run that would end later, as far as can be guessed.
        device: as in ``RunConfig``.
        side_by_side: runs at a time on a GPU.
        paths: where data lies, by name.
        everyone: final runs of all methods, also those that no test is about.
        questions: whose runs are made too, after the registered ones of their situation.
        commit_name: of the code, where there is no git to ask.
        most_judged: images at most that a model is judged on, of a rehearsal.
        say: where a line about every run goes.
        clock: seconds.

    Returns:
        Whether each situation is complete.
    """
    end = None if minutes is None else clock() + 60 * minutes
    images = Images(paths, most_judged)
    where = {
        "device": device_name(pick_device(device)),
        "torch": _torch_version(),
        "commit": commit_name or commit(),
        "side_by_side": side_by_side,
    }
    # All names are looked up before the first run.
    chosen = [protocol.situation(name) for name in situations]
    share = float(side_by_side if pick_device(device).type == "cuda" else 1)
    sessions: dict[str, _Session] = {}
    for situation in chosen:
        name = situation.name
        names = (situation.like, name) if situation.like else (name,)
        files = [folder / f"{each}.jsonl" for folder in (*known, out) for each in names]
        records = read_records(files)
        asked = [each for each in questions if each.situation == name]
        session = _Session(protocol, situation, images, records, everyone, asked, end, clock)
        session.ratios.append(share)
        sessions[name] = session

    def next_job() -> Job | None:
        """Of the first situation that has one: the next fills lanes that wait for a rung's end."""
        return next(filter(None, (each.next_job() for each in sessions.values())), None)

    base = MEMORY if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="largemargin-", dir=base) as scratch:
        for job, outcome in trained(
            next_job, images, folder=Path(scratch), device=device, side_by_side=side_by_side
        ):
            error = outcome.error
            if error is not None and outcome.divergence is None:
                # Not a result: it is tried again by the next call.
                say(f"{job.key}: FAILED: {type(error).__name__}: {error}")
                continue
            session = sessions[job.task.name]
            record = session.judge(job, outcome, where)
            append_record(out / f"{session.situation.name}.jsonl", record)
            say(line(record))
            if session.is_over():
                images.forget(session.situation)
    return {name: each.is_complete() for name, each in sessions.items()}


def trained(
    next_job: Callable[[], Job | None],
    images: Images,
    *,
    folder: Path,
    device: str,
    side_by_side: int,
) -> Iterator[tuple[Job, TrainingOutcome]]:
    """Train what ``next_job`` gives, each in a folder of its own that is deleted afterwards."""
    under_way: dict[Path, Job] = {}

    def next_training() -> TrainingJob | None:
        job = next_job()
        if job is None:
            return None
        place = folder / job.key.replace("/", "-")
        task = images.task(job.task, job.seed, job.split)  # without it nothing can be run
        spec, data, config = job.protocol.methods[job.method], task.data, job.config
        if spec.best_epoch:
            data = replace(data, validation=task.validation)
        if (weights := config.model.weights) is not None:
            model = replace(config.model, weights=str(images.file(weights)))
            config = replace(config, model=model)
        under_way[place] = job
        return TrainingJob(
            replace(config, device=device),
            place,
            data=lambda: data,
            before_step=partial(change, job),
        )

    trust()  # the networks of this package are named by their paths

    for outcome in iter_finished(next_training, side_by_side=side_by_side):
        place = Path(str(outcome.job.folder))
        yield under_way.pop(place), outcome
        shutil.rmtree(place, ignore_errors=True)


def change(job: Job, trainer: Trainer) -> None:
    """What a method does beside its steps, before each of them and after the last."""
    if job.reweight_at is not None:
        reweight(job.reweight_at, trainer)
    probe = job.protocol.methods[job.method].probe
    last = trainer.config.epochs * len(trainer.batches)
    if probe is not None and trainer.done == {"start": 0, "only": last}[probe]:
        fit_head(job.penalty, trainer)


def judged_model(job: Job, trainer: Trainer) -> nn.Module:
    """The network with the weights that count."""
    best = job.protocol.methods[job.method].best_epoch
    return trainer.best_model if best else trainer.evaluated()


def reweight(share: float, trainer: Trainer) -> None:
    """After this share of the steps LDAM, or the only term, gets balanced class weights."""
    if trainer.done != round(share * trainer.config.epochs * len(trainer.batches)):
        return
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
    if trainer.graph is not None:  # captured steps know the old weights
        trainer.graph.graphs.clear()
        trainer.graph.plain_steps.clear()


class _Session:
    """The runs of one situation."""

    def __init__(
        self,
        protocol: Protocol,
        situation: Situation,
        images: Images,
        records: dict[str, dict[str, Any]],
        everyone: bool,
        asked: Sequence[FollowUp],
        end: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.protocol, self.situation, self.images = protocol, situation, images
        self.records, self.everyone, self.asked = records, everyone, asked
        self.end, self.clock = end, clock
        self.begun: set[str] = set()
        self.ratios: list[float] = []
        """How much longer runs took than was guessed; beside four others about five times."""

    def next_job(self) -> Job | None:
        job = next((each for each in self._waiting() if each.key not in self.begun), None)
        if job is None or (self.end is not None and self.clock() + self._guess(job) > self.end):
            return None
        self.begun.add(job.key)
        return job

    def is_over(self) -> bool:
        """Whether no run is left, not even one under way."""
        return self.begun <= self.records.keys() and next(self._waiting(), None) is None

    def is_complete(self) -> bool:
        """Whether all that is registered was run."""
        if not is_complete(self.protocol, self.situation, self.records):
            return False
        registered = swaps(self.protocol, self.situation, self.records)
        return next(self._beside(registered.values()), None) is None

    def _waiting(self) -> Iterator[Job]:
        yield from next_jobs(self.protocol, self.situation, self.records, everyone=self.everyone)
        yield from self._beside(swaps(self.protocol, self.situation, self.records).values())
        yield from self._beside(self.asked)

    def _beside(self, questions: Iterable[FollowUp]) -> Iterator[Job]:
        for question in questions:
            jobs = followup_jobs(self.protocol, question, self.records) or []
            yield from (each for each in jobs if each.key not in self.records)

    def _guess(self, job: Job) -> float:
        """Seconds until a run that begins now ends, with what runs beside it."""
        recent = self.ratios[-RECENT:]
        return SAFETY * statistics.median(recent) * self._alone(job)

    def _alone(self, job: Job) -> float:
        return seconds_of(self.situation, job, train_images(self.situation))

    def judge(self, job: Job, outcome: TrainingOutcome, where: Mapping[str, Any]) -> dict[str, Any]:
        situation, trainer = self.situation, outcome.trainer
        assert trainer is not None
        self.ratios.append(outcome.seconds / self._alone(job))
        scores: dict[str, Any] = {"score": None}
        if outcome.divergence is None:
            task = self.images.task(situation, job.seed, job.split)
            scores = assess(
                judged_model(job, trainer),
                task.judged,
                score=situation.score,
                split=job.split,
                precision=job.config.precision,
                validation=task.validation,
                ood=task.ood,
            )
        record = {
            "key": job.key,
            "situation": situation.name,
            "method": job.method,
            "stage": job.stage,
            "trial": job.trial,
            "seed": job.seed,
            "judged_on": job.split,
            "epochs": job.epochs,
            "objective": asdict(job.config.objective),
            "optimizer": {
                name: getattr(job.config.optimizer, name)
                for name in ("lr", "weight_decay", "clip_norm")
            }
            | {path.rpartition(".")[2]: each for path, each in optimizer_of(job).items()},
            "noise": asdict(job.config.noise),
            "reweight_at": job.reweight_at,
            "status": "finished" if outcome.divergence is None else "diverged",
            "steps": trainer.done,
            "seconds": round(trainer.seconds, 3),
            "wall_seconds": round(outcome.seconds, 3),
            "bad_steps": trainer.journal.bad_steps,
            **scores,
            **where,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.records[job.key] = record
        return record


def line(record: Mapping[str, Any]) -> str:
    """A run as people read it."""
    score = record["score"]
    said = "diverged" if record["status"] == "diverged" else "not a number"
    if score is not None:
        said = f"{record['judged_on']} {100 * score:.2f} %"
    return f"{record['key']}: {said}, {record['wall_seconds']:.1f} s"


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
