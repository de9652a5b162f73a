"""The papers' networks, and those of torchvision and timm, by name."""

from largemargin.app.config import ModelConfig
from largemargin.app.models.build import Classifier, Normalize, build_model, list_models
from largemargin.app.models.library_networks import trust
from largemargin.app.models.networks import MODELS, Network

__all__ = [
    "MODELS",
    "Classifier",
    "ModelConfig",
    "Network",
    "Normalize",
    "build_model",
    "list_models",
    "trust",
]
