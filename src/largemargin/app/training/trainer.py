"""``Trainer``: one run from its configuration to its result, a step at a time.

Below it: the random numbers and the batches of a run, and what is wrong with bad steps.
"""

import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.config import RunConfig
from largemargin.app.data.augment import Mix
from largemargin.app.data.load import Data
from largemargin.app.data.samples import Batches
from largemargin.app.models.build import build_model
from largemargin.app.training.checkpoints import Checkpoints, marked
from largemargin.app.training.config_file import to_dict
from largemargin.app.training.files import damage_named
from largemargin.app.training.journal import EpochTotals, Journal, Progress
from largemargin.app.training.objective import needs_of, objective_of, refuse_soft_targets
from largemargin.app.training.presets import preset_of
from largemargin.app.training.processes import Processes, autocast
from largemargin.app.training.run_scores import Diverged, Scores
from largemargin.app.training.step import (
    AveragedModel,
    BufferSnapshot,
    GraphStep,
    LearningRate,
    Step,
    make_optimizer,
)
from largemargin.dropin.attach import attach
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError, MarginWarning
from largemargin.measuring.sample_draws import seed_for

READ_EVERY = 50
"""Steps between readings of what the device has added up."""

SNAPSHOT = "kept."
"""How tensors of the snapshot are named in a checkpoint in the middle of an epoch."""

NAMED = 64
"""Samples of a bad step that are named in the journal."""


@dataclass(eq=False, repr=False)
class Trainer:
    """Everything a run needs; :meth:`steps` trains, and pauses after every step."""

    config: RunConfig
    data: Data
    journal: Journal
    _: KW_ONLY
    processes: Processes
    on_epoch: Callable[[dict[str, Any]], None] | None = None
    """Called with every epoch's row; an exception from it ends the run."""

    def __post_init__(self) -> None:
        self.progress = Progress(shown=False)
        self.device = self.processes.device
        self.rng = RunRng(self.device)
        self.stop_requested = False
        with self.rng():
            self._build()

    def _build(self) -> None:
        config, data = self.config, self.data
        seed_all(config.seed, "init")
        self.bare = build_model(
            config.model,
            len(data.classes),
            channels=data.channels,
            size=data.size,
            mean=data.mean,
            std=data.std,
        ).to(self.device)
        if self.device.type == "cuda":
            self.bare = self.bare.to(memory_format=torch.channels_last)
        self.batches = training_batches(config, data, self.processes)
        self.criterion = self._attached()
        self.graphs = self._uses_graph()
        parameters = [*self.bare.parameters(), *self.criterion.parameters()]
        below = {id(parameter) for parameter in self.bare.backbone.parameters()}
        head = [parameter for parameter in parameters if id(parameter) not in below]
        self.optimizer = make_optimizer(
            config.optimizer, parameters, head=head, on_device=self.graphs
        )
        self.rate = LearningRate(
            config.optimizer, epochs=config.epochs, steps_per_epoch=len(self.batches)
        )
        self.average = None if config.ema is None else AveragedModel(self.bare, config.ema)
        self.totals = EpochTotals(self.device, compiled=config.compile)
        self.model, optimizer = self.processes.prepare(self.bare, self.optimizer)
        self.step = Step(
            self.model,
            self.criterion,
            optimizer,
            noise=config.noise,
            clip_norm=config.optimizer.clip_norm,
            totals=self.totals,
            average=self.average,
            autocast=partial(autocast, config.precision, self.device),
            backward=self.processes.backward,
            scaler=self.processes.scaler,
            compiled=config.compile and "inputs" not in needs_of(config.objective),
            alone=self.processes.world == 1,
        )
        self.step.usual_size = config.batch_size // self.processes.world
        self.graph = GraphStep(self.step, self.batches) if self.graphs else None
        self.snapshot = BufferSnapshot(self.bare, self.criterion, average=self.average)
        self.scores = Scores(config, data, self.processes)
        self.checkpoints = Checkpoints(self.journal.folder)
        self.epoch, self.done = 0, 0
        self.mid_epoch: dict[str, Any] | None = None
        self.in_epoch, self.epoch_started, self.epoch_seconds = 0, 0.0, 0.0
        self.best: dict[str, Any] | None = None
        self.best_model = deepcopy(self.bare) if self.data.validation else self.bare
        self.best_is_new = False
        self.waited = 0
        self.seconds = 0.0

    def _attached(self) -> Criterion:
        """The criterion, after what is wrong with its objective here was said."""
        config, data = self.config, self.data
        counts = torch.bincount(data.train.labels, minlength=len(data.classes)).tolist()
        chosen = preset_of(config.objective, config.noise)
        if chosen is not None:
            head: Any = self.bare.head
            pretrained = config.model.weights is not None
            chosen.warn(len(counts), head.in_features, counts, pretrained=pretrained)
        scheduled = config.objective.schedule == "preset"
        criterion = attach(
            self.bare,
            objective_of(config.objective, counts, data.classes),
            layers=config.objective.layers,
            schedule="preset" if scheduled else None,
            total_steps=config.epochs * len(self.batches) if scheduled else None,
            stepping="manual",
            accumulate=config.noise.losses_per_step,
        )
        self._check_noise()
        for name in ("mixup", "cutmix"):
            if getattr(config.data, name):
                refuse_soft_targets(criterion.objective, f"data.{name}")
        return criterion

    @property
    def _world(self) -> int:
        world: int = self.processes.world
        return world

    def _check_noise(self) -> None:
        needs = needs_of(self.config.objective)
        if ("noisy" in needs) != (self.config.noise.use == "pair"):
            asked = f"the objective {self.config.objective.name!r} "
            asked += "needs" if "noisy" in needs else "does not look at"
            raise LargeMarginError(
                f"{asked} pairs of clean and noisy images, but noise.use is "
                f"{self.config.noise.use}. Use pair for robust_discriminative and stability, and "
                "only for these."
            )

    def _uses_graph(self) -> bool:
        config = self.config
        reasons = {
            "there is no CUDA device": self.device.type != "cuda",
            "there are several processes": self._world > 1,
            "fp16 has to rescale its loss on the host": config.precision == "fp16",
            "the images are not held in device memory": self.batches.pixels is None,
            "schedules of the loss change it on the host": config.objective.schedule != "none",
            "there is no full batch": len(self.data.train) < config.batch_size,
        }
        against = [reason for reason, holds in reasons.items() if holds]
        if config.graph == "on" and against:
            raise LargeMarginError(
                f"graph is on, but {against[0]}. Use graph: auto, which takes the plain path then."
            )
        return config.graph != "off" and not against

    def resume(self) -> bool:
        """Go on from the last checkpoint; False where there is none."""
        found = self.checkpoints.find("last")
        if found is None:
            self.journal.cut(0)  # it may have been killed just before its first checkpoint
            return False
        state = self.checkpoints.load(
            found,
            model=self.bare,
            criterion=self.criterion,
            optimizer=self.optimizer,
            average=self.average,
            scaler=self.processes.scaler,
        )
        self.epoch, self.done = state["epoch"], state["steps"]
        self.best, self.waited = state.get("best"), state["waited"]
        self.seconds = state["seconds"]
        paused = state.get("paused")
        self.mid_epoch = paused and {**paused, "tensors": state["tensors"]}
        self.snapshot.keep()
        self.journal.cut(self.done)
        return True

    def steps(self) -> Iterator[None]:
        """Train to the end; after every step control goes back to the caller."""
        while self.epoch < self.config.epochs and not self._out_of_patience():
            yield from self._train_epoch()
            self._end_epoch()

    def _out_of_patience(self) -> bool:
        return self.config.patience is not None and self.waited >= self.config.patience

    def _train_epoch(self) -> Iterator[None]:
        started = time.perf_counter()
        self.bare.train()
        with self.rng():
            # Random numbers depend on the epoch alone, so a resumed run draws the same.
            seed_all(self.config.seed, self.epoch, self.processes.rank)
        self.totals.clear()
        first = 0
        if self.mid_epoch is not None:
            first, started = self.mid_epoch["steps"], started - self.mid_epoch["seconds"]
            with damage_named(f"the checkpoint in {self.checkpoints.folder}"):
                self._restore(self.mid_epoch)
            self.mid_epoch = None
        self.epoch_started = started
        work = partial(self._graph_steps, self.graph) if self.graph else self._plain_steps
        for number, images in enumerate(work(first), first):
            self.criterion.step()
            self.totals.count(images * self._world)
            self.done, self.in_epoch = self.done + 1, number + 1
            if (number + 1) % READ_EVERY == 0 or number + 1 == len(self.batches):
                self._read_totals()
            self.progress.step(images * self._world)
            yield
        self.seconds += time.perf_counter() - started
        self.epoch_seconds = time.perf_counter() - started

    def _restore(self, mid_epoch: dict[str, Any]) -> None:
        """Go on with what :meth:`pause` wrote: totals, buffers, the next random numbers."""
        tensors = mid_epoch["tensors"]
        self.totals.restore(mid_epoch["sums"])
        self.snapshot.load(marked(tensors, SNAPSHOT))
        self.journal.bad_steps = mid_epoch["reported"]
        # Other processes have other parts of the batches, so their numbers would fit nobody.
        if mid_epoch["processes"] == self._world:
            self.rng.restore(marked(tensors, f"{self.processes.rank}."))

    def _plain_steps(self, first: int) -> Iterator[int]:
        for batch in self.batches.epoch(self.epoch, first):
            self.rate.set(self.optimizer, self.done)
            with self.rng():
                self._plain_step(batch.images, batch.labels)
            yield len(batch.labels)

    def _graph_steps(self, graph: GraphStep, first: int) -> Iterator[int]:
        graph.begin(self.epoch)
        for number in range(first, len(self.batches)):
            self.rate.set(self.optimizer, self.done)
            with self.rng():
                if self._measures_gradients():
                    images, labels = graph.batch(number)
                    self._plain_step(images, labels)
                    size = len(labels)
                else:
                    size = graph(number)
            yield size

    def _measures_gradients(self) -> bool:
        every = self.config.gradients_every
        return every > 0 and self.done % every == 0

    def _plain_step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """A step without a graph; from time to time it measures the gradients of the terms."""
        if not self._measures_gradients():
            self.step(images, labels)
            return
        self.criterion.measures_gradients = True
        try:
            self.step(images, labels, plain=True)
        finally:
            self.criterion.measures_gradients = False
        self.journal.gradients(self.epoch, self.done, self.criterion)

    def _read_totals(self) -> None:
        """Show the totals; after bad steps put back the buffers, after too many stop."""
        totals = self.totals.read()
        self.progress.show(totals)
        if self.done == min(READ_EVERY, len(self.batches)) and not totals.bad:
            warn_no_gradient(self.criterion)
        if totals.bad > self.journal.bad_steps:
            self.snapshot.restore()
            samples = suspicious_samples(self.batches, self.epoch, totals.last_bad)
            self.journal.report_bad(self.epoch, self.done, totals, samples)
        elif totals.bad_in_a_row == 0:
            self.snapshot.keep()
        if totals.bad_in_a_row > self.config.max_bad_steps:
            named = ", ".join(totals.bad_terms) or "the gradient"
            saved = self.checkpoints.where() or "not there: no epoch was finished"
            raise Diverged(
                f"{totals.bad_in_a_row} steps in a row were not finite ({named}), at step "
                f"{self.done} with learning rate {self.rate.at(self.done):.3g}. Lower "
                "optimizer.lr or optimizer.clip_norm, and look at the samples that metrics.jsonl "
                f"names under bad_steps. The last good checkpoint is {saved}."
            )

    def _end_epoch(self) -> None:
        self.processes.share_buffers(self.bare, self.evaluated())
        row = {
            "kind": "epoch",
            "epoch": self.epoch,
            "step": self.done,
            "lr": self.rate.at(self.done - 1),
            **self.totals.read().row(),
            "validation": self.scores.validation(self.evaluated()),
            "geometry": self.scores.epoch_geometry(self.evaluated()),
            "seconds": self.epoch_seconds,
            "images_per_s": self.totals.read().images / max(1e-9, self.epoch_seconds),
        }
        self.epoch += 1
        self._compare(row)
        self.journal.write(row)
        last = self.epoch == self.config.epochs or self._out_of_patience()
        if last or self.epoch % self.config.checkpoint_every == 0:
            self._checkpoint(last)
        self.progress.end_epoch(row)
        if self.on_epoch is not None:
            self.on_epoch(row)

    def evaluated(self) -> nn.Module:
        """The model that counts: the averaged one where there is one."""
        return self.bare if self.average is None else self.average.model

    def images_per_s(self) -> float:
        """Over the whole training, without evaluation."""
        full = len(self.batches) * self.config.batch_size
        images = min(len(self.data.train), full) * self.epoch
        return images / max(1e-9, self.seconds)

    def _compare(self, row: dict[str, Any]) -> None:
        """Keep a copy of the model if it is better on the validation images than all before."""
        if row["validation"] is None:
            return
        value = row["validation"][self.config.select]
        score = -value if self.config.select == "loss" else value
        score = -math.inf if math.isnan(score) else score
        if self.best is not None and not score > self.best["score"]:
            self.waited += 1
            return
        self.waited = 0
        self.best = {"score": score, "epoch": row["epoch"], **row["validation"]}
        # Made once, before anything is compiled; later only filled.
        self.best_model.load_state_dict(self.evaluated().state_dict())
        self.best_is_new = True

    def pause(self) -> None:
        """Write a checkpoint in the middle of an epoch, from which the run goes on as it would."""
        mid_epoch = {
            "steps": self.in_epoch,
            "seconds": time.perf_counter() - self.epoch_started,
            "sums": self.totals.state(),
            "reported": self.journal.bad_steps,
            "processes": self._world,
        }
        kept = {f"{SNAPSHOT}{name}": each for name, each in self.snapshot.states().items()}
        tensors = kept | self.processes.of_all(self.rng.states())
        if self.processes.rank == 0:
            self._write_checkpoint(f"step-{self.done:08d}", mid_epoch, tensors)
        self.processes.wait()

    def _checkpoint(self, last: bool) -> None:
        if self.processes.rank == 0:
            self._write_checkpoint(f"epoch-{self.epoch:04d}", last=last)
        self.best_is_new = False
        self.processes.wait()

    def _write_checkpoint(
        self,
        name: str,
        mid_epoch: dict[str, Any] | None = None,
        tensors: dict[str, Tensor] | None = None,
        last: bool = False,
    ) -> None:
        facts: dict[str, Any] = {"config": to_dict(self.config), "classes": self.data.classes}
        scaler = self.processes.scaler
        state = {
            "epoch": self.epoch,
            "steps": self.done,
            "best": self.best,
            "waited": self.waited,
            "seconds": self.seconds,
            "scaler": None if scaler is None else scaler.state_dict(),
            "paused": mid_epoch,
        }
        best = None
        if self.best_is_new or (last and self.best is None):
            epoch = self.epoch if self.best is None else self.best["epoch"] + 1
            model = self.evaluated() if self.best is None else self.best_model
            best = f"best-{epoch:04d}"
            self.checkpoints.write_best(best, {"best": self.best}, model=model, **facts)
        # Written after the best one, which it refers to.
        self.checkpoints.write_last(
            name,
            state,
            model=self.bare,
            criterion=self.criterion,
            optimizer=self.optimizer,
            average=self.average,
            mid_epoch=tensors,
            best=best,
            **facts,
        )


def seed_all(*parts: int | str) -> None:
    """Seed torch's generators (all devices) and Python's."""
    seed = seed_for(*parts)
    torch.manual_seed(seed)
    random.seed(seed)


class RunRng:
    """The CUDA random numbers of one run, apart from those of other runs in the process.

    A captured graph goes on drawing from the generator state that was current at its capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._generator = torch.cuda.default_generators[index]
            self._state = self._generator.clone_state()

    def states(self) -> dict[str, Tensor]:
        """Where all generators of the run are, for the middle of an epoch."""
        python = torch.tensor(random.getstate()[1], dtype=torch.int64)
        found = {"torch": torch.get_rng_state(), "python": python}
        if self._generator is not None:
            with self():
                found["device"] = self._generator.get_state()
        return found

    def restore(self, states: dict[str, Tensor]) -> None:
        """Put the generators where :meth:`states` found them."""
        torch.set_rng_state(states["torch"])
        random.setstate((3, tuple(states["python"].tolist()), None))
        if self._generator is not None and "device" in states:
            with self():
                self._generator.set_state(states["device"])

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._generator is None:
            yield
            return
        outer = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._state)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(outer)


def training_batches(config: RunConfig, data: Data, processes: Processes) -> Batches:
    """This process's part of the training images, at least two of them in every step."""
    images, world = len(data.train), processes.world
    least = 2 * world  # batch normalisation cannot train on a single image
    if images < least:
        raise LargeMarginError(
            f"training needs at least two images for each process, {least} in all, but got "
            f"{images} (processes: {world}). Give more images, a smaller data.validation, or use "
            "fewer processes."
        )
    if config.batch_size < least:
        raise LargeMarginError(
            f"batch_size is that of all processes together and must leave each of them two images, "
            f"but {config.batch_size} was given for {world} processes. Give {least} or more."
        )
    mixed = config.data.mixup != 0 or config.data.cutmix != 0
    mix = Mix(len(data.classes), mixup=config.data.mixup, cutmix=config.data.cutmix)
    return Batches(
        data.train,
        config.batch_size,
        device=processes.device,
        seed=config.seed,
        augment=data.augment,
        rank=processes.rank,
        world=world,
        workers=config.data.workers,
        drop_last=0 < images % config.batch_size < least,
        twice=config.noise.crop == "own",
        mix=mix if mixed else None,
    )


def suspicious_samples(batches: Batches, epoch: int, step: int) -> list[str]:
    """Names of samples whose images are not finite; where all are, those of the whole step.

    A step of several processes is that of all of them.
    """
    samples, first = batches.samples, step * batches.batch_size
    index = batches.order(epoch)[first : first + batches.batch_size]
    if samples.pixels is not None and samples.pixels.is_floating_point():
        broken = ~torch.isfinite(samples.pixels[index]).flatten(1).all(1)
        index = index[broken] if bool(broken.any()) else index
    return [str(samples.ids[number]) for number in index[:NAMED].tolist()]


def warn_no_gradient(criterion: Criterion) -> None:
    """Say so where the last step had no gradient for the network below its head, to the last bit.

    A hinge that is satisfied everywhere can do this, a network whose units all died of a learning
    rate that is too high, and a compiler that loses a gradient.
    """
    head = {id(parameter) for parameter in criterion.layer.parameters()}
    below = [
        parameter
        for parameter in criterion.model.parameters()
        if parameter.requires_grad and id(parameter) not in head
    ]
    sizes = [parameter.grad.norm() for parameter in below if parameter.grad is not None]
    if below and not (sizes and bool(torch.stack(sizes).any())):
        warnings.warn(
            f"the loss has no gradient for any of the {len(below)} parameters below the head: only "
            "the head is trained. Every unit of a layer may be dead: lower optimizer.lr, or clip. "
            "If the run is compiled and compile: false helps, tell us.",
            MarginWarning,
            stacklevel=2,
        )
