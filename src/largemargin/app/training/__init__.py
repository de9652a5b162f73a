"""Training runs: settings, the engine, folders of runs."""

from largemargin.app.config import NoiseConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from largemargin.app.training.config_file import from_dict, read_config, to_dict, write_config
from largemargin.app.training.engine import Interrupted, train
from largemargin.app.training.parallel_runs import train_many
from largemargin.app.training.presets import Preset, preset
from largemargin.app.training.runs import Run

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
