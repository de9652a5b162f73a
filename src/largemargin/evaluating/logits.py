"""Any model as a function from inputs to logits, in evaluation mode."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from largemargin.dropin.find import find_layer, out_features, unwrapped
from largemargin.dropin.outputs import tensors_in
from largemargin.errors import LargeMarginError
from largemargin.measuring.batches import call
from largemargin.measuring.turns import turn


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
        if num_classes is None:
            num_classes = out_features(self.head)
        if not isinstance(num_classes, int) or num_classes < 2:
            raise LargeMarginError(
                f"num_classes must be an integer >= 2, but {num_classes!r} was given."
            )
        self.num_classes = num_classes
        self.through_head = layer is not None
        """The outputs do not say which of them are logits: the head's output is read."""

    @property
    def head(self) -> nn.Module:
        """The layer that :func:`largemargin.attach` would find."""
        return find_layer(unwrapped(self.model)[0], self.layer)[1]

    @property
    def device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def forward(self, inputs: Any) -> Tensor:
        if not self.through_head:
            found = self._chosen(call(self.model, inputs))
            if found is not None:
                return found
            self.through_head = True
        return self._at_head(inputs)

    def _chosen(self, outputs: Any) -> Tensor | None:
        """The logits among the outputs; None where only the head can tell."""
        named = _named_logits(outputs)
        if named is not None:
            self._check(named)
            return named
        fitting = [each for each in tensors_in(outputs) if self._fits(each)]
        return fitting[0] if len(fitting) == 1 else None

    def _fits(self, tensor: Tensor) -> bool:
        wide = tensor.dim() >= 2 and tensor.shape[-1] == self.num_classes
        return wide and tensor.is_floating_point()

    def _check(self, logits: Tensor) -> None:
        if not self._fits(logits):
            raise LargeMarginError(
                f"the model returns the shape {tuple(logits.shape)} ({logits.dtype}), but logits "
                f"of {self.num_classes} classes have shape (N, {self.num_classes}). Is this the "
                "model of these classes?"
            )

    def read(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The logits of a batch, (N, C), and the features that its head made them of, (N, D)."""
        outputs, features, at_head = self._watched(inputs)
        logits = None if self.through_head else self._chosen(outputs)
        if logits is None:
            self._check(at_head)
            logits = at_head
        if logits.dim() != 2 or features.dim() != 2:
            raise LargeMarginError(
                "one row of logits per sample is needed, but the head gives the shape "
                f"{tuple(at_head.shape)}."
            )
        return logits, features

    def _at_head(self, inputs: Any) -> Tensor:
        logits = self._watched(inputs)[2]
        self._check(logits)
        return logits

    def _watched(self, inputs: Any) -> tuple[Any, Tensor, Tensor]:
        """What the model returns, and what went into its head and came out of it."""
        # Compiled code knows no new hooks; what is called here is not compiled.
        model, _ = unwrapped(self.model)
        name, head = find_layer(model, self.layer)
        seen: list[tuple[Tensor, Tensor]] = []

        def watch(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> None:
            seen.append((args[0] if args else next(iter(kwargs.values())), output))

        handle = head.register_forward_hook(watch, with_kwargs=True)
        try:
            outputs = call(model, inputs)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise LargeMarginError(
                f"{type(model).__name__} calls its layer {name!r} {len(seen)} times in a forward "
                "pass; a head is called once. Name the layer that makes the logits: layer=..."
            )
        return outputs, *seen[0]

    @contextmanager
    def evaluating(self, *, gradients: bool = False) -> Iterator["LogitModel"]:
        """Evaluation mode, every module's mode restored afterwards; without gradients by default.

        Parameters collect no gradient in either case. One thread at a time.
        """
        with turn(self.model):
            modes = [(module, module.training) for module in self.modules()]
            needing = [each for each in self.parameters() if each.requires_grad and gradients]
            self.eval()
            try:
                for parameter in needing:
                    parameter.requires_grad_(False)
                with torch.set_grad_enabled(gradients):
                    yield self
            finally:
                for parameter in needing:
                    parameter.requires_grad_(True)
                for module, mode in modes:
                    module.training = mode


def _without_ddp(model: nn.Module) -> nn.Module:
    if isinstance(model, DistributedDataParallel):
        return _without_ddp(model.module)
    inner, in_ddp = unwrapped(model)  # which refuses wrappers that cannot be read
    return inner if in_ddp else model


def _named_logits(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if found is None:
        found = getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None
