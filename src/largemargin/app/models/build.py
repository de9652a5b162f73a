"""``build_model``: settings to a network of normalisation, backbone, feature layer and head."""

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largemargin.app.config import ModelConfig
from largemargin.app.models.library_networks import (
    LIBRARIES,
    build_by_path,
    build_outside,
    load_backbone,
    near,
)
from largemargin.app.models.networks import MODELS, Network, Size
from largemargin.errors import LargeMarginError, check_choice, check_num_classes, check_number
from largemargin.heads.simplex import SimplexHead


class Normalize(nn.Module):
    """(x - mean) / std of each channel of images (N, C, H, W); without arguments the identity.

    >>> Normalize((0.5,), (0.25,))(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise LargeMarginError(
                f"mean and std must be given together, one number per channel, but mean is {mean} "
                f"and std is {std}."
            )
        if std is not None and min(std) <= 0:
            raise LargeMarginError(
                f"std must be positive in every channel, but {tuple(std)} was given. A channel "
                "that never changes has std 0: use 1 for it."
            )
        for name, values in (("mean", mean), ("std", std)):
            each = None if values is None else torch.tensor(values, dtype=torch.float32)
            self.register_buffer(name, None if each is None else each.reshape(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            return images
        return (images - self.mean) / self.std

    def extra_repr(self) -> str:
        if self.mean is None or self.std is None:
            return "identity"
        shown = ([round(x, 4) for x in each.flatten().tolist()] for each in (self.mean, self.std))
        return "mean={}, std={}".format(*shown)


class Classifier(nn.Module):
    """``head(feature_layer(backbone(normalize(images))))``: images in [0, 1] to logits (N, C).

    ``features(images)`` gives what the head sees, (N, D). ``notes`` says in sentences what was
    changed to make a network fit, such as a first convolution for grey images. Modules that
    ``fixed`` names stay in evaluation mode during training.
    """

    fixed: tuple[str, ...] = ()

    def __init__(
        self,
        normalize: nn.Module,
        backbone: nn.Module,
        head: nn.Module,
        *,
        feature_layer: nn.Module | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        self.feature_layer = nn.Identity() if feature_layer is None else feature_layer
        self.head = head
        self.notes = tuple(notes)

    def features(self, images: Tensor) -> Tensor:
        """What enters the head, (N, D), of images (N, channels, H, W) in [0, 1]."""
        features: Tensor = self.feature_layer(self.backbone(self.normalize(images)))
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for name in self.fixed:
            self.get_submodule(name).eval()
        return self

    def freeze(self, names: Sequence[str], *, batch_norm: bool) -> None:
        """Train these modules no more, and, if asked to, no statistics of batch normalisation."""
        modules = dict(self.named_modules())
        for name in names:
            if name.partition(".")[0] != "backbone" or name not in modules:
                inside = [each for each in modules if each.count(".") == 1 and each[0] == "b"]
                raise LargeMarginError(
                    "model.freeze must name the backbone or modules in it, but "
                    f"{name!r} was given. There are backbone, {', '.join(inside)}."
                )
            modules[name].requires_grad_(False)
        kept = [name for name, each in modules.items() if isinstance(each, _BatchNorm)]
        self.fixed = (*names, *(kept if batch_norm else ()))
        if batch_norm and not kept:
            raise LargeMarginError(
                "model.freeze_batch_norm is true, but this network has no batch normalisation. "
                "Leave it out."
            )


class MeanOfFlips(nn.Module):
    """Features of images and of their mirror images, averaged: test-time augmentation."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        mean: Tensor = (self.features(images) + self.features(images.flip(-1))) / 2
        return mean


def with_flips(model: nn.Module) -> nn.Module:
    """The trained model, in evaluation mode, that looks at every image and its mirror image."""
    assert isinstance(model, Classifier)
    features = nn.Sequential(model.backbone, model.feature_layer)
    return Classifier(model.normalize, MeanOfFlips(features), model.head).eval()


def list_models() -> dict[str, str]:
    """Names that ``ModelConfig.name`` takes, each with a line of description."""
    own = {name: network.description for name, network in MODELS.items()}
    return own | {f"{library}/NAME": f"any classifier of {library}" for library in LIBRARIES}


def build_model(
    config: ModelConfig,
    num_classes: int,
    *,
    channels: int = 3,
    size: Size = (32, 32),
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Classifier:
    """A network for images (N, channels, *size) with values in [0, 1].

    Its first layer subtracts ``mean`` and divides by ``std`` (nothing where both are None), its
    last is ``head``, an ``nn.Linear`` unless the settings ask for a simplex. Initial weights are
    drawn from torch's global generator.

    >>> model = build_model(ModelConfig("small_cnn"), 10, channels=1, size=(8, 8))
    >>> images = torch.rand(2, 1, 8, 8)
    >>> model(images).shape, model.features(images).shape
    (torch.Size([2, 10]), torch.Size([2, 32]))
    """
    check_num_classes(num_classes)
    check_number("channels", channels, at_least=1)
    size = _checked(size)
    if mean is not None and len(mean) != channels:
        raise LargeMarginError(
            f"mean and std need one number per channel: the images have {channels}, but "
            f"{len(mean)} were given."
        )
    normalize = Normalize(mean, std)
    notes: list[str] = []
    backbone, dim = _build_backbone(config, channels, size, notes)
    feature_layer = None
    if config.feature_dim is not None:
        check_number("feature_dim", config.feature_dim, at_least=1)
        before = (nn.ReLU(),) if config.feature_activation == "relu" else ()
        feature_layer = nn.Sequential(*before, nn.Linear(dim, config.feature_dim))
        dim = config.feature_dim
    check_choice("head", config.head, ("linear", "simplex"))
    head = (nn.Linear if config.head == "linear" else SimplexHead)(dim, num_classes)
    model = Classifier(normalize, backbone, head, feature_layer=feature_layer, notes=notes)
    if config.freeze or config.freeze_batch_norm:
        model.freeze(config.freeze, batch_norm=config.freeze_batch_norm)
        if config.weights is None and not _is_path(config.name):
            model.notes += ("what is frozen has random weights: model.weights names no others.",)
    return model


def _is_path(name: str) -> bool:
    """Of a network in Python, ``package.module.Network``; its weights are its own matter."""
    return "." in name and "/" not in name


def _build_backbone(
    config: ModelConfig, channels: int, size: Size, notes: list[str]
) -> tuple[nn.Module, int]:
    if "/" in config.name:
        return build_outside(config, channels, size, notes)
    if _is_path(config.name):
        return build_by_path(config, channels, size)
    return _build_own(config, channels, size)


def _build_own(config: ModelConfig, channels: int, size: Size) -> tuple[nn.Module, int]:
    if config.name not in MODELS:
        raise LargeMarginError(
            f"there is no network {config.name!r}.{near(config.name, MODELS)} This library has "
            f"{', '.join(MODELS)}; others are written torchvision/NAME or timm/NAME, such as "
            "torchvision/resnet50."
        )
    network = MODELS[config.name]
    if min(size) < network.smallest:
        raise LargeMarginError(
            f"{config.name} needs images of at least {network.smallest}x{network.smallest} pixels, "
            f"but they are {size[0]}x{size[1]}. Enlarge them (size of the data settings) or take a "
            "smaller network, such as small_cnn."
        )
    choices = _choices(config, network)
    options = _options(config, network, choices)
    try:
        backbone, dim = network.build(channels, size, **choices, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, LargeMarginError):
            raise
        raise LargeMarginError(
            f"{config.name} cannot be built for images of {size[0]}x{size[1]} with the options "
            f"{options}: {error}."
        ) from error
    if config.weights is not None:
        load_backbone(backbone, config.weights, config.name)
    return backbone, dim


def _choices(config: ModelConfig, network: Network) -> dict[str, Any]:
    """Dropout and batch norm, where the network has them."""
    own = {"dropout": network.dropout, "batch_norm": network.batch_norm}
    chosen: dict[str, Any] = {}
    for name, default in own.items():
        given = getattr(config, name)
        if default is None and given is not None:
            having = [each for each, net in MODELS.items() if getattr(net, name) is not None]
            raise LargeMarginError(
                f"{config.name} leaves no choice of {name}, but {given!r} was given. Leave it out; "
                f"networks with that choice: {', '.join(having)}."
            )
        if default is not None:
            chosen[name] = default if given is None else given
    if "dropout" in chosen:
        check_number("dropout", chosen["dropout"], at_least=0, below=1)
    return chosen


def _options(config: ModelConfig, network: Network, choices: dict[str, Any]) -> dict[str, Any]:
    taken = {"channels", "size", "blocks", *choices}
    allowed = [name for name in inspect.signature(network.build).parameters if name not in taken]
    for name in config.options:
        if name not in allowed:
            raise LargeMarginError(
                f"{config.name} has no option {name!r}. It has "
                f"{', '.join(map(repr, allowed)) or 'none'}."
            )
    return dict(config.options)


def _checked(size: Size) -> Size:
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise LargeMarginError(f"size must be (height, width) in pixels, but {size!r} was given.")
    for side in size:
        check_number("each side of size", side, at_least=1)
    return int(size[0]), int(size[1])
