"""Reading a model's features while it runs, and knowing which outputs they belong to.

Tensors made by the head, and those the model returns instead of them (a cast, a softmax), carry a
mark that leads to what was read beside them. Several forward passes per step, compiled or not,
therefore cannot be confused. Where the caller makes a new tensor from an output, the autograd graph
leads back to the head. Without mark and graph the last passes are compared by what they predict.
"""

import weakref
from copy import deepcopy
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from largemargin.dropin.find import ancestors, out_features
from largemargin.dropin.marks import PREFIX, Mark, Pass, Seen, alike, marked
from largemargin.dropin.outputs import tensors_in
from largemargin.dropin.sharded import is_fsdp
from largemargin.errors import LargeMarginError
from largemargin.prototypes.centroids import recomputing

KEPT = 2
"""Passes without graph that are remembered: a clean and a noisy one."""

SEARCHED = 64
"""Nodes of the graph looked at between an output and the head."""

NOTHING = (Seen(torch.empty(0, 0), None, (), {}, (-1,), False), torch.empty(0, 0))
"""Stands for a pass that has not been: compiled code need not be made again after the first."""

_names = count()


class Tap:
    """Hooks on a model that mark its outputs with the head's input."""

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        *,
        features: dict[str, nn.Module] | None = None,
        layers: tuple[nn.Module, ...] = (),
        with_inputs: bool = False,
    ) -> None:
        self.name = f"{PREFIX}{next(_names)}"
        self.model = model
        self.layer = layer
        self.around = ancestors(model, layer)
        self.num_classes = out_features(layer)
        self.features = list(features or ())
        self.layer_count = len(layers)
        self.removed = False
        self.ran = False
        """Whether the head ever ran."""
        self.recent: tuple[tuple[Seen, Tensor], ...] = ()
        """Passes in plain Python, detached."""
        self.last = self.before = NOTHING
        """Passes in compiled code. Code outside may make a new tensor from one of its outputs,
        whose graph is one node: two passes cannot be told apart then unless both are kept."""
        self.held: dict[str, Tensor] = {}
        self.blind = False
        self.inside = False
        self.passes = 0
        """Of the head, inside the model's present forward pass."""
        self.current: tuple[Seen, Tensor] | None = None
        self.handles: list[RemovableHandle] = []
        for name, module in (features or {}).items():
            self._hook(module, _Hold(self, f"features {name}"))
        for index, module in enumerate(layers):
            self._hook(module, _Hold(self, f"layers {index}"))
        hook = _StartHook(self, with_inputs)
        self.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        self.handles.append(layer.register_forward_hook(_HeadHook(self), with_kwargs=True))
        self._hook(model, _FinishHook(self))

    def _hook(self, module: nn.Module, hook: Any) -> None:
        self.handles.append(module.register_forward_hook(hook))

    @property
    def is_fsdp(self) -> bool:
        return any(is_fsdp(module) for module in self.around)

    @property
    def idle(self) -> bool:
        """Hooks have nothing to do: taken off, exporting, or running again in a backward pass."""
        # torch 2.11 answers is_exporting() with True wherever dynamo traces.
        exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        return self.removed or exporting or recomputing()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.removed = True
        self.recent, self.held, self.current = (), {}, None
        self.last = self.before = NOTHING

    def start(self) -> None:
        self.inside, self.passes, self.current = True, 0, None
        self.held, self.blind = {}, False

    def take(self, features: Tensor, logits: Tensor) -> None:
        """Remember what came into the head and mark what went out of it."""
        with_grad = torch.is_grad_enabled()
        blind = self.blind or not with_grad
        layers = tuple(self._held(f"layers {index}") for index in range(self.layer_count))
        own = {name: self._held(f"features {name}") for name in self.features}
        shape = tuple(logits.shape)
        seen = Seen(features, self.held.get("inputs"), layers, own, shape, blind)
        self.held, self.blind, self.ran = {}, False, True
        mark = Mark(seen)
        setattr(logits, self.name, mark)
        if self.inside:
            self.passes += 1
            self.current = (seen, logits)
        if torch.compiler.is_compiling():
            self.before, self.last = self.last, (seen, logits)
            return
        if with_grad:
            node = logits.grad_fn
            if node is not None and node is not features.grad_fn:
                metadata: Any = node.metadata
                metadata[self.name] = seen
            # No graph is kept alive here: it ends with the tensors the caller holds.
            remembered = seen.detached()
        else:
            # Logits collected over an evaluation must not keep all features in memory.
            mark.weak, mark.seen, remembered = weakref.ref(seen), None, seen
        self.recent = (*self.recent[1 - KEPT :], (remembered, logits.detach()))

    def finish(self, outputs: Any) -> None:
        """Mark what the model returns in place of the head's output."""
        self.inside = False
        current, self.current = self.current, None
        if current is None:
            return
        seen, logits = current
        shape = logits.shape
        for tensor in tensors_in(outputs):
            if tensor is not logits and tensor.shape == shape and not hasattr(tensor, self.name):
                mark = Mark(seen, logits, self.passes > 1)
                if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                    mark.weak, mark.seen, mark.logits = weakref.ref(seen), None, None
                setattr(tensor, self.name, mark)

    def _held(self, name: str) -> Tensor:
        held = self.held.get(name)
        if held is None:
            kind, which = name.split(" ")
            given = f"layers[{which}]" if kind == "layers" else "features"
            raise LargeMarginError(
                f"the module given as {given} did not run before the head. Name one that the model "
                "calls on its way to the head."
            )
        return held

    def find(self, outputs: Any, what: str = "outputs") -> tuple[Pass, bool]:
        """The pass that made these outputs, and whether it was read without gradients."""
        if not self.ran:
            self._check_in_place()
            raise LargeMarginError(
                f"no forward pass has gone through the head {type(self.layer).__name__} yet, so "
                f"{what} cannot be its outputs. Call criterion(model(x), labels) with the model "
                "given to attach (a copy of it needs an attach of its own). If that is what you "
                "did, the model never calls this layer: name its head, attach(model, objective, "
                "layer=...)."
            )
        tensors = tensors_in(outputs)
        if not tensors:
            raise LargeMarginError(
                f"{what} must be what model(x) returned: a tensor, or a tuple, list, dict or "
                f"dataclass with one, but {type(outputs).__name__} holds no tensor."
            )
        found = self._by_mark(tensors, what)
        if found is not None:
            return found
        if not torch.compiler.is_compiling():
            for tensor in tensors:
                seen = self._from_graph(tensor)
                if seen is not None:
                    return seen.whole(None), seen.blind
        return self._by_value(tensors, what)

    def _by_mark(self, tensors: list[Tensor], what: str) -> tuple[Pass, bool] | None:
        passes: list[tuple[Pass, bool]] = []
        for tensor in tensors:
            mark = getattr(tensor, self.name, None)
            if not isinstance(mark, Mark):
                continue
            if mark.several:
                raise LargeMarginError(
                    f"the head ran several times to make {what}, so features and outputs do not "
                    "belong together one to one. Let the model return the head's own outputs, and "
                    "pass those of one run."
                )
            seen = mark.found()
            if seen is None:
                raise LargeMarginError(
                    f"the forward pass that made {what} ran without gradients and others came "
                    "after it, so its features are gone. Call the criterion right after model(x)."
                )
            logits = tensor if mark.logits is None and mark.weak is None else mark.logits
            if all(seen.features is not each.features for each, _ in passes):
                passes.append((seen.whole(logits), seen.blind))
        if len(passes) > 1:
            raise LargeMarginError(
                f"{what} hold the results of {len(passes)} runs of the head. Pass those of one; a "
                "noisy pass goes to noisy=..."
            )
        return passes[0] if passes else None

    def _from_graph(self, tensor: Tensor) -> Seen | None:
        """The pass whose head made what this tensor was computed from."""
        compiled = {
            logits.grad_fn: seen
            for seen, logits in (self.before, self.last)
            if logits.requires_grad
        }
        front: list[Any] = [tensor.grad_fn]
        looked = 0
        while front and looked < SEARCHED:
            node: Any = front.pop(0)
            looked += 1
            if node is None:
                continue
            seen = node.metadata.get(self.name) or compiled.get(node)
            if seen is not None:
                # Another shape: not the head's output, but an earlier use of the layer.
                return seen if seen.shape == tuple(tensor.shape) else None
            front.extend(following for following, _ in node.next_functions)
        return None

    def _by_value(self, tensors: list[Tensor], what: str) -> tuple[Pass, bool]:
        """A remembered pass, for outputs without mark and graph, if they can have come from it."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if torch.compiler.is_compiling():
            seen, logits = self.last
            if seen.shape in shapes:
                return seen.whole(logits), seen.blind
        else:
            for seen, logits in (self.last, self.before, *reversed(self.recent)):
                for tensor in tensors:
                    if tensor.grad_fn is None and not marked(tensor) and alike(tensor, logits):
                        return seen.whole(None), seen.blind
        self._check_in_place()
        if not any(shape[-1:] == (self.num_classes,) for shape in shapes):
            raise LargeMarginError(
                f"{what} hold no tensor with {self.num_classes} columns, one per row of the head's "
                f"weight; their shapes are {shapes}. Pass what model(x) returned; if the head is "
                "another layer, name it: attach(model, objective, layer=...)."
            )
        raise LargeMarginError(
            f"{what} were not made by a recent forward pass of the attached model: neither they "
            "nor their graph lead to its head. Call the criterion with what that model returned. A "
            "copy of the model (EMA, deepcopy) needs an attach of its own."
        )

    def _check_in_place(self) -> None:
        if all(module is not self.layer for module in self.model.modules()):
            raise LargeMarginError(
                f"the head this criterion reads, a {type(self.layer).__name__}, is no longer in "
                "the model: it was replaced after attach, by hand or by another attach. Call "
                "attach again."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tap":
        copied = object.__new__(Tap)
        memo[id(self)] = copied
        for name, value in self.__getstate__().items():
            setattr(copied, name, deepcopy(value, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """A copy remembers no passes, and does not take the original's outputs for its own."""
        forgotten: dict[str, Any] = {
            "recent": (),
            "last": NOTHING,
            "before": NOTHING,
            "held": {},
            "current": None,
            "ran": False,
            "inside": False,
        }
        return {**self.__dict__, **forgotten, "name": f"{PREFIX}{next(_names)}"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.name = f"{PREFIX}{next(_names)}"  # names of another process may be taken in this one


class _StartHook:
    """Before the model: forgets an interrupted pass, and lets gradients reach the input.

    The input is the first floating point tensor of the call.
    """

    def __init__(self, tap: Tap, with_inputs: bool) -> None:
        self.tap = tap
        self.with_inputs = with_inputs

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tap = self.tap
        if not tap.idle:
            tap.start()
        if not self.with_inputs or tap.removed or not torch.is_grad_enabled():
            return None
        given: list[Any] = [*args, *kwargs.values()]
        for index, value in enumerate(given):
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value if value.requires_grad else value.detach().requires_grad_()
                given[index] = value
                if not tap.idle:
                    tap.held["inputs"] = value
                named = dict(zip(kwargs, given[len(args) :], strict=True))
                return tuple(given[: len(args)]), named
        raise LargeMarginError(
            "a loss on input gradients needs a floating point input, but the model was called "
            f"with {[type(value).__name__ for value in given]}. For token ids name a layer: "
            "LayerMargin with attach(..., layers=['embeddings'])."
        )


class _Hold:
    """After a named module: its output."""

    def __init__(self, tap: Tap, name: str) -> None:
        self.tap = tap
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.tap.idle:
            return
        self.tap.held[self.name] = tensors_in(output)[0]
        self.tap.blind = self.tap.blind or not torch.is_grad_enabled()


class _HeadHook:
    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not self.tap.idle:
            self.tap.take(args[0] if args else next(iter(kwargs.values())), output)


class _FinishHook:
    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.tap.idle:
            self.tap.finish(output)


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


_run_as_they_are(_StartHook, _Hold, _HeadHook, _FinishHook)
