"""``measure``: how wide the margins of a trained model are, in one call."""

import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.batches import IGNORED, device_of
from largemargin.measuring.bounds import BoundSettings
from largemargin.measuring.capture import Capture
from largemargin.measuring.conclusion import conclude
from largemargin.measuring.curvature import CurvatureSettings
from largemargin.measuring.layers import LayerReader, Layers, LayerStreams
from largemargin.measuring.parts import InputParts
from largemargin.measuring.ranks import together
from largemargin.measuring.reading import Normalization
from largemargin.measuring.results import Geometry
from largemargin.measuring.samples import Samples, leads, skipped_note
from largemargin.measuring.sphere import check_sphere
from largemargin.measuring.store import FeatureStore
from largemargin.measuring.stream import Stream
from largemargin.ops import SIMILARITIES
from largemargin.ops.distributed import world_size
from largemargin.prototypes.form import HeadView

COVARIANCE_DIM = 4096
"""Widest features whose D x D covariance (NC1) is kept: 128 MiB in float64."""


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
            input space is then that before it.
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
    _check_settings(radius, worst, bins)
    _check_data_name(data_name)
    capture = Capture(model, layer=layer, features=features)
    where = torch.device(device) if device is not None else device_of(capture.model)
    parts = InputParts(
        model,
        layer=layer,
        input_margins=input_margins,
        layer_margins=layer_margins,
        curvature=curvature,
        bounds=bounds,
        max_samples=max_samples,
        normalization=normalization,
        radius=radius,
    )
    with ExitStack() as stack:
        stack.enter_context(capture.running())
        stack.enter_context(parts.hooked())
        folder = _folder(store, stack) if pairwise or bounds or sphere else None
        kept = _store(folder, "features") if pairwise or bounds or sphere else None
        stream = _stream(capture.view(), kept)
        names = _checked_names(class_names, stream.num_classes)
        if sphere:
            check_sphere(stream.dim)
        beside = _layer_streams(capture, layers, stream, pairwise, folder)
        samples = Samples(capture, stream, where, progress, parts, beside)
        shared = sync and world_size() > 1
        with nullcontext() if beside is None else beside.reader.hooked():
            passes = together(shared, lambda: samples.read(loader))
        if shared:
            samples.number(passes)
            stream = stream.merged()
            if beside is not None:
                beside.merge()
        strangers = None
        if ood is not None:
            strangers = together(shared, lambda: samples.read_strangers(ood))
        geometry = conclude(
            stream,
            radius=radius,
            worst=worst,
            bins=bins,
            strangers=strangers,
            pairwise=pairwise,
            sphere=sphere,
            layers=beside,
            notes=samples.notes(loader, passes),
        )
        notes = list(geometry.notes)
        found = parts.results(stream, notes, bins=bins, shared=shared)
        return replace(geometry, **found, notes=tuple(notes), data=data_name, class_names=names)


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
    _check_settings(radius, worst, bins)
    _check_data_name(data_name)
    check_choice("similarity", similarity, SIMILARITIES)
    check_number("scale", scale, above=0)
    check_number("batch_size", batch_size, at_least=1)
    features, labels, weight = (torch.as_tensor(each) for each in (features, labels, weight))
    bias = None if bias is None else torch.as_tensor(bias)
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
    stream = _stream(
        HeadView(weight.detach(), None if bias is None else bias.detach(), similarity, scale),
        FeatureStore() if pairwise or sphere else None,
    )
    names = _checked_names(class_names, stream.num_classes)
    if sphere:
        check_sphere(stream.dim)
    notes = []
    for start in range(0, len(features), batch_size):
        part = slice(start, start + batch_size)
        stream.add(*_known(features[part], labels[part], start))
    if stream.seen < len(features):
        notes.append(skipped_note(len(features) - stream.seen))
    strangers = None
    if ood is not None:
        others = torch.as_tensor(ood)
        parts = [others[start : start + batch_size] for start in range(0, len(others), batch_size)]
        strangers = [leads(stream, parts)]
    geometry = conclude(
        stream,
        radius=radius,
        worst=worst,
        bins=bins,
        strangers=strangers,
        pairwise=pairwise,
        sphere=sphere,
        notes=notes,
    )
    return replace(geometry, data=data_name, class_names=names)


def _known(features: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are not skipped, with their labels and their positions from ``start`` on."""
    where = torch.arange(start, start + len(features))
    if labels.dim() != 1 or labels.is_floating_point():
        return features, labels, where  # refused later, by who says what is wrong
    keep = labels.long() != IGNORED  # torch takes 156 of uint8 for -100
    return features[keep.to(features.device)], labels[keep], where[keep.cpu()]


def _check_settings(radius: float, worst: int, bins: int) -> None:
    check_number("radius", radius, at_least=0)
    check_number("worst", worst, at_least=0)
    check_number("bins", bins, at_least=1)


def _check_data_name(given: object) -> None:
    if given is not None and not isinstance(given, str):
        raise LargeMarginError(
            f"data_name must say in words what is measured, as 'CIFAR-10, test', but "
            f"{type(given).__name__} was given."
        )


def _checked_names(given: Sequence[str] | None, classes: int) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = () if isinstance(given, str) else tuple(given)
    if len(names) != classes or not all(isinstance(each, str) for each in names):
        raise LargeMarginError(
            f"class_names must be {classes} names, one for each class in the order of the labels, "
            f"but {given if isinstance(given, str) else list(names[:5])!r} was given"
            f"{f', {len(names)} of them' if len(names) > 5 else ''}."
        )
    return names


def _stream(head: HeadView, store: FeatureStore | None) -> Stream:
    return Stream(head, covariance=head.weight.shape[-1] <= COVARIANCE_DIM, store=store)


def _folder(store: str | Path | None, stack: ExitStack) -> Path | None:
    """A folder inside ``store`` that is removed at the end; None to keep features in memory."""
    if store is None:
        return None
    Path(store).mkdir(parents=True, exist_ok=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=store)))


def _store(folder: Path | None, name: str) -> FeatureStore:
    return FeatureStore(None if folder is None else folder / f"{name}.bin")


def _layer_streams(
    capture: Capture, layers: Layers, stream: Stream, pairwise: bool, folder: Path | None
) -> LayerStreams | None:
    if not layers:
        return None
    return LayerStreams(
        LayerReader(capture, layers),
        num_classes=stream.num_classes,
        like=stream.scores.weight,
        widest=COVARIANCE_DIM,
        store=lambda name: _store(folder, name) if pairwise else None,
    )
