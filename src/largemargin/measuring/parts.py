"""The parts of a measurement that look behind the features: inputs, layers, curvature, bounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, check_number
from largemargin.measuring.bounds import BoundSettings, measure_bounds
from largemargin.measuring.curvature import CurvatureCollector, CurvatureSettings
from largemargin.measuring.fully_connected import FullyConnected
from largemargin.measuring.input_margins import MarginCollector
from largemargin.measuring.ranks import gather
from largemargin.measuring.reading import Columns, Normalization, Reader, chosen
from largemargin.measuring.stream import Stream


class InputParts:
    """Takes in the batches of a measurement, as far as one of these parts was asked for."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: str | None = None,
        input_margins: bool = False,
        layer_margins: Sequence[str] = (),
        curvature: bool | CurvatureSettings = False,
        bounds: bool | BoundSettings = False,
        max_samples: int | None = None,
        normalization: Normalization | None = None,
        radius: float = 0.5,
    ) -> None:
        if max_samples is not None:
            check_number("max_samples", max_samples, at_least=1)
        reader = Reader(model, layer=layer, layers=layer_margins, normalization=normalization)
        self.reader = reader
        self.margins: MarginCollector | None = None
        self.curvature: CurvatureCollector | None = None
        self.bounds: BoundSettings | None = None
        if input_margins or layer_margins:
            self.margins = MarginCollector(
                reader,
                input_margins=input_margins,
                layer_margins=layer_margins,
                max_samples=max_samples,
            )
        if curvature:
            settings = _settings("curvature", curvature, CurvatureSettings())
            self.curvature = CurvatureCollector(reader, settings, max_samples=max_samples)
        if bounds:
            self.bounds = _settings("bounds", bounds, BoundSettings(radius=radius))
            self.bounds.check()
            self.network = FullyConnected(reader)
            self.columns = Columns(reader.num_classes, max_samples)

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.margins, self.curvature, self.bounds))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks on the model, where something was asked for."""
        if not self:
            yield
            return
        with self.reader.hooked():
            yield

    def add(self, inputs: Any, labels: Tensor, index: Tensor | None) -> None:
        if self.margins is not None:
            self.margins.add(inputs, labels, index)
        if self.curvature is not None:
            self.curvature.add(inputs, labels, index)
        if self.bounds is not None and self.network.reason is None:
            found = self.columns.choose(labels, index)
            if found is not None:
                images = chosen(inputs, found[0], self.columns.size)
                with torch.no_grad():
                    if isinstance(images, Tensor):
                        images = self.reader.raw(images)
                    self.network.add(images)

    def results(
        self, stream: Stream, notes: list[str], *, bins: int, shared: bool
    ) -> dict[str, Any]:
        """Fields of a geometry, by name."""
        found: dict[str, Any] = {}
        if self.margins is not None:
            margins = self.margins.result(notes, bins, shared=shared)
            found |= {"input_margins": margins.input, "layer_margins": margins.layers}
        if self.curvature is not None:
            found["curvature"] = self.curvature.result(notes, bins, shared=shared)
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
