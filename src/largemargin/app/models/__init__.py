"""The papers' networks, and those of torchvision and timm, by name."""

from largemargin.app.config import ModelConfig
from largemargin.app.models.build import MODELS, Classifier, Normalize, build_model, list_models
from largemargin.app.models.by_path import trust
from largemargin.app.models.networks import Network

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
