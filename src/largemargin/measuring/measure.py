"""``measure``: how wide the margins of a trained model are, in one pass over data."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largemargin.dropin.model_outputs import flat_beside, rows
from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_layout,
    check_matrix,
    check_number,
)
from largemargin.geometry.pairs import blocks
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.batches import (
    IGNORED,
    NOTHING,
    count_samples,
    device_for,
    fail_together,
    gather,
    has_positions,
    loader_batches,
    need_labels,
    order_notes,
)
from largemargin.measuring.calibration import Rejection, calibration, rejection
from largemargin.measuring.distributions import Margins, describe, describe_classes
from largemargin.measuring.feature_geometry import (
    ClassCompactness,
    check_sphere,
    measure_centers,
    measure_collapse,
    measure_compactness,
    measure_prototypes,
    measure_sphere,
    measure_variance,
)
from largemargin.measuring.generalization import BoundSettings, FullyConnected, measure_bounds
from largemargin.measuring.geometry_result import Geometry, WorstSample
from largemargin.measuring.input_curvature import CurvatureCollector, CurvatureSettings
from largemargin.measuring.input_margins import MarginCollector
from largemargin.measuring.input_space import Columns, InputSpace, Normalization
from largemargin.measuring.layers import (
    LayerGeometry,
    LayerReader,
    Layers,
    LayerStreams,
    measure_layer,
)
from largemargin.measuring.probe import Probe, differs
from largemargin.measuring.scores import LEADS
from largemargin.measuring.stream import FeatureStore, Stream, check_norms, check_width
from largemargin.ops.distributed import world_size
from largemargin.ops.similarity import SIMILARITIES


def measure(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layer: str | None = None,
    features: str | None = None,
    layers: Layers = (),
    pairwise: bool = False,
    sphere: bool = False,
    store: str | Path | None = None,
    radius: float = 0.5,
    worst: int = 20,
    bins: int = 50,
    ood: Iterable[Any] | None = None,
    device: torch.device | str | None = None,
    sync: bool = True,
    progress: bool = False,
    input_margins: bool = False,
    layer_margins: Sequence[str] = (),
    curvature: bool | CurvatureSettings = False,
    bounds: bool | BoundSettings = False,
    max_samples: int | None = None,
    normalization: Normalization | None = None,
    data_name: str | None = None,
    class_names: Sequence[str] | None = None,
) -> Geometry:
    """Measure the geometry of a classifier on labelled data.

    One evaluation pass; features are dropped batch by batch unless ``pairwise`` asks for them.
    The model is put in evaluation mode and every module's mode restored; nothing else of it
    changes. Under torch.distributed every process measures its part and all return the result of
    the whole; samples a ``DistributedSampler`` repeats to fill up count once.

    Args:
        model: any model :func:`largemargin.attach` can read, attached or not, wrapped or not.
        loader: yields (inputs, labels), (first, second, ..., labels) for a model of several
            inputs, or dicts with "labels" whose rest are keyword arguments of the model. Labels
            are class indices, (N, T) for a head on sequences; those that are -100 are skipped.
        layer: name of the head; default the last linear layer.
        features: name of a module whose output are the features instead of the head's input.
        layers: names of layers to measure too in the same pass, their outputs averaged over space
            or positions, with class means as prototypes; "blocks" for the blocks of the network;
            or names with a function from what the layer gives to (N, D).
        pairwise: keep features, for dispersions, separation and NC4, and for margins and accuracy
            at ``layers``: N x D floats each, and time that grows with N^2.
        sphere: also features and class vectors as points on a sphere, where D = 3.
        store: folder for the features instead of memory; the file is removed afterwards.
        radius: delta_v of "share of samples inside it" (with ``pairwise``).
        worst: how many samples of smallest margin to list.
        bins: of the histograms.
        ood: yields inputs (or tuples and dicts like ``loader``) of other data, for rejection.
        device: where to send batches; default that of the model.
        sync: False measures this process alone, for calls on one process of several.
        progress: show a progress bar (needs tqdm).
        input_margins: also linearised margins in input space (ODN-G): a backward pass a batch.
        layer_margins: names of layers at which to measure them too (Elsayed et al. 2018), "input"
            for the input: a backward pass for every rival class.
        curvature: also input-loss curvature and how it goes with robustness (NGR-21, NGR-7.3):
            True, or a ``CurvatureSettings``. The cost of 21 passes.
        bounds: also generalization quantities, labelled with what they assume: True, or a
            ``BoundSettings``. Keeps the features.
        max_samples: how many samples, from the first, these four look at; default all.
        normalization: (mean, std) that the loader normalises by, one number or one per channel:
            input space is then that before it, where images have to lie in [0, 1]; (0, 1) takes
            them as they are.
        data_name: what the loader holds, in words, as "CIFAR-10, test": kept in the result, where a
            saved one says what it is of, and compared by :func:`compare_geometry`.
        class_names: one for each class, in the order of the labels: tables name classes by them.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> data = [(torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))]
        >>> measure(model, data).margins["raw"].overall.minimum
        2.0
    """
    settings = MeasureSettings(radius, worst, bins, pairwise, sphere, data_name, class_names)
    probe = Probe(model, layer=layer, features=features)
    where = device_for(probe.model, device)
    parts = InputParts(
        InputSpace(probe, normalization),
        input_margins=input_margins,
        layer_margins=layer_margins,
        curvature=curvature,
        bounds=bounds,
        max_samples=max_samples,
        radius=radius,
    )
    shared = sync and world_size() > 1
    with ExitStack() as stack:
        stack.enter_context(probe.evaluating())
        keep = bool(pairwise or bounds or sphere)
        folder = _folder(store, stack) if keep else None
        stream = Stream(probe.view(), store=_store(folder, "features", keep))
        settings.check_head(stream)
        streams: LayerStreams | None = None
        if layers:
            streams = LayerStreams(
                LayerReader(probe, layers),
                num_classes=stream.num_classes,
                like=stream.scores.weight,
                store=lambda name: _store(folder, name, pairwise),
            )
        run = MeasuringPass(probe, stream, where, progress, parts, streams)
        counts = fail_together(shared, lambda: run.over(loader))
        if shared:
            run.number(counts)
            stream = stream.merged()
            if streams is not None:
                streams.merge()
        others = None if ood is None else fail_together(shared, partial(run.over_ood, ood))
        geometry = build_geometry(stream, settings, run.notes(loader, counts), others, streams)
        notes = list(geometry.notes)
        found = parts.results(stream, notes, bins=bins, shared=shared)
        return replace(geometry, **found, notes=tuple(notes))


def measure_arrays(
    features: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    similarity: str = "dot",
    scale: float = 1.0,
    pairwise: bool = False,
    sphere: bool = False,
    radius: float = 0.5,
    worst: int = 20,
    bins: int = 50,
    ood: Tensor | None = None,
    batch_size: int = 8192,
    data_name: str | None = None,
    class_names: Sequence[str] | None = None,
) -> Geometry:
    """:func:`measure` on saved features (N, D), labels (N,), class vectors (C, D) and bias (C,).

    Tensors or NumPy arrays; ``ood`` are features of other data. ``similarity`` and ``scale`` say
    how the head makes logits, as in :class:`largemargin.ClassHead`; ``data_name`` says in words
    what the features are of, ``class_names`` what the classes are called. Labels of -100 are
    skipped.

    Example:
        >>> features = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
        >>> measure_arrays(features, torch.tensor([0, 1]), torch.eye(2)).accuracy
        1.0
    """
    settings = MeasureSettings(radius, worst, bins, pairwise, sphere, data_name, class_names)
    check_choice("similarity", similarity, SIMILARITIES)
    check_number("scale", scale, above=0)
    check_number("batch_size", batch_size, at_least=1)
    features, labels = _array("features", features), _array("labels", labels)
    weight = _array("weight", weight)
    bias = None if bias is None else _array("bias", bias).detach()
    _check_arrays(features, labels, weight, bias)
    stream = Stream(
        HeadView(weight.detach(), bias, similarity, scale),
        store=FeatureStore() if pairwise or sphere else None,
    )
    settings.check_head(stream)
    for part in blocks(len(features), batch_size):
        stream.add(*_known(features[part], labels[part], part.start))
    skipped = len(features) - stream.seen
    others = None
    if ood is not None:
        ood = _array("ood", ood)
        others = [ood_scores(stream, (ood[part] for part in blocks(len(ood), batch_size)))]
    return build_geometry(stream, settings, [skipped_note(skipped)] if skipped else [], others)


def _array(name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise LargeMarginError(
            f"{name} must be a tensor or a NumPy array of numbers, but {type(values).__name__} "
            "was given."
        ) from None
    check_layout(name, tensor)
    return tensor


def _check_arrays(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        raise LargeMarginError(
            f"bias must have one number per row of weight, ({weight.shape[0]},), but its shape is "
            f"{tuple(bias.shape)}."
        )
    if labels.dim() == 0 or features.dim() == 0 or len(labels) != len(features):
        raise LargeMarginError(
            "labels must have one entry per row of features, but the shape of features is "
            f"{tuple(features.shape)} and that of labels {tuple(labels.shape)}."
        )


def _known(features: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are not skipped, with their labels and their positions from ``start`` on."""
    where = torch.arange(start, start + len(features))
    if labels.dim() != 1 or labels.is_floating_point():
        return features, labels, where  # refused later, by who says what is wrong
    keep = labels.long() != IGNORED  # torch takes 156 of uint8 for -100
    return features[keep.to(features.device)], labels[keep], where[keep.cpu()]


@dataclass(frozen=True)
class MeasureSettings:
    """What :func:`measure` and :func:`measure_arrays` were asked for in the same words."""

    radius: float
    worst: int
    bins: int
    pairwise: bool
    sphere: bool
    data_name: str | None
    class_names: Sequence[str] | None

    def __post_init__(self) -> None:
        check_number("radius", self.radius, at_least=0)
        check_number("worst", self.worst, at_least=0)
        check_number("bins", self.bins, at_least=1)
        if self.data_name is not None and not isinstance(self.data_name, str):
            raise LargeMarginError(
                f"data_name must say in words what is measured, as 'CIFAR-10, test', but "
                f"{type(self.data_name).__name__} was given."
            )

    def check_head(self, stream: Stream) -> None:
        """Refuse what does not fit the classes or the features of the head."""
        given, classes = self.class_names, stream.num_classes
        names = () if given is None or isinstance(given, str) else tuple(given)
        known = len(names) == classes and all(isinstance(each, str) for each in names)
        if given is not None and not known:
            raise LargeMarginError(
                f"class_names must be {classes} names, one for each class in the order of the "
                f"labels, but {given if isinstance(given, str) else list(names[:5])!r} was given"
                f"{f', {len(names)} of them' if len(names) > 5 else ''}."
            )
        if self.sphere:
            check_sphere(stream.dim)


def _folder(store: str | Path | None, stack: ExitStack) -> Path | None:
    """A folder inside ``store`` that is removed at the end; None to keep features in memory."""
    if store is None:
        return None
    Path(store).mkdir(parents=True, exist_ok=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=store)))


def _store(folder: Path | None, name: str, keep: bool) -> FeatureStore | None:
    if not keep:
        return None
    return FeatureStore(None if folder is None else folder / f"{name}.bin")


@dataclass
class PassCounts:
    """Counts of a pass over a loader, beside its stream."""

    samples: int = 0
    """That came, each sequence one."""
    rows: int = 0
    """That came, those that were skipped among them."""
    skipped: int = 0
    """Labelled -100."""
    numbered: bool = False
    """Samples came with their positions in the dataset."""
    own_logits: bool = False
    """The head does not do what its weight and bias say."""


@dataclass
class MeasuringPass:
    """Takes the samples of a loader through a model into a stream."""

    probe: Probe
    stream: Stream
    device: torch.device
    progress: bool
    parts: "InputParts"
    layers: LayerStreams | None
    counts: PassCounts = field(default_factory=PassCounts)

    def over(self, loader: Iterable[Any]) -> PassCounts:
        self.counts.numbered = has_positions(loader)
        for inputs, given, index in loader_batches(loader, self.device, progress=self.progress):
            labels = need_labels(given)
            hooks = None if self.layers is None else self.layers.reader.hooks(labels)
            features, logits, _ = self.probe.read(inputs, hooks)
            if self.counts.rows == 0 and self.probe.features_name is None:
                self.counts.own_logits = differs(self.stream.head, features, logits)
            self.counts.samples += len(labels)
            flat = flat_beside(labels, features).to(features.device)
            self._add(rows(features), flat, index)
            self.parts.add(inputs, labels, index)
        return self.counts

    def _add(self, features: Tensor, labels: Tensor, index: Tensor) -> None:
        """Rows to measure and their indices: no ignored ones, no repeated ones."""
        count = len(features)
        if len(labels) != count or labels.dim() != 1:
            self.stream.add(features, labels)  # which says what is wrong
            return
        if not self.counts.numbered:
            where = torch.arange(self.counts.rows, self.counts.rows + count)
        else:
            # Positions of a sequence follow each other.
            length = count // max(len(index), 1)
            inside = torch.arange(length) + length * index[:, None]
            where = torch.where(index[:, None] < 0, -1, inside).flatten()
        where = where.to(features.device)
        ignored = labels == IGNORED
        self.counts.rows += count
        self.counts.skipped += int((ignored & (where >= 0)).sum())
        keep = ~ignored & (where >= 0)
        whole = bool(keep.all())
        if not whole:
            features, labels, where = features[keep], labels[keep], where[keep]
        if self.layers is not None:
            self.layers.select(None if whole else keep, where)
        self.stream.add(features, labels, where)
        if self.layers is not None:
            self.layers.add(labels)

    def number(self, counts: list[PassCounts]) -> None:
        """Count on from the processes before this one, where samples had no number."""
        if not any(each.numbered for each in counts):
            before = sum(each.rows for each in counts[: dist.get_rank()])
            parts = self.stream.columns["index"]
            self.stream.columns["index"] = [each + before for each in parts]

    def over_ood(self, loader: Iterable[Any]) -> dict[str, Tensor]:
        """Scores of other data."""

        def features() -> Iterator[Tensor]:
            for inputs, _, index in loader_batches(loader, self.device, progress=self.progress):
                flat = rows(self.probe.read(inputs).features)
                own = index >= 0
                if len(index) == len(flat) and not bool(own.all()):
                    flat = flat[own.to(flat.device)]
                yield flat

        return ood_scores(self.stream, features())

    def notes(self, loader: Iterable[Any], counts: list[PassCounts]) -> list[str]:
        """Caveats of how the data was read."""
        found = order_notes(loader)
        if len(counts) > 1 and not any(each.numbered for each in counts):
            found += _unnumbered_notes(loader, counts)
        skipped = sum(each.skipped for each in counts)
        if skipped:
            found.append(skipped_note(skipped))
        if any(each.own_logits for each in counts):
            found.append(
                f"the head {self.probe.head_name!r} makes other logits than its weight and bias "
                "do: accuracy, loss and margins are those of its weight as a plain "
                f"{self.stream.head.similarity!r} head"
            )
        if self.probe.features_name is not None:
            found.append(
                f"features are those of {self.probe.features_name!r}; accuracy, loss and margins "
                "are those of the head on them"
            )
        return found


def _unnumbered_notes(loader: Iterable[Any], counts: list[PassCounts]) -> Iterator[str]:
    """Of processes whose loaders do not say which samples they give."""
    yield (
        "indices count the samples of one process after those of another; use a "
        "DistributedSampler for positions in the dataset"
    )
    more = sum(each.samples for each in counts) - count_samples(loader)
    if more > 0:
        yield (
            f"the processes read {more} samples more than the dataset has: those that were "
            "repeated to fill up batches count more than once"
        )


def skipped_note(count: int) -> str:
    return f"{count} samples labelled {IGNORED} were skipped"


def ood_scores(stream: Stream, parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """Scores of the features of out-of-distribution data."""
    scores = stream.scores
    found: dict[str, list[Tensor]] = {name: [torch.zeros(0).double()] for name in LEADS}
    for features in parts:
        check_matrix("ood", features, "(N, D)")
        check_width(features, stream.dim, what="features of the data given as ood")
        for part in torch.split(features.to(scores.weight.device), scores.rows_at_once):
            each = scores.unlabelled(part)
            if not bool(torch.isfinite(each["lead_raw"]).all()):
                raise LargeMarginError(
                    "features must be finite, but the data given as ood has NaN or infinite ones."
                )
            for name in LEADS:
                found[name].append(each[name].double().cpu())
    return {name: torch.cat(each) for name, each in found.items()}


class InputParts:
    """The parts of a measurement that look behind the features: at inputs, layers and curvature.

    Takes in the batches of a measurement, as far as one of these parts was asked for.
    """

    def __init__(
        self,
        space: InputSpace,
        *,
        input_margins: bool = False,
        layer_margins: Sequence[str] = (),
        curvature: bool | CurvatureSettings = False,
        bounds: bool | BoundSettings = False,
        max_samples: int | None = None,
        radius: float = 0.5,
    ) -> None:
        if max_samples is not None:
            check_number("max_samples", max_samples, at_least=1)
        self.space = space
        self.columns = Columns(space, max_samples)
        self.margins: MarginCollector | None = None
        self.curvature: CurvatureCollector | None = None
        self.bounds: BoundSettings | None = None
        if input_margins or layer_margins:
            self.margins = MarginCollector(
                space, input_margins=input_margins, layer_margins=layer_margins
            )
        if curvature:
            settings = _settings("curvature", curvature, CurvatureSettings())
            self.curvature = CurvatureCollector(space, settings)
        if bounds:
            self.bounds = _settings("bounds", bounds, BoundSettings(radius=radius))
            self.bounds.check()
            self.network = FullyConnected(space)

    def add(self, inputs: Any, labels: Tensor, index: Tensor) -> None:
        collectors = [each for each in (self.margins, self.curvature) if each is not None]
        looks_at_network = self.bounds is not None and self.network.reason is None
        if not collectors and not looks_at_network:
            return
        chosen = self.columns.choose(inputs, labels, index)
        if chosen is None:
            return
        for each in collectors:
            self.columns.add(**each.columns(chosen))
        if looks_at_network:
            images = chosen.inputs
            with torch.no_grad():
                if isinstance(images, Tensor):
                    images = self.space.raw(images, checked=False)
                self.network.add(images)

    def results(
        self, stream: Stream, notes: list[str], *, bins: int, shared: bool
    ) -> dict[str, Any]:
        """Fields of a geometry, by name."""
        found: dict[str, Any] = {}
        columns: dict[str, Tensor] = {}
        if self.margins is not None or self.curvature is not None:
            columns = self.columns.joined(shared)
        if self.margins is not None:
            margins = self.margins.result(columns, notes, bins)
            found |= {"input_margins": margins.input, "layer_margins": margins.layers}
        if self.curvature is not None:
            found["curvature"] = self.curvature.result(columns, notes, bins)
        if self.bounds is not None:
            if shared:
                self.network.merge(gather(self.network.mine()))
            found["bounds"] = measure_bounds(stream, self.network, self.bounds)
        return found


S = TypeVar("S", CurvatureSettings, BoundSettings)


def _settings(name: str, given: bool | S, default: S) -> S:
    if given is True:
        return default
    if isinstance(given, type(default)):
        return given
    raise LargeMarginError(
        f"{name} must be True, False or a {type(default).__name__}, but "
        f"{type(given).__name__} was given."
    )


def build_geometry(
    stream: Stream,
    settings: MeasureSettings,
    notes: list[str],
    ood: list[dict[str, Tensor]] | None = None,
    layers: LayerStreams | None = None,
) -> Geometry:
    """The geometry of what a stream has taken in."""
    if stream.seen == 0:
        raise LargeMarginError(NOTHING)
    head, radius, bins = stream.head, settings.radius, settings.bins
    labels, predicted = stream.column("label"), stream.column("predicted")
    norms = stream.column("norm")
    check_norms(norms, stream.column("index"))
    notes += _stream_notes(stream)
    correct = predicted == labels
    leads = {name: stream.column(name) for name in LEADS}
    return Geometry(
        samples=stream.seen,
        classes=stream.num_classes,
        dim=stream.dim,
        similarity=head.similarity,
        scale=float(head.scale),
        accuracy=float(correct.double().mean()),
        loss=float(stream.column("loss").mean()),
        feature_norm=describe(norms, bins=bins),
        margins={
            name: Margins(
                describe(stream.column(name), bins=bins),
                describe_classes(stream.column(name), labels, stream.num_classes),
            )
            for name in ("raw", "cosine", "distance")
        },
        softmax_bias=describe(stream.column("softmax_bias"), bins=bins),
        worst=_worst(stream, settings.worst),
        prototypes=measure_prototypes(head.weight, notes),
        centers=measure_centers(stream.sums),
        variance=measure_variance(stream.sums, notes),
        collapse=measure_collapse(stream.sums, stream.scores.weight, stream.kept, predicted, notes),
        compactness=_compactness(stream, radius, notes) if settings.pairwise else None,
        calibration=calibration(stream.column("confidence"), correct),
        errors=rejection(
            {name: each[correct] for name, each in leads.items()},
            {name: each[~correct] for name, each in leads.items()},
        ),
        ood=_rejected(leads, ood, notes),
        sphere=measure_sphere(stream, notes) if settings.sphere else None,
        layers=None if layers is None else _layers(layers, stream, radius, bins, notes),
        notes=tuple(notes),
        data=settings.data_name,
        class_names=None if settings.class_names is None else tuple(settings.class_names),
    )


def _stream_notes(stream: Stream) -> Iterator[str]:
    absent = (stream.sums.counts == 0).nonzero()[:, 0].tolist()
    if absent:
        shown = ", ".join(str(each) for each in absent[:8])
        shown += f" and {len(absent) - 8} others" if len(absent) > 8 else ""
        yield f"no samples of class {shown}: numbers by class are NaN there"
    if stream.scores.curved:
        yield "distances to boundaries are NaN: those of a cosine head with a bias are not planes"


def _compactness(stream: Stream, radius: float, notes: list[str]) -> ClassCompactness:
    assert stream.kept is not None
    columns = {name: stream.column(name) for name in ("label", "index", "boundary", "distance")}
    return measure_compactness(stream.kept, columns, stream.sums, radius, notes)


def _layers(
    layers: LayerStreams, stream: Stream, radius: float, bins: int, notes: list[str]
) -> tuple[LayerGeometry, ...]:
    notes += layers.reader.notes()
    found = tuple(
        measure_layer(each, stream, radius=radius, bins=bins, notes=notes)
        for each in layers.streams.values()
    )
    if any(each.store is None for each in layers.streams.values()):
        notes.append("margins and accuracy at layers need the features, which pairwise=True keeps")
    return found


def _rejected(
    leads: dict[str, Tensor], ood: list[dict[str, Tensor]] | None, notes: list[str]
) -> Rejection | None:
    if ood is None:
        return None
    others = {name: torch.cat([each[name] for each in ood]) for name in LEADS}
    if len(others[LEADS[0]]) == 0:
        notes.append("the loader given as ood is empty: its AUROC is NaN")
    return rejection(leads, others)


def _worst(stream: Stream, count: int) -> tuple[WorstSample, ...]:
    names = ("index", "label", "predicted", "rival", "raw", "cosine", "distance")
    columns = [stream.column(name) for name in names]
    order = columns[0].argsort(stable=True)
    order = order[columns[4][order].argsort(stable=True)][:count]
    return tuple(
        WorstSample(*row) for row in zip(*(c[order].tolist() for c in columns), strict=True)
    )
