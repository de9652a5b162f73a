"""Robustness to input perturbations and attacks."""

from largemargin.robust.attacks import Attack, fgsm, pgd
from largemargin.robust.auto_pgd import apgd
from largemargin.robust.perturbations import (
    GAUSSIAN_CIFAR10,
    GAUSSIAN_ROAD,
    GAUSSIAN_SVHN,
    ROAD_400X500,
    SCALED_32,
    UNIFORM_CIFAR10,
    UNIFORM_SVHN,
    DownUp,
    Draws,
    Patches,
    Perturbation,
    Stripes,
    add_gaussian,
    add_uniform,
    down_up,
    mask_stripes,
    occlude,
)

__all__ = [
    "add_gaussian",
    "add_uniform",
    "occlude",
    "mask_stripes",
    "down_up",
    "fgsm",
    "pgd",
    "apgd",
    "Attack",
    "Perturbation",
    "Draws",
    "DownUp",
    "Patches",
    "Stripes",
    "ROAD_400X500",
    "SCALED_32",
    "GAUSSIAN_CIFAR10",
    "GAUSSIAN_SVHN",
    "GAUSSIAN_ROAD",
    "UNIFORM_CIFAR10",
    "UNIFORM_SVHN",
]
