"""``evaluate``: what a trained classifier is worth, in one pass over the data.

``Origin`` says which images of a run and which of its models it was, ``Evaluation`` what was found:
as data, as JSON and as a table.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_count
from largemargin.evaluation_config import EvaluationConfig
from largemargin.geometry.pairs import widen
from largemargin.measuring.accuracy import Accuracy, AccuracyCounter, Counts, wilson
from largemargin.measuring.batches import (
    IGNORED,
    DataBatch,
    Source,
    Split,
    bar,
    check_range,
    count_batches,
    device_for,
    fail_together,
    need_labels,
    source_batches,
)
from largemargin.measuring.calibrate import Temperature, number_of
from largemargin.measuring.calibration import Calibration
from largemargin.measuring.confidence import SCORES, OODScores, Scorer, compare_scores, scores_of
from largemargin.measuring.input_space import Normalization, PixelUnits
from largemargin.measuring.logit_model import LogitModel, ReadingOptions
from largemargin.measuring.records import Record
from largemargin.measuring.retrieval import (
    CrossCamera,
    Retrieval,
    cross_camera,
    head_inputs_of,
    retrieval_of,
)
from largemargin.measuring.robust_accuracy import (
    AttackedAccuracy,
    AttackedCounts,
    PerturbedAccuracy,
    PerturbedCounts,
    attacks_of,
    perturbation_suite,
    stride_for,
)
from largemargin.ops.distributed import world_size

OF_PEOPLE = ("folder", "csv", "arrays")
"""Data that is told apart by where it lies: people's own."""


@dataclass(frozen=True)
class Origin(Record):
    """Which images and which model of a run an evaluation is of."""

    split: str
    """test, validation or train."""
    data: str
    """Name of the data set."""
    path: str | None
    """Where it lies."""
    own: bool
    """The data of the run, not other data that was given."""
    which: str
    """Model of the run: best or last."""
    usual: bool
    """What is taken where nothing is asked for: only then it is the result of the run."""
    flips: bool = False
    """Features are means over every image and its mirror image."""

    def __str__(self) -> str:
        place = "" if self.path is None else f" {self.path}"
        whose = "of the run" if self.own else f"of {self.data}{place}"
        flips = " with test-time flips" if self.flips else ""
        return f"{self.split} images {whose}, {self.which} model{flips}"

    @property
    def file_name(self) -> str:
        """In the folder of the run, where ``evaluation.json`` is its result.

        Example:
            >>> Origin("train", "folder", "my photos/", False, "last", False).file_name
            'evaluation-my_photos-train-last.json'
        """
        if self.usual:
            return "evaluation.json"
        name = Path(self.path).stem if self.data in OF_PEOPLE and self.path else ""
        parts = [] if self.own else [re.sub(r"[^\w-]+", "_", name or self.data)]
        last = [] if self.which == "best" else [self.which]
        flips = ["flips"] if self.flips else []
        return "-".join(["evaluation", *parts, self.split, *last, *flips]) + ".json"


FORMAT = 1
SHOWN_CLASSES = 30
"""Up to this many classes the table shows each."""


@dataclass(frozen=True)
class Evaluation(Record):
    """Everything :func:`evaluate` found; parts that were not asked for are None or empty."""

    classes: tuple[str, ...]
    clean: Accuracy
    interval: tuple[float, float]
    """Wilson's interval of the clean accuracy: where it may lie on unlimited data of this kind."""
    confidence: float
    settings: dict[str, Any]
    """The :class:`EvaluationConfig` it was made with."""
    seconds: float
    notes: tuple[str, ...]
    """What was left out, and why."""
    perturbed: dict[str, PerturbedAccuracy] = field(default_factory=dict)
    attacked: tuple[AttackedAccuracy, ...] = ()
    ood: OODScores | None = None
    """How well scores of the predicted class tell out-of-distribution data."""
    retrieval: Retrieval | None = None
    cross_camera: CrossCamera | None = None
    temperature: float | None = None
    """What logits were divided by for ``calibrated``; fitted to other data."""
    calibrated: Calibration | None = None
    """Calibration of the probabilities with that temperature."""
    origin: Origin | None = None
    """Which images and which model of a run, where the command evaluated one."""
    format: int = FORMAT

    RENAMED: ClassVar[dict[str, str]] = {"strangers": "ood"}

    def __str__(self) -> str:
        """A table: one quantity a line, notes at the end."""
        lines = [*_clean(self), *_changed(self), *_detected(self), *_searched(self)]
        width = max(len(name) for name, value in lines if value)
        text = [f"{name:<{width}}  {value}".rstrip() for name, value in lines]
        title = f"{self.clean.samples:,} samples, {len(self.classes):,} classes"
        return "\n".join([title, *text, *(f"note: {note}" for note in self.notes)])


class Search(NamedTuple):
    """Queries and gallery of a search across cameras: splits with ``extra["camera"]``."""

    query: Split
    gallery: Split


def evaluate(
    model: nn.Module,
    data: Source,
    *,
    class_names: Sequence[str] | None = None,
    config: EvaluationConfig | None = None,
    ood: Source | None = None,
    search: Search | None = None,
    temperature: Temperature | float | None = None,
    normalization: Normalization | None = None,
    device: torch.device | str | None = None,
    sync: bool = True,
    progress: bool = False,
) -> Evaluation:
    """Accuracy, calibration, robustness, OOD detection and retrieval of a classifier.

    The data is read once; every batch then goes through all perturbations and attacks. The model
    is put in evaluation mode and every module's mode restored. Under torch.distributed every
    process evaluates its part and all return the result of the whole.

    Args:
        model: any model :func:`largemargin.attach` can read. It takes images in [0, 1]: models of
            this library normalise them in their first layer. For one that does not, say what the
            loader does (``normalization``), or put ``largemargin.app.models.Normalize`` in front.
        data: a split, or a loader of (images, labels) in an order of its own that does not change.
        class_names: one for each class, in the order of the labels; default their numbers.
        config: which parts to run; default all of them.
        ood: data of no known class, for OOD detection.
        search: queries and gallery of re-identification data.
        temperature: fitted to other data (:func:`calibrate_temperature`): the calibration with it
            is reported too. Nothing else depends on it.
        normalization: (mean, std) that the loader normalises by, one number or one per channel:
            images are perturbed and attacked as they were before.
        device: where to compute; default where the model is.
        sync: False evaluates on this process alone, for calls on one process of several.
        progress: show a progress bar with the time left (needs tqdm).

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
        >>> data = [(torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 0, 1, 0, 1]))]
        >>> found = evaluate(model, data, config=EvaluationConfig(draws=2, attacks=()))
        >>> found.clean.samples, len(found.perturbed["stripes"].runs)
        (6, 2)
    """
    started = time.perf_counter()
    config = _checked_config(config)
    reader = LogitModel(model, num_classes=None if class_names is None else len(class_names))
    names = tuple(str(each) for each in class_names or range(reader.num_classes))
    where = device_for(reader.model, device)
    shared = sync and world_size() > 1
    divisor = None if temperature is None else number_of(temperature)
    reader.pixels = PixelUnits(normalization)
    run = _Pass(reader, data, config, where, divisor, scored=ood is not None, shared=shared)
    run.prepare(fail_together(shared, run.look))
    parts = fail_together(shared, lambda: run.over_data(progress))
    found = run.results(parts)
    options: ReadingOptions = {
        "batch_size": config.batch_size, "device": where, "workers": config.workers, "sync": sync,
        "progress": progress,
    }  # fmt: skip
    if ood is not None:
        found["ood"] = run.ood_scores(parts, scores_of(reader, ood, "ood", **options))
    if search is not None:
        found["cross_camera"] = run.across(search, options)
    return Evaluation(
        classes=names,
        confidence=config.confidence,
        settings=asdict(config),
        seconds=time.perf_counter() - started,
        notes=tuple(run.notes),
        temperature=divisor,
        **found,
    )


def _checked_config(given: EvaluationConfig | None) -> EvaluationConfig:
    config = EvaluationConfig() if given is None else given
    if not isinstance(config, EvaluationConfig):
        raise LargeMarginError(
            "config must be an EvaluationConfig, as EvaluationConfig(draws=3), but "
            f"{type(config).__name__} was given."
        )
    check_count("batch_size", config.batch_size, at_least=1)
    return config


class _Pass:
    """One pass over the data with everything that is counted on the way."""

    def __init__(
        self,
        reader: LogitModel,
        data: Source,
        config: EvaluationConfig,
        device: torch.device,
        temperature: float | None,
        *,
        scored: bool,
        shared: bool,
    ) -> None:
        self.reader, self.data, self.config, self.device = reader, data, config, device
        self.temperature, self.shared = temperature, shared
        self.clean = AccuracyCounter(reader, data, config.bins, device)
        self.calibrated: Counts | None = None
        """Of logits divided by the temperature."""
        if temperature is not None:
            self.calibrated = Counts(reader.num_classes, bins=config.bins, device=device)
        self.scorer = Scorer(reader) if scored else None
        self.perturbed: PerturbedCounts | None = None
        self.attacked: AttackedCounts | None = None
        self.scores: dict[str, list[Tensor]] = {name: [torch.zeros(0)] for name in SCORES}
        self.features: list[tuple[Tensor, Tensor]] = []
        self.notes: list[str] = []
        self.waiting: Iterator[DataBatch] = iter(())

    def look(self) -> tuple[int, ...] | None:
        """Shape of an image, from the first batch; () for other inputs, None without a batch."""
        config = self.config
        read = source_batches(
            self.data,
            batch_size=config.batch_size,
            device=self.device,
            workers=config.workers,
            shared=self.shared,
        )
        first = next(read, None)
        if first is None:
            return None
        self.waiting = chain([first], read)
        images = first.inputs
        if not (isinstance(images, Tensor) and images.dim() == 4 and images.is_floating_point()):
            return ()
        if self._changes_images:
            check_range(self.reader.pixels.raw(images, checked=False))
        return tuple(images.shape[1:])

    @property
    def _changes_images(self) -> bool:
        config = self.config
        noise = config.gaussian or config.uniform or config.perturbations != "none"
        return bool(noise or config.attacks)

    def prepare(self, shapes: list[tuple[int, ...] | None]) -> None:
        """Get ready for images of this shape, which is that of all processes."""
        shape = next((each for each in shapes if each is not None), ())
        if not self._changes_images:
            return
        if not shape:
            if any(each is not None for each in shapes):
                self.notes.append("the inputs are no images: perturbations and attacks left out")
            return
        config = self.config
        size = shape[1], shape[2]
        suite = perturbation_suite(
            config.perturbations, size, gaussian=config.gaussian, uniform=config.uniform
        )
        if suite:
            self.perturbed = PerturbedCounts(
                self.reader, suite, draws=config.draws, seed=config.seed, device=self.device
            )
        attacks = attacks_of(
            config.attacks, linf=config.linf, l2=config.l2, steps=config.attack_steps
        )
        if attacks:
            every = "config=EvaluationConfig(attack_samples=None)"
            stride = stride_for(
                self.data, config.attack_samples, name="attack_samples", every=every
            )
            self.attacked = AttackedCounts(
                self.reader, attacks, seed=config.seed, device=self.device, stride=stride
            )

    def over_data(self, progress: bool) -> dict[str, Any]:
        number = count_batches(self.data, self.config.batch_size, shared=self.shared)
        parts = [each for each in (self.perturbed, self.attacked) if each is not None]
        passes = 1 + sum(each.passes for each in parts)
        total = None if number is None else number * passes
        with self.reader.evaluating(), bar("evaluate", total, progress) as advance:
            for batch in self.waiting:
                self._add_clean(batch)
                advance()
                for part in parts:
                    part.add(batch, advance)
        return {
            "clean": self.clean.sums(),
            "calibrated": None if self.calibrated is None else self.calibrated.sums(),
            "perturbed": None if self.perturbed is None else self.perturbed.sums(),
            "attacked": None if self.attacked is None else self.attacked.sums(),
            "scores": {name: torch.cat(each) for name, each in self.scores.items()},
            "features": self.features,
        }

    def _add_clean(self, batch: DataBatch) -> None:
        labels = need_labels(batch.labels)
        if self.scorer is None and not self.config.retrieval:
            self._count(self.reader(batch.inputs), labels, batch)
            return
        logits, features = self.reader.read(batch.inputs)
        self._count(logits, labels, batch)
        if self.config.retrieval:
            self.features.append((features.cpu(), labels.cpu()))
        if self.scorer is not None:
            scored = self.scorer.of(logits, features)
            for name in SCORES:
                self.scores[name].append(getattr(scored, name).cpu())

    def _count(self, logits: Tensor, labels: Tensor, batch: DataBatch) -> None:
        self.clean.add_logits(batch, logits)
        if self.calibrated is not None and self.temperature is not None:
            self.calibrated.add(widen(logits) / self.temperature, labels)

    def results(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields of an evaluation, by name, from what every process has counted."""

        def sums(name: str) -> list[Any]:
            return [part[name] for part in parts]

        clean = self.clean.result(sums("clean"))
        if clean.skipped:
            self.notes.append(f"{clean.skipped} samples labelled {IGNORED} were skipped")
        if clean.broken:
            self.notes.append(f"{clean.broken} samples have NaN logits and count as wrong")
        confidence = self.config.confidence
        right = round(clean.accuracy * clean.samples)
        interval = wilson(right, clean.samples, confidence=confidence)
        found: dict[str, Any] = {"clean": clean, "interval": interval}
        if self.perturbed is not None:
            found["perturbed"] = self.perturbed.result(sums("perturbed"))
        if self.attacked is not None:
            found["attacked"] = self.attacked.result(sums("attacked"), confidence=confidence)
        if self.config.retrieval:
            found["retrieval"] = self._retrieval(parts)
        if self.calibrated is not None:
            found["calibrated"] = self.calibrated.result(sums("calibrated")).calibration
        return found

    def _retrieval(self, parts: list[dict[str, Any]]) -> Retrieval | None:
        every = [each for part in parts for each in part["features"]]
        features, labels = (torch.cat(column) for column in zip(*every, strict=True))
        known = labels != IGNORED
        broken = int((~features[known].isfinite().all(1)).sum())
        if broken:
            self.notes.append(
                f"the features of {broken} samples are not finite: retrieval left out"
            )
            return None
        if int(torch.bincount(labels[known]).max()) < 2:
            self.notes.append("no class has two samples: retrieval left out")
            return None
        return retrieval_of(
            _ranked_on(self.device, features[known]),
            labels[known],
            similarity=self.config.similarity,
            at=self.config.recall_at,
        )

    def ood_scores(self, parts: list[dict[str, Any]], other: dict[str, Tensor]) -> OODScores:
        known = {name: torch.cat([part["scores"][name] for part in parts]) for name in SCORES}
        return compare_scores(known, other, Scorer(self.reader).margin)

    def across(self, search: Search, options: ReadingOptions) -> CrossCamera:
        """What a search across cameras finds."""
        (queries, people), gallery = (
            head_inputs_of(self.reader.model, each, **options) for each in search
        )
        cameras = []
        for name, split in zip(("query", "gallery"), search, strict=True):
            if "camera" not in split.extra:
                raise LargeMarginError(
                    f"the {name} images have no cameras: extra['camera'] must hold one number per "
                    "image."
                )
            cameras.append(split.extra["camera"])
        queries, how = _ranked_on(self.device, queries), self.config.similarity
        return cross_camera(queries, people, cameras[0], *gallery, cameras[1], similarity=how)


def _ranked_on(device: torch.device, features: Tensor) -> Tensor:
    """Sorting is most of a search; where there is a GPU, it is done there."""
    return features.to(device) if device.type == "cuda" else features


Lines = Iterator[tuple[str, str]]


def _clean(e: Evaluation) -> Lines:
    c, (low, high) = e.clean, e.interval
    said = f"{100 * e.confidence:g} % interval: {_number(low)} to {_percent(high)}"
    yield "accuracy", f"{_percent(c.accuracy)}   ({said})"
    yield "balanced accuracy", _percent(c.balanced)
    yield "worst class", f"{_percent(c.worst)}   {e.classes[c.worst_class]}"
    yield "cross entropy", f"{c.loss:.4g}"
    yield "calibration error", _percent(c.ece)
    if e.calibrated is not None and e.temperature is not None:
        with_it = f"with temperature {e.temperature:.4g}"
        yield f"  {with_it}", _percent(e.calibrated.expected_error)
    confused = _most_confused(e)
    if confused:
        yield "most confused", confused
    if len(e.classes) > SHOWN_CLASSES:
        return
    yield "accuracy by class", ""
    for name, share, count in zip(e.classes, e.clean.per_class, e.clean.counts, strict=True):
        yield f"  {name}", f"{_percent(share)}   of {count:,}" if count else "no samples"


def _most_confused(e: Evaluation) -> str:
    pairs = [
        (count, true, said)
        for true, row in enumerate(e.clean.confusion or ())
        for said, count in enumerate(row)
        if true != said and count
    ]
    top = sorted(pairs, key=lambda each: (-each[0], each[1], each[2]))[:3]
    return ", ".join(f"{e.classes[t]} as {e.classes[s]} ({n}x)" for n, t, s in top)


def _changed(e: Evaluation) -> Lines:
    """On images that are perturbed or attacked."""
    if e.perturbed:
        runs = max(len(each.runs) for each in e.perturbed.values())
        drawn = "" if runs == 1 else f", mean ± std of {runs} draws"
        yield f"accuracy under perturbations{drawn}", ""
    for name, each in e.perturbed.items():
        spread = "" if math.isnan(each.std) else f" ± {_number(each.std)}"
        yield f"  {name.replace('_', ' ')}", f"{_number(each.accuracy)}{spread} %"
    if e.attacked:
        yield f"accuracy under attacks, of {e.attacked[0].samples:,} samples", ""
    for attack in e.attacked:
        interval = f"({_number(attack.low)} to {_percent(attack.high)})"
        yield f"  {attack.attack}", f"{_percent(attack.accuracy)}   {interval}"


def _detected(e: Evaluation) -> Lines:
    if e.ood is not None:
        yield f"OOD detection, {e.ood.ood:,} samples, AUROC (false positives at 95 %)", ""
        for name, area in e.ood.auroc.items():
            what = f"margin ({e.ood.margin})" if name == "margin" else name.replace("_", " ")
            yield f"  by {what}", f"{area:.4f}   ({_percent(e.ood.fpr95[name])})"


def _searched(e: Evaluation) -> Lines:
    if e.retrieval is not None:
        r = e.retrieval
        yield f"retrieval ({r.similarity}, {r.queries:,} queries)", ""
        for k, share in r.recall.items():
            yield f"  recall at {k}", _percent(share)
        yield "  mean average precision", _percent(r.mean_average_precision)
    if e.cross_camera is not None:
        x = e.cross_camera
        yield f"across cameras ({x.queries:,} queries, {x.gallery:,} images)", ""
        yield "  mean average precision", _percent(x.mean_average_precision)
        yield "  rank 1, rank 5", f"{_percent(x.rank1)}, {_percent(x.rank5)}"


def _number(share: float) -> str:
    return f"{100 * share:.2f}"


def _percent(share: float) -> str:
    return f"{_number(share)} %"
