"""What is called before and after a model and its head, to read them: see ``Tap``."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from largemargin.dropin.outputs import tensors_in
from largemargin.errors import LargeMarginError

if TYPE_CHECKING:
    from largemargin.dropin.tap import Tap


class Hook:
    """What all of them say to torch.jit.script, which asks for their names."""

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile a model with an attached loss. Take it off first with "
            "criterion.undo(), or use torch.jit.trace, torch.export or "
            "largemargin.export.to_exported_program, which leave the loss out."
        )


class StartHook(Hook):
    """Before the model: forgets an interrupted pass, and lets gradients reach the input.

    The input is the first floating point tensor of the call.
    """

    def __init__(self, tap: "Tap", with_inputs: bool) -> None:
        self.tap = tap
        self.with_inputs = with_inputs

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tap = self.tap
        given: list[Any] = [*args, *kwargs.values()]
        if tap.idle or _symbols(given):
            return None
        tap.start()
        if not self.with_inputs or not torch.is_grad_enabled():
            return None
        for index, value in enumerate(given):
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value if value.requires_grad else value.detach().requires_grad_()
                given[index] = value
                tap.running.held["inputs"] = value
                named = dict(zip(kwargs, given[len(args) :], strict=True))
                return tuple(given[: len(args)]), named
        raise LargeMarginError(
            "a loss on input gradients needs a floating point input, but the model was called "
            f"with {[type(value).__name__ for value in given]}. For token ids name a layer: "
            "LayerMargin with attach(..., layers=['embeddings'])."
        )


class Hold(Hook):
    """After a named module: its output."""

    def __init__(self, tap: "Tap", name: str) -> None:
        self.tap = tap
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.tap.idle or _symbols([output]):
            return
        running = self.tap.running
        running.held[self.name] = tensors_in(output)[0]
        running.blind = running.blind or not torch.is_grad_enabled()


class HeadHook(Hook):
    def __init__(self, tap: "Tap") -> None:
        self.tap = tap

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        # A layer that took the place of ours has its hooks too, and this one among them.
        if not (self.tap.idle or _symbols([output])) and module is self.tap.layer:
            self.tap.take(args[0] if args else next(iter(kwargs.values())), output)


class FinishHook(Hook):
    def __init__(self, tap: "Tap") -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (self.tap.idle or _symbols([output])):
            self.tap.finish(output)


def _symbols(values: list[Any]) -> bool:
    """Whether torch.fx runs the model on symbols: there is nothing to read then."""
    return any(isinstance(value, torch.fx.Proxy) for value in values)


def _run_as_they_are(*kinds: type) -> None:
    """Keep dynamo from compiling hooks by themselves.

    It calls the hooks of the module given to ``torch.compile`` outside of the graph and would
    compile each as a function of its own, with guards on the tensors it sees: again and again.
    Hooks inside the graph are traced with it all the same.
    """
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # a private name; without it compiling is slower, not wrong
        return
    for kind in kinds:
        plain = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(kind.__call__.__code__, plain)


_run_as_they_are(StartHook, Hold, HeadHook, FinishHook)
