"""``load``: a saved folder back into a freshly built model."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from largemargin.dropin import Criterion
from largemargin.dropin.find import find_layer, parents_of, unwrapped
from largemargin.errors import LargeMarginError
from largemargin.export.attached import load_criterion_state, rebuild_criterion
from largemargin.export.folder import CRITERION, MODEL, read_config
from largemargin.export.plain import check_whole
from largemargin.export.tensors import read_tensors
from largemargin.losses.terms import matrix_of
from largemargin.prototypes import ClassHead, SimplexHead

SHOWN = 6
"""Names listed in a message before the rest is counted."""


class Loaded(NamedTuple):
    """What a folder held, in place."""

    model: nn.Module
    """The model that was given, with the saved weights and head."""
    criterion: Criterion | None
    config: dict[str, Any] | None
    """Yours, as given to ``save``."""
    class_names: list[str] | None


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    criterion: Criterion | Literal["saved", "none"] = "saved",
    strict: bool = True,
) -> Loaded:
    """Load what :func:`save` wrote into ``model``, a fresh one of the same architecture.

    Its head may be the plain ``nn.Linear`` it was built with: it takes the form that was saved.
    Parameters stay the same objects, so an optimizer made before keeps training them; make it after
    ``load`` where the criterion has parameters of its own. Tensors are read on the CPU and copied
    to where the model is. Nothing in the folder is run as code. If the folder does not fit, the
    model is left as it was.

    Args:
        path: of the folder.
        model: built by you; ``read_config(path)["config"]`` may say how.
        criterion: "saved" attaches the saved objective with its banks, parameters, schedules and
            step count, where one was saved. "none" loads the model alone, for prediction. Or a
            criterion attached to this model already, whose state is loaded: needed for losses and
            schedules that are not this library's.
        strict: every tensor of the model must be in the folder and the other way round. False
            loads those that are in both.
    """
    folder = Path(path)
    saved = read_config(folder)
    bare = unwrapped(model)[0]
    check_whole(bare)
    _check_criterion(criterion, saved, bare)
    state = read_tensors(folder / MODEL)
    undo: list[Callable[[], None]] = []
    attached: Criterion | None = criterion if isinstance(criterion, Criterion) else None
    described = saved["criterion"]
    try:
        head, rebuilt = saved["head"], criterion == "saved" and described is not None
        with_state = rebuilt or attached is not None
        tensors = read_tensors(folder / CRITERION) if with_state else {}
        _check_size(find_layer(bare, head["layer"])[1], head)
        if not (rebuilt and described["replaced_head"]):
            _take_form(bare, head, undo)
        if rebuilt:
            attached = rebuild_criterion(model, described, head, tensors)
            undo.append(attached.undo)
        _check_state(bare, state, strict)
        if attached is not None:
            load_criterion_state(attached, described, tensors)
    except Exception as error:
        for restore in reversed(undo):
            restore()
        if isinstance(error, KeyError | TypeError | AttributeError):
            raise LargeMarginError(
                f"{folder} is damaged: its configuration lacks or misspells something "
                f"({type(error).__name__}: {error})."
            ) from error
        raise
    bare.load_state_dict({**state, **(saved["model_extra_state"] or {})}, strict=strict)
    layer = bare.get_submodule(head["layer"])
    if isinstance(layer, ClassHead):
        layer.similarity, layer.scale = head["similarity"], float(head["scale"])
    if attached is not None:
        attached.train(layer.training)
    return Loaded(model, attached, saved["config"], saved["class_names"])


def _check_criterion(given: object, saved: Mapping[str, Any], model: nn.Module) -> None:
    if isinstance(given, Criterion):
        if saved["criterion"] is None:
            raise LargeMarginError(
                "a criterion was given, but the folder holds a model alone. Leave criterion out."
            )
        if all(module is not given.layer for module in model.modules()):
            raise LargeMarginError(
                "the criterion is attached to another model than the one given. Attach it to this "
                "one."
            )
    elif given not in ("saved", "none"):
        raise LargeMarginError(
            f'criterion must be "saved", "none" or what attach returned, but {given!r} was given.'
        )


def _take_form(model: nn.Module, head: Mapping[str, Any], undo: list[Callable[[], None]]) -> None:
    """Turn the model's plain head into the kind that was saved."""
    layer, kind = model.get_submodule(head["layer"]), head["kind"]
    if kind == "Linear" or isinstance(layer, SimplexHead):
        return
    if isinstance(layer, ClassHead):
        before = layer.similarity, layer.scale

        def restyle() -> None:
            layer.similarity, layer.scale = before

        undo.append(restyle)
        layer.similarity, layer.scale = head["similarity"], float(head["scale"])
        return
    if not isinstance(layer, nn.Linear):
        return
    if kind == "SimplexHead":
        new: nn.Module = SimplexHead(
            layer.in_features,
            layer.out_features,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
        )
    else:
        new = ClassHead.from_linear(
            layer,
            similarity=head["similarity"],
            scale=head["scale"],
            bias=bool(head["bias"]) and layer.bias is not None,
        )
    places = parents_of(model, layer)
    if not places:
        raise LargeMarginError(
            f"the saved head is a {kind}, but the model is a bare nn.Linear, which cannot be "
            f"replaced from outside. Build the model with lm.{kind}."
        )

    def put(module: nn.Module) -> None:
        for parent, name in places:
            parent._modules[name] = module

    undo.append(partial(put, layer))
    put(new.train(layer.training))


def _check_size(layer: nn.Module, head: Mapping[str, Any]) -> None:
    has, wanted = tuple(matrix_of(layer).shape), (head["num_classes"], head["in_features"])
    if has != wanted:
        raise LargeMarginError(
            f"the saved head {head['layer']!r} has {wanted[0]} classes and {wanted[1]} features, "
            f"but the model's has {has[0]} and {has[1]}. Build the model as it was saved."
        )


def _check_state(model: nn.Module, state: dict[str, Tensor], strict: bool) -> None:
    """Compare names and shapes before anything is written."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    problems = []
    if strict:
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        if missing:
            problems.append(f"the folder lacks {_listed(missing)}")
        if unexpected:
            problems.append(f"the model lacks {_listed(unexpected)}")
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    if shapes:
        problems.append(f"the folder has other shapes: {_listed(shapes)}")
    if problems:
        hint = " strict=False loads what is in both." if strict and not shapes else ""
        raise LargeMarginError(
            f"the saved weights do not fit the model: {'; '.join(problems)}. Build the model as it "
            f"was saved.{hint}"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
