"""Layers before the head: their outputs in a pass, one row per sample, and the geometry of these.

:func:`block_names` finds the blocks of a network, which studies "block by block" look at. Class
means stand for the class vectors that a layer does not have.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.dropin.find_head import ancestors, find_module
from largemargin.dropin.model_outputs import tensors_in
from largemargin.errors import LargeMarginError
from largemargin.geometry.pairs import blocks, widen
from largemargin.heads.head_spec import HeadView
from largemargin.measuring.batches import gather
from largemargin.measuring.distributions import Distribution, Margins, describe, describe_classes
from largemargin.measuring.feature_geometry import (
    Centers,
    ClassCompactness,
    Collapse,
    Variance,
    measure_centers,
    measure_collapse,
    measure_compactness,
    measure_variance,
)
from largemargin.measuring.probe import LayerHook, Probe
from largemargin.measuring.records import Record
from largemargin.measuring.scores import HeadScores
from largemargin.measuring.stream import (
    ClassSums,
    FeatureStore,
    Stream,
    append,
    check_norms,
    gather_store,
)
from largemargin.ops.norms import safe_norm

BLOCKS = "blocks"
"""Stands for the blocks that :func:`block_names` finds."""

ROWS = 65_536

CLASS_MEANS = "class means of these samples"
MARGINS = ("raw", "cosine", "distance")

Pool: TypeAlias = Callable[[Any], Tensor]
"""From what a layer gives to (N, D)."""

Layers: TypeAlias = str | Sequence[str] | Mapping[str, Pool]
"""Names of layers, or "blocks", or names with a pooling of one's own."""


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a layer once it has run."""

    module: str
    shape: tuple[int, ...]
    """Of the output of one sample."""
    pooling: str
    dim: int
    notes: tuple[str, ...] = ()


class LayerReader:
    """Takes named layers while a :class:`Probe` reads its model: one row per sample each.

    (N, D) is taken as it is. Images (N, C, H, W) and volumes are averaged over space. (N, T, D) is
    averaged over T; where the labels are (N, T) too, every position is a row. The output of a
    one-dimensional convolution, (N, C, L), is averaged over L.
    """

    def __init__(self, probe: Probe, layers: Layers) -> None:
        self.found_by_us = isinstance(layers, str) and layers == BLOCKS
        self.pools = _pools(probe, layers)
        self.labels = torch.zeros(0)
        self.facts: dict[str, LayerFacts] = {}
        self.rows: dict[str, Tensor] = {}
        self.dropped: dict[str, str] = {}
        """Blocks that cannot be read, and why."""
        self.settled = False
        """A batch has gone through: blocks are no longer dropped."""

    def hooks(self, labels: Tensor) -> dict[str, LayerHook]:
        """For a pass of samples with these labels."""
        self.labels, self.rows = labels, {}
        return {name: partial(self._take, name) for name in self.pools}

    def taken(self) -> dict[str, Tensor]:
        """After it: (N, D) of every layer, in the order they were named in."""
        for name in [each for each in self.pools if each not in self.rows]:
            self._refuse(name, "the model does not call it in a forward pass")
        self.settled = True
        return {name: self.rows[name] for name in self.pools}

    def notes(self) -> Iterator[str]:
        for name, reason in self.dropped.items():
            yield f"the block {name!r} is left out: {reason}"
        for name, facts in self.facts.items():
            yield from (f"layer {name!r}: {note}" for note in facts.notes)

    def _refuse(self, name: str, reason: str) -> None:
        """Raise where the layer was asked for by name; leave out a block we found ourselves."""
        if not self.found_by_us or self.settled:
            raise LargeMarginError(
                f"the layer {name!r} cannot be measured: {reason}. Name another layer; names are "
                "those of model.named_modules()."
            )
        self.dropped[name] = reason
        self.pools = {each: pool for each, pool in self.pools.items() if each != name}
        self.rows.pop(name, None)
        self.facts.pop(name, None)
        if not self.pools:
            raise LargeMarginError(
                f"layers='blocks' found no block that can be measured: {self.dropped}. Name layers."
            )

    def _take(self, name: str, module: nn.Module, output: Any) -> None:
        if name not in self.pools:
            return
        if name in self.rows:
            self._refuse(name, "the model calls it several times in a forward pass")
            return
        pool, found = self.pools[name], tensors_in(output)
        reason = self._unfit(output, found, pool)
        if reason is not None:
            self._refuse(name, reason)
            return
        first = found[0].detach()
        notes: tuple[str, ...] = ()
        if pool is not None:
            rows, how = self._given(name, pool(output)), "given"
        elif self.labels.dim() > 1:
            rows, how = first.flatten(0, -2), "none, one row per position"
        else:
            rows, how = pool_output(first, module)
            notes = tuple(_pooling_notes(first, found))
        if name not in self.facts:
            kind, shape = type(module).__name__, tuple(first.shape[1:])
            self.facts[name] = LayerFacts(kind, shape, how, rows.shape[1], notes)
        elif rows.shape[1] != self.facts[name].dim:
            raise LargeMarginError(
                f"the layer {name!r} gave {self.facts[name].dim} features at first and "
                f"{rows.shape[1]} now. Pool its output: layers={{{name!r}: function}}."
            )
        # A copy: what follows may write into the output, and averages are new already.
        self.rows[name] = rows.clone() if rows.data_ptr() == first.data_ptr() else rows

    def _unfit(self, output: Any, found: list[Tensor], pool: Pool | None) -> str | None:
        """Why there is no row per sample in what a layer gives."""
        if not found or not found[0].is_floating_point():
            given = f"a tensor of {found[0].dtype}" if found else type(output).__name__
            return f"it must give a floating point tensor, but it gives {given}"
        shape, wanted = tuple(found[0].shape), tuple(self.labels.shape)
        if pool is not None or (shape[: len(wanted)] == wanted and len(shape) > len(wanted)):
            return None
        if len(wanted) > 1:
            return f"labels are {wanted}, one per position, but the shape of its output is {shape}"
        return (
            f"it must give one vector or image per sample, ({wanted[0]}, ...), but the shape of "
            f"its output is {shape}"
        )

    def _given(self, name: str, rows: Any) -> Tensor:
        """What a pooling of the caller returns."""
        count = self.labels.numel()
        matrix = isinstance(rows, Tensor) and rows.dim() == 2 and rows.is_floating_point()
        if matrix and len(rows) == count:
            made: Tensor = rows.detach()
            return made
        given = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise LargeMarginError(
            f"the pooling given for layer {name!r} must return floating point ({count}, D), but it "
            f"returns {given}."
        )


def pool_output(output: Tensor, module: nn.Module) -> tuple[Tensor, str]:
    """(N, D) of the output of a layer, and how it was made; averages in float32 at least.

    Example:
        >>> pool_output(torch.ones(2, 3, 4, 4), nn.Conv2d(3, 3, 1))[1]
        'mean over space'
    """
    if output.dim() == 2:
        return output, "none"
    wide = torch.promote_types(output.dtype, torch.float32)
    if output.dim() > 3:
        return output.mean(tuple(range(2, output.dim())), dtype=wide), "mean over space"
    # (N, C, L) where a convolution or its norm comes last.
    weighted = [each for each in module.modules() if getattr(each, "weight", None) is not None]
    if weighted and isinstance(weighted[-1], nn.Conv1d | nn.BatchNorm1d):
        return output.mean(2, dtype=wide), "mean over positions, the last dimension"
    return output.mean(1, dtype=wide), "mean over positions"


def _pooling_notes(first: Tensor, found: list[Tensor]) -> Iterator[str]:
    if len(found) > 1:
        yield f"it gives {len(found)} tensors; the first one is measured"
    shape = tuple(first.shape)
    if len(shape) == 4 and shape[1] == shape[2] != shape[3]:
        yield (
            f"the shape {shape} may have channels last, while space was taken to be the last two "
            "dimensions. If so pool yourself: layers={name: lambda output: output.mean((1, 2))}"
        )


def _pools(probe: Probe, layers: Layers) -> dict[str, Pool | None]:
    if isinstance(layers, str):
        if layers != BLOCKS:
            raise LargeMarginError(
                f"layers must be a list of names or {BLOCKS!r}, but {layers!r} was given. Write "
                f"[{layers!r}]."
            )
        return dict.fromkeys(block_names(probe.model, probe.head))
    pools: dict[str, Pool | None]
    pools = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers)
    if not isinstance(layers, Mapping) and len(pools) != len(layers):
        raise LargeMarginError(f"layers must differ, but {list(layers)} were given.")
    for name, pool in pools.items():
        if not isinstance(name, str):
            raise LargeMarginError(
                f"layers must be names, but {type(name).__name__} was given. Names are those of "
                "model.named_modules()."
            )
        find_module(probe.model, name)
        if pool is not None and not callable(pool):
            raise LargeMarginError(
                f"layers must map names to functions that pool, but {name!r} is mapped to {pool!r}."
            )
    return pools


@dataclass
class LayerStream:
    """Norms and class sums of one layer; rows are those of the head's stream."""

    name: str
    facts: LayerFacts
    sums: ClassSums
    store: FeatureStore | None
    norms: list[Tensor] = field(default_factory=list)

    def add(self, features: Tensor, labels: Tensor, norms: Tensor) -> None:
        append(self.norms, norms)
        for part in blocks(len(features), ROWS):
            self.sums.add(features[part], labels[part])
        if self.store is not None:
            self.store.add(features)

    @property
    def norm(self) -> Tensor:
        return torch.cat([each.cpu() for each in self.norms] or [torch.zeros(0).double()])

    def merge(self) -> None:
        """Take in what the other processes have; rows come in rank order, as in the stream."""
        device = self.sums.counts.device
        everyone = gather((self.norm, self.sums.to("cpu")))
        first, *others = (sums.to(device) for _, sums in everyone)
        for each in others:
            first.merge(each)
        self.sums, self.norms = first, [norm for norm, _ in everyone]
        if self.store is not None:
            self.store = gather_store(self.store)


@dataclass
class LayerStreams:
    """The streams of all layers that a reader reads."""

    reader: LayerReader
    num_classes: int
    like: Tensor
    store: Callable[[str], FeatureStore | None]
    streams: dict[str, LayerStream] = field(default_factory=dict)
    batch: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def select(self, keep: Tensor | None, index: Tensor) -> None:
        """Rows of the batch to measure; ``index`` are their samples."""
        self.batch = {}
        for name, rows in self.reader.taken().items():
            features = (rows if keep is None else rows[keep.to(rows.device)]).to(self.like.device)
            norms = safe_norm(widen(features))
            if norms.device.type == "cpu":
                check_norms(norms, index, f"features at layer {name!r}")
            self.batch[name] = features, norms

    def add(self, labels: Tensor) -> None:
        labels = labels.to(self.like.device).long()
        for name, (features, norms) in self.batch.items():
            if name not in self.streams:
                self.streams[name] = self._new(name, self.reader.facts[name])
            self.streams[name].add(features, labels, norms)
        self.batch = {}

    def merge(self) -> None:
        """Join the streams of all processes, also of those that had no batch."""
        known = [(name, each.facts) for name, each in self.streams.items()]
        everyone = gather((known, self.reader.dropped))
        agreed, dropped = max(everyone, key=lambda each: len(each[0]))
        self.reader.dropped, self.reader.facts = dropped, dict(agreed)
        for name, facts in agreed:
            if name not in self.streams:
                self.streams[name] = self._new(name, facts)
            self.streams[name].merge()

    def _new(self, name: str, facts: LayerFacts) -> LayerStream:
        sums = ClassSums.empty(self.num_classes, facts.dim, covariance=True, like=self.like)
        return LayerStream(name, facts, sums, self.store(f"layer.{len(self.streams)}"))


def block_names(model: nn.Module, head: nn.Module) -> tuple[str, ...]:
    """Names of the blocks of a model, in the order they are registered in.

    They are the children with layers inside of the outermost module that has two such children of
    one type: ``layer1`` to ``layer4`` of a ResNet, the stages of an EfficientNet, the layers of a
    transformer. (Not two of which one alone has such blocks inside: those are a backbone and
    something beside it.) A network without such modules is cut after each of its layers with a
    weight: in an ``nn.Sequential`` just before the next one or ``nn.Flatten``, so that activation
    and pooling belong to the block.
    What the head is inside of is no block.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
        >>> block_names(net, net[3])
        ('1', '2')
    """
    around = {id(each) for each in ancestors(model, head)}
    queue = deque([("", model)])
    while queue:
        path, module = queue.popleft()
        inside = [(_join(path, name), each) for name, each in module.named_children()]
        blocks = _blocks(inside, around)
        stacks = [_alike(_blocks(list(each.named_children()), around)) for _, each in blocks]
        if _alike(blocks) and not (len(blocks) == 2 and sum(stacks) == 1):
            return tuple(name for name, _ in blocks)
        queue.extend(inside)
    found = _runs(model, head)
    if not found:
        raise LargeMarginError(
            f"{type(model).__name__} has no layers before its head, so layers='blocks' finds none. "
            "Leave layers out."
        )
    return found


def _blocks(inside: list[tuple[str, nn.Module]], around: set[int]) -> list[tuple[str, nn.Module]]:
    """Those with layers inside that are called, and that the head is not inside of."""
    return [
        (name, each)
        for name, each in inside
        if id(each) not in around
        and _composite(each)
        # Lists and dicts of modules have no forward of their own and are never called.
        and type(each).forward is not nn.Module.forward
    ]


def _alike(blocks: list[tuple[str, nn.Module]]) -> bool:
    """Whether two of them are of one type."""
    return max(Counter(type(each) for _, each in blocks).values(), default=0) >= 2


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _composite(module: nn.Module) -> bool:
    """A module with parameters in its children."""
    return any(next(child.parameters(), None) is not None for child in module.children())


def _runs(model: nn.Module, head: nn.Module) -> tuple[str, ...]:
    """Where blocks of single layers end: each layer with a weight and what follows it."""
    found = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if module is head or weight is None or weight.dim() < 2 or _composite(module):
            continue
        found.append(_end_of_run(model, path))
    return tuple(found)


def _end_of_run(model: nn.Module, path: str) -> str:
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if not isinstance(parent, nn.Sequential):
        return path
    children = dict(parent.named_children())
    for following in list(children)[list(children).index(name) + 1 :]:
        child = children[following]
        weights = any(parameter.dim() >= 2 for parameter in child.parameters())
        if weights or isinstance(child, nn.Flatten):  # images are pooled, not flattened
            break
        name = following
    return _join(parent_path, name)


@dataclass(frozen=True)
class LayerGeometry(Record):
    """How well a layer tells the classes apart.

    There is no linear head at it, so the class means of the measured samples are the prototypes and
    the nearest one is the prediction. They come from the samples they are measured on: with few
    samples per class in many dimensions, accuracy and margins are better than on new data, which
    ``left_out_accuracy`` is not.
    """

    name: str
    module: str
    """Its type."""
    shape: tuple[int, ...]
    """Of the output of one sample."""
    pooling: str
    """How that became one vector."""
    dim: int
    prototypes: str
    """What stands for class vectors."""
    feature_norm: Distribution
    variance: Variance
    centers: Centers
    collapse: Collapse | None
    """NC3 is NaN, there are no class vectors; NC4 is the share of samples whose nearest class mean
    at this layer is not what the head predicts."""
    accuracy: float
    """Of the nearest class mean; NaN where features were not kept."""
    left_out_accuracy: float
    """The same with each sample left out of the mean of its own class, as if it were new; a sample
    alone in its class counts as wrong."""
    margins: dict[str, Margins] | None
    """Of the classifier by the nearest class mean; None where features were not kept. "distance":
    signed Euclidean distance to the nearest boundary, the plane halfway between two means; "raw":
    half the difference of squared distances to the nearest other mean and the own one; "cosine":
    from the middle of the class means."""
    compactness: ClassCompactness | None


def measure_layer(
    layer: LayerStream, stream: Stream, *, radius: float, bins: int, notes: list[str]
) -> LayerGeometry:
    """The geometry of a layer beside the stream of the head, whose samples it shares."""
    own: list[str] = []
    index, norms = stream.column("index"), layer.norm
    check_norms(norms, index, f"features at layer {layer.name!r}")
    facts, sums = layer.facts, layer.sums
    rows = None if layer.store is None else layer.store.all()
    accuracy = left_out = math.nan
    margins, compactness = None, None
    if rows is not None:
        labels = stream.column("label")
        columns = _by_means(layer, rows, labels, own) | {"label": labels, "index": index}
        if "predicted" in columns:
            accuracy = float((columns["predicted"] == labels).double().mean())
            left_out = float(columns["left_out"].mean())
            margins = {
                name: Margins(
                    describe(columns[name], bins=bins),
                    describe_classes(columns[name], labels, stream.num_classes),
                )
                for name in MARGINS
            }
        compactness = measure_compactness(rows, columns, sums, radius, own)
    found = LayerGeometry(
        layer.name,
        facts.module,
        facts.shape,
        facts.pooling,
        facts.dim,
        CLASS_MEANS,
        describe(norms, bins=bins),
        measure_variance(sums, own),
        measure_centers(sums),
        measure_collapse(sums, None, rows, stream.column("predicted"), own),
        accuracy,
        left_out,
        margins,
        compactness,
    )
    notes += [f"layer {layer.name!r}: {note}" for note in own]
    return found


def _by_means(
    layer: LayerStream, rows: Tensor, labels: Tensor, notes: list[str]
) -> dict[str, Tensor]:
    """Margins, boundaries and predictions of the nearest class mean, for each row."""
    sums = layer.sums
    present = (sums.counts > 0).nonzero()[:, 0]
    if len(present) < 2:
        notes.append("margins to class means need samples of two classes at least: None")
        unknown = torch.full((len(rows),), math.nan, dtype=torch.float64)
        return {"distance": unknown, "boundary": unknown}
    means = sums.means[present]
    # From the middle of the means: far from it, squares would lose the digits margins are made of.
    middle = means[0] + (means - means[0]).mean(0)
    scores = HeadScores(HeadView(means - middle, None, "euclidean", 1.0))
    sizes = sums.counts[present].to(means.dtype)
    place = torch.full_like(sums.counts, -1)
    place[present] = torch.arange(len(present), device=present.device)
    names = (*MARGINS, "boundary", "predicted", "left_out")
    found = {
        name: torch.empty(len(rows), dtype=torch.long if name == "predicted" else torch.float64)
        for name in names
    }
    for part in blocks(len(rows), scores.rows_at_once):
        features = widen(rows[part].to(means.device)) - middle
        own = place[labels[part].to(means.device)]
        columns = scores.labelled(features, own)
        columns["predicted"] = present[columns["predicted"]]
        columns["left_out"] = _right_when_left_out(
            (features - scores.weight[own]).square().sum(1), columns["raw"], sizes[own]
        )
        for name in names:
            found[name][part] = columns[name].cpu()
    return found


def _right_when_left_out(own: Tensor, raw: Tensor, sizes: Tensor) -> Tensor:
    """Whether the own class mean is nearest when the sample is no part of it, 1 or 0.

    Leaving one of n samples out moves the mean away from it by the factor n / (n - 1). ``own`` are
    squared distances to the whole mean; twice ``raw`` further is the nearest other one.
    """
    moved = own * (sizes / (sizes - 1).clamp_min(1)).square()
    return ((moved < own + 2 * raw) & (sizes > 1)).to(own.dtype)
