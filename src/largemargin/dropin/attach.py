"""``attach``: a loss on a model that exists already, in two lines."""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from largemargin.dropin.criterion import Criterion, terms_that_need
from largemargin.dropin.feature_hooks import FeatureHooks
from largemargin.dropin.find_head import (
    ancestors,
    check_plain,
    find_layer,
    find_module,
    parents_of,
    unwrapped,
)
from largemargin.dropin.fsdp import is_fsdp, refuse_tensor_parallel
from largemargin.dropin.saved_heads import keep_form, loading
from largemargin.dropin.training_warnings import Watch, check_ceiling, check_shape_left
from largemargin.dropin.zero_rows import fill_zero_rows
from largemargin.errors import LargeMarginError, MarginWarning, check_choice, check_number
from largemargin.heads.class_head import ClassHead
from largemargin.heads.head_spec import HeadSpec
from largemargin.heads.sharded_class_head import ShardedClassHead
from largemargin.losses import LOSSES
from largemargin.losses.base.classwise import set_accumulation
from largemargin.losses.base.loss import Loss, Weighted
from largemargin.losses.base.objective import Objective
from largemargin.losses.base.schedules import Schedule, preset_schedule
from largemargin.losses.base.terms import matrix_of
from largemargin.ops.shards import is_sharded
from largemargin.ops.similarity import SIMILARITIES

Terms: TypeAlias = Objective | Loss | Weighted
Stepping: TypeAlias = Literal["automatic", "manual"]

HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)
"""Of a module, where torch keeps what users have registered on it."""


def attach(
    model: nn.Module,
    objective: Terms | Callable[[int, int], Terms],
    *,
    layer: str | None = None,
    features: str | Mapping[str, str] | None = None,
    layers: str | Sequence[str] = (),
    similarity: str | None = None,
    schedule: Schedule | Sequence[Schedule] | Literal["preset"] | None = None,
    total_steps: int | None = None,
    stepping: Stepping = "automatic",
    accumulate: int = 1,
    gradient_norms: bool = False,
    warn: bool = True,
) -> Criterion:
    """Train ``model`` with ``objective``: ``criterion(model(x), labels)`` is the loss.

    The model's last linear layer is its head: its input are the features, its weight are the
    prototypes. The weight stays the same parameter, so an optimizer made before still trains it.
    Where the objective works on cosines (CosFace, ArcFace, LM-Softmax, ...) or distances, the layer
    is replaced by a :class:`ClassHead` on the same weight, so that ``model(x)`` predicts with the
    geometry it was trained with; its bias, which such a head does not have, is set aside.
    ``criterion.undo()`` restores the layer. Class vectors that are zero, as in torchvision's vision
    transformers, get random values where the objective has no gradient at zero, with a warning.

    Call it before DDP, ``fully_shard`` and ``torch.compile``; plain DDP and compiled models are
    accepted too.

    Args:
        model: any module with a linear layer, returning logits or a tuple, dict or dataclass.
        objective: a loss, ``weight * loss``, an ``Objective``, or a function
            ``(num_classes, dim) -> objective`` for losses that have to know both, as
            ``lm.Discriminative``.
        layer: name of the head where it is not the last linear layer, as ``"head.fc"``.
        features: name of a module whose output are the features instead of the head's input, or
            such a name for single terms: ``{"center": "layer3"}``.
        layers: names of modules (or one) whose outputs go to a loss on hidden layers
            (``LayerMargin``).
        similarity: of the head; default what the objective asks for, otherwise as it is.
        schedule: schedules of hyper-parameters (:mod:`largemargin.losses.base.schedules`), or
            "preset": the usual ones for these losses over ``total_steps``. Default none, but for an
            objective that was measured with one (:func:`largemargin.preset`): then "preset".
        stepping: "automatic" counts training calls, "manual" waits for ``criterion.step()``.
        accumulate: micro-batches per optimisation step; schedules, centroid banks and the centers
            of ``CenterLoss`` count steps.
        gradient_norms: keep each term's gradient norm on the features in
            ``criterion.gradient_norms``. One extra backward pass to the features per term.
        warn: warn, once, when targets stay beyond 90 degrees, when the head gets gradients but
            never changes, when classes are never seen by a centroid bank, when labels stay far
            below the head's rows, when a margin is wider than this many classes in this dimension
            can have; and of what saving the model loses.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> criterion = attach(model, LOSSES["cosface"](scale=8.0))
        >>> loss = criterion(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 0, 1]))
        >>> loss.dim(), sorted(criterion.terms)
        (0, ['cosface'])
        >>> model[2]
        ClassHead(in_features=8, num_classes=3, similarity='cosine', scale=8.0, bias=False)
    """
    _check_model(model)
    check_choice("stepping", stepping, ("automatic", "manual"))
    check_number("accumulate", accumulate, at_least=1)
    if schedule is None and getattr(objective, "scheduled", False):
        schedule = "preset"
    bare, in_ddp = unwrapped(model)
    path, head, (num_classes, dim) = _head(bare, layer)
    with warnings.catch_warnings():
        if not warn:
            warnings.simplefilter("ignore", MarginWarning)  # of a preset
        objective = objective_from(objective, num_classes, dim)
    named = _named_features(bare, features, objective)
    hidden = _hidden_layers(bare, layers, objective)
    _check_sizes(objective, num_classes, dim, {*named})
    spec = _head_spec(objective, num_classes, similarity)
    schedules = _schedules(schedule, objective, total_steps)
    check_plain(path, head)
    undo: list[Callable[[], None]] = []
    changed = _reshape(bare, path, head, spec, undo, in_ddp=in_ddp)
    with ExitStack() as back:  # what is refused leaves the model as it was
        for restore in undo:
            back.callback(restore)
        _follow_head(objective, head)
        set_accumulation(objective, accumulate)
        if warn:
            check_ceiling(objective, num_classes, dim)
            check_shape_left(objective, head if spec is None else None)
        hooks = FeatureHooks(
            bare,
            changed,
            features=named,
            layers=hidden,
            with_inputs=bool(terms_that_need(objective, "inputs")),
            named=layer is not None,
        )
        back.callback(hooks.remove)
        bias_free = changed is not head and getattr(head, "bias", None) is None
        for forget in keep_form(hooks, bias_free=bias_free, warn=warn):
            back.callback(forget)
            undo.append(forget)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # code compiled before does not know the hooks
        criterion = Criterion(
            objective,
            hooks,
            undo=undo,
            schedules=schedules,
            accumulate=accumulate,
            automatic=stepping == "automatic",
            gradient_norms=gradient_norms,
            watch=Watch() if warn else None,
            owns_head=changed is not head,
        )
        if not loading():  # then the weights are those of a folder
            fill_zero_rows(bare, path, changed, objective, same=in_ddp, warn=warn)
        back.pop_all()
    return criterion


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, Loss | Weighted | Objective):
        raise LargeMarginError(
            f"model must be an nn.Module with a linear layer, but {type(model).__name__} was "
            "given. The order is attach(model, objective)."
        )


def _head(model: nn.Module, layer: str | None) -> tuple[str, nn.Module, tuple[int, int]]:
    """Name of the head, the head, and its numbers of classes and features."""
    path, head = find_layer(model, layer)
    if isinstance(head, ShardedClassHead):
        raise LargeMarginError(
            f"layer {path!r} is a ShardedClassHead, whose logits would be gathered in every "
            "forward pass, which it is there to avoid. Call the loss on the features instead: "
            "loss(backbone(x), head, labels)."
        )
    if not any(map(is_fsdp, ancestors(model, head))):
        refuse_tensor_parallel(getattr(head, "weight", None))
    weight = matrix_of(head)
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise LargeMarginError(
            f"layer {path!r} is lazy and has no weight yet. Run one batch through the model first."
        )
    if weight.is_inference():
        raise LargeMarginError(
            f"the weight of layer {path!r} was made under torch.inference_mode() and cannot be "
            "trained. Build the model outside of it, or train copy.deepcopy(model)."
        )
    if weight.is_complex():
        raise LargeMarginError(
            f"the weight of layer {path!r} is {weight.dtype}, but margins are those of real "
            "numbers. Let the head take real features."
        )
    return path, head, (int(weight.shape[0]), int(weight.shape[-1]))


def _named_features(
    model: nn.Module, features: str | Mapping[str, str] | None, objective: Objective
) -> dict[str, nn.Module]:
    """The modules whose outputs are features, by the term they are for."""
    if features is None:
        return {}
    if not isinstance(features, Mapping):
        features = dict.fromkeys(objective.terms, features)
    for term in features:
        if term not in objective.terms:
            raise LargeMarginError(
                f"features names a module for the term {term!r}, but the objective's terms are "
                f"{list(objective.terms)}."
            )
    return {term: find_module(model, name) for term, name in features.items()}


def _hidden_layers(
    model: nn.Module, layers: str | Sequence[str], objective: Objective
) -> tuple[nn.Module, ...]:
    """The modules whose outputs go to losses on hidden layers."""
    names = [layers] if isinstance(layers, str) else layers
    hidden = tuple(find_module(model, name) for name in names)
    terms = terms_that_need(objective, "layers")
    if terms and not hidden:
        raise LargeMarginError(
            f"the term {terms[0]!r} works on hidden layers; name them: attach(model, objective, "
            "layers=['layer2', 'layer3'])."
        )
    return hidden


def _check_sizes(objective: Objective, num_classes: int, dim: int, own_features: set[str]) -> None:
    """Losses that hold one row per class must have been made for this head."""
    for name, loss in objective.terms.items():
        wanted = {"num_classes": num_classes} | ({} if name in own_features else {"dim": dim})
        for module, what in product(loss.modules(), wanted):
            has = getattr(module, what, None)
            if isinstance(has, int) and has != wanted[what]:
                raise LargeMarginError(
                    f"the term {name!r} was made with {what}={has}, but the head has "
                    f"{num_classes} classes in dimension {dim}. Pass a function and attach "
                    f"fills them in: lambda num_classes, dim: {type(module).__name__}"
                    "(num_classes, dim)."
                )
        for module, what in product(loss.modules(), ("class_counts", "margin")):
            each: Any = getattr(module, what, None)
            one = not isinstance(each, Tensor | Sequence) or getattr(each, "ndim", 1) == 0
            if not one and len(each) != num_classes:
                raise LargeMarginError(
                    f"the term {name!r} was made with {len(each)} {what}, but the head "
                    f"has {num_classes} classes. Give one number per class, in the order of "
                    "the labels."
                )


def _head_spec(objective: Objective, num_classes: int, similarity: str | None) -> HeadSpec | None:
    """How the head has to make its logits; None: as it does."""
    if similarity is None:
        return objective.head_form(num_classes)
    check_choice("similarity", similarity, SIMILARITIES)
    wanted = objective.head_form(num_classes, similarity)
    return wanted or HeadSpec(similarity, bias=similarity == "dot")


def _follow_head(objective: Objective, head: nn.Module) -> None:
    """Bring the losses to the device of the head, and to float64 where it is."""
    weight = head.weight
    assert isinstance(weight, torch.Tensor)
    if weight.device.type != "meta":
        objective.to(weight.device)
    if weight.dtype == torch.float64:
        objective.double()


def _reshape(
    model: nn.Module,
    path: str,
    head: nn.Module,
    spec: HeadSpec | None,
    undo: list[Callable[[], None]],
    *,
    in_ddp: bool,
) -> nn.Module:
    """Make the head predict as the objective trains; the layer that does, maybe a new one."""
    if spec is None:
        return head
    bias = getattr(head, "bias", None)
    loses_bias = bias is not None and not spec.bias
    before = getattr(head, "similarity", "dot"), getattr(head, "scale", 1.0)
    if before == (spec.similarity, spec.scale) and not loses_bias:
        return head
    places = parents_of(model, head)
    _check_reshape(path, head, spec, places, loses_bias_in_ddp=loses_bias and in_ddp)
    if isinstance(head, ClassHead):
        undo.append(_Restyled(head, head.similarity, head.scale, head.bias, head.shaped_by_attach))
        head.similarity, head.scale = spec.similarity, spec.scale
        head.shaped_by_attach = True
        if loses_bias:
            head.bias = None
        return head
    assert isinstance(head, nn.Linear)
    form: Any = {"similarity": spec.similarity, "scale": spec.scale}
    new = ClassHead.from_linear(head, **form, bias=bias is not None and spec.bias)
    new.shaped_by_attach = True
    # The same dicts, so that hooks of the layer go on and their handles still take them off.
    for hooks in HOOKS:
        setattr(new, hooks, getattr(head, hooks))
    for parent, name in places:
        undo.append(_Replaced(parent, name, head, new))
        parent._modules[name] = new
    return new


def _check_reshape(
    path: str,
    head: nn.Module,
    spec: HeadSpec,
    places: list[tuple[nn.Module, str]],
    *,
    loses_bias_in_ddp: bool,
) -> None:
    """Refuse a head that cannot be another one."""
    if not isinstance(head, nn.Linear | ClassHead):
        raise LargeMarginError(
            f"the objective needs a head with similarity={spec.similarity!r}, but {path!r} is a "
            f"{type(head).__name__}, which is always {getattr(head, 'similarity', 'dot')!r}."
        )
    if loses_bias_in_ddp:
        raise LargeMarginError(
            f"the objective trains a head without bias, but DDP already counts on that of "
            f"{path!r}. Call attach before wrapping the model in DistributedDataParallel."
        )
    if is_sharded(head.weight):
        raise LargeMarginError(
            f"the objective needs another head than {path!r} is, but its weight is sharded "
            "already. Call attach before fully_shard."
        )
    if any(getattr(parent, "_orig_mod", None) is head for parent, _ in places):
        raise LargeMarginError(
            f"the objective needs another head than {path!r} is, but that was compiled by itself, "
            "and the compiled code would go on calling it. Call attach before torch.compile."
        )
    if isinstance(head, nn.Linear) and not places:
        raise LargeMarginError(
            f"the objective needs a head with similarity={spec.similarity!r}, but the model is a "
            "bare nn.Linear, which cannot be replaced from outside. Use nn.Sequential(model), or "
            f"ClassHead.from_linear(model, similarity={spec.similarity!r}, scale={spec.scale:g})."
        )


@dataclass
class _Restyled:
    """A head whose form was changed; calling it changes it back. (Data, so that copies work.)"""

    head: ClassHead
    similarity: str
    scale: float
    bias: nn.Parameter | None
    shaped: bool

    def __call__(self) -> None:
        self.head.bias = _beside(self.bias, self.head.weight)
        self.head.similarity, self.head.scale = self.similarity, self.scale
        self.head.shaped_by_attach = self.shaped


@dataclass
class _Replaced:
    """A layer another one stands for; calling it puts it back, with the trained weight."""

    parent: nn.Module
    name: str
    old: nn.Linear
    new: ClassHead

    def __call__(self) -> None:
        if self.parent._modules.get(self.name) is not self.new:
            return  # somebody has put another layer there since
        self.old.bias = _beside(self.old.bias, self.new.weight)  # type: ignore[assignment]
        self.old.weight = self.new.weight  # a copy or a conversion may have made another
        self.old.train(self.new.training)
        self.parent._modules[self.name] = self.old


def _beside(bias: nn.Parameter | None, weight: Tensor) -> nn.Parameter | None:
    """A bias that was set aside, the same parameter, where and what the weight is by now."""
    if is_sharded(weight):
        raise LargeMarginError(
            "the head's weight is sharded, so the layer it came from cannot be put back. Load the "
            "trained weights into an unsharded model and call undo() there."
        )
    if bias is not None:
        bias.data = bias.data.to(device=weight.device, dtype=weight.dtype)
    return bias


def _schedules(
    schedule: Schedule | Sequence[Schedule] | str | None,
    objective: Objective,
    total_steps: int | None,
) -> list[Schedule]:
    if schedule is None:
        return []
    if not isinstance(schedule, str):
        return list(schedule) if isinstance(schedule, Iterable) else [schedule]
    check_choice("schedule", schedule, ("preset",))
    if total_steps is None:
        raise LargeMarginError(
            'schedule="preset" stretches over the training: pass total_steps=epochs * '
            "steps_per_epoch, or schedule=() to go without it."
        )
    return preset_schedule(objective, total_steps)


def objective_from(setting: Any, num_classes: int, dim: int) -> Objective:
    """The objective of a loss, a weighted one, an objective or a function of the head's size."""
    if isinstance(setting, type) and issubclass(setting, nn.Module):
        raise _class_given(setting)
    makes = not isinstance(setting, nn.Module) and callable(setting)
    made = setting(num_classes, dim) if makes else setting
    if isinstance(made, Objective):
        return made
    inner = made.loss if isinstance(made, Weighted) else made
    if isinstance(made, str):
        raise _refusal(repr(made), _written(made))
    if not isinstance(inner, Loss):
        raise _refusal(type(made).__name__, _instead_of(type(made)))
    names = [name for name, kind in LOSSES.items() if kind is type(inner)]
    return Objective(**{names[0] if names else "loss": made})


def _class_given(kind: type) -> LargeMarginError:
    name = kind.__name__
    if not issubclass(kind, Loss):
        return _refusal(f"the class {name}", _instead_of(kind))
    return LargeMarginError(
        f"objective must be a loss, but the class {name} was given. Make one: {name}(...), or pass "
        f"a function that makes one for this head: lambda num_classes, dim: {name}(...)."
    )


def _refusal(what: str, instead: str) -> LargeMarginError:
    return LargeMarginError(
        "objective must be a loss of largemargin, `weight * loss`, an Objective, or a function "
        f"(num_classes, dim) that returns one, but {what} was given.{instead}"
    )


def _written(text: str) -> str:
    """The losses that a text names, as they are made."""
    kinds = [LOSSES.get(part.split("*")[-1].strip()) for part in text.lower().split("+")]
    made = " + ".join(f"lm.{kind.__name__}(...)" for kind in kinds if kind)
    return f" Make it: {made}." if all(kinds) else ""


def _instead_of(kind: type) -> str:
    """What to write for what people try first."""
    if issubclass(kind, nn.CrossEntropyLoss):
        return " torch's cross entropy, with weight and label_smoothing, is lm.CrossEntropy(...)."
    if issubclass(kind, nn.Module):
        return (
            " Add a loss of your own to that of the criterion: criterion(outputs, labels) + "
            "yours(outputs, labels)."
        )
    if issubclass(kind, Iterable):
        return " Losses add up: lm.CosFace() + 0.5 * lm.SampleMargin()."
    return ""
