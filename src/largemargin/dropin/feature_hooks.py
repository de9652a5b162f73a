"""Reading a model's features while it runs, and finding the pass that made given outputs.

Hooks around the model and its head record what went into the head (``ForwardRecord``). A mark on
the head's output, and on tensors that the model returns instead of it (a cast, a softmax), leads
to that record, so several forward passes per step, compiled or not, cannot be confused. Where the
caller makes a new tensor from an output, the autograd graph leads back to the head. Without mark
and graph the last passes are compared by what they predict.
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

from largemargin.dropin.find_head import active_copy, ancestors, out_features, returned_before
from largemargin.dropin.fsdp import is_fsdp, refuse_tensor_parallel
from largemargin.dropin.match_outputs import Agreement, check_unchanged, chosen_rows, same
from largemargin.dropin.model_outputs import nodes_behind, tensors_in
from largemargin.errors import LargeMarginError
from largemargin.ops.shards import is_sharded
from largemargin.tracing import exporting

PREFIX = "_largemargin_pass_"
"""Of the attribute that holds a mark; every attached model has its own."""

KEPT = 2
"""Passes without graph that are remembered: a clean and a noisy one."""

SEARCHED = 64
"""Nodes of the graph looked at between an output and the head."""

_names = count()


class Pass(NamedTuple):
    """What one forward pass through the head saw."""

    features: Tensor
    logits: Tensor | None
    """The head's output; None where only something computed from it is left."""
    inputs: Tensor | None
    layers: tuple[Tensor, ...]
    own: dict[str, Tensor]
    """Outputs of modules that were named as features, by the term they are for."""
    blind: bool = False
    """Something was read while gradients were switched off."""
    untouched: bool = False
    """Whether the logits are what the head gave for these features, with their graph."""
    swapped: tuple[Tensor, Tensor | None] | None = None
    """Weight and bias of the head in that pass, where the layer has others by now."""

    def chosen(self, rows: Tensor, logits: Tensor) -> "Pass":
        """These rows of it, in this order."""

        def of(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, -2)[rows]

        own = {name: of(tensor) for name, tensor in self.own.items()}
        return self._replace(features=of(self.features), logits=logits, own=own)


@dataclass(eq=False)
class ForwardRecord:
    """A pass without the head's output. (That carries this object: it must not be held by it.)"""

    features: Tensor
    inputs: Tensor | None
    layers: tuple[Tensor, ...]
    own: dict[str, Tensor]
    shape: tuple[int, ...]
    """Of the head's output."""
    blind: bool
    version: int | None = None
    """Of the head's output, which counts changes in place; None where that is not followed."""
    head: tuple[Tensor, Tensor | None] | None = None
    """Weight and bias that were used; None where that is not followed."""
    logits: Tensor | None = None
    """The head's output, detached, of a pass that is run again: nobody else remembers it."""

    def whole(
        self,
        logits: Tensor | None,
        untouched: bool = False,
        swapped: tuple[Tensor, Tensor | None] | None = None,
    ) -> Pass:
        seen = self.features, logits, self.inputs, self.layers, self.own, self.blind
        return Pass(*seen, untouched, swapped)

    def detached(self) -> "ForwardRecord":
        inputs = None if self.inputs is None else self.inputs.detach()
        layers = tuple(map(Tensor.detach, self.layers)) if self.layers else ()
        own = {name: each.detach() for name, each in self.own.items()} if self.own else {}
        seen = self.features.detach(), inputs, layers, own
        return ForwardRecord(*seen, self.shape, self.blind, self.version)


NO_PASS = (ForwardRecord(torch.empty(0, 0), None, (), {}, (-1,), False), torch.empty(0, 0))
"""Stands for a pass that has not been: compiled code need not be made again after the first."""


@dataclass(eq=False)
class Mark:
    """On a tensor: where what was read beside it is. Saved or copied, it is an empty dict."""

    record: ForwardRecord | None
    logits: Tensor | None = None
    """The head's output, on tensors made from it."""
    several: bool = False
    """Whether the head ran several times before the tensor was returned."""
    made: bool = False
    """On a tensor that the model returns in place of the head's output."""
    weak: weakref.ref[ForwardRecord] | None = None
    """In place of the record, where the mark must not keep it alive."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


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
            argument = f"layers[{which}]" if kind == "layers" else "features"
            raise LargeMarginError(
                f"the module given as {argument} did not run before the head. Name one that the "
                "model calls on its way to the head."
            )
        return self.held[name]


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
        self.layer = self.original = layer
        self.around = ancestors(model, layer)
        self.num_classes = out_features(layer)
        self.features = list(features or ())
        self.layer_count = len(layers)
        self.wanted = (
            *(f"layers {index}" for index in range(len(layers))),
            *(f"features {term}" for term in self.features),
        )
        """What has to be held when the head runs."""
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
        self.last = self.before = NO_PASS
        """Passes in compiled code. Code outside may make a new tensor from one of its outputs,
        whose graph is one node: two passes cannot be told apart then unless both are kept."""
        self.plain = Running()
        self.again = Running()
        """The same for activation checkpointing, which runs code again in a backward pass."""
        self._kinds: list[type] = []
        self._is_fsdp = False
        self._strangers: set[int] = set()
        self.handles: list[RemovableHandle] = []
        for term, module in (features or {}).items():
            self._hook(module, OutputHook(self, f"features {term}"))
        for index, module in enumerate(layers):
            self._hook(module, OutputHook(self, f"layers {index}"))
        start = StartHook(self, with_inputs)
        self.handles.append(model.register_forward_pre_hook(start, with_kwargs=True))
        self.handles.append(layer.register_forward_hook(HeadHook(self), with_kwargs=True))
        self._hook(model, FinishHook(self))

    def _hook(self, module: nn.Module, hook: Any) -> None:
        self.handles.append(module.register_forward_hook(hook))

    @property
    def is_fsdp(self) -> bool:
        """Whether ``fully_shard`` was called on the head or a module around it."""
        if torch.compiler.is_compiling():
            return any(map(is_fsdp, self.around))
        kinds = [*map(type, self.around)]  # fully_shard changes the class of a module
        if kinds != self._kinds:
            self._kinds, self._is_fsdp = kinds, any(map(is_fsdp, self.around))
        return self._is_fsdp

    def ignores(self, value: Any) -> bool:
        """Hooks have nothing to do: taken off, exporting, or traced by torch.jit or torch.fx."""
        if torch.compiler.is_compiling():
            return self.removed or exporting()
        return self.removed or torch._C._is_tracing() or isinstance(value, torch.fx.Proxy)

    @property
    def running(self) -> Running:
        """The pass that the model is in."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return self.plain  # not ``recomputing``
        if not self.again.ends:
            # A second run stops where nothing more is needed, and never comes to its end.
            self.again.ends = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.again.forget)
        return self.again

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.removed, self.recent = [], True, ()
        self.plain.forget()
        self.again.forget()
        self.last = self.before = NO_PASS

    def follow(self, module: nn.Module | None = None) -> nn.Module:
        """The head, which PEFT may have made a copy of since; ``module`` runs with our hooks."""
        if module is None or id(module) not in self._strangers:
            for each in self.model.modules():
                copy = active_copy(each)
                if copy is not None and each.original_module in (self.layer, self.original):
                    self.layer, self.around = copy, ancestors(self.model, copy)
            if module is not None and module is not self.layer:
                self._strangers.add(id(module))
        return self.layer

    def head_ran(self, features: Tensor, logits: Tensor) -> None:
        """Remember what came into the head and mark what went out of it."""
        if type(features) is not Tensor or type(logits) is not Tensor:
            refuse_tensor_parallel(features, logits)
        running = self.running
        again = running is self.again
        if again and not set(self.wanted) <= running.held.keys():
            return  # a part of the model is run again, and no criterion with it
        record = self._record(features, logits, running)
        running.held, running.blind, self.ran = {}, False, True
        mark = Mark(record)
        setattr(logits, self.name, mark)
        if running.inside:
            running.passes += 1
            running.current = (record, logits)
        if torch.compiler.is_compiling():
            self.before, self.last = self.last, (record, logits)
        else:
            self._remember(record, mark, logits, again)

    def _record(self, features: Tensor, logits: Tensor, running: Running) -> ForwardRecord:
        held = tuple(map(running.read, self.wanted)) if self.wanted else ()
        inputs, layers = running.held.get("inputs"), held[: self.layer_count]
        own = dict(zip(self.features, held[self.layer_count :], strict=True)) if held else {}
        blind = running.blind or not torch.is_grad_enabled()
        record = ForwardRecord(features, inputs, layers, own, tuple(logits.shape), blind)
        if not torch.compiler.is_compiling():
            record.version = None if logits.is_inference() else logits._version
            parameters = self.layer._parameters
            weight = parameters.get("weight")  # None where it is computed
            record.head = None if weight is None else (weight, parameters.get("bias"))
        return record

    def _remember(self, record: ForwardRecord, mark: Mark, logits: Tensor, again: bool) -> None:
        """Keep a pass in plain Python for outputs that have lost their mark."""
        if torch.is_grad_enabled():
            node = logits.grad_fn
            if node is not None and node is not record.features.grad_fn:
                metadata: Any = node.metadata
                metadata[self.name] = record
            # No graph is kept alive here: it ends with the tensors the caller holds.
            remembered = record if not record.features.requires_grad else record.detached()
        else:
            # Logits collected over an evaluation must not keep all features in memory.
            mark.weak, mark.record, remembered = weakref.ref(record), None, record
        if again:
            record.logits = logits.detach()
        else:
            self.recent = (*self.recent[1 - KEPT :], (remembered, logits.detach()))

    def mark(self, outputs: Any, record: ForwardRecord, logits: Tensor, several: bool) -> None:
        """Mark what the model returns in place of the head's output."""
        shape = logits.shape
        if not (self.named or torch.compiler.is_compiling()):
            self.named = True  # looked at once
            self.doubt = returned_before(self.model, self.layer, record.features, logits, outputs)
        for tensor in tensors_in(outputs):
            if tensor is not logits and tensor.shape == shape and not hasattr(tensor, self.name):
                mark = Mark(record, logits, several=several, made=True)
                if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                    mark.weak, mark.record, mark.logits = weakref.ref(record), None, None
                setattr(tensor, self.name, mark)

    def find(self, outputs: Any, what: str = "outputs") -> Pass:
        """The pass that made these outputs."""
        if type(outputs) is Tensor and not torch.compiler.is_compiling():
            record = self._own_record(outputs)
            if record is not None:
                return self._of_head(outputs, record, what)
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
        if found is None and not torch.compiler.is_compiling():
            found = self._by_graph(tensors, what)
        return self._by_value(tensors, what) if found is None else found

    def usual_record(self, outputs: Tensor) -> ForwardRecord | None:
        """The pass that made outputs which are the head's own, untouched, in ordinary training."""
        record = self._own_record(outputs)
        if record is None or record.version != outputs._version or record.head is None:
            return None
        if self.removed or record.blind or record.inputs is not None or record.own:
            return None
        weight, parameters = record.head[0], self.layer._parameters
        if weight is not parameters.get("weight") or record.head[1] is not parameters.get("bias"):
            return None
        plain = type(weight) is nn.Parameter and weight.dim() == len(record.shape) == 2
        return record if plain else None

    def _own_record(self, outputs: Tensor) -> ForwardRecord | None:
        """The pass of outputs that are the head's own, of one run and with gradients."""
        mark = outputs.__dict__.get(self.name)
        if self.doubt or type(mark) is not Mark or mark.made or mark.several:
            return None
        return mark.record

    def _by_mark(self, tensors: list[Tensor], what: str) -> Pass | None:
        own: list[tuple[Tensor, Mark]] = []
        made: list[tuple[Tensor, Mark]] = []
        for tensor in tensors:
            mark = getattr(tensor, self.name, None)
            if isinstance(mark, Mark):
                (made if mark.made else own).append((tensor, mark))
        passes: list[Pass] = []
        read: list[Tensor] = []
        for tensor, mark in (*own, *made):  # others may only look like the head's own output
            record = self._record_of(mark, what)
            if read and any(record.features is features for features in read):
                continue
            read.append(record.features)
            if mark.made:
                logits = self._logits_of(record) if mark.logits is None else mark.logits
                found = self._rows(record, tensor, logits, what)
                passes.append(
                    found if found.logits is not None else found._replace(logits=mark.logits)
                )
            else:
                passes.append(self._of_head(tensor, record, what, kept=mark.weak is None))
        if len(passes) > 1:
            raise LargeMarginError(
                f"{what} hold the results of {len(passes)} runs of the head. Pass those of one; a "
                "noisy pass goes to noisy=..."
            )
        return passes[0] if passes else None

    def _of_head(
        self, logits: Tensor, record: ForwardRecord, what: str, *, kept: bool = True
    ) -> Pass:
        """The pass whose head returned just these logits."""
        if record.version is not None and logits._version != record.version:
            check_unchanged(logits, record.version, what)
        swapped, used, now = None, record.head, self.layer._parameters
        if used is not None and not (used[0] is now.get("weight") and used[1] is now.get("bias")):
            swapped = self._swapped(record)
        return record.whole(logits if kept else None, kept, swapped)

    def _record_of(self, mark: Mark, what: str) -> ForwardRecord:
        if mark.several:
            raise LargeMarginError(
                f"the head ran several times to make {what}, so features and outputs do not "
                "belong together one to one. Let the model return the head's own outputs, and "
                "pass those of one run."
            )
        record = mark.record if mark.weak is None else mark.weak()
        if record is None:
            raise LargeMarginError(
                f"the forward pass that made {what} ran without gradients and others came "
                "after it, so its features are gone. Call the criterion right after model(x)."
            )
        return record

    def _by_graph(self, tensors: list[Tensor], what: str) -> Pass | None:
        for tensor in tensors:
            record = self._behind(tensor)
            if record is not None and tensor.shape[-1:] == record.shape[-1:]:
                return self._rows(record, tensor, self._logits_of(record), what)
        return None

    def _behind(self, tensor: Tensor) -> ForwardRecord | None:
        """The pass whose head made what this tensor was computed from."""
        compiled = {logits.grad_fn: record for record, logits in (self.before, self.last)}
        for node in nodes_behind(tensor.grad_fn, SEARCHED):
            record: ForwardRecord | None = node.metadata.get(self.name) or compiled.get(node)
            if record is not None:
                return record
        return None

    def _rows(
        self, record: ForwardRecord, tensor: Tensor, logits: Tensor | None, what: str
    ) -> Pass:
        """The pass, or those rows of it that the tensor is made of."""
        whole = record.whole(None, swapped=self._swapped(record))
        rows = None if logits is None else self.agreement.rows_of(tensor, logits, what)
        if rows is None:
            return whole
        if record.inputs is not None or record.layers:
            raise LargeMarginError(
                f"{what} are a choice of the head's rows, or have another order. Losses on "
                "gradients of inputs or layers need all of them, as the head returned them."
            )
        return whole.chosen(rows, tensor)

    def _logits_of(self, record: ForwardRecord) -> Tensor | None:
        """The head's output of a pass, where it is still remembered."""
        if record.logits is not None:
            return record.logits
        for compiled, logits in (self.last, self.before):
            if compiled is record:
                return logits.detach()
        for remembered, logits in reversed(self.recent):
            if remembered.features.data_ptr() == record.features.data_ptr():
                return logits
        return None

    def _swapped(self, record: ForwardRecord) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the pass, where functional_call had put others into the layer."""
        if record.head is None:
            return None
        now = self.layer._parameters
        weight = now.get("weight")
        if weight is None or (record.head[0] is weight and record.head[1] is now.get("bias")):
            return None
        return None if self.is_fsdp or is_sharded(weight) else record.head

    def _by_value(self, tensors: list[Tensor], what: str) -> Pass:
        """A remembered pass, for outputs without mark and graph, if they can have come from it."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if torch.compiler.is_compiling():
            record, logits = self.last
            if record.shape in shapes:
                return record.whole(logits)
        else:
            found = self._equal(tensors)
            if found is not None:
                return found
        self._check_in_place()
        if not any(shape[-1:] == (self.num_classes,) for shape in shapes):
            no_numbers = not any(tensor.is_floating_point() for tensor in tensors)
            raise LargeMarginError(
                f"{what} hold no tensor with {self.num_classes} columns, one per row of the head's "
                f"weight; their shapes are {shapes}. Pass what model(x) returned; if the head is "
                "another layer, name it: attach(model, objective, layer=...)."
                + (" The order is criterion(outputs, labels)." if no_numbers else "")
            )
        raise LargeMarginError(
            f"{what} were not made by a recent forward pass of the attached model: neither they "
            "nor their graph lead to its head. Call the criterion with what that model returned. A "
            "copy of the model (EMA, deepcopy) needs an attach of its own."
        )

    def _equal(self, tensors: list[Tensor]) -> Pass | None:
        """A remembered pass whose logits, or some rows of them, one of the tensors holds."""
        for record, logits in (self.last, self.before, *reversed(self.recent)):
            for tensor in tensors:
                if tensor.grad_fn is not None or marked(tensor):
                    continue
                if same(tensor, logits):
                    return record.whole(None)
                if tensor.dim() > 1 and tensor.shape[-1:] == logits.shape[-1:]:
                    rows = chosen_rows(tensor, logits)
                    if rows is not None and not record.layers and record.inputs is None:
                        return record.whole(None).chosen(rows, tensor)
        return None

    def _check_in_place(self) -> None:
        if all(module is not self.layer for module in self.model.modules()):
            raise LargeMarginError(
                f"the head this criterion reads, a {type(self.layer).__name__}, is no longer in "
                "the model: it was replaced after attach, by hand or by another attach. Call "
                "attach again."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "FeatureHooks":
        if id(self.model) not in memo and id(self.layer) in memo:
            return self  # a copy of the head alone, as PEFT makes one: not of the whole model
        copied = object.__new__(FeatureHooks)
        memo[id(self)] = copied
        for name, value in self.__getstate__().items():
            setattr(copied, name, deepcopy(value, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """A copy remembers no passes, and does not take the original's outputs for its own."""
        forgotten: dict[str, Any] = {
            "recent": (),
            "last": NO_PASS,
            "before": NO_PASS,
            "plain": Running(),
            "again": Running(),
            "ran": False,
            "_kinds": [],  # classes that fully_shard makes cannot be saved
        }
        return {**self.__dict__, **forgotten, "name": f"{PREFIX}{next(_names)}"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.name = f"{PREFIX}{next(_names)}"  # names of another process may be taken in this one


def marked(tensor: Tensor) -> bool:
    """Whether another model's head, or a copy's, marked the tensor."""
    return any(name.startswith(PREFIX) for name in getattr(tensor, "__dict__", ()))


@dataclass(eq=False, repr=False)
class Hook:
    """What torch calls around a module, on behalf of ``owner``."""

    owner: FeatureHooks

    @property
    def __name__(self) -> str:
        # torch.jit.script, which cannot compile a hook, asks for its name.
        raise AttributeError(
            "torch.jit.script cannot compile a model with an attached loss. Take it off first with "
            "criterion.undo(), or use torch.jit.trace, torch.export or "
            "largemargin.export.to_exported_program, which leave the loss out."
        )


@dataclass(eq=False, repr=False)
class StartHook(Hook):
    """Before the model: forgets an interrupted pass, and lets gradients reach the input.

    The input is the first floating point tensor of the call.
    """

    with_inputs: bool

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        owner = self.owner
        values: list[Any] = [*args, *kwargs.values()]
        if owner.ignores(values[0] if values else None):
            return None
        if owner.again.ends:
            owner.again.forget()
        running = owner.running
        if running is owner.plain:
            running.forget()  # an interrupted pass
        running.inside = True
        if not self.with_inputs or not torch.is_grad_enabled():
            return None
        for index, value in enumerate(values):
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value if value.requires_grad else value.detach().requires_grad_()
                values[index] = value
                running.held["inputs"] = value
                named = dict(zip(kwargs, values[len(args) :], strict=True))
                return tuple(values[: len(args)]), named
        raise LargeMarginError(
            "a loss on input gradients needs a floating point input, but the model was called "
            f"with {[type(value).__name__ for value in values]}. For token ids name a layer: "
            "LayerMargin with attach(..., layers=['embeddings'])."
        )


@dataclass(eq=False, repr=False)
class OutputHook(Hook):
    """After a named module: holds its output."""

    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.owner.ignores(output):
            return
        running = self.owner.running
        running.held[self.name] = tensors_in(output)[0]
        running.blind = running.blind or not torch.is_grad_enabled()


class HeadHook(Hook):
    """After the head: records the pass."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # A layer that took the place of ours has its hooks too, and this one among them, maybe
        # without the named arguments that it asked for.
        output = rest[-1]
        if self.owner.ignores(output):
            return
        if module is self.owner.layer or module is self.owner.follow(module):
            self.owner.head_ran(args[0] if args else next(iter(rest[0].values())), output)


class FinishHook(Hook):
    """After the model: marks what it returns."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        owner = self.owner
        if owner.ignores(output):
            return
        running = owner.running
        running.inside = False
        ran, running.current = running.current, None
        if ran is not None and not (output is ran[1] and owner.named):
            owner.mark(output, *ran, several=running.passes > 1)


def _keep_out_of_dynamo(*kinds: type) -> None:
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


_keep_out_of_dynamo(StartHook, OutputHook, HeadHook, FinishHook)
