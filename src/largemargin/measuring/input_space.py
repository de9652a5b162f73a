"""A model as a function of its inputs before normalisation, with gradients to them.

Margins and curvature in input space are taken here, and kept sample by sample in columns.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_labels
from largemargin.measuring.batches import (
    IGNORED,
    NOTHING,
    SKIP,
    change_tensors,
    check_range,
    device_for,
    gather,
    loader_batches,
    need_labels,
    take_rows,
)
from largemargin.measuring.probe import LayerHook, Probe, Reading
from largemargin.ops.distributed import world_size
from largemargin.ops.norms import normalize

Numbers: TypeAlias = float | Sequence[float]
Normalization: TypeAlias = tuple[Numbers, Numbers]
"""Mean and standard deviation, one number each or one per channel."""

AS_GIVEN = " Inputs that are no pixels are measured as they are with normalization=(0, 1)."


class PixelUnits:
    """Between what a loader gives and what was before its normalisation, [0, 1] for images.

    (0, 1) says that inputs are to be taken as they are, whatever their range.
    """

    def __init__(self, normalization: Normalization | None) -> None:
        self.normalization = None if normalization is None else _numbers(normalization)
        self.as_given = False
        if self.normalization is not None:
            mean, std = self.normalization
            self.as_given = bool((mean == 0).all() and (std == 1).all())

    def raw(self, inputs: Tensor, *, checked: bool = True) -> Tensor:
        """Inputs of the loader as they were before normalisation.

        Images that are not in [0, 1] then are refused where that is ``checked``.
        """
        found = inputs
        if self.normalization is not None:
            mean, std = (_per_channel(each, inputs) for each in self.normalization)
            found = inputs * std + mean
        if checked and not self.as_given and inputs.dim() == 4:
            check_range(found, AS_GIVEN)
        return found

    def normalized(self, inputs: Any) -> Any:
        """The way back."""
        if self.normalization is None or not isinstance(inputs, Tensor):
            return inputs
        mean, std = (_per_channel(each, inputs) for each in self.normalization)
        return (inputs - mean) / std


class InputSpace(nn.Module):
    """A model whose result is its head's output, one row of logits per sample.

    Wrappers (DDP, torch.compile) are taken off: gradients with respect to inputs are no step of
    training that they should take part in. With ``normalization``, the mean and standard deviation
    that the loader normalises by, it takes inputs as they were before.
    """

    def __init__(self, probe: Probe, normalization: Normalization | None = None) -> None:
        super().__init__()
        self.model = probe.model
        self.probe = probe
        self.pixels = PixelUnits(normalization)
        self.raw, self.normalized = self.pixels.raw, self.pixels.normalized

    @property
    def head(self) -> nn.Module:
        return self.probe.head

    @property
    def num_classes(self) -> int:
        return self.probe.num_classes

    @property
    def units(self) -> str:
        """In which units inputs are, for a result to say."""
        given = self.pixels.normalization is None
        return "as the loader gives them" if given else "before normalisation"

    def forward(self, inputs: Any) -> Tensor:
        return self.read(inputs).logits

    def read(self, inputs: Any, layers: Mapping[str, LayerHook] | None = None) -> Reading:
        """One pass; ``layers`` as in :meth:`Probe.read`."""
        # A model may write into its input, which a leaf does not allow.
        inputs = change_tensors(
            self.normalized(inputs),
            lambda each: each.clone() if each.is_leaf and each.requires_grad else each,
        )
        reading = self.probe.read(inputs, layers)
        if reading.logits.dim() != 2:
            raise LargeMarginError(
                "margins and curvature in input space need one row of logits per sample, but the "
                f"head {self.probe.head_name!r} made the shape {tuple(reading.logits.shape)}."
            )
        return reading

    def backbone(self, inputs: Tensor) -> Tensor:
        """Features in which the head is linear: its input, of length 1 for a cosine head."""
        features = self.read(inputs).features
        cosine = getattr(self.head, "similarity", "dot") == "cosine"
        return normalize(features) if cosine else features

    def linear_head(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head on those features, up to a shift common to all classes."""
        view = self.probe.view()
        weight, bias = view.weight, view.bias
        if view.similarity in ("cosine", "cosine_prototypes"):
            weight = normalize(weight)
        elif view.similarity == "euclidean":
            half = -0.5 * weight.square().sum(1)
            bias = half if bias is None else half + bias
        return view.scale * weight, None if bias is None else view.scale * bias


def _per_channel(values: Tensor, inputs: Tensor) -> Tensor:
    if values.dim() == 0:
        return values.to(inputs)
    if values.dim() != 1 or inputs.dim() < 2 or len(values) != inputs.shape[1]:
        raise LargeMarginError(
            "normalization must be one mean and one standard deviation, or one for each of the "
            f"channels, dimension 1 of inputs of shape {tuple(inputs.shape)}, but the shape "
            f"{tuple(values.shape)} was given."
        )
    return values.to(inputs).view(1, -1, *[1] * (inputs.dim() - 2))


def _numbers(normalization: Normalization) -> tuple[Tensor, Tensor]:
    try:
        mean, std = (torch.as_tensor(each, dtype=torch.float64) for each in normalization)
    except (TypeError, ValueError):
        raise LargeMarginError(
            f"normalization must be (mean, std), but {normalization!r} was given."
        ) from None
    if not bool((std > 0).all()):
        raise LargeMarginError(f"standard deviations must be positive, but {std} was given.")
    return mean, std


def need_tensor(inputs: Any, what: str) -> Tensor:
    """The one floating point tensor that a model takes."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return inputs
    given = f"{inputs.dtype} tensor" if isinstance(inputs, Tensor) else type(inputs).__name__
    raise LargeMarginError(
        f"{what} needs a model of one floating point tensor, but the loader gives a {given}. For "
        "token ids measure margins at a layer: layer_margins=['embeddings']."
    )


class ChosenRows(NamedTuple):
    """The rows of a batch that are measured."""

    inputs: Any
    labels: Tensor
    indices: Tensor
    """On the CPU."""
    batch_size: int
    """Of the batch they were taken from."""


class Collector(Protocol):
    """A part of a measurement that gives numbers of each sample."""

    space: InputSpace

    def columns(self, rows: ChosenRows) -> dict[str, Tensor]: ...


class Columns:
    """Numbers of each sample, batch by batch: indices, labels and what else is named.

    Samples with an index below 0 are repetitions and left out, as are those labelled -100 and
    those from ``max_samples`` on.
    """

    def __init__(self, space: InputSpace, max_samples: int | None) -> None:
        self.space = space
        self.limit = math.inf if max_samples is None else max_samples
        self.parts: dict[str, list[Tensor]] = {}

    def choose(self, inputs: Any, labels: Tensor | None, index: Tensor) -> ChosenRows | None:
        """The rows of a batch to take, whose labels and indices are kept; None for no row."""
        labels = need_labels(labels)
        if labels.dim() != 1:
            raise LargeMarginError(
                "margins and curvature in input space need one label per sample, but the labels' "
                f"shape is {tuple(labels.shape)}."
            )
        index = index.cpu()
        keep = (index >= 0) & (index < self.limit) & (labels != IGNORED).cpu()
        rows = keep.nonzero()[:, 0]
        if len(rows) == 0:
            return None
        here, count = rows.to(labels.device), len(labels)
        labels = labels[here]
        classes = self.space.num_classes
        check_labels(labels, len(rows), classes, soft=False, skip=SKIP, validate=True)
        self.add(label=labels.long(), index=index[rows])
        return ChosenRows(take_rows(inputs, here, count), labels.long(), index[rows], count)

    def add(self, **values: Tensor) -> None:
        for name, each in values.items():
            self.parts.setdefault(name, []).append(each.detach().cpu())

    def joined(self, shared: bool) -> dict[str, Tensor]:
        """The columns, where ``shared`` those of all processes, in the order of sample indices."""
        mine = {name: torch.cat(parts) for name, parts in self.parts.items()}
        everyone = [each for each in (gather(mine) if shared else [mine]) if each]
        if not everyone:
            raise LargeMarginError(NOTHING)
        columns = {name: torch.cat([each[name] for each in everyone]) for name in everyone[0]}
        if shared:
            order = columns["index"].argsort(stable=True)
            columns = {name: each[order] for name, each in columns.items()}
        return columns


def read_columns(
    collector: Collector,
    loader: Iterable[Any],
    max_samples: int | None,
    device: torch.device | str | None,
    progress: bool,
) -> dict[str, Tensor]:
    """What a collector gives for the samples of a loader, of all processes."""
    space = collector.space
    columns = Columns(space, max_samples)
    for batch in loader_batches(loader, device_for(space.model, device), progress=progress):
        chosen = columns.choose(*batch)
        if chosen is not None:
            columns.add(**collector.columns(chosen))
    return columns.joined(world_size() > 1)
