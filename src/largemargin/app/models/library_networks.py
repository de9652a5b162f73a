"""Backbones from outside: torchvision and timm without their head, and your own by Python path.

Pretrained weights come from a local safetensors file, or from where the library publishes them. A
Python path in a configuration makes Python import a module, which runs it. So :func:`trust` has to
be called first: by ``largemargin train --trust_config``, or by a program that knows its
configurations.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.config import ModelConfig
from largemargin.app.models.networks import Size
from largemargin.dropin.find_head import find_layer, parents_of
from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.export.tensor_files import listed, read_tensors

LIBRARIES = ("torchvision", "timm")
SOURCES = ("weights", "weights_backbone", "checkpoint_path", "cache_dir", "scriptable")
"""Arguments of their constructors that name files or addresses, or change what is built."""
PREFIX = "backbone."
"""How names begin in a file of a whole :class:`Classifier`."""


def build_outside(
    config: ModelConfig, channels: int, size: Size, notes: list[str]
) -> tuple[nn.Module, int]:
    """``torchvision/NAME`` or ``timm/NAME`` as a backbone, and the number of its features."""
    library, _, name = config.name.partition("/")
    if library not in LIBRARIES or not name:
        raise LargeMarginError(
            f"a network of another library is written torchvision/NAME or timm/NAME, but "
            f"{config.name!r} was given."
        )
    # Options change the network; where weights come from is said by ``weights`` alone.
    for option in config.options:
        if option in SOURCES or option.startswith("pretrained"):
            raise LargeMarginError(
                f"model.options holds {option!r}, which would load weights past the checks. Give a "
                ".safetensors file as model.weights instead."
            )
    if config.batch_norm is not None:
        raise LargeMarginError(
            f"{config.name} decides itself about batch norm, but batch_norm={config.batch_norm} "
            "was given. Leave it out; some networks have a variant, such as "
            "torchvision/vgg16_bn."
        )
    made = _torchvision if library == "torchvision" else _timm
    backbone = made(name, config, channels, notes)
    return backbone, width_of(backbone, config.name, channels, size)


def _torchvision(name: str, config: ModelConfig, channels: int, notes: list[str]) -> nn.Module:
    try:
        from torchvision import models
    except ImportError:
        raise MissingPackage(
            f"torchvision/{name} needs torchvision: pip install 'largemargin[train]'"
        ) from None
    known = models.list_models(module=models)
    if name not in known:
        raise LargeMarginError(f"torchvision has no classifier {name!r}.{near(name, known)}")
    try:
        model = models.get_model(name, weights=None, **_torchvision_options(name, config))
    except TypeError as error:
        raise LargeMarginError(_bad_option(config, error)) from error
    path, head = find_layer(model, None) if _ends_linear(model) else ("", nn.Identity())
    if not path:
        raise LargeMarginError(
            f"torchvision/{name} ends in a convolution, which cannot serve as prototypes. Take "
            "another network, such as torchvision/mobilenet_v3_small."
        )
    state = _torchvision_state(name, config, model, path)
    if channels != 3:
        _change_first(model, channels, state, f"torchvision/{name}", notes)
    for parent, child in parents_of(model, head):
        setattr(parent, child, nn.Identity())
    if state is not None:
        model.load_state_dict(state)
    assert isinstance(model, nn.Module)
    return model


def _torchvision_options(name: str, config: ModelConfig) -> dict[str, Any]:
    options = dict(config.options)
    if config.dropout is not None:
        options["dropout"] = config.dropout
    if name in ("googlenet", "inception_v3"):
        # Their second outputs are of use only with their own training script.
        options = {"aux_logits": False, "init_weights": True} | options
        # Their pretrained weights expect colours scaled in another way, which this option does.
        options.setdefault("transform_input", config.weights is not None)
    return options


def _ends_linear(model: nn.Module) -> bool:
    """Whether the last layer with weights is linear."""
    layers = [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    return bool(layers) and isinstance(layers[-1], nn.Linear)


def _torchvision_state(
    name: str, config: ModelConfig, model: nn.Module, head: str
) -> dict[str, Tensor] | None:
    """Pretrained weights without those of the head, or None."""
    if config.weights is None:
        return None
    if is_file_name(config.weights):
        state, source = read_weights(config.weights), config.weights
    else:
        state, source = _fetch_torchvision(name, config.weights)
    outputs = (f"{head}.", "aux1.", "aux2.", "AuxLogits.")
    source = f"{source} for torchvision/{name}"
    fit(state, model.state_dict(), source=source, may_miss=lambda key: key.startswith(outputs))
    return state


def _fetch_torchvision(name: str, weights: str) -> tuple[dict[str, Tensor], str]:
    from torchvision import models

    sets = models.get_model_weights(name)
    wanted = "DEFAULT" if weights.lower() == "default" else weights
    if wanted not in sets.__members__:
        listed = ", ".join(dict.fromkeys(["default", *sets.__members__]))
        raise LargeMarginError(
            f"torchvision/{name} has no weights {weights!r}. It has {listed}; or give a "
            ".safetensors file."
        )
    entry = sets[wanted]
    file = entry.url.rsplit("/", 1)[-1]
    place = f"{torch.hub.get_dir()}/checkpoints/{file}"
    try:
        state: dict[str, Tensor] = entry.get_state_dict(
            progress=False, check_hash=True, weights_only=True
        )
    except UnpicklingError as error:
        raise LargeMarginError(
            f"{place} holds more than weights, and reading it could run code. It is not the "
            "published file: delete it, and fetch it again."
        ) from error
    except (OSError, RuntimeError) as error:
        raise LargeMarginError(
            f"the weights of torchvision/{name} could not be fetched from {entry.url} "
            f"({_first_line(error)}). Without network: fetch that file elsewhere and place it as "
            f"{place}, or convert it to .safetensors and give its path as weights."
        ) from error
    return dict(state), file


def _timm(name: str, config: ModelConfig, channels: int, notes: list[str]) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise MissingPackage(f"timm/{name} needs timm: pip install 'largemargin[timm]'") from None
    if not timm.is_model(name):
        raise LargeMarginError(f"timm has no network {name!r}.{near(name, timm.list_models())}")
    options = dict(config.options)
    if config.dropout is not None:
        options["drop_rate"] = config.dropout
    from_file = config.weights is not None and is_file_name(config.weights)
    if channels != 3:
        notes.append(
            f"the first layer of timm/{name} was made for {_counted(channels)}"
            + (", its weights summed or repeated over colours." if config.weights else ".")
        )
    try:
        model: nn.Module = timm.create_model(
            name,
            pretrained=config.weights is not None and not from_file,
            num_classes=0,
            in_chans=channels,
            **options,
            **_tag(name, config.weights, from_file),
        )
    except TypeError as error:
        raise LargeMarginError(_bad_option(config, error)) from error
    except (OSError, RuntimeError) as error:
        raise LargeMarginError(_not_fetched(timm, name, error)) from error
    if from_file:
        _load_timm(model, name, str(config.weights), channels)
    return model


def _tag(name: str, weights: str | None, from_file: bool) -> dict[str, Any]:
    """A set of weights by its tag, as a1_in1k; "default" is timm's own choice."""
    if weights is None or from_file or weights.lower() == "default":
        return {}
    import timm

    if f"{name}.{weights}" not in timm.list_pretrained(f"{name}.*"):
        tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{name}.*")]
        raise LargeMarginError(
            f"timm/{name} has no weights {weights!r}. It has {', '.join(['default', *tags])}; or "
            "give a .safetensors file."
        )
    return {"pretrained_cfg": weights}


def _not_fetched(timm: Any, name: str, error: Exception) -> str:
    config = timm.get_pretrained_cfg(name)
    where = getattr(config, "hf_hub_id", None) or getattr(config, "url", None) or "its origin"
    return (
        f"the weights of timm/{name} could not be fetched from {where} ({_first_line(error)}). "
        f"Without network: fetch model.safetensors of {where} elsewhere, place it anywhere, such "
        f"as {name}.safetensors, and give its path as weights."
    )


def _load_timm(model: nn.Module, name: str, path: str, channels: int) -> None:
    state = read_weights(path)
    wanted = model.state_dict()
    for key in [key for key in state if key not in wanted]:
        # num_classes=0 leaves the head out, so whatever is called so in the file is not needed.
        if key.rpartition(".")[0] in _head_names(model):
            del state[key]
    for key, value in state.items():
        if key in wanted and value.dim() == 4 and value.shape[1] == 3 != wanted[key].shape[1]:
            state[key] = spread_channels(value, channels)
    fit(state, wanted, source=f"{path} for timm/{name}")
    model.load_state_dict(state)


def _head_names(model: nn.Module) -> tuple[str, ...]:
    config = getattr(model, "default_cfg", {})
    named = config.get("classifier", ()) if isinstance(config, dict) else ()
    return (named,) if isinstance(named, str) else tuple(named or ())


def _change_first(
    model: nn.Module, channels: int, state: dict[str, Tensor] | None, name: str, notes: list[str]
) -> None:
    """Another first convolution; pretrained colours become equal shares of all channels."""
    path, first = next(
        (path, each) for path, each in model.named_modules() if isinstance(each, nn.Conv2d)
    )
    changed = nn.Conv2d(
        channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        first.dilation,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )
    for parent, child in parents_of(model, first):
        setattr(parent, child, changed)
    text = f"the first convolution of {name} was replaced by one for {_counted(channels)}"
    if state is not None:
        state[f"{path}.weight"] = spread_channels(state[f"{path}.weight"], channels)
        text += "; each has the mean of the pretrained weights of the colours times 3/channels"
    notes.append(f"{text}.")


def width_of(backbone: nn.Module, name: str, channels: int, size: Size) -> int:
    """How many features the backbone gives; one image tells, and whether it is large enough."""
    training = backbone.training
    backbone.eval()
    parameter = next(backbone.parameters())
    image = torch.zeros(1, channels, *size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad():
            features = backbone(image)
    except (RuntimeError, AssertionError, ValueError, ZeroDivisionError) as error:
        taken = inspect.signature(type(backbone).__init__).parameters
        raise LargeMarginError(
            f"{name} cannot take images of {size[0]}x{size[1]} pixels ({_first_line(error)}). Give "
            "them the size it was made for (size of the data settings), mostly 224"
            + (", or set options: {img_size: ...}." if "img_size" in taken else ".")
        ) from error
    backbone.train(training)
    if not isinstance(features, Tensor) or features.dim() != 2:
        given = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise LargeMarginError(
            f"{name} gives {given} where features (1, D) are needed, so it is no plain classifier. "
            "Take another network."
        )
    return int(features.shape[1])


def _bad_option(config: ModelConfig, error: TypeError) -> str:
    given = dict(config.options) | ({} if config.dropout is None else {"dropout": config.dropout})
    return f"{config.name} does not take the options {given}: {_first_line(error)}."


def _counted(channels: int) -> str:
    return "1 channel" if channels == 1 else f"{channels} channels"


def near(name: str, known: Iterable[str]) -> str:
    """A sentence that names what may have been meant; nothing where nothing is like it."""
    found = get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_trusted = [False]


def trust(allowed: bool = True) -> None:
    """Allow ``ModelConfig(name="package.module.Network")`` in this process, or forbid it again."""
    _trusted[0] = allowed


def build_by_path(config: ModelConfig, channels: int, size: Size) -> tuple[nn.Module, int]:
    """The backbone that a class or function at ``config.name`` makes, and its number of features.

    It is called with ``config.options``, and with ``channels`` where it has such an argument. Its
    outputs for images (N, channels, *size) must be features (N, D); the head is added to it.
    """
    if not _trusted[0]:
        raise LargeMarginError(
            f"model.name {config.name!r} is a Python path, and importing it runs its code. Pass "
            "--trust_config (in Python: largemargin.app.models.trust()) if you wrote or read it."
        )
    module, _, name = config.name.rpartition(".")
    try:
        build = getattr(importlib.import_module(module), name)
        options = dict(config.options)
        if "channels" in inspect.signature(build).parameters:
            options.setdefault("channels", channels)
        backbone = build(**options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise LargeMarginError(
            f"the network {config.name} cannot be built: {error}. Its module must be found by "
            "Python (PYTHONPATH), and the class or function must take model.options."
        ) from error
    if not isinstance(backbone, nn.Module):
        raise LargeMarginError(
            f"{config.name} gives a {type(backbone).__name__}, not an nn.Module."
        )
    if config.weights is not None:
        load_backbone(backbone, config.weights, config.name)
    return backbone, width_of(backbone, config.name, channels, size)


def load_backbone(backbone: nn.Module, weights: str, name: str) -> None:
    """Load a .safetensors file into a network of this library; its other layers stay as drawn."""
    if not is_file_name(weights):
        raise LargeMarginError(
            f"no pretrained weights of {name} are published, so weights={weights!r} cannot be "
            "fetched. Give a .safetensors file of the backbone, or take torchvision/NAME or "
            "timm/NAME."
        )
    state = read_weights(weights)
    wanted = backbone.state_dict()
    fit(state, wanted, source=f"{weights} for {name}")
    backbone.load_state_dict({key: state[key] for key in wanted})


def is_file_name(weights: str) -> bool:
    return weights.endswith((".safetensors", ".pth", ".pt", ".bin")) or "/" in weights


def read_weights(path: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file; of a whole classifier's file those of its backbone."""
    if not path.endswith(".safetensors"):
        raise LargeMarginError(
            f"weights must be a .safetensors file, but {path!r} was given. Other formats run code "
            "when they are read; convert one you trust: "
            "safetensors.torch.save_file(torch.load(path, weights_only=True), "
            "'weights.safetensors')."
        )
    if not Path(path).is_file():
        raise LargeMarginError(f"there is no file {path} to read weights from.")
    state = read_tensors(Path(path))
    inner = {
        key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)
    }
    return inner or state


def fit(
    state: dict[str, Tensor],
    wanted: Mapping[str, Tensor],
    *,
    source: str,
    may_miss: Callable[[str], bool] = lambda key: False,
) -> None:
    """Check names and shapes of a file against a network; names that ``may_miss`` are dropped."""
    for key in [key for key in state if may_miss(key)]:
        del state[key]
    needed = {key: value for key, value in wanted.items() if not may_miss(key)}
    missing = [
        key for key in needed if key not in state and not key.endswith("num_batches_tracked")
    ]
    surplus = [key for key in state if key not in needed]
    if missing or surplus:
        raise LargeMarginError(
            f"the weights {source} belong to another network: "
            f"{'; '.join(listed('missing are', missing) + listed('unknown are', surplus))}."
        )
    for key, value in needed.items():
        # Counters of old files may be missing; a fresh network's zero is as good.
        state.setdefault(key, value)
        if state[key].shape != value.shape:
            raise LargeMarginError(
                f"the weights {source} do not fit: {key} is {tuple(state[key].shape)} there and "
                f"{tuple(value.shape)} in this network."
            )


def spread_channels(weight: Tensor, channels: int) -> Tensor:
    """First-layer weights (out, 3, k, k) for another number of channels, same answer to grey.

    Every channel gets the mean over colours times 3 / channels, so an image whose channels are all
    equal gives what its grey RGB version gave.
    """
    mean = weight.mean(dim=1, keepdim=True) * (weight.shape[1] / channels)
    return mean.expand(-1, channels, *[-1] * (weight.dim() - 2)).to(torch.float32).clone()
