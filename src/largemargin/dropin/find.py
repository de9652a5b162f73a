"""Finding the classification layer of a model."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from largemargin.errors import LargeMarginError
from largemargin.prototypes import ClassHead, SimplexHead

HEADS = (nn.Linear, ClassHead, SimplexHead)
"""What can be a head. Subclasses of these count too."""


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


def out_features(layer: nn.Module) -> int:
    width = getattr(layer, "out_features", None) or getattr(layer, "num_classes", None)
    assert isinstance(width, int)
    return width


def find_layer(model: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """The head by name, or the last linear layer where that is the only likely one."""
    if name is not None:
        return name, _named(model, name)
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
            f"one: pass layer={path!r}."
        )
    return path, layer


def find_module(model: nn.Module, name: str) -> nn.Module:
    """A module by its dotted name."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        names = [path for path, _ in model.named_modules() if path]
        close = _closest(name, names)
        raise LargeMarginError(
            f"{type(model).__name__} has no layer {name!r}. Closest: {close}. Names are those of "
            "model.named_modules()."
        ) from None


def parents_of(model: nn.Module, layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every place a layer is registered at: its parent and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is layer
    ]


def _named(model: nn.Module, name: str) -> nn.Module:
    layer = find_module(model, name)
    if isinstance(layer, HEADS):
        return layer
    inside = [path for path, module in layer.named_modules() if isinstance(module, HEADS)]
    hint = f" Inside it is {name + '.' + inside[-1]!r}." if inside else ""
    raise LargeMarginError(
        f"layer {name!r} must be an nn.Linear or ClassHead, but it is a {type(layer).__name__}."
        f"{hint}"
    )


def ancestors(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """The modules a layer is inside of, the model and the layer itself among them."""
    return [
        module
        for module in model.modules()
        if module is model or any(each is layer for each in module.modules())
    ]


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by name, without the projections that attention calls by their weight."""
    inside = {
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


def _parallel_heads(model: nn.Module, layers: dict[str, nn.Module], path: str) -> Iterator[str]:
    """Layers beside the one at ``path`` that read features of its width and feed no layer.

    Inside an ``nn.Sequential`` layers follow each other; elsewhere two children may be two heads.
    The last linear layer of another child is one if it takes as many features as ours does and
    gives a number that neither ours, nor the layer after it, nor one of its own block takes. In a
    list or dict of modules it is enough that both give the same number.
    """
    ours = layers[path]
    width = _in_features(ours)
    names = list(layers)
    parts = path.split(".") if path else []
    for depth in range(len(parts)):
        prefix = ".".join(parts[:depth])
        parent = model.get_submodule(prefix)
        if isinstance(parent, nn.Sequential):
            continue
        for name, _ in parent.named_children():
            start = ".".join((*parts[:depth], name))
            inside = [each for each in names if each == start or each.startswith(start + ".")]
            if name == parts[depth] or not inside:
                continue
            rival = layers[inside[-1]]
            after = names[names.index(inside[-1]) + 1]
            feeds = {width, *(_in_features(layers[each]) for each in (*inside, after))}
            listed = isinstance(parent, nn.ModuleList | nn.ModuleDict)
            alike = _in_features(rival) == width or (
                listed and out_features(rival) == out_features(ours)
            )
            if rival is not ours and alike and out_features(rival) not in feeds:
                yield inside[-1]


def _in_features(layer: nn.Module) -> int:
    width = layer.in_features
    assert isinstance(width, int)
    return width


def _widths(layer: nn.Module) -> str:
    return f"{_in_features(layer)} -> {out_features(layer)}"


def _closest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    # The end of a name counts too: people write "fc" for "backbone.fc".
    ends = {each.rsplit(".", 1)[-1]: each for each in names}
    near = [ends.get(each, each) for each in get_close_matches(name, [*names, *ends], cutoff=0.4)]
    found = list(dict.fromkeys(near)) or names[-3:]
    return ", ".join(repr(each) for each in found) or "none: it has no submodules"
