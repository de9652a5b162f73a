"""Reading a model: its head, the features that enter it and the outputs of named layers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.dropin.find_head import find_layer, find_module, unwrapped
from largemargin.dropin.model_outputs import named_rows, tensors_in
from largemargin.dropin.saved_heads import check_restored
from largemargin.errors import LargeMarginError
from largemargin.geometry.evaluation_mode import evaluating
from largemargin.heads.head_spec import HeadView
from largemargin.losses.base.terms import matrix_of
from largemargin.measuring.batches import call
from largemargin.ops.shards import gathered

LayerHook: TypeAlias = Callable[[nn.Module, Any], Any]
"""Called with a layer and its output; what it returns, unless None, takes the output's place."""


class Reading(NamedTuple):
    """One pass of a model over a batch."""

    features: Tensor
    """What entered the head, (N, D) or (N, T, D); or the output of the module named instead."""
    logits: Tensor
    """What the head made of its input."""
    outputs: Any
    """What the model returned."""


class Probe:
    """Reads a model pass by pass. Hooks stay on the model for one pass only, so that other passes
    of it, by other parts of a measurement, are not looked at.

    DDP and torch.compile are taken off: DDP would wait for the other processes in every batch,
    also when they have fewer of them, and compiled code knows no new hooks.

    Args:
        model: any model :func:`largemargin.attach` can read, wrapped or not.
        layer: name of the head; default the last linear layer.
        features: name of a module whose output are the features instead of the head's input.

    Example:
        >>> probe = Probe(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)))
        >>> reading = probe.read(torch.zeros(5, 2))
        >>> probe.head_name, reading.features.shape, reading.logits.shape
        ('2', torch.Size([5, 3]), torch.Size([5, 4]))
    """

    def __init__(
        self, model: nn.Module, *, layer: str | None = None, features: str | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise LargeMarginError(
                f"model must be an nn.Module, but {type(model).__name__} was given. The order is "
                "measure(model, loader); for saved features use measure_arrays."
            )
        self.model, _ = unwrapped(model)
        self.head_name, head = find_layer(self.model, layer)
        check_restored(self.model, head)
        self.features_name = features
        if features is not None:
            find_module(self.model, features)

    @property
    def head(self) -> nn.Module:
        return self.model.get_submodule(self.head_name)

    @property
    def num_classes(self) -> int:
        return int(matrix_of(self.head).shape[0])

    def view(self) -> HeadView:
        """Class vectors of the head and how it makes logits."""
        weight = getattr(self.head, "weight", None)
        if isinstance(weight, nn.parameter.UninitializedParameter):
            raise LargeMarginError(
                f"layer {self.head_name!r} is lazy and has no weight yet. Run one batch through "
                "the model first."
            )
        return head_view(self.head)

    @contextmanager
    def evaluating(self) -> Iterator[Self]:
        """Evaluation mode without gradients, one thread at a time; modes are restored."""
        with evaluating(self.model):
            yield self

    def read(self, inputs: Any, layers: Mapping[str, LayerHook] | None = None) -> Reading:
        """One pass, in whatever mode the model is.

        Args:
            inputs: a tensor, a tuple (the model's arguments) or a dict (its keyword arguments).
            layers: what to call with the outputs of which layers.
        """
        at_head: list[tuple[Tensor, Tensor]] = []
        named: list[Tensor] = []

        def take_head(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> None:
            at_head.append((args[0] if args else next(iter(kwargs.values())), output))

        with ExitStack() as hooks:
            for name, hook in (layers or {}).items():
                module = find_module(self.model, name)
                hooks.enter_context(
                    module.register_forward_hook(lambda m, args, out, hook=hook: hook(m, out))
                )
            hooks.enter_context(self.head.register_forward_hook(take_head, with_kwargs=True))
            if self.features_name is not None:
                source = find_module(self.model, self.features_name)
                hooks.enter_context(
                    source.register_forward_hook(
                        lambda m, args, out: named.append(tensors_in(out)[0])
                    )
                )
            outputs = call(self.model, inputs)
        if len(at_head) != 1:
            times = "never calls" if not at_head else f"calls {len(at_head)} times"
            raise LargeMarginError(
                f"{type(self.model).__name__} {times} its layer {self.head_name!r} in a forward "
                "pass; a head is called once. Name the layer that makes the logits: layer=..."
            )
        features, logits = at_head[0]
        if self.features_name is not None:
            features = self._named_features(named, features)
        return Reading(features, logits, outputs)

    def _named_features(self, named: list[Tensor], like: Tensor) -> Tensor:
        if len(named) != 1:
            raise LargeMarginError(
                f"the module {self.features_name!r} given as features ran {len(named)} times in a "
                "forward pass. Name one that runs once, before the head."
            )
        rows = named_rows(named[0], like)
        return rows.reshape(*like.shape[:-1], rows.shape[-1])


def head_view(layer: nn.Module) -> HeadView:
    """Class vectors of a head and how it makes logits, gathered and detached."""
    bias = getattr(layer, "bias", None)
    return HeadView(
        gathered(matrix_of(layer)).detach(),
        None if bias is None else gathered(bias).detach(),
        getattr(layer, "similarity", "dot"),
        float(getattr(layer, "scale", 1.0)),
    )


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
