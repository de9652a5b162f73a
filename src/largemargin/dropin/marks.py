"""What a forward pass saw, and the marks that lead to it from the tensors it made."""

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from largemargin.errors import LargeMarginError

PREFIX = "_largemargin_pass_"
"""Of the attribute that holds a mark; every attached model has its own."""


class Pass(NamedTuple):
    """What one forward pass through the head saw."""

    features: Tensor
    logits: Tensor | None
    """The head's output; None where only something computed from it is left."""
    inputs: Tensor | None
    layers: tuple[Tensor, ...]
    own: dict[str, Tensor]
    """Outputs of modules that were named as features, by the term they are for."""
    swapped: tuple[Tensor, Tensor | None] | None = None
    """Weight and bias of the head in that pass, where the layer has others by now."""

    def chosen(self, rows: Tensor, logits: Tensor) -> "Pass":
        """These rows of it, in this order."""

        def of(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, -2)[rows]

        own = {name: of(each) for name, each in self.own.items()}
        return self._replace(features=of(self.features), logits=logits, own=own)


class Seen:
    """A pass without the head's output. (That carries this object: it must not be held by it.)"""

    def __init__(
        self,
        features: Tensor,
        inputs: Tensor | None,
        layers: tuple[Tensor, ...],
        own: dict[str, Tensor],
        shape: tuple[int, ...],
        blind: bool,
        version: int | None = None,
        head: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        self.features = features
        self.inputs = inputs
        self.layers = layers
        self.own = own
        self.shape = shape
        self.blind = blind
        """Something was read while gradients were switched off."""
        self.version = version
        """Of the head's output, which counts changes in place; None where that is not followed."""
        self.head = head
        """Weight and bias that were used; None where that is not followed."""
        self.logits: Tensor | None = None
        """The head's output, detached, of a pass that is run again: nobody else remembers it."""

    def whole(self, logits: Tensor | None) -> Pass:
        return Pass(self.features, logits, self.inputs, self.layers, self.own)

    def detached(self) -> "Seen":
        layers = tuple(each.detach() for each in self.layers)
        own = {name: each.detach() for name, each in self.own.items()}
        inputs = None if self.inputs is None else self.inputs.detach()
        return Seen(
            self.features.detach(), inputs, layers, own, self.shape, self.blind, self.version
        )


@dataclass
class Running:
    """What is known of a forward pass while the model is in it."""

    inside: bool = False
    """Whether it began at the model itself, not at a part of it."""
    passes: int = 0
    """Of the head."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """Inputs, and outputs of named modules."""
    blind: bool = False
    """Whether one of them was read while gradients were switched off."""
    current: tuple[Seen, Tensor] | None = None
    """The last pass of the head."""
    ends: bool = False
    """Whether the backward pass it is in will forget it."""

    def forget(self) -> None:
        """As new; the same object, which compiled code has been made for."""
        self.inside, self.passes, self.held, self.blind = False, 0, {}, False
        self.current, self.ends = None, False

    def read(self, name: str) -> Tensor:
        if name not in self.held:
            kind, which = name.split(" ")
            given = f"layers[{which}]" if kind == "layers" else "features"
            raise LargeMarginError(
                f"the module given as {given} did not run before the head. Name one that the model "
                "calls on its way to the head."
            )
        return self.held[name]


class Mark:
    """On a tensor: where what was read beside it is. Saved or copied, it is an empty dict."""

    def __init__(
        self,
        seen: Seen | None,
        logits: Tensor | None = None,
        several: bool = False,
        made: bool = False,
    ):
        self.made = made
        """On a tensor that the model returns in place of the head's output."""
        self.seen = seen
        self.logits = logits
        """The head's output, on tensors made from it."""
        self.several = several
        self.weak: weakref.ref[Seen] | None = None

    def found(self) -> Seen | None:
        return self.seen if self.weak is None else self.weak()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


def marked(tensor: Tensor) -> bool:
    """Whether another model's head, or a copy's, marked the tensor."""
    return any(name.startswith(PREFIX) for name in getattr(tensor, "__dict__", ()))
