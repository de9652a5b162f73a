"""Any model as a function from inputs to logits, and passes of it over data of all processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largemargin.dropin.find_head import out_features, unwrapped
from largemargin.dropin.model_outputs import named_logits, tensors_in
from largemargin.errors import LargeMarginError
from largemargin.geometry.evaluation_mode import evaluation_mode, model_lock
from largemargin.measuring.batches import (
    Advance,
    DataBatch,
    Source,
    bar,
    call,
    count_batches,
    device_for,
    fail_together,
    source_batches,
)
from largemargin.measuring.input_space import PixelUnits
from largemargin.measuring.probe import Probe
from largemargin.ops.distributed import world_size


class LogitModel(nn.Module):
    """A model whose result is the tensor of logits, whatever it returns itself.

    A tensor is taken as it is; of a dict, tuple or dataclass the entry called "logits", or the
    only tensor with one column per class. Where several would do (features as wide as there are
    classes), the output of the head that :func:`largemargin.attach` would find is taken.

    DDP is taken off, since it waits for the other processes in every batch, also when they have
    fewer of them. Compiled models stay compiled.

    Args:
        model: any model :func:`largemargin.attach` can read, attached or not, wrapped or not.
        num_classes: C; default the width of the head that ``attach`` would find.
        layer: name of the head, whose output is then always taken.

    Example:
        >>> class Net(nn.Linear):
        ...     def forward(self, x):
        ...         return {"features": x, "scores": super().forward(x)}
        >>> LogitModel(Net(4, 3), num_classes=3)(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, model: nn.Module, *, num_classes: int | None = None, layer: str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise LargeMarginError(
                f"model must be an nn.Module, but {type(model).__name__} was given. The order is "
                "model first, then the data."
            )
        self.model = _without_ddp(model)
        self.layer = layer
        self._probe: Probe | None = None
        if num_classes is None:
            num_classes = out_features(self.head)
        if not isinstance(num_classes, int) or num_classes < 2:
            raise LargeMarginError(
                f"num_classes must be an integer >= 2, but {num_classes!r} was given."
            )
        self.num_classes = num_classes
        self.pixels = PixelUnits(None)
        """How the data is normalised, for what changes images before that."""
        self.through_head = layer is not None
        """The outputs do not say which of them are logits: the head's output is read."""

    @property
    def probe(self) -> Probe:
        """Reads the head, which is looked for only where it is needed."""
        if self._probe is None:
            self._probe = Probe(self.model, layer=self.layer)
        return self._probe

    @property
    def head(self) -> nn.Module:
        """The layer that :func:`largemargin.attach` would find."""
        return self.probe.head

    @contextmanager
    def evaluating(self, *, gradients: bool = False) -> Iterator["LogitModel"]:
        """Evaluation mode, every module's mode restored afterwards; without gradients by default.

        Parameters collect no gradient in either case. One thread at a time.
        """
        with (
            model_lock(self.model),
            evaluation_mode(self, frozen=gradients),
            torch.set_grad_enabled(gradients),
        ):
            yield self

    def forward(self, inputs: Any) -> Tensor:
        if not self.through_head:
            found = self._chosen(call(self.model, inputs))
            if found is not None:
                return found
            self.through_head = True
        return self._checked(self.probe.read(inputs).logits)

    def on_pixels(self, images: Tensor) -> Tensor:
        """The logits of images as they were before they were normalised."""
        return self.forward(self.pixels.normalized(images))

    def read(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The logits of a batch, (N, C), and the features that its head made them of, (N, D)."""
        features, at_head, outputs = self.probe.read(inputs)
        logits = None if self.through_head else self._chosen(outputs)
        if logits is None:
            logits = self._checked(at_head)
        if logits.dim() != 2 or features.dim() != 2:
            raise LargeMarginError(
                "one row of logits per sample is needed, but the head gives the shape "
                f"{tuple(at_head.shape)}."
            )
        return logits, features

    def _chosen(self, outputs: Any) -> Tensor | None:
        """The logits among the outputs; None where only the head can tell."""
        named = named_logits(outputs)
        if named is not None:
            return self._checked(named)
        fitting = [each for each in tensors_in(outputs) if self._fits(each)]
        return fitting[0] if len(fitting) == 1 else None

    def _fits(self, tensor: Tensor) -> bool:
        wide = tensor.dim() >= 2 and tensor.shape[-1] == self.num_classes
        return wide and tensor.is_floating_point()

    def _checked(self, logits: Tensor) -> Tensor:
        if not self._fits(logits):
            raise LargeMarginError(
                f"the model returns the shape {tuple(logits.shape)} ({logits.dtype}), but logits "
                f"of {self.num_classes} classes have shape (N, {self.num_classes}). Is this the "
                "model of these classes?"
            )
        return logits


def _without_ddp(model: nn.Module) -> nn.Module:
    if isinstance(model, DistributedDataParallel):
        return _without_ddp(model.module)
    inner, in_ddp = unwrapped(model)  # which refuses wrappers that cannot be read
    return inner if in_ddp else model


class ReadingOptions(TypedDict, total=False):
    """Options of every pass of a model over data; :func:`accuracy_of` says what they mean."""

    batch_size: int
    device: torch.device | str | None
    workers: int
    sync: bool
    progress: bool


def columns_of(
    reader: LogitModel,
    data: Source,
    columns: Callable[[DataBatch], tuple[Tensor, ...]],
    what: str,
    empty: str,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
) -> tuple[Tensor, ...]:
    """What ``columns(batch)`` gives, on the CPU, of all batches of all processes.

    ``what`` names the pass on the progress bar, ``empty`` says what is wrong where there is no row
    at all; the others are as in :func:`accuracy_of`.
    """
    where, shared = device_for(reader.model, device), sync and world_size() > 1

    def read() -> list[tuple[Tensor, ...]]:
        parts = []
        total = count_batches(data, batch_size, shared=shared)
        with reader.evaluating(), bar(what, total, progress) as advance:
            for batch in source_batches(
                data, batch_size=batch_size, device=where, workers=workers, shared=shared
            ):
                parts.append(tuple(column.cpu() for column in columns(batch)))
                advance()
        return parts

    every = [part for parts in fail_together(shared, read) for part in parts]
    found = tuple(torch.cat(column) for column in zip(*every, strict=True))
    if not found or len(found[0]) == 0:
        raise LargeMarginError(empty)
    return found


R = TypeVar("R", covariant=True)


class Counter(Protocol[R]):
    """Sums over samples that a pass makes, and the result they give."""

    @property
    def passes(self) -> int:
        """Passes of the model over a batch, for the progress bar."""
        ...

    def add(self, batch: DataBatch, advance: Advance) -> None: ...

    def sums(self) -> Any: ...

    def result(self, parts: list[Any]) -> R:
        """From the sums of every process."""
        ...


def count_over(
    model: nn.Module,
    data: Source,
    make_counter: Callable[[LogitModel, torch.device], Counter[R]],
    what: str,
    *,
    num_classes: int | None = None,
    layer: str | None = None,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    workers: int = 0,
    sync: bool = True,
    progress: bool = False,
) -> R:
    """One pass with a counter: its result over all processes."""
    shared = sync and world_size() > 1
    made: list[Counter[R]] = []

    def count() -> Any:
        reader = LogitModel(model, num_classes=num_classes, layer=layer)
        where = device_for(reader.model, device)
        counter = make_counter(reader, where)
        made.append(counter)
        number = count_batches(data, batch_size, shared=shared)
        total = None if number is None else number * counter.passes
        with reader.evaluating(), bar(what, total, progress) as advance:
            for batch in source_batches(
                data, batch_size=batch_size, device=where, workers=workers, shared=shared
            ):
                counter.add(batch, advance)
        return counter.sums()

    parts = fail_together(shared, count)
    return made[0].result(parts)
