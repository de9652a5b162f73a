"""T_alpha on models: larger features and margins without another decision (LMD Proposition 4.4)."""

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from largemargin.dropin.find_head import find_layer, find_module, unwrapped
from largemargin.errors import LargeMarginError, check_number
from largemargin.geometry.dispersion import rescale_network
from largemargin.geometry.input_gradients import evaluation
from largemargin.measuring.probe import Probe

AFFINE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm),
)
"""Layers whose output is multiplied by a number when their weight and bias are."""

HOMOGENEOUS = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Identity, nn.Flatten, nn.Unflatten),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
"""Modules that commute with a positive number."""

FUNCTIONS: set[Any] = {
    *(torch.relu, F.relu, F.leaky_relu, torch.flatten, torch.squeeze, torch.unsqueeze),
    *(torch.mean, torch.sum, torch.amax, torch.reshape, F.dropout, operator.getitem),
    *(F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d, torch.transpose, torch.permute),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
}
SUMS: set[Any] = {operator.add, operator.iadd, torch.add}
METHODS = {
    *("relu", "relu_", "flatten", "view", "reshape", "squeeze", "unsqueeze", "mean", "sum"),
    *("amax", "contiguous", "permute", "transpose"),
}


def rescale_model(
    model: nn.Module,
    alpha: float,
    *,
    layer: str | None = None,
    features_layer: str | None = None,
    inputs: Tensor | None = None,
) -> nn.Module:
    r"""A copy of a model under :math:`T_\alpha` (LMD Proposition 4.4, NGY-P4.4).

    Weight and bias of the layer that produces the features, and the bias of the head, are
    multiplied by :math:`\alpha > 0`. Features, logits, margins and dispersions are then multiplied
    by it too. Predictions stay; probabilities and the softmax loss do not (erratum N10). So
    neither a large margin nor a small dispersion means anything by itself, only their ratio.

    Args:
        model: features must come from one linear, convolution or normalisation layer, followed by
            nothing but ReLU, pooling and reshaping.
        alpha: :math:`\alpha`.
        layer: name of the head; default the last linear layer.
        features_layer: name of the layer that produces the features; default: found by tracing
            the model. Named, it is checked by tracing where the model can be traced.
        inputs: a batch on which the copy is compared with the model; needed for a model that
            cannot be traced, to know that the features do scale.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> bool((rescale_model(model, 2.0)[2].bias == 2 * model[2].bias).all())
        True
    """
    check_number("alpha", alpha, above=0, hint="A ReLU layer commutes with positive factors only.")
    bare, _ = unwrapped(model)
    head_name, head = find_layer(bare, layer)
    if getattr(head, "similarity", "dot") == "euclidean":
        raise LargeMarginError(
            "a Euclidean head decides by distances to class vectors that stay where they are, so "
            "predictions would change."
        )
    name = _features_layer(bare, head_name, features_layer, checked=inputs is not None)
    changed = copy.deepcopy(bare)
    _scale(changed, name, head_name, alpha)
    if inputs is not None:
        _compare(bare, changed, layer, inputs, alpha, name)
    return changed


def _features_layer(model: nn.Module, head_name: str, given: str | None, *, checked: bool) -> str:
    """The layer that produces the features: found, or given and not contradicted by tracing."""
    found, trouble = _produced_by(model, head_name)
    if given is None:
        if found is None:
            raise LargeMarginError(
                f"the layer that produces the features was not found: {trouble}. Name it, with a "
                "batch to check it on: features_layer=..., inputs=..."
            )
        return found
    find_module(model, given)
    if found is not None and found != given:
        raise LargeMarginError(
            f"features_layer={given!r} does not produce the features: {found!r} comes after it "
            "and before the head."
        )
    if found is None and not checked:
        raise LargeMarginError(
            f"whether the features scale with {given!r} is not known: {trouble}. Pass a batch to "
            "check it on: inputs=..."
        )
    return given


def _produced_by(model: nn.Module, head_name: str) -> tuple[str | None, str]:
    """The layer whose output becomes the features, by tracing back from the head; or why not."""
    head = model.get_submodule(head_name)
    if head is model:
        return None, "no layer comes before the head"
    try:
        graph = _Tracer(head).trace(model)
    except Exception as error:  # tracing runs the model's code on stand-ins: anything can happen
        return None, f"the model cannot be traced ({type(error).__name__})"
    calls = _calls(graph, head_name)
    if len(calls) != 1:
        return None, f"the model calls its head {len(calls)} times"
    features = calls[0].args[0] if calls[0].args else next(iter(calls[0].kwargs.values()))
    for node in _backwards(features):
        if node.op == "call_module" and isinstance(_module(model, node), AFFINE):
            uses = len(_calls(graph, str(node.target)))
            if uses > 1:
                return None, f"the model calls {node.target!r} {uses} times"
            return str(node.target), ""
        trouble = _not_homogeneous(model, node)
        if trouble:
            return None, trouble
    return None, "no layer comes before the head"


def _not_homogeneous(model: nn.Module, node: fx.Node) -> str:
    """Why a step before the head does not commute with a factor; nothing where it does."""
    if node.op == "call_module":
        module = _module(model, node)
        if isinstance(module, HOMOGENEOUS):
            return ""
        kind = type(module).__name__
        return f"{kind} {str(node.target)!r} before the head does not commute with a factor"
    if node.op == "call_function" and node.target in SUMS:
        return "the features are a sum of several layers' outputs"
    known = {"call_function": FUNCTIONS, "call_method": METHODS}
    if node.target in known.get(node.op, ()):
        return ""
    return f"{node.name!r} before the head does not commute with a factor"


def _calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_module" and node.target == name]


def _module(model: nn.Module, node: fx.Node) -> nn.Module:
    return model.get_submodule(str(node.target))


def _backwards(node: Any) -> Iterator[fx.Node]:
    while isinstance(node, fx.Node) and node.op != "placeholder":
        yield node
        node = node.args[0] if node.args else None


class _Tracer(fx.Tracer):
    """Leaves the head and every module of torch whole."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is self.head or super().is_leaf_module(m, module_qualified_name)


def _scale(changed: nn.Module, name: str, head_name: str, alpha: float) -> None:
    source, head = changed.get_submodule(name), changed.get_submodule(head_name)
    if not isinstance(source, AFFINE) or source.weight is None:
        raise LargeMarginError(
            f"layer {name!r} must be a linear, convolution or normalisation layer with a weight, "
            f"but it is {source}."
        )
    for module, its in ((source, name), (head, head_name)):
        if is_parametrized(module):
            raise LargeMarginError(
                f"layer {its!r} is parametrized, so that its weight cannot be multiplied. Remove "
                "the parametrization first: torch.nn.utils.parametrize.remove_parametrizations."
            )
    bias = getattr(head, "bias", None)
    scaled = [p for p in (*source.parameters(), bias) if p is not None]
    _check_unshared(changed, (source, head), scaled, name)
    new = rescale_network(source.weight, source.bias, bias, factor=alpha)
    with torch.no_grad():
        for parameter, value in (
            (source.weight, new.weight),
            (source.bias, new.bias),
            (bias, new.head_bias),
        ):
            if parameter is not None and value is not None:
                parameter.copy_(value)


def _check_unshared(
    model: nn.Module, owners: tuple[nn.Module, ...], scaled: list[Tensor], name: str
) -> None:
    own = {id(parameter) for parameter in scaled}
    for place, module in model.named_modules():
        if any(module is owner for owner in owners):
            continue
        shared = [each for each, p in module.named_parameters(recurse=False) if id(p) in own]
        if shared:
            raise LargeMarginError(
                f"layer {place!r} shares its {shared[0]} with {name!r}: scaling one would change "
                "the other."
            )


def _compare(
    model: nn.Module, changed: nn.Module, layer: str | None, inputs: Tensor, alpha: float, name: str
) -> None:
    found = []
    for each in (model, changed):
        with evaluation(each, inputs), torch.no_grad():
            found.append(Probe(each, layer=layer).read(inputs).features)
    size = float(found[0].abs().max())
    close = 1e-4 if found[0].dtype == torch.float32 else 1e-9
    if not torch.allclose(alpha * found[0], found[1], rtol=close, atol=close * alpha * size):
        raise LargeMarginError(
            f"the features do not scale with layer {name!r}: something between it and the head "
            "does not commute with a factor (a normalisation, a sum with a shortcut, a sigmoid). "
            "Features must come from one layer, followed by nothing but ReLU, pooling and "
            "reshaping."
        )
