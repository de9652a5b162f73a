"""``evaluate``: what a trained classifier is worth, in one pass over the data."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from largemargin.data.samples import Samples
from largemargin.errors import LargeMarginError, check_count
from largemargin.evaluating.attacked import AttackedCounts, attacks_of, stride_for
from largemargin.evaluating.config import EvaluationConfig
from largemargin.evaluating.correct import Rights
from largemargin.evaluating.counting import Counts
from largemargin.evaluating.cross_camera import CrossCamera, cross_camera
from largemargin.evaluating.embeddings import embeddings_of
from largemargin.evaluating.evaluation import Evaluation
from largemargin.evaluating.interval import wilson
from largemargin.evaluating.logits import LogitModel
from largemargin.evaluating.ood import Strangers, compare_scores, scores_of
from largemargin.evaluating.perturbed import PerturbedCounts, perturbation_suite
from largemargin.evaluating.pieces import (
    Piece,
    Source,
    check_range,
    count_pieces,
    need_labels,
    pieces,
)
from largemargin.evaluating.progress import bar
from largemargin.evaluating.retrieval import Retrieval, retrieval_of
from largemargin.evaluating.scored import SCORES, Scorer
from largemargin.evaluating.temperature import Temperature, number_of
from largemargin.geometry.pairs import widen
from largemargin.measuring.batches import IGNORED
from largemargin.measuring.ranks import together
from largemargin.ops.distributed import world_size


class Search(NamedTuple):
    """Queries and gallery of a search across cameras: splits with ``extra["camera"]``."""

    query: Samples
    gallery: Samples


def evaluate(
    model: nn.Module,
    data: Source,
    *,
    class_names: Sequence[str] | None = None,
    config: EvaluationConfig | None = None,
    ood: Source | None = None,
    search: Search | None = None,
    temperature: Temperature | float | None = None,
    device: torch.device | str | None = None,
    sync: bool = True,
    progress: bool = False,
) -> Evaluation:
    """Accuracy, calibration, robustness, rejection of strangers and retrieval of a classifier.

    The data is read once; every batch then goes through all perturbations and attacks. The model
    is put in evaluation mode and every module's mode restored. Under torch.distributed every
    process evaluates its part and all return the result of the whole.

    Args:
        model: any model :func:`largemargin.attach` can read. It takes images in [0, 1]: models of
            this library normalise them in their first layer. For one that does not, put
            ``largemargin.models.Normalize`` in front.
        data: a split, or a loader of (images, labels) in an order of its own that does not change.
        class_names: one for each class, in the order of the labels; default their numbers.
        config: which parts to run; default all of them.
        ood: other data, for the detection of strangers.
        search: queries and gallery of re-identification data.
        temperature: fitted to other data (:func:`calibrate_temperature`): the calibration with it
            is reported too. Nothing else depends on it.
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
    config = EvaluationConfig() if config is None else config
    if not isinstance(config, EvaluationConfig):
        raise LargeMarginError(
            "config must be an EvaluationConfig, as EvaluationConfig(draws=3), but "
            f"{type(config).__name__} was given."
        )
    check_count("batch_size", config.batch_size, at_least=1)
    reader = LogitModel(model, num_classes=None if class_names is None else len(class_names))
    names = tuple(str(each) for each in class_names or range(reader.num_classes))
    where = reader.device if device is None else torch.device(device)
    shared = sync and world_size() > 1
    passing = _Pass(reader, data, config, where, strangers=ood is not None, shared=shared)
    if temperature is not None:
        passing.divide_by(number_of(temperature))
    passing.prepare(together(shared, passing.look))
    parts = together(shared, lambda: passing.run(progress))
    notes = passing.notes
    clean = replace(
        passing.clean.result([part["clean"] for part in parts]),
        correct=passing.rights.result([part["rights"] for part in parts]),
    )
    right = round(clean.accuracy * clean.samples)
    perturbed, attacked = passing.perturbed, passing.attacked
    if clean.skipped:
        notes.append(f"{clean.skipped} samples labelled {IGNORED} were skipped")
    if clean.broken:
        notes.append(f"{clean.broken} samples have NaN logits and count as wrong")
    options = {"batch_size": config.batch_size, "device": where, "workers": config.workers}
    return Evaluation(
        classes=names,
        clean=clean,
        interval=wilson(right, clean.samples, confidence=config.confidence),
        confidence=config.confidence,
        perturbed=perturbed.result([part["perturbed"] for part in parts]) if perturbed else {},
        attacked=(
            attacked.result([part["attacked"] for part in parts], confidence=config.confidence)
            if attacked
            else ()
        ),
        strangers=_strangers(reader, parts, ood, shared, options, progress),
        retrieval=_retrieval(parts, config, where, notes),
        cross_camera=_across(model, search, config, options | {"sync": sync}, progress),
        settings=asdict(config),
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
        temperature=passing.temperature,
        calibrated=(
            passing.calibrated.result([part["calibrated"] for part in parts]).calibration
            if passing.calibrated
            else None
        ),
    )


class _Pass:
    """One pass over the data with everything that is counted on the way."""

    def __init__(
        self,
        reader: LogitModel,
        data: Source,
        config: EvaluationConfig,
        device: torch.device,
        *,
        strangers: bool,
        shared: bool,
    ) -> None:
        self.reader, self.data, self.config, self.device = reader, data, config, device
        self.shared = shared
        self.clean = Counts(reader.num_classes, bins=config.bins, device=device)
        self.rights = Rights(data)
        self.temperature: float | None = None
        self.calibrated: Counts | None = None
        self.scorer = Scorer(reader) if strangers else None
        self.perturbed: PerturbedCounts | None = None
        self.attacked: AttackedCounts | None = None
        self.scores: dict[str, list[Tensor]] = {name: [torch.zeros(0)] for name in SCORES}
        self.features: list[tuple[Tensor, Tensor]] = []
        self.notes: list[str] = []
        self.waiting: Iterator[Piece] = iter(())

    def divide_by(self, temperature: float) -> None:
        """Count the calibration of logits divided by it, too."""
        self.temperature = temperature
        classes, bins = self.reader.num_classes, self.config.bins
        self.calibrated = Counts(classes, bins=bins, device=self.device)

    def look(self) -> tuple[int, ...] | None:
        """Shape of an image, from the first batch; () for other inputs, None without a batch."""
        config = self.config
        read = pieces(
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
            check_range(images)
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
        suite = perturbation_suite(
            config.perturbations,
            (shape[1], shape[2]),
            gaussian=config.gaussian,
            uniform=config.uniform,
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

    def run(self, progress: bool) -> dict[str, Any]:
        number = count_pieces(self.data, self.config.batch_size, shared=self.shared)
        parts = [each for each in (self.perturbed, self.attacked) if each is not None]
        passes = 1 + sum(each.passes for each in parts)
        total = None if number is None else number * passes
        with self.reader.evaluating(), bar("evaluate", total, progress) as shown:
            for piece in self.waiting:
                self._add_clean(piece)
                shown.update()
                for part in parts:
                    part.add(piece, shown)
        return {
            "clean": self.clean.sums(),
            "rights": self.rights.found(),
            "calibrated": None if self.calibrated is None else self.calibrated.sums(),
            "perturbed": None if self.perturbed is None else self.perturbed.sums(),
            "attacked": None if self.attacked is None else self.attacked.sums(),
            "scores": {name: torch.cat(each) for name, each in self.scores.items()},
            "features": self.features,
        }

    def _add_clean(self, piece: Piece) -> None:
        labels = need_labels(piece)
        if self.scorer is None and not self.config.retrieval:
            self._count(self.reader(piece.inputs), labels, piece)
            return
        logits, features = self.reader.read(piece.inputs)
        self._count(logits, labels, piece)
        if self.config.retrieval:
            self.features.append((features.cpu(), labels.cpu()))
        if self.scorer is not None:
            scored = self.scorer.of(logits, features)
            for name in SCORES:
                self.scores[name].append(getattr(scored, name).cpu())

    def _count(self, logits: Tensor, labels: Tensor, piece: Piece) -> None:
        self.clean.add(logits, labels)
        self.rights.add(piece, logits)
        if self.calibrated is not None and self.temperature is not None:
            self.calibrated.add(widen(logits) / self.temperature, labels)


def _strangers(
    reader: LogitModel,
    parts: list[dict[str, Any]],
    ood: Source | None,
    shared: bool,
    options: dict[str, Any],
    progress: bool,
) -> Strangers | None:
    if ood is None:
        return None
    options = options | {"shared": shared, "progress": progress, "what": "strangers"}
    theirs = together(shared, lambda: scores_of(reader, ood, **options))
    strangers = {name: torch.cat([each[name] for each in theirs]) for name in SCORES}
    if len(strangers["margin"]) == 0:
        raise LargeMarginError("the data given as ood is empty.")
    known = {name: torch.cat([part["scores"][name] for part in parts]) for name in SCORES}
    return compare_scores(known, strangers, Scorer(reader).margin)


def _retrieval(
    parts: list[dict[str, Any]], config: EvaluationConfig, device: torch.device, notes: list[str]
) -> Retrieval | None:
    if not config.retrieval:
        return None
    every = [each for part in parts for each in part["features"]]
    features, labels = (torch.cat(column) for column in zip(*every, strict=True))
    known = labels != IGNORED
    broken = int((~features[known].isfinite().all(1)).sum())
    if broken:
        notes.append(f"the features of {broken} samples are not finite: retrieval left out")
        return None
    if int(torch.bincount(labels[known]).max()) < 2:
        notes.append("no class has two samples: retrieval left out")
        return None
    return retrieval_of(
        _ranked_on(device, features[known]),
        labels[known],
        similarity=config.similarity,
        at=config.recall_at,
    )


def _ranked_on(device: torch.device, features: Tensor) -> Tensor:
    """Sorting is most of a search; where there is a GPU, it is done there."""
    return features.to(device) if device.type == "cuda" else features


def _across(
    model: nn.Module,
    search: Search | None,
    config: EvaluationConfig,
    options: dict[str, Any],
    progress: bool,
) -> CrossCamera | None:
    if search is None:
        return None
    found = [embeddings_of(model, each, progress=progress, **options) for each in search]
    cameras = []
    for name, split in zip(("query", "gallery"), search, strict=True):
        if "camera" not in split.extra:
            raise LargeMarginError(
                f"the {name} images have no cameras: extra['camera'] must hold one number per "
                "image."
            )
        cameras.append(split.extra["camera"])
    (queries, people), gallery = found
    queries = _ranked_on(options["device"], queries)
    return cross_camera(
        queries, people, cameras[0], *gallery, cameras[1], similarity=config.similarity
    )
