"""Reading a model's features while it runs, and knowing which outputs they belong to.

Tensors made by the head, and those the model returns instead of them (a cast, a softmax), carry a
mark that leads to what was read beside them. Several forward passes per step, compiled or not,
therefore cannot be confused. Where the caller makes a new tensor from an output, the autograd graph
leads back to the head. Without mark and graph the last passes are compared by what they predict.

What a forward pass saw, and the marks that lead to it from the tensors it made.

What is called before and after a model and its head, to read them: see ``Tap``.
"""

import weakref
from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from largemargin.dropin.find_head import ancestors, out_features, returned_before
from largemargin.dropin.fsdp import is_fsdp, refuse_tensor_parallel
from largemargin.dropin.match_outputs import Agreement, check_unchanged, chosen_rows, same
from largemargin.dropin.model_outputs import tensors_in
from largemargin.errors import LargeMarginError
from largemargin.heads.centroid_bank import recomputing
from largemargin.ops.shards import is_sharded
from largemargin.tracing import exporting, jit_traces

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


class ForwardRecord:
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

    def detached(self) -> "ForwardRecord":
        layers = tuple(each.detach() for each in self.layers)
        own = {name: each.detach() for name, each in self.own.items()}
        inputs = None if self.inputs is None else self.inputs.detach()
        return ForwardRecord(
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
    current: tuple[ForwardRecord, Tensor] | None = None
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
        seen: ForwardRecord | None,
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
        self.weak: weakref.ref[ForwardRecord] | None = None

    def found(self) -> ForwardRecord | None:
        return self.seen if self.weak is None else self.weak()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


def marked(tensor: Tensor) -> bool:
    """Whether another model's head, or a copy's, marked the tensor."""
    return any(name.startswith(PREFIX) for name in getattr(tensor, "__dict__", ()))


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

    def __init__(self, tap: "FeatureHooks", with_inputs: bool) -> None:
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

    def __init__(self, tap: "FeatureHooks", name: str) -> None:
        self.tap = tap
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.tap.idle or _symbols([output]):
            return
        running = self.tap.running
        running.held[self.name] = tensors_in(output)[0]
        running.blind = running.blind or not torch.is_grad_enabled()


class HeadHook(Hook):
    def __init__(self, tap: "FeatureHooks") -> None:
        self.tap = tap

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        # A layer that took the place of ours has its hooks too, and this one among them.
        if not (self.tap.idle or _symbols([output])) and module is self.tap.layer:
            self.tap.take(args[0] if args else next(iter(kwargs.values())), output)


class FinishHook(Hook):
    def __init__(self, tap: "FeatureHooks") -> None:
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


KEPT = 2
"""Passes without graph that are remembered: a clean and a noisy one."""

SEARCHED = 64
"""Nodes of the graph looked at between an output and the head."""

NOTHING = (ForwardRecord(torch.empty(0, 0), None, (), {}, (-1,), False), torch.empty(0, 0))
"""Stands for a pass that has not been: compiled code need not be made again after the first."""

_names = count()


class FeatureHooks:
    """Hooks on a model that mark its outputs with the head's input."""

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Module,
        *,
        features: dict[str, nn.Module] | None = None,
        layers: tuple[nn.Module, ...] = (),
        with_inputs: bool = False,
        named: bool = True,
    ) -> None:
        self.name = f"{PREFIX}{next(_names)}"
        self.model = model
        self.layer = layer
        self.around = ancestors(model, layer)
        self.num_classes = out_features(layer)
        self.features = list(features or ())
        self.layer_count = len(layers)
        self.removed = False
        self.agreement = Agreement()
        self.named = named
        """Whether the user said which layer is the head."""
        self.doubt = ""
        """Why it may be another one."""
        self.ran = False
        """Whether the head ever ran."""
        self.recent: tuple[tuple[ForwardRecord, Tensor], ...] = ()
        """Passes in plain Python, detached."""
        self.last = self.before = NOTHING
        """Passes in compiled code. Code outside may make a new tensor from one of its outputs,
        whose graph is one node: two passes cannot be told apart then unless both are kept."""
        self.plain = Running()
        self.again = Running()
        """The same for activation checkpointing, which runs code again in a backward pass."""
        self.handles: list[RemovableHandle] = []
        for name, module in (features or {}).items():
            self._hook(module, Hold(self, f"features {name}"))
        for index, module in enumerate(layers):
            self._hook(module, Hold(self, f"layers {index}"))
        hook = StartHook(self, with_inputs)
        self.handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        self.handles.append(layer.register_forward_hook(HeadHook(self), with_kwargs=True))
        self._hook(model, FinishHook(self))

    def _hook(self, module: nn.Module, hook: Any) -> None:
        self.handles.append(module.register_forward_hook(hook))

    @property
    def is_fsdp(self) -> bool:
        return any(is_fsdp(module) for module in self.around)

    @property
    def idle(self) -> bool:
        """Hooks have nothing to do: taken off, exporting, or traced by torch.jit."""
        return self.removed or exporting() or jit_traces()

    @property
    def running(self) -> Running:
        """The pass that the model is in."""
        if not recomputing():
            return self.plain
        if not self.again.ends:
            # A second run stops where nothing more is needed, and never comes to its end.
            self.again.ends = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.again.forget)
        return self.again

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.removed = True
        self.recent = ()
        self.plain.forget()
        self.again.forget()
        self.last = self.before = NOTHING

    def start(self) -> None:
        self.again.forget()
        running = self.running
        if running is self.plain:
            running.forget()
        running.inside = True

    def take(self, features: Tensor, logits: Tensor) -> None:
        """Remember what came into the head and mark what went out of it."""
        refuse_tensor_parallel(features, logits)
        with_grad, again, running = torch.is_grad_enabled(), recomputing(), self.running
        wanted = [f"layers {index}" for index in range(self.layer_count)]
        wanted += [f"features {name}" for name in self.features]
        if again and not all(name in running.held for name in wanted):
            return  # a part of the model is run again, and no criterion with it
        blind = running.blind or not with_grad
        held = [running.read(name) for name in wanted]
        layers = tuple(held[: self.layer_count])
        own = dict(zip(self.features, held[self.layer_count :], strict=True))
        shape = tuple(logits.shape)
        version = head = None
        if not torch.compiler.is_compiling():
            version = None if logits.is_inference() else logits._version
            head = self._parameters()
        seen = ForwardRecord(
            features, running.held.get("inputs"), layers, own, shape, blind, version, head
        )
        running.held, running.blind, self.ran = {}, False, True
        mark = Mark(seen)
        setattr(logits, self.name, mark)
        if running.inside:
            running.passes += 1
            running.current = (seen, logits)
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
        if again:
            seen.logits = logits.detach()
            return
        self.recent = (*self.recent[1 - KEPT :], (remembered, logits.detach()))

    def finish(self, outputs: Any) -> None:
        """Mark what the model returns in place of the head's output."""
        running = self.running
        running.inside = False
        current, running.current = running.current, None
        if current is None:
            return
        seen, logits = current
        shape = logits.shape
        if not (self.named or torch.compiler.is_compiling()):
            self.named = True  # looked at once
            self.doubt = returned_before(self.model, self.layer, seen.features, logits, outputs)
        for tensor in tensors_in(outputs):
            if tensor is not logits and tensor.shape == shape and not hasattr(tensor, self.name):
                mark = Mark(seen, logits, running.passes > 1, made=True)
                if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                    mark.weak, mark.seen, mark.logits = weakref.ref(seen), None, None
                setattr(tensor, self.name, mark)

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
        if self.doubt:
            raise LargeMarginError(self.doubt)
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
                if seen is not None and tensor.shape[-1:] == seen.shape[-1:]:
                    return self._rows(seen, tensor, self._logits_of(seen), what)
        return self._by_value(tensors, what)

    def _rows(
        self, seen: ForwardRecord, tensor: Tensor, logits: Tensor | None, what: str
    ) -> tuple[Pass, bool]:
        """The pass, or those rows of it that the tensor is made of."""
        whole = seen.whole(None)._replace(swapped=self._swapped(seen))
        rows = None if logits is None else self.agreement.rows_of(tensor, logits, what)
        if rows is None:
            return whole, seen.blind
        if seen.inputs is not None or seen.layers:
            raise LargeMarginError(
                f"{what} are a choice of the head's rows, or have another order. Losses on "
                "gradients of inputs or layers need all of them, as the head returned them."
            )
        return whole.chosen(rows, tensor), seen.blind

    def _logits_of(self, seen: ForwardRecord) -> Tensor | None:
        """The head's output of a pass, where it is still remembered."""
        if seen.logits is not None:
            return seen.logits
        for compiled, logits in (self.last, self.before):
            if compiled is seen:
                return logits.detach()
        for remembered, logits in reversed(self.recent):
            if remembered.features.data_ptr() == seen.features.data_ptr():
                return logits
        return None

    def _swapped(self, seen: ForwardRecord) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the pass, where functional_call had put others into the layer."""
        now = self._parameters()
        if seen.head is None or now is None or self.is_fsdp or is_sharded(now[0]):
            return None
        kept = seen.head[0] is now[0] and seen.head[1] is now[1]
        return None if kept else seen.head

    def _parameters(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias that the layer has now; None where the weight is computed."""
        weight = self.layer._parameters.get("weight")
        return None if weight is None else (weight, self.layer._parameters.get("bias"))

    def _by_mark(self, tensors: list[Tensor], what: str) -> tuple[Pass, bool] | None:
        passes: list[tuple[Pass, bool]] = []
        found = [(each, getattr(each, self.name, None)) for each in tensors]
        # The head's own output first: others may only look like it.
        ours = [(each, mark) for each, mark in found if isinstance(mark, Mark)]
        read: list[Tensor] = []
        for tensor, mark in sorted(ours, key=lambda pair: pair[1].made):
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
            if any(seen.features is each for each in read):
                continue
            read.append(seen.features)
            if mark.made:
                reference = self._logits_of(seen) if mark.logits is None else mark.logits
                pair = self._rows(seen, tensor, reference, what)
                if pair[0].logits is None and mark.logits is not None:
                    pair = pair[0]._replace(logits=mark.logits), pair[1]
                passes.append(pair)
            else:
                check_unchanged(tensor, seen.version, what)
                logits = tensor if mark.weak is None else None
                swapped = self._swapped(seen)
                passes.append((seen.whole(logits)._replace(swapped=swapped), seen.blind))
        if len(passes) > 1:
            raise LargeMarginError(
                f"{what} hold the results of {len(passes)} runs of the head. Pass those of one; a "
                "noisy pass goes to noisy=..."
            )
        return passes[0] if passes else None

    def _from_graph(self, tensor: Tensor) -> ForwardRecord | None:
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
                return seen
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
                    if tensor.grad_fn is not None or marked(tensor):
                        continue
                    if same(tensor, logits):
                        return seen.whole(None), seen.blind
                    if tensor.dim() > 1 and tensor.shape[-1:] == logits.shape[-1:]:
                        rows = chosen_rows(tensor, logits)
                        if rows is not None and not (seen.layers or seen.inputs is not None):
                            return seen.whole(None).chosen(rows, tensor), seen.blind
        self._check_in_place()
        if not any(shape[-1:] == (self.num_classes,) for shape in shapes):
            whole = tensors and not any(tensor.is_floating_point() for tensor in tensors)
            raise LargeMarginError(
                f"{what} hold no tensor with {self.num_classes} columns, one per row of the head's "
                f"weight; their shapes are {shapes}. Pass what model(x) returned; if the head is "
                "another layer, name it: attach(model, objective, layer=...)."
                + (" The order is criterion(outputs, labels)." if whole else "")
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "FeatureHooks":
        copied = object.__new__(FeatureHooks)
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
            "plain": Running(),
            "again": Running(),
            "ran": False,
        }
        return {**self.__dict__, **forgotten, "name": f"{PREFIX}{next(_names)}"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.name = f"{PREFIX}{next(_names)}"  # names of another process may be taken in this one
