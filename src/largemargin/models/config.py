"""Which network, as typed settings."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """The network. It takes images with values in [0, 1]; normalisation is its first layer.

    Args:
        name: a network of this library (``largemargin list --models``), ``torchvision/NAME``,
            ``timm/NAME`` or, with ``--trust_config``, the Python path of your own, whose outputs
            are features: ``package.module.Network``.
        feature_dim: width of an additional linear layer between the backbone and the head, whose
            outputs are the features; default none, the features are those of the backbone.
        feature_activation: what comes before that layer: relu (as in the papers) or none.
        dropout: probability, where the network has dropout; default its own.
        batch_norm: with or without, where the network leaves the choice; default its own.
        head: linear, or simplex: prototypes fixed at equal angles, times one learned number (needs
            features of at least as many dimensions as classes less one).
        weights: pretrained weights: default (the library's download), the name of a torchvision
            weight set, or a local .safetensors file of the backbone.
        options: further arguments of the torchvision or timm constructor; for networks of this
            library width and dim of small_cnn, hidden of mlp, depth and width of wrn28_10.
    """

    name: str = "small_cnn"
    feature_dim: int | None = None
    feature_activation: Literal["relu", "none"] = "relu"
    dropout: float | None = None
    batch_norm: bool | None = None
    head: Literal["linear", "simplex"] = "linear"
    weights: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
