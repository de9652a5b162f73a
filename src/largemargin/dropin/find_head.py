"""Finding the classification layer of a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from largemargin.dropin.match_outputs import same
from largemargin.dropin.model_outputs import nodes_behind, tensors_in
from largemargin.errors import LargeMarginError
from largemargin.heads.class_head import ClassHead
from largemargin.heads.simplex import SimplexHead

HEADS = (nn.Linear, ClassHead, SimplexHead)
"""What can be a head. Subclasses of these count too."""

NEAR = 16
"""Nodes of the graph looked at between two layers."""


def unwrapped(model: nn.Module) -> tuple[nn.Module, bool]:
    """The module inside DDP and torch.compile wrappers, and whether DDP is among them."""
    in_ddp = False
    while True:
        if isinstance(model, DataParallel):
            raise LargeMarginError(
                "nn.DataParallel runs copies of the model in threads, so one criterion cannot read "
                "them. Use torch.nn.parallel.DistributedDataParallel, or attach to the model "
                "without a wrapper."
            )
        if type(model).__name__ == "FullyShardedDataParallel":
            raise LargeMarginError(
                "FullyShardedDataParallel flattens the head's weight, so that it cannot be read as "
                "prototypes. Use torch.distributed.fsdp.fully_shard (FSDP2), after attach."
            )
        if isinstance(model, DistributedDataParallel):
            model, in_ddp = model.module, True
        elif hasattr(model, "_orig_mod"):
            inner = model._orig_mod
            assert isinstance(inner, nn.Module)
            model = inner
        else:
            return model, in_ddp


def out_features(layer: Any) -> int:
    width: int = getattr(layer, "out_features", None) or layer.num_classes
    return width


def find_layer(model: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """The head by name, or the last linear layer where that is the only likely one."""
    if name is not None:
        return _named_head(model, name)
    layers = _candidates(model)
    if not layers:
        raise LargeMarginError(
            f"{type(model).__name__} has no linear layer to take prototypes from. Give it an "
            "nn.Linear or lm.ClassHead as its last layer; a 1x1 convolution as head has to be "
            "replaced by pooling and a linear layer."
        )
    path, layer = next(reversed(layers.items()))
    rivals = set(_parallel_heads(model, layers, path))
    if rivals:
        likely = [each for each in layers if each in rivals or each == path]
        listed = ", ".join(f"{each!r} ({_widths(layers[each])})" for each in likely)
        raise LargeMarginError(
            f"{type(model).__name__} has several layers that may be its head: {listed}. Say which "
            f"one, {' or '.join(f'layer={each!r}' for each in likely)}: the one whose outputs are "
            "predictions, not those of an auxiliary or a distilled head. For a loss on each, call "
            "attach once for each and add the losses up."
        )
    _refuse_adapted(model, path)
    return path, layer


def _named_head(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    layer = find_module(model, name)
    active = active_copy(layer)
    if active is not None:
        name = next(path for path, module in model.named_modules() if module is active)
        layer = active
    _refuse_adapted(model, f"{name}.base_layer" if "base_layer" in layer._modules else name)
    if isinstance(layer, HEADS):
        return name, layer
    inside = [path for path, module in layer.named_modules() if isinstance(module, HEADS)]
    hint = f" Inside it is {name + '.' + inside[-1]!r}." if inside else ""
    raise LargeMarginError(
        f"layer {name!r} must be an nn.Linear or ClassHead, but it is a "
        f"{type(layer).__name__}.{hint}"
    )


def find_module(model: nn.Module, name: str) -> nn.Module:
    """A module by its dotted name."""
    if not isinstance(name, str):
        own = [path for path, each in model.named_modules() if each is name or path == str(name)]
        raise LargeMarginError(
            f"layers are named, as in model.named_modules(), but {type(name).__name__} was given."
            + (f" Its name is {own[0]!r}." if own else "")
        )
    try:
        return model.get_submodule(name)
    except AttributeError:
        names = [path for path, _ in model.named_modules() if path]
        raise LargeMarginError(
            f"{type(model).__name__} has no layer {name!r}. Closest: {_closest(name, names)}. "
            "Names are those of model.named_modules()."
        ) from None


def returned_before(
    model: nn.Module, head: nn.Module, features: Tensor, logits: Tensor, outputs: Any
) -> str:
    """Why another layer may be the head: its output is returned before the head's, and is none of
    its features. Empty where nothing speaks for it."""
    tensors = tensors_in(outputs)
    position = next((at for at, each in enumerate(tensors) if each is logits), 0)
    before = [each for each in tensors[:position] if each.dim() > 1 and each is not features]
    for tensor in before:
        made = _linear_of(model, tensor)
        if made is None or made[1] is head:
            continue
        if any(node is tensor.grad_fn for node in nodes_behind(features.grad_fn, NEAR)):
            continue
        own = next(path for path, module in model.named_modules() if module is head)
        return (
            f"{type(model).__name__} returns the output of {made[0]!r} ({_widths(made[1])}) before "
            f"that of {own!r} ({_widths(head)}), its last linear layer. Say which one is the head: "
            f"layer={made[0]!r} or layer={own!r}."
        )
    return ""


def _linear_of(model: nn.Module, tensor: Tensor) -> tuple[str, nn.Module] | None:
    """The linear layer whose output a tensor is, with its name."""
    weights = _weights_behind(tensor.grad_fn)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(module.weight is each for each in weights):
            return path, module
    return None


def _weights_behind(node: Any) -> list[Any]:
    """The parameters of the product that a node belongs to."""
    weights: list[Any] = []
    front = [node]
    for _ in range(8):
        node = front.pop(0) if front else None
        name = type(node).__name__
        if name.startswith("AccumulateGrad"):
            weights.append(node.variable)
        elif name.startswith(("Addmm", "Mm", "T", "View", "UnsafeView", "Add", "Reshape")):
            behind = [each for each, _ in node.next_functions if each is not None]
            if name.startswith(("Addmm", "Mm")):  # its weight and bias, not its input
                own = ("AccumulateGrad", "T", "Permute")
                behind = [each for each in behind if type(each).__name__.startswith(own)]
            front += behind
    return weights


def check_plain(path: str, layer: nn.Module) -> None:
    """Refuse a kind of nn.Linear whose outputs are not those of its weight and bias alone.

    A loss on features and class vectors would train something else than the layer computes.
    """
    if any(name in layer._modules for name in ("weight_fake_quant", "activation_post_process")):
        raise LargeMarginError(
            f"layer {path!r} is prepared for quantization ({type(layer).__name__}): it rounds its "
            "weight or outputs, and a loss on the weight would not see that. Keep the head in "
            "floating point: head.qconfig = None before prepare_qat."
        )
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return
    kind = type(layer).__name__
    more = [name for name, _ in layer.named_parameters() if name not in ("weight", "bias")]
    if not more and _is_linear(layer):
        return
    beyond = f" (it has the parameters {', '.join(more)} too)" if more else ""
    raise LargeMarginError(
        f"layer {path!r} is a {kind}, whose outputs are not weight times features plus bias"
        f"{beyond}; the loss would not see the rest. Merge an adapter into the weight, or keep it "
        "to other layers; for a cosine head use lm.ClassHead."
    )


def _is_linear(layer: nn.Linear) -> bool:
    """Whether a layer gives what its weight and bias do; where that cannot be tried, yes."""
    weight = layer.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.is_meta:
        return True
    training = layer.training
    layer.eval()
    try:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randn(4, layer.in_features, generator=generator).to(weight)
            return same(layer(inputs), nn.functional.linear(inputs, weight, layer.bias))
    finally:
        layer.train(training)


def parents_of(model: nn.Module, layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every place a layer is registered at: its parent and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is layer
    ]


def ancestors(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """The modules a layer is inside of, the model and the layer itself among them."""
    return [
        module
        for module in model.modules()
        if module is model or any(each is layer for each in module.modules())
    ]


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by name, without the projections that attention calls by their weight."""
    inside = _adapters(model) | {
        child
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, HEADS) and module not in inside
    }


def active_copy(module: Any) -> nn.Module | None:
    """What runs in place of a layer that PEFT trains as a copy of it (``modules_to_save``)."""
    children = module._modules  # TorchScript's have no ``get``
    if "modules_to_save" not in children or "original_module" not in children:
        return None
    copies, original = children["modules_to_save"], children["original_module"]
    names = () if getattr(module, "disable_adapters", False) else module.active_adapters
    used: nn.Module = next((copies[name] for name in names if name in copies), original)
    return used


def _adapters(model: nn.Module) -> set[nn.Module]:
    """What PEFT has put into a model beside its layers: low-rank factors, copies not in use."""
    found: set[nn.Module] = set()
    for module in model.modules():
        used = active_copy(module)
        if used is None and "base_layer" in module._modules:
            used = module._modules["base_layer"]
        if used is not None:
            found |= {*module.modules()} - {*used.modules()}
    return found


def _refuse_adapted(model: nn.Module, path: str) -> None:
    """A layer with adapters beside it gives more than its weight times the features."""
    parent, _, name = path.rpartition(".")
    if name == "base_layer" or ".lora_" in f".{path}":
        whole = path.split(".lora_")[0] if name != "base_layer" else parent
        raise LargeMarginError(
            f"the head {whole!r} is adapted by PEFT ({type(model.get_submodule(whole)).__name__}), "
            "so that a loss on its weight would not see the adapter. Keep the adapter to other "
            f"layers (target_modules) and train the head whole: modules_to_save="
            f"[{whole.rpartition('.')[2]!r}]."
        )


def _parallel_heads(model: nn.Module, layers: dict[str, nn.Module], path: str) -> Iterator[str]:
    """Layers beside the one at ``path`` that read features of its width and feed no layer.

    Inside an ``nn.Sequential`` layers follow each other; elsewhere two children may be two heads.
    The last linear layer of another child is one if it takes as many features as ours does and
    gives a number that neither ours, nor the layer after it, nor one of its own block takes. In a
    list or dict of modules it is enough that both give the same number.
    """
    names = list(layers)
    parts = path.split(".") if path else []
    for depth in range(len(parts)):
        prefix = ".".join(parts[:depth])
        parent = model.get_submodule(prefix)
        if isinstance(parent, nn.Sequential):
            continue
        listed = isinstance(parent, nn.ModuleList | nn.ModuleDict)
        for name, _ in parent.named_children():
            start = ".".join((*parts[:depth], name))
            inside = [each for each in names if each == start or each.startswith(start + ".")]
            if name != parts[depth] and inside and _rivals(layers, path, inside, listed):
                yield inside[-1]


def _rivals(layers: dict[str, nn.Module], path: str, inside: list[str], listed: bool) -> bool:
    """Whether the last of the layers ``inside`` a child may be a head as well as ours."""
    names, ours, rival = list(layers), layers[path], layers[inside[-1]]
    after = names[names.index(inside[-1]) + 1]
    feeds = {ours.in_features, *(layers[each].in_features for each in (*inside, after))}
    given = out_features(rival)
    alike = rival.in_features == ours.in_features or (listed and given == out_features(ours))
    return rival is not ours and alike and given not in feeds


def _widths(layer: nn.Module) -> str:
    return f"{layer.in_features} -> {out_features(layer)}"


def _closest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    # The end of a name counts too: people write "fc" for "backbone.fc".
    ends = {each.rsplit(".", 1)[-1]: each for each in names}
    near = [ends.get(each, each) for each in get_close_matches(name, [*names, *ends], cutoff=0.4)]
    found = list(dict.fromkeys(near)) or names[-3:]
    return ", ".join(repr(each) for each in found) or "none: it has no submodules"
