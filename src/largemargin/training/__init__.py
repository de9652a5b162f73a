"""Training runs: settings, the engine, folders of runs."""

from largemargin.training.config import (
    NoiseConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)
from largemargin.training.config_file import from_dict, read_config, to_dict, write_config
from largemargin.training.engine import Interrupted, train
from largemargin.training.many import train_many
from largemargin.training.presets import Preset, preset
from largemargin.training.runs import Run

__all__ = [
    "Interrupted",
    "NoiseConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Preset",
    "Run",
    "RunConfig",
    "from_dict",
    "preset",
    "read_config",
    "to_dict",
    "train",
    "train_many",
    "write_config",
]
