"""Features of several layers in the plane, clean and under noise."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_labels, check_number
from largemargin.geometry import variance_split
from largemargin.measuring.batches import IGNORED, SKIP, device_of, order_note
from largemargin.measuring.capture import Capture
from largemargin.measuring.features import Variance
from largemargin.measuring.layers import Layers
from largemargin.measuring.projection import METHODS, project
from largemargin.measuring.reading import Normalization, Reader
from largemargin.measuring.records import Record
from largemargin.measuring.seen import (
    PENULTIMATE,
    Change,
    Noise,
    Observer,
    Seen,
    check_noise,
    disturbing,
    layer_reader,
    told,
)
from largemargin.measuring.subset import Quotas, draw_from

CLEAN, NOISY = "clean", "noisy"

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
        layer: name of the head; default the last linear layer.
        method: "tsne" (default) or "pca".
        noise: standard deviation of Gaussian noise on the inputs (0.06 for the CIFAR-10 figures of
            ROB), or a ``robust.Perturbation``. Clean and noisy samples are embedded together.
        max_samples: how many, the same number of each class as far as there are so many; default
            2000.
        classes: which classes; default all of the head.
        seed: of the samples, the noise and t-SNE.
        perplexity: of t-SNE, default 30; at most a third of the number of points is used.
        normalization: (mean, std) that the loader normalises by: noise is added before it.
        batch_size: of the passes through the model.
        device: where they run; default that of the model.
        progress: show a progress bar (needs tqdm).

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        >>> data = [(torch.randn(20, 2), torch.arange(20) % 2)]
        >>> made = embed(net, data, layers=["0"], method="pca", noise=0.1)
        >>> len(made.layers[0].points["noisy"])
        20
    """
    _check(method, seed, perplexity)
    check_number("batch_size", batch_size, at_least=1)
    if noise is not None:
        check_noise(noise)
    capture = Capture(model, layer=layer, features=None)
    where = torch.device(device) if device is not None else device_of(capture.model)
    num_classes = len(capture.view().weight)
    quotas = Quotas(max_samples, num_classes, classes, seed)
    reader, names = layer_reader(capture, layers)
    changes: dict[str, Change] = {CLEAN: lambda inputs, index: inputs}
    if noise is not None:
        space = Reader(model, layer=layer, normalization=normalization)
        changes[NOISY] = disturbing(space, noise, seed)
    drawn = draw_from(loader, quotas, num_classes=num_classes, progress=progress)
    with capture.running(), nullcontext() if reader is None else reader.hooked():
        seen = Observer(capture, reader, names, where, batch_size).see(drawn, changes)
    notes = [*quotas.notes(), *([] if reader is None else reader.notes())]
    order = order_note(loader)
    notes += [] if order is None else [order]
    words = None if noise is None else told(noise)
    return _embedded(seen, words, notes, method=method, seed=seed, perplexity=perplexity)


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
    _check(method, seed, perplexity)
    labels = torch.as_tensor(labels)
    seen = Seen(labels, torch.arange(len(labels)))
    for condition, given in ((CLEAN, features), (NOISY, noisy)):
        for name, rows in ({} if given is None else _by_layer(given)).items():
            seen.rows.setdefault(name, {})[condition] = _rows(name, rows, len(labels))
    uneven = [name for name, each in seen.rows.items() if len(each) != 1 + (noisy is not None)]
    if uneven:
        raise LargeMarginError(
            f"features and noisy must hold the same layers, but {uneven} are in one of them only."
        )
    for condition, given in ((CLEAN, logits), (NOISY, noisy_logits)):
        if given is not None:
            seen.logits[condition] = _rows("logits", given, len(labels))
    used = labels[labels.long() != IGNORED] if labels.dim() == 1 else labels
    num_classes = int(used.max()) + 1 if used.numel() else 1
    check_labels(used, len(used), num_classes, soft=False, skip=SKIP, validate=True)
    seen.labels = labels.long()
    present = torch.unique(used).tolist() if classes is None else classes
    quotas = Quotas(max_samples, num_classes, present, seed)
    quotas.offer(labels, seen.index, None)
    seen = seen.chosen(quotas.drawn().index)
    seen.pooling = dict.fromkeys(seen.rows, "as given")
    words = None if noisy is None else "as given"
    return _embedded(seen, words, [], method=method, seed=seed, perplexity=perplexity)


def _check(method: str, seed: int, perplexity: float) -> None:
    check_choice("method", method, METHODS)
    check_number("seed", seed, at_least=0)
    check_number("perplexity", perplexity, above=0)


def _by_layer(given: Arrays) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {PENULTIMATE: given}


def _rows(name: str, given: Any, count: int) -> Tensor:
    rows = torch.as_tensor(given)
    if rows.dim() != 2 or len(rows) != count:
        raise LargeMarginError(
            f"{name} must have shape ({count}, D), a row for each label, but the shape is "
            f"{tuple(rows.shape)}."
        )
    return rows.detach().cpu().double()


def _embedded(
    seen: Seen, noise: str | None, notes: list[str], *, method: str, seed: int, perplexity: float
) -> Embeddings:
    layers = []
    for name, conditions in seen.rows.items():
        made, said = _layer(name, conditions, seen, method, seed, perplexity)
        layers.append(made)
        notes += [f"layer {name!r}: {note}" for note in said]
    return Embeddings(
        method,
        int(seed),
        len(seen.labels),
        noise,
        tuple(seen.labels.tolist()),
        tuple(seen.index.tolist()),
        {name: tuple(each.argmax(1).tolist()) for name, each in seen.logits.items()},
        {name: _margins(each, seen.labels) for name, each in seen.logits.items()},
        tuple(layers),
        tuple(_assumed(method, seed, layers, noise)),
        tuple(notes),
    )


def _layer(
    name: str,
    conditions: dict[str, Tensor],
    seen: Seen,
    method: str,
    seed: int,
    perplexity: float,
) -> tuple[LayerEmbedding, tuple[str, ...]]:
    for condition, rows in conditions.items():
        bad = ~torch.isfinite(rows).all(1)
        if bool(bad.any()):
            raise LargeMarginError(
                f"features at layer {name!r} must be finite, but sample "
                f"{int(seen.index[bad][0])} has NaN or infinite ones ({condition}). Look for a "
                "diverged model or broken inputs."
            )
    together = torch.cat(list(conditions.values()))
    found = project(together, method=method, seed=seed, perplexity=perplexity)
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
    ), found.notes


def _variance(rows: Tensor, labels: Tensor) -> Variance:
    within, between, total, ratio = (float(each) for each in variance_split(rows, labels))
    return Variance(within, between, total, ratio if total > 0 else math.nan)


def _margins(logits: Tensor, labels: Tensor) -> tuple[float, ...]:
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    return tuple((logits.gather(1, labels[:, None])[:, 0] - others).tolist())


def _assumed(
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
