"""Running a model and reading what enters its head, any shape of outputs, wrapped or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.dropin.find import find_layer, find_module, unwrapped
from largemargin.dropin.outputs import named_rows, tensors_in
from largemargin.errors import LargeMarginError
from largemargin.measuring.batches import call, evaluating
from largemargin.measuring.reading import head_view
from largemargin.prototypes.form import HeadView


class Capture:
    """Reads features of a model in evaluation mode. Use it inside ``with capture.running():``.

    DDP and torch.compile are taken off: DDP would wait for the other processes in every batch,
    also when they have fewer of them.
    """

    def __init__(self, model: nn.Module, *, layer: str | None, features: str | None) -> None:
        if not isinstance(model, nn.Module):
            raise LargeMarginError(
                f"model must be an nn.Module, but {type(model).__name__} was given. The order is "
                "measure(model, loader); for saved features use measure_arrays."
            )
        self.model, _ = unwrapped(model)
        self.head_name, self.head = find_layer(self.model, layer)
        self.features_name = features
        self.source = None if features is None else find_module(self.model, features)
        self.reading = False
        """Other passes of the model, by other parts of a measurement, are not looked at."""
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.named: list[Tensor] = []

    @contextmanager
    def running(self) -> Iterator["Capture"]:
        with evaluating(self.model):
            handles = [self.head.register_forward_hook(self._at_head, with_kwargs=True)]
            if self.source is not None:
                handles.append(self.source.register_forward_hook(self._at_source))
            try:
                yield self
            finally:
                for handle in handles:
                    handle.remove()
                self._forget()

    def view(self) -> HeadView:
        weight = getattr(self.head, "weight", None)
        if isinstance(weight, nn.parameter.UninitializedParameter):
            raise LargeMarginError(
                f"layer {self.head_name!r} is lazy and has no weight yet. Run one batch through "
                "the model first."
            )
        return head_view(self.head)

    def read(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The features of a batch, (N, D) or (N, T, D), and what the head made of its input."""
        self._forget()
        self.reading = True
        try:
            call(self.model, inputs)
        finally:
            self.reading = False
        if len(self.inputs) != 1:
            times = "never calls" if not self.inputs else f"calls {len(self.inputs)} times"
            raise LargeMarginError(
                f"{type(self.model).__name__} {times} its layer {self.head_name!r} in a forward "
                "pass; a head is called once. Name the layer that makes the logits: layer=..."
            )
        features, outputs = self.inputs[0], self.outputs[0]
        if self.source is not None:
            if len(self.named) != 1:
                raise LargeMarginError(
                    f"the module {self.features_name!r} given as features ran {len(self.named)} "
                    "times in a forward pass. Name one that runs once, before the head."
                )
            rows = named_rows(self.named[0], features)
            features = rows.reshape(*features.shape[:-1], rows.shape[-1])
        self._forget()
        return features, outputs

    def _forget(self) -> None:
        self.inputs, self.outputs, self.named = [], [], []

    def _at_head(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if self.reading:
            self.inputs.append(args[0] if args else next(iter(kwargs.values())))
            self.outputs.append(output)

    def _at_source(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.reading:
            self.named.append(tensors_in(output)[0])


def differs(view: HeadView, features: Tensor, outputs: Tensor) -> bool:
    """Whether a head makes other logits than its weight, bias, similarity and scale say."""
    expected = view(features.detach().flatten(0, -2)).float()
    given = outputs.detach().flatten(0, -2).float()
    if given.shape != expected.shape:
        return True
    if not bool(torch.isfinite(expected).all()):
        return False  # which is refused elsewhere
    rounding = 0.05 if outputs.dtype in (torch.float16, torch.bfloat16) else 1e-2
    size = float(expected.abs().amax()) if expected.numel() else 0.0
    tolerance = rounding * max(size, 1e-6)
    return not torch.allclose(given, expected, rtol=rounding, atol=tolerance)
