"""Pretrained weights from a local safetensors file."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from largemargin.errors import LargeMarginError, MissingPackage

PREFIX = "backbone."
"""How names begin in a file of a whole :class:`Classifier`."""
SHOWN = 4
"""Names that a message lists before it says how many more there are."""


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
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingPackage(
            "reading .safetensors needs safetensors. Install it: pip install 'largemargin[export]'"
        ) from None
    try:
        state: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise LargeMarginError(
            f"{path} is not a safetensors file, or damaged: {error}. Files of torch.save and other "
            "pickles are refused, whatever they are called: reading one can run any code."
        ) from error
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
            + "; ".join(
                f"{what} {_shown(keys)}"
                for what, keys in (("missing are", missing), ("unknown are", surplus))
                if keys
            )
            + "."
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


def _shown(keys: list[str]) -> str:
    rest = len(keys) - SHOWN
    return ", ".join(keys[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
