"""Running a model with gradients to its inputs, and reading its head and layers on the way.

Running a model and reading what enters its head, any shape of outputs, wrapped or not.

Threads that read one model take turns: its modes and hooks belong to one reader at a time.

Any model as a function from inputs to logits, in evaluation mode.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from largemargin.dropin.find_head import find_layer, find_module, out_features, unwrapped
from largemargin.dropin.model_outputs import named_rows, tensors_in
from largemargin.errors import LargeMarginError, check_labels
from largemargin.heads.head_spec import HeadView
from largemargin.losses.base.terms import matrix_of
from largemargin.measuring.batches import IGNORED, NOTHING, SKIP, call, given_labels
from largemargin.measuring.evaluation_mode import evaluating, model_lock
from largemargin.measuring.ranks import gather
from largemargin.ops.norms import normalize
from largemargin.ops.shards import gathered

INPUT = "input"
"""Stands for the model's input among names of layers."""


def head_view(layer: nn.Module) -> HeadView:
    """Class vectors of a head and how it makes logits, gathered and detached."""
    bias = getattr(layer, "bias", None)
    return HeadView(
        gathered(matrix_of(layer)).detach(),
        None if bias is None else gathered(bias).detach(),
        getattr(layer, "similarity", "dot"),
        float(getattr(layer, "scale", 1.0)),
    )


Numbers: TypeAlias = float | Sequence[float]
Normalization: TypeAlias = tuple[Numbers, Numbers]
"""Mean and standard deviation, one number each or one per channel."""


class Reader(nn.Module):
    """A model whose result is its head's output; what else was read stands beside it.

    Wrappers (DDP, torch.compile) are taken off: gradients with respect to inputs are no step of
    training that they should take part in. With ``normalization``, the mean and standard deviation
    that the loader normalises by, it takes inputs as they were before.

    Use it inside ``with reader.hooked():``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: str | None = None,
        layers: Sequence[str] = (),
        normalization: Normalization | None = None,
    ) -> None:
        super().__init__()
        if isinstance(layers, str):
            raise LargeMarginError(
                f"layer_margins must be a list of names, but {layers!r} was given. Write "
                f"[{layers!r}]."
            )
        self.model, _ = unwrapped(model)
        self.head_name, _ = find_layer(self.model, layer)
        self.names = tuple(name for name in layers if name != INPUT)
        for name in self.names:
            find_module(self.model, name)
        self.mean: Tensor | None = None
        self.std: Tensor | None = None
        if normalization is not None:
            self.mean, self.std = _numbers(normalization)
        self.reading = False
        """Other passes of the model, by other parts of a measurement, are not looked at."""
        self.features: Tensor | None = None
        self.logits: Tensor | None = None
        self.outputs: dict[str, Tensor] = {}

    @property
    def head(self) -> nn.Module:
        return self.model.get_submodule(self.head_name)

    @property
    def num_classes(self) -> int:
        return int(matrix_of(self.head).shape[0])

    @property
    def units(self) -> str:
        """In which units inputs are, for a result to say."""
        if self.std is None:
            return "as the loader gives them"
        return "before normalisation"

    @contextmanager
    def hooked(self) -> Iterator["Reader"]:
        handles: list[RemovableHandle] = []
        try:
            for name in self.names:
                module = find_module(self.model, name)
                handles.append(module.register_forward_hook(_Keep(self, name)))
            handles.append(self.head.register_forward_hook(self._keep_head, with_kwargs=True))
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.features, self.logits, self.outputs = None, None, {}

    def forward(self, inputs: Any) -> Tensor:
        self.features, self.logits, self.outputs = None, None, {}
        self.reading = True
        try:
            call(self.model, _unharmed(self.normalized(inputs)))
        finally:
            self.reading = False
        if self.logits is None or self.features is None:
            raise LargeMarginError(
                f"the model did not call its head {self.head_name!r}. Name the layer that makes "
                "its logits: layer=..."
            )
        if self.logits.dim() != 2:
            raise LargeMarginError(
                "margins and curvature in input space need one row of logits per sample, but the "
                f"head {self.head_name!r} made the shape {tuple(self.logits.shape)}."
            )
        missing = [name for name in self.names if name not in self.outputs]
        if missing:
            raise LargeMarginError(f"the model did not call {missing}. Name layers that it uses.")
        return self.logits

    def backbone(self, inputs: Tensor) -> Tensor:
        """Features in which the head is linear: its input, of length 1 for a cosine head."""
        self(inputs)
        assert self.features is not None
        cosine = getattr(self.head, "similarity", "dot") == "cosine"
        return normalize(self.features) if cosine else self.features

    def linear_head(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the head on those features, up to a shift common to all classes."""
        view = head_view(self.head)
        weight, bias = view.weight, view.bias
        if view.similarity in ("cosine", "cosine_prototypes"):
            weight = normalize(weight)
        elif view.similarity == "euclidean":
            half = -0.5 * weight.square().sum(1)
            bias = half if bias is None else half + bias
        return view.scale * weight, None if bias is None else view.scale * bias

    def raw(self, inputs: Tensor) -> Tensor:
        """Inputs of the loader as they were before normalisation."""
        std, mean = self._per_channel(self.std, inputs), self._per_channel(self.mean, inputs)
        inputs = inputs if std is None else inputs * std
        return inputs if mean is None else inputs + mean

    def normalized(self, inputs: Any) -> Any:
        if not isinstance(inputs, Tensor):
            return inputs
        std, mean = self._per_channel(self.std, inputs), self._per_channel(self.mean, inputs)
        inputs = inputs if mean is None else inputs - mean
        return inputs if std is None else inputs / std

    def _per_channel(self, values: Tensor | None, inputs: Tensor) -> Tensor | None:
        if values is None or values.dim() == 0:
            return None if values is None else values.to(inputs)
        if values.dim() != 1 or inputs.dim() < 2 or len(values) != inputs.shape[1]:
            raise LargeMarginError(
                "normalization must be one mean and one standard deviation, or one for each of the "
                f"channels, dimension 1 of inputs of shape {tuple(inputs.shape)}, but the shape "
                f"{tuple(values.shape)} was given."
            )
        return values.to(inputs).view(1, -1, *[1] * (inputs.dim() - 2))

    def _keep_head(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not self.reading:
            return
        if self.logits is not None:
            raise LargeMarginError(
                f"the model calls its head {self.head_name!r} several times, so it has no one row "
                "of logits per sample."
            )
        self.features = args[0] if args else next(iter(kwargs.values()))
        self.logits = output


class _Keep:
    """After a named layer: its output. What follows gets a copy, since it may write into it."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.reader, self.name = reader, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.reader.reading:
            return None
        if self.name in self.reader.outputs:
            raise LargeMarginError(
                f"the model calls the layer {self.name!r} several times, so that its output is not "
                "one point. Name another layer."
            )
        found = tensors_in(output)
        if not found or not found[0].is_floating_point():
            raise LargeMarginError(
                f"the layer {self.name!r} must give a floating point tensor, but it gives "
                f"{type(output).__name__}."
            )
        kept = found[0]
        if torch.is_grad_enabled() and not kept.requires_grad:
            kept.requires_grad_()  # behind an integer input, with parameters frozen
        self.reader.outputs[self.name] = kept
        return kept.clone() if kept is output else None


def _numbers(normalization: Normalization) -> tuple[Tensor, Tensor]:
    try:
        mean, std = (torch.as_tensor(each, dtype=torch.float64) for each in normalization)
    except (TypeError, ValueError):
        raise LargeMarginError(
            f"normalization must be (mean, std), but {normalization!r} was given."
        ) from None
    if not bool((std > 0).all()):
        raise LargeMarginError(f"standard deviations must be positive, but {std} was given.")
    return mean, std


def _unharmed(inputs: Any) -> Any:
    """Copies of leaves: a model may write into its input, which a leaf does not allow."""
    if isinstance(inputs, dict):
        return {name: _unharmed(each) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_unharmed(each) for each in inputs)
    leaf = isinstance(inputs, Tensor) and inputs.is_leaf and inputs.requires_grad
    return inputs.clone() if leaf else inputs


def need_tensor(inputs: Any, what: str) -> Tensor:
    """The one floating point tensor that a model takes."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return inputs
    given = f"{inputs.dtype} tensor" if isinstance(inputs, Tensor) else type(inputs).__name__
    raise LargeMarginError(
        f"{what} needs a model of one floating point tensor, but the loader gives a {given}. For "
        "token ids measure margins at a layer: layer_margins=['embeddings']."
    )


class Columns:
    """Numbers of each sample, batch by batch: indices, labels and what else is named.

    Samples with an index below 0 are repetitions and left out, as are those labelled -100 and
    those from ``max_samples`` on.
    """

    def __init__(self, num_classes: int, max_samples: int | None) -> None:
        self.num_classes = num_classes
        self.limit = math.inf if max_samples is None else max_samples
        self.parts: dict[str, list[Tensor]] = {}
        self.arrived = self.size = 0

    def choose(
        self, labels: Tensor | None, index: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Which rows of a batch to take, with their labels and indices; None for no row."""
        labels = given_labels(labels)
        if labels.dim() != 1:
            raise LargeMarginError(
                "margins and curvature in input space need one label per sample, but the labels' "
                f"shape is {tuple(labels.shape)}."
            )
        if index is None:
            index = torch.arange(self.arrived, self.arrived + len(labels))
        self.size = len(labels)
        self.arrived += self.size
        index = index.cpu()
        keep = (index >= 0) & (index < self.limit) & (labels != IGNORED).cpu()
        rows = keep.nonzero()[:, 0]
        if len(rows) == 0:
            return None
        here = rows.to(labels.device)
        labels = labels[here]
        check_labels(labels, len(rows), self.num_classes, soft=False, skip=SKIP, validate=True)
        self.add(label=labels.long(), index=index[rows])
        return here, labels.long(), index[rows]

    def add(self, **values: Tensor) -> None:
        for name, each in values.items():
            self.parts.setdefault(name, []).append(each.detach().cpu())

    def joined(self, shared: bool) -> dict[str, Tensor]:
        """The columns, where ``shared`` those of all processes, in the order of sample indices."""
        mine = {name: torch.cat(parts) for name, parts in self.parts.items()}
        everyone = [each for each in (gather(mine) if shared else [mine]) if each]
        if not everyone:
            raise LargeMarginError(NOTHING)
        columns = {name: torch.cat([each[name] for each in everyone]) for name in everyone[0]}
        if shared:
            order = columns["index"].argsort(stable=True)
            columns = {name: each[order] for name, each in columns.items()}
        return columns


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
        with model_lock(self.model):
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
