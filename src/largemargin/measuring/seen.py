"""What a model makes of chosen samples, at its layers and its head, clean and under noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, check_number
from largemargin.geometry.pairs import blocks
from largemargin.measuring.batches import moved
from largemargin.measuring.capture import Capture
from largemargin.measuring.draws import SampleDraws
from largemargin.measuring.layers import LayerReader, Layers
from largemargin.measuring.reading import Reader, need_tensor
from largemargin.measuring.subset import Drawn, joined
from largemargin.robust import Perturbation, add_gaussian

PENULTIMATE = "penultimate"
"""Stands for what enters the head among names of layers."""

Noise: TypeAlias = float | Perturbation
"""Standard deviation of Gaussian noise, or any perturbation of images."""

Change: TypeAlias = Callable[[Any, Tensor], Any]
"""From inputs and their sample indices to the inputs the model is given."""


@dataclass
class Seen:
    """(N, D) rows by layer and condition, (N, C) logits by condition."""

    labels: Tensor
    index: Tensor
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    pooling: dict[str, str] = field(default_factory=dict)

    def chosen(self, keep: Tensor) -> "Seen":
        """The same of some samples."""
        return Seen(
            self.labels[keep],
            self.index[keep],
            {
                name: {condition: each[keep] for condition, each in conditions.items()}
                for name, conditions in self.rows.items()
            },
            {condition: each[keep] for condition, each in self.logits.items()},
            self.pooling,
        )


def layer_reader(capture: Capture, layers: Layers) -> tuple[LayerReader | None, list[str] | None]:
    """What reads the layers before the head, and the names asked for; None for all it reads."""
    if isinstance(layers, str):
        return LayerReader(capture, layers), None
    names = list(layers)
    others = [name for name in names if name != PENULTIMATE]
    if not names or len(set(names)) != len(names):
        raise LargeMarginError(f"layers must be different names, but {names} were given.")
    if not others:
        return None, names
    pools = {name: layers[name] for name in others} if isinstance(layers, Mapping) else others
    return LayerReader(capture, pools), names


class Observer:
    """Takes batches of samples through a model. Use it while capture and reader are hooked."""

    def __init__(
        self,
        capture: Capture,
        reader: LayerReader | None,
        names: list[str] | None,
        device: torch.device,
        batch_size: int,
    ) -> None:
        self.capture, self.reader, self.names = capture, reader, names
        self.device, self.batch_size = device, batch_size

    def see(self, drawn: Drawn, changes: dict[str, Change]) -> Seen:
        """Rows and logits of the samples under each condition."""
        seen = Seen(drawn.labels, drawn.index)
        for condition, change in changes.items():
            parts = [
                self._read(drawn, part, change)
                for part in blocks(len(drawn.labels), self.batch_size)
            ]
            for name in parts[0]:
                whole = torch.cat([each[name] for each in parts])
                if name == "":
                    seen.logits[condition] = whole
                else:
                    seen.rows.setdefault(name, {})[condition] = whole
        seen.pooling = {PENULTIMATE: "none"}
        if self.reader is not None:
            seen.pooling |= {name: each.pooling for name, each in self.reader.facts.items()}
        order = [*self.reader.facts, PENULTIMATE] if self.reader is not None else [PENULTIMATE]
        seen.rows = {name: seen.rows[name] for name in (self.names or order)}
        return seen

    def _read(self, drawn: Drawn, part: slice, change: Change) -> dict[str, Tensor]:
        """Features of a batch by layer, and under no name its logits; on the CPU."""
        inputs = change(joined(drawn.inputs[part]), drawn.index[part])
        if self.reader is not None:
            self.reader.expect(drawn.labels[part])
        features, logits = self.capture.read(moved(inputs, self.device))
        if features.dim() != 2:
            raise LargeMarginError(
                "embeddings need one vector per sample at the head, but what enters it has the "
                f"shape {tuple(features.shape)}."
            )
        found = {PENULTIMATE: features, "": logits}
        if self.reader is not None:
            found |= self.reader.taken()
        return {name: each.detach().cpu().double() for name, each in found.items()}


def check_noise(noise: object) -> None:
    if isinstance(noise, Perturbation):
        return
    if isinstance(noise, int | float) and not isinstance(noise, bool):
        check_number("noise", noise, above=0)
        return
    raise LargeMarginError(
        "noise must be a standard deviation or a robust.Perturbation, but "
        f"{type(noise).__name__} was given."
    )


def disturbing(space: Reader, noise: Noise, seed: int) -> Change:
    """Inputs under noise, which belongs to each sample and lies before normalisation."""

    def change(inputs: Any, index: Tensor) -> Any:
        images = space.raw(need_tensor(inputs, "noise"))
        if isinstance(noise, Perturbation):
            draws = SampleDraws(seed, "perturbation")
            noisy = torch.stack(
                [
                    noise(image, generator=draws.generator(which))
                    for image, which in zip(images, index.tolist(), strict=True)
                ]
            )
        else:
            drawn = SampleDraws(seed, "gaussian noise").normal(index, 1, images)[:, 0]
            noisy = add_gaussian(images, drawn, sigma=noise)
        return space.normalized(noisy)

    return change


def told(noise: Noise) -> str:
    """A noise in words: of a perturbation what is not left as it is by default."""
    if not isinstance(noise, Perturbation):
        return f"Gaussian, sigma {noise:g}"
    parts = [(each.name, getattr(noise, each.name), each.default) for each in fields(noise)]
    set_ones = [f"{name}={value}" for name, value, default in parts if value != default]
    return f"Perturbation({', '.join(set_ones)})"
