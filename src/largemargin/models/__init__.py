"""The papers' networks, and those of torchvision and timm, by name."""

from largemargin.models.build import MODELS, build_model, list_models
from largemargin.models.by_path import trust
from largemargin.models.classifier import Classifier, Normalize
from largemargin.models.config import ModelConfig
from largemargin.models.network import Network

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
