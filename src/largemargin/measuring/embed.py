"""Samples in the plane: features of several layers, clean and under noise.

A few samples of every class are drawn in one pass over a loader (``ClassQuotas``), read at layers
and at the head (:func:`read_samples`), and projected by principal components or t-SNE
(``Projector``).
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.errors import (
    LargeMarginError,
    check_choice,
    check_labels,
    check_number,
    optional_module,
)
from largemargin.geometry.dispersion import variance_split
from largemargin.geometry.pairs import blocks
from largemargin.measuring.batches import (
    IGNORED,
    SKIP,
    change_tensors,
    device_for,
    loader_batches,
    need_labels,
    order_notes,
    to_device,
)
from largemargin.measuring.feature_geometry import Variance
from largemargin.measuring.input_space import InputSpace, Normalization, need_tensor
from largemargin.measuring.layers import LayerReader, Layers
from largemargin.measuring.plots import plain_text, plot_samples
from largemargin.measuring.probe import Probe
from largemargin.measuring.records import Record
from largemargin.measuring.robust.perturbations import Perturbation, add_gaussian
from largemargin.measuring.sample_draws import SampleDraws

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PENULTIMATE = "penultimate"
"""Stands for what enters the head among names of layers."""

UNIT = "features of length 1"
"""What is said of them where ``unit`` brings them to it."""

METHODS = ("tsne", "pca")

FIRST_PCA = 50
"""Wider features go to t-SNE as this many principal components, as van der Maaten has it (30) and
scikit-learn advises (50)."""

FEWEST = 4
"""Points that t-SNE needs: perplexity 1 counts three times as many neighbours."""

CLEAN, NOISY = "clean", "noisy"

Noise: TypeAlias = float | Perturbation
"""Standard deviation of Gaussian noise, or any perturbation of images."""

Change: TypeAlias = Callable[[Any, Tensor], Any]
"""From inputs and their sample indices to the inputs the model is given."""

Point: TypeAlias = tuple[float, float]

Arrays: TypeAlias = Tensor | Mapping[str, Tensor]
"""(N, D) features, or those of several layers by name."""


@dataclass(frozen=True)
class LayerEmbedding(Record):
    """A layer in the plane. Clean and noisy points are of one fit, so they share its axes."""

    layer: str
    pooling: str
    """How the output of the layer became one vector per sample."""
    dim: int
    points: dict[str, tuple[Point, ...]]
    """By condition, "clean" and, where there is noise, "noisy"; in the order of ``labels``."""
    variance: dict[str, Variance]
    """Within and between classes of the points (ODN-VAR, Tables 2 and 3 of ODN)."""
    feature_variance: dict[str, Variance]
    """The same of the features themselves."""
    explained: tuple[float, ...]
    """Share of the variance that each axis shows; empty for t-SNE, which has no such thing."""
    perplexity: float | None
    """Of t-SNE, as it was used."""
    components: int | None
    """Principal components given to t-SNE; None where it saw all dimensions."""


@dataclass(frozen=True)
class Embeddings(Record):
    """Samples in the plane, layer by layer: see :func:`embed`."""

    method: str
    seed: int
    samples: int
    noise: str | None
    labels: tuple[int, ...]
    index: tuple[int, ...]
    """Positions of the samples in the data."""
    predictions: dict[str, tuple[int, ...]]
    """Of the whole model, by condition; empty where logits are not known."""
    margins: dict[str, tuple[float, ...]]
    """Logit of the own class minus the largest other one, by condition."""
    layers: tuple[LayerEmbedding, ...]
    assumed: tuple[str, ...]
    """What the picture depends on."""
    notes: tuple[str, ...]

    def __str__(self) -> str:
        noise = "" if self.noise is None else f", noise {self.noise}"
        lines = [f"{self.samples:,} samples in the plane by {self.method}{noise}"]
        for condition, predicted in self.predictions.items():
            right = sum(a == b for a, b in zip(predicted, self.labels, strict=True))
            lines.append(f"accuracy, {condition}: {100 * right / self.samples:.2f} %")
        width = max(28, *(len(each.layer) + 10 for each in self.layers))
        title = "variance between / within"
        lines.append(f"{title:<{width}}{'plane':>11}{'features':>11}{'dim':>8}")
        for each in self.layers:
            for condition, plane in each.variance.items():
                name, whole = f"  {each.layer}, {condition}", each.feature_variance[condition]
                ratios = f"{plane.ratio:>11.4g}{whole.ratio:>11.4g}"
                lines.append(f"{name:<{width}}{ratios}{each.dim:>8}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        layer: str | None = None,
        condition: str = CLEAN,
        class_names: Sequence[str] | None = None,
    ) -> "Axes":
        """Draw the samples of one layer in the colours of their classes. Needs matplotlib.

        Samples that the model predicts wrong are ringed.

        Args:
            ax: matplotlib axes to draw on; default a new figure of pyplot's.
            layer: which of the layers; default the last one.
            condition: "clean" (default) or, where there is noise, "noisy".
            class_names: in the order of the labels, for the legend, which up to 20 classes have.

        Returns:
            The axes.
        """
        found = {each.layer: each for each in self.layers}
        name = self.layers[-1].layer if layer is None else layer
        check_choice("layer", name, found)
        check_choice("condition", condition, found[name].points)
        predicted = self.predictions.get(condition, ())
        points = found[name].points[condition]
        ax = plot_samples(ax, points, self.labels, predicted, class_names)
        classes = len(set(self.labels))
        title = f"Features of {self.samples:,} samples, {classes:,} classes"
        title += "" if name == PENULTIMATE else f", layer {name}"
        title += "" if condition == CLEAN else f", noise: {self.noise}"
        ax.set_title(plain_text(title))
        if found[name].explained:
            shares = (f"{100 * share:.3g} % of the variance" for share in found[name].explained)
            ax.set(xlabel=f"component 1: {next(shares)}", ylabel=f"component 2: {next(shares)}")
        else:
            ax.set(xlabel="t-SNE (axes have no unit)", xticks=[], yticks=[])
        return ax


@dataclass(frozen=True)
class SampleSubset:
    """Samples of a subset in the order of their indices; inputs as the model takes them."""

    inputs: list[Any]
    labels: Tensor
    index: Tensor


@dataclass
class SampleReading:
    """(N, D) rows by layer and condition, (N, C) logits by condition."""

    labels: Tensor
    index: Tensor
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    pooling: dict[str, str] = field(default_factory=dict)


def embed(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Layers = (PENULTIMATE,),
    layer: str | None = None,
    method: str = "tsne",
    noise: Noise | None = None,
    max_samples: int = 2000,
    classes: Sequence[int] | None = None,
    seed: int = 0,
    perplexity: float = 30.0,
    normalization: Normalization | None = None,
    unit: bool | None = None,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Embeddings:
    """Features of layers in two dimensions, as in the figures of LMD, ROB and ODN.

    One pass over the loader draws the samples; only these go through the model. Under
    torch.distributed each process embeds what its own loader yields.

    Args:
        model: any model :func:`largemargin.measure` can read.
        loader: as there, one label per sample.
        layers: names, pooled as :func:`largemargin.measure` does; "penultimate" (default) is what
            enters the head; "blocks" stands for the blocks of the network and "penultimate".
        method: "tsne" (default) or "pca".
        noise: standard deviation of Gaussian noise on the inputs (0.06 for the CIFAR-10 figures of
            ROB), or a ``robust.Perturbation``. Clean and noisy samples are embedded together.
        max_samples: how many, the same number of each class as far as there are so many; default
            2000.
        classes: which classes; default all of the head.
        seed: of the samples, the noise and t-SNE.
        perplexity: of t-SNE, default 30; at most a third of the number of points is used.
        normalization: (mean, std) that the loader normalises by: noise is added before it.
        unit: bring what enters the head to length 1; default where the head compares cosines, which
            do not depend on lengths.
        batch_size: of the passes through the model.
        layer, device, progress: as in :func:`largemargin.measure`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        >>> data = [(torch.randn(20, 2), torch.arange(20) % 2)]
        >>> made = embed(net, data, layers=["0"], method="pca", noise=0.1)
        >>> len(made.layers[0].points["noisy"])
        20
    """
    projector = Projector(method, seed, perplexity)
    check_number("batch_size", batch_size, at_least=1)
    probe = Probe(model, layer=layer)
    where = device_for(probe.model, device)
    num_classes = len(probe.view().weight)
    quotas = ClassQuotas(max_samples, num_classes, classes, seed)
    reader, names = layer_reader(probe, layers)
    changes: dict[str, Change] = {CLEAN: lambda inputs, index: inputs}
    if noise is not None:
        changes[NOISY] = noise_change(InputSpace(probe, normalization), noise, seed)
    drawn = draw_samples(loader, quotas, num_classes, progress)
    with probe.evaluating():
        seen = read_samples(probe, reader, names, drawn, changes, where, batch_size)
    unit = probe.view().similarity == "cosine" if unit is None else unit
    unit = unit and PENULTIMATE in seen.rows
    if unit:
        rows = seen.rows[PENULTIMATE].items()
        seen.rows[PENULTIMATE] = {name: nn.functional.normalize(each) for name, each in rows}
    notes = [*quotas.notes(), *([] if reader is None else reader.notes()), *order_notes(loader)]
    words = None if noise is None else noise_label(noise)
    made = _build_embeddings(seen, words, notes, projector)
    return replace(made, assumed=(*made.assumed, UNIT)) if unit else made


def embed_arrays(
    features: Arrays,
    labels: Tensor,
    *,
    noisy: Arrays | None = None,
    logits: Tensor | None = None,
    noisy_logits: Tensor | None = None,
    method: str = "tsne",
    max_samples: int = 2000,
    classes: Sequence[int] | None = None,
    seed: int = 0,
    perplexity: float = 30.0,
) -> Embeddings:
    """:func:`embed` on saved features: (N, D), or several of them by the names of their layers.

    Tensors or NumPy arrays. ``noisy`` are features of the same samples under noise, ``logits`` and
    ``noisy_logits`` (N, C), for predictions and margins. Labels of -100 are skipped.

    Example:
        >>> features, labels = torch.randn(12, 5), torch.arange(12) % 3
        >>> embed_arrays(features, labels, method="pca").layers[0].dim
        5
    """
    projector = Projector(method, seed, perplexity)
    labels = torch.as_tensor(labels)
    used = labels[labels.long() != IGNORED] if labels.dim() == 1 else labels
    num_classes = int(used.max()) + 1 if used.numel() else 1
    check_labels(used, len(used), num_classes, soft=False, skip=SKIP, validate=True)
    present = torch.unique(used).tolist() if classes is None else classes
    quotas = ClassQuotas(max_samples, num_classes, present, seed)
    quotas.offer(labels, torch.arange(len(labels)), None)
    drawn = quotas.drawn()
    seen = _given_reading(len(labels), drawn, (features, noisy), (logits, noisy_logits))
    return _build_embeddings(seen, None if noisy is None else "as given", [], projector)


def _given_reading(
    count: int,
    drawn: SampleSubset,
    features: tuple[Arrays | None, Arrays | None],
    logits: tuple[Tensor | None, Tensor | None],
) -> SampleReading:
    """What was saved of those of ``count`` samples that were drawn, clean and under noise."""
    seen = SampleReading(drawn.labels, drawn.index)
    given = {
        name: each for name, each in zip((CLEAN, NOISY), features, strict=True) if each is not None
    }
    for condition, layers in given.items():
        by_layer = layers if isinstance(layers, Mapping) else {PENULTIMATE: layers}
        for name, rows in by_layer.items():
            seen.rows.setdefault(name, {})[condition] = _rows(name, rows, count)[drawn.index]
    seen.pooling = dict.fromkeys(seen.rows, "as given")
    uneven = [name for name, each in seen.rows.items() if len(each) != len(given)]
    if uneven:
        raise LargeMarginError(
            f"features and noisy must hold the same layers, but {uneven} are in one of them only."
        )
    for condition, scores in zip((CLEAN, NOISY), logits, strict=True):
        if scores is not None:
            seen.logits[condition] = _rows("logits", scores, count)[drawn.index]
    return seen


def _rows(name: str, given: Any, count: int) -> Tensor:
    rows = torch.as_tensor(given)
    if rows.dim() != 2 or len(rows) != count:
        raise LargeMarginError(
            f"{name} must have shape ({count}, D), a row for each label, but the shape is "
            f"{tuple(rows.shape)}."
        )
    return rows.detach().cpu().double()


def _build_embeddings(
    seen: SampleReading, noise: str | None, notes: list[str], projector: "Projector"
) -> Embeddings:
    layers = [_layer(name, rows, seen, projector, notes) for name, rows in seen.rows.items()]
    return Embeddings(
        projector.method,
        int(projector.seed),
        len(seen.labels),
        noise,
        tuple(seen.labels.tolist()),
        tuple(seen.index.tolist()),
        {name: tuple(each.argmax(1).tolist()) for name, each in seen.logits.items()},
        {name: _margins(each, seen.labels) for name, each in seen.logits.items()},
        tuple(layers),
        tuple(_assumptions(projector.method, projector.seed, layers, noise)),
        tuple(notes),
    )


def _layer(
    name: str,
    conditions: dict[str, Tensor],
    seen: SampleReading,
    projector: "Projector",
    notes: list[str],
) -> LayerEmbedding:
    for condition, rows in conditions.items():
        bad = ~torch.isfinite(rows).all(1)
        if bool(bad.any()):
            raise LargeMarginError(
                f"features at layer {name!r} must be finite, but sample "
                f"{int(seen.index[bad][0])} has NaN or infinite ones ({condition}). Look for a "
                "diverged model or broken inputs."
            )
    together = torch.cat(list(conditions.values()))
    found = projector(together)
    notes += [f"layer {name!r}: {note}" for note in found.notes]
    points = dict(zip(conditions, torch.split(found.points, len(seen.labels)), strict=True))
    return LayerEmbedding(
        name,
        seen.pooling[name],
        together.shape[1],
        {key: tuple((x, y) for x, y in each.tolist()) for key, each in points.items()},
        {key: _variance(each, seen.labels) for key, each in points.items()},
        {key: _variance(each, seen.labels) for key, each in conditions.items()},
        found.explained,
        found.perplexity,
        found.components,
    )


def _variance(rows: Tensor, labels: Tensor) -> Variance:
    within, between, total, ratio = (float(each) for each in variance_split(rows, labels))
    return Variance(within, between, total, ratio if total > 0 else math.nan)


def _margins(logits: Tensor, labels: Tensor) -> tuple[float, ...]:
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return tuple((logits.gather(1, labels[:, None])[:, 0] - others).tolist())


def _assumptions(
    method: str, seed: int, layers: list[LayerEmbedding], noise: str | None
) -> Iterator[str]:
    yield f"samples drawn with seed {seed}, the same number of each class"
    if noise is not None:
        yield f"noise: {noise}, seed {seed}; clean and noisy samples fitted together"
    if method == "pca":
        yield "PCA: the point farthest along each axis is on its positive side"
        return
    yield f"t-SNE of scikit-learn, started from PCA, learning rate 'auto', seed {seed}"
    yield "t-SNE: sizes of clusters and distances between them mean little"
    for each in layers:
        before = f" of {each.components} principal components" if each.components else ""
        yield f"t-SNE of {each.layer!r}: perplexity {each.perplexity}{before}"


class ClassQuotas:
    """As many samples of each class as fit into ``samples``, those of the smallest random key.

    A key belongs to the seed and the index of a sample. So the choice depends neither on batches
    nor on the model, and two models are seen on the same samples.
    """

    def __init__(
        self, samples: int, num_classes: int, classes: Sequence[int] | None, seed: int
    ) -> None:
        check_number("max_samples", samples, at_least=1)
        wanted = range(num_classes) if classes is None else classes
        wrong = [each for each in wanted if not 0 <= int(each) < num_classes]
        if wrong or len(set(wanted)) != len(wanted) or len(wanted) == 0:
            raise LargeMarginError(
                f"classes must be different class indices in [0, {num_classes}), but "
                f"{list(wanted)} were given."
            )
        if samples < len(wanted):
            raise LargeMarginError(
                f"max_samples must be at least {len(wanted)}, one for each class, but {samples} "
                "was given. Ask for more, or for some classes: classes=[...]."
            )
        share, rest = divmod(int(samples), len(wanted))
        self.sizes = {int(each): share + (rank < rest) for rank, each in enumerate(wanted)}
        self.draws = SampleDraws(seed, "subset")
        self.heaps: dict[int, list[tuple[int, int, Any]]] = {each: [] for each in self.sizes}

    def offer(self, labels: Tensor, index: Tensor, inputs: Any) -> None:
        count = len(labels)

        def own_part(each: Tensor) -> Tensor | _Row:
            return _Row(each[row].clone()) if each.dim() > 0 and len(each) == count else each

        for row, (label, key) in enumerate(
            zip(labels.tolist(), self.draws.keys(index), strict=True)
        ):
            heap = self.heaps.get(label)
            if heap is None or int(index[row]) < 0:
                continue
            full = len(heap) >= self.sizes[label]
            if full and -key <= heap[0][0]:
                continue
            entry = (-key, int(index[row]), change_tensors(inputs, own_part))
            put = heapq.heapreplace if full else heapq.heappush
            put(heap, entry)

    def drawn(self) -> SampleSubset:
        heaps = self.heaps.items()
        found = [(index, label, inputs) for label, heap in heaps for _, index, inputs in heap]
        if not found:
            raise LargeMarginError(
                f"nothing was found to embed: the loader is empty, or has no sample of the classes "
                f"{sorted(self.sizes)[:8]}."
            )
        found.sort(key=lambda each: each[0])
        index, labels, inputs = zip(*found, strict=True)
        return SampleSubset(list(inputs), torch.tensor(labels), torch.tensor(index))

    def notes(self) -> list[str]:
        """Classes that have fewer samples than there was room for."""
        short = [label for label, heap in self.heaps.items() if len(heap) < self.sizes[label]]
        if not short:
            return []
        kept = sum(len(heap) for heap in self.heaps.values())
        listed = ", ".join(str(each) for each in short[:8]) + (", ..." if len(short) > 8 else "")
        return [
            f"{kept} of {sum(self.sizes.values())} samples: there are no more of class {listed}"
        ]


def draw_samples(
    loader: Iterable[Any], quotas: ClassQuotas, num_classes: int, progress: bool
) -> SampleSubset:
    """The samples of a loader that the quotas take; they stay on the CPU."""
    for inputs, given, index in loader_batches(loader, torch.device("cpu"), progress=progress):
        labels = need_labels(given)
        if labels.dim() != 1:
            raise LargeMarginError(
                "embeddings need one label per sample, but the labels' shape is "
                f"{tuple(labels.shape)}."
            )
        labels = labels.cpu()
        used = labels[labels != IGNORED]
        check_labels(used, len(used), num_classes, soft=False, skip=SKIP, validate=True)
        quotas.offer(labels, index, inputs)
    return quotas.drawn()


def stack_samples(samples: list[Any]) -> Any:
    """Single samples as a batch."""
    first = samples[0]
    if isinstance(first, dict):
        return {name: stack_samples([each[name] for each in samples]) for name in first}
    if isinstance(first, tuple):
        return tuple(stack_samples(list(each)) for each in zip(*samples, strict=True))
    if not isinstance(first, _Row):
        return first
    rows = [each.value for each in samples]
    shapes = sorted({tuple(row.shape) for row in rows})
    if len(shapes) > 1:
        raise LargeMarginError(
            f"samples must be of one shape to stand in one batch, but {shapes[:4]} were found. Let "
            "the loader bring them to one shape."
        )
    return torch.stack(rows)


@dataclass(frozen=True)
class _Row:
    """The part of a batch that belongs to one sample; anything else is shared by all."""

    value: Tensor


def layer_reader(probe: Probe, layers: Layers) -> tuple[LayerReader | None, list[str] | None]:
    """What reads the layers before the head, and the names asked for; None for all it reads."""
    if isinstance(layers, str):
        return LayerReader(probe, layers), None
    names = list(layers)
    others = [name for name in names if name != PENULTIMATE]
    if not names or len(set(names)) != len(names):
        raise LargeMarginError(f"layers must be different names, but {names} were given.")
    if not others:
        return None, names
    pools = {name: layers[name] for name in others} if isinstance(layers, Mapping) else others
    return LayerReader(probe, pools), names


def read_samples(
    probe: Probe,
    reader: LayerReader | None,
    names: list[str] | None,
    drawn: SampleSubset,
    changes: dict[str, Change],
    device: torch.device,
    batch_size: int,
) -> SampleReading:
    """Rows of layers (by default all) and logits of samples under each condition, on the CPU."""
    seen = SampleReading(drawn.labels, drawn.index)
    for condition, change in changes.items():
        parts = []
        for part in blocks(len(drawn.labels), batch_size):
            inputs = change(stack_samples(drawn.inputs[part]), drawn.index[part])
            parts.append(_read(probe, reader, to_device(inputs, device), drawn.labels[part]))
        whole = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
        seen.logits[condition] = whole.pop("")
        for name, rows in whole.items():
            seen.rows.setdefault(name, {})[condition] = rows
    facts = {} if reader is None else reader.facts
    seen.pooling = {name: each.pooling for name, each in facts.items()} | {PENULTIMATE: "none"}
    seen.rows = {name: seen.rows[name] for name in (names or seen.pooling)}
    return seen


def _read(
    probe: Probe, reader: LayerReader | None, inputs: Any, labels: Tensor
) -> dict[str, Tensor]:
    """Features of a batch by layer, and under no name its logits."""
    hooks = None if reader is None else reader.hooks(labels)
    features, logits, _ = probe.read(inputs, hooks)
    if features.dim() != 2:
        raise LargeMarginError(
            "embeddings need one vector per sample at the head, but what enters it has the "
            f"shape {tuple(features.shape)}."
        )
    found = {PENULTIMATE: features, "": logits, **({} if reader is None else reader.taken())}
    return {name: each.detach().cpu().double() for name, each in found.items()}


def noise_change(space: InputSpace, noise: Noise, seed: int) -> Change:
    """Inputs under noise, which belongs to each sample and lies before normalisation."""
    if isinstance(noise, bool) or not isinstance(noise, int | float | Perturbation):
        raise LargeMarginError(
            "noise must be a standard deviation or a robust.Perturbation, but "
            f"{type(noise).__name__} was given."
        )
    if not isinstance(noise, Perturbation):
        check_number("noise", noise, above=0)

    def change(inputs: Any, index: Tensor) -> Any:
        images = space.raw(need_tensor(inputs, "noise"))
        if isinstance(noise, Perturbation):
            draws = SampleDraws(seed, "perturbation")
            pairs = zip(images, index.tolist(), strict=True)
            noisy = torch.stack([noise(x, generator=draws.generator(at)) for x, at in pairs])
        else:
            drawn = SampleDraws(seed, "gaussian noise").normal(index, 1, images)[:, 0]
            noisy = add_gaussian(images, drawn, sigma=noise)
        return space.normalized(noisy)

    return change


def noise_label(noise: Noise) -> str:
    """A noise in words: of a perturbation what is not left as it is by default."""
    if not isinstance(noise, Perturbation):
        return f"Gaussian, sigma {noise:g}"
    parts = [(each.name, getattr(noise, each.name), each.default) for each in fields(noise)]
    set_ones = [f"{name}={value}" for name, value, default in parts if value != default]
    return f"Perturbation({', '.join(set_ones)})"


@dataclass(frozen=True)
class Projection:
    """(N, 2) points and how they were made."""

    points: Tensor
    explained: tuple[float, ...] = ()
    """Share of the variance of each principal component."""
    perplexity: float | None = None
    components: int | None = None
    """Principal components t-SNE was given instead of all dimensions."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Projector:
    """Points of (N, D) rows in the plane; equal rows and settings give equal points."""

    method: str
    seed: int
    perplexity: float

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_number("seed", self.seed, at_least=0)
        check_number("perplexity", self.perplexity, above=0)

    def __call__(self, rows: Tensor) -> Projection:
        if len(rows) < 2:
            raise LargeMarginError(f"a plane needs 2 samples at least, but {len(rows)} was given.")
        rows = rows.double()
        if bool((rows == rows[0]).all()):
            return Projection(torch.zeros(len(rows), 2).double(), notes=("all features are equal",))
        if rows.shape[1] == 1:  # a line in the plane
            rows = torch.cat([rows, torch.zeros_like(rows)], 1)
        if self.method == "pca":
            points, explained = principal(rows, 2)
            return Projection(points, explained)
        return _tsne(rows, self.seed, self.perplexity)


def principal(rows: Tensor, count: int) -> tuple[Tensor, tuple[float, ...]]:
    """Scores of the first principal components, and their shares of the variance.

    The sign of a component is free; here the score farthest from 0 is positive, whatever way the
    features are turned.
    """
    made = _sklearn("decomposition").PCA(n_components=count, svd_solver="full")
    scores = torch.as_tensor(made.fit_transform(rows.numpy()))
    farthest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    shares = tuple(float(each) for each in made.explained_variance_ratio_)
    return scores * torch.where(farthest < 0, -1.0, 1.0), shares


def _tsne(rows: Tensor, seed: int, perplexity: float) -> Projection:
    count, dim = rows.shape
    if count < FEWEST:
        raise LargeMarginError(
            f"t-SNE needs {FEWEST} points at least, but {count} were given. Use method='pca'."
        )
    notes = []
    most = (count - 1) / 3
    if perplexity > most:
        notes.append(f"perplexity {perplexity:g} is too large for {count} points: {most:g} instead")
        perplexity = most
    components = min(FIRST_PCA, count) if dim > FIRST_PCA else None
    if components is not None:
        rows, _ = principal(rows, components)
    maker = _sklearn("manifold").TSNE(
        n_components=2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed
    )
    # Sums of several threads differ from run to run, and t-SNE makes much of small differences.
    limits = import_module("threadpoolctl").threadpool_limits  # scikit-learn depends on it
    with limits(1, user_api="openmp"):
        # float32 also takes off the last digits, in which one product differs from the next.
        points = maker.fit_transform(rows.float().numpy())
    return Projection(
        torch.as_tensor(points).double(), (), float(perplexity), components, tuple(notes)
    )


def _sklearn(name: str) -> Any:
    return optional_module(f"sklearn.{name}", "embeddings need scikit-learn", extra="sklearn")
