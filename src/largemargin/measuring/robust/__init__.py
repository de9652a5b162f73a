"""Robustness to input perturbations and attacks."""

from largemargin.measuring.robust.attacks import Attack as Attack
from largemargin.measuring.robust.attacks import apgd as apgd
from largemargin.measuring.robust.attacks import fgsm as fgsm
from largemargin.measuring.robust.attacks import pgd as pgd
from largemargin.measuring.robust.perturbations import GAUSSIAN_CIFAR10 as GAUSSIAN_CIFAR10
from largemargin.measuring.robust.perturbations import GAUSSIAN_ROAD as GAUSSIAN_ROAD
from largemargin.measuring.robust.perturbations import GAUSSIAN_SVHN as GAUSSIAN_SVHN
from largemargin.measuring.robust.perturbations import ROAD_400X500 as ROAD_400X500
from largemargin.measuring.robust.perturbations import SCALED_32 as SCALED_32
from largemargin.measuring.robust.perturbations import UNIFORM_CIFAR10 as UNIFORM_CIFAR10
from largemargin.measuring.robust.perturbations import UNIFORM_SVHN as UNIFORM_SVHN
from largemargin.measuring.robust.perturbations import DownUp as DownUp
from largemargin.measuring.robust.perturbations import Patches as Patches
from largemargin.measuring.robust.perturbations import Perturbation as Perturbation
from largemargin.measuring.robust.perturbations import PerturbationDraws as PerturbationDraws
from largemargin.measuring.robust.perturbations import Stripes as Stripes
from largemargin.measuring.robust.perturbations import add_gaussian as add_gaussian
from largemargin.measuring.robust.perturbations import add_uniform as add_uniform
from largemargin.measuring.robust.perturbations import down_up as down_up
from largemargin.measuring.robust.perturbations import mask_stripes as mask_stripes
from largemargin.measuring.robust.perturbations import occlude as occlude

__all__ = [n for n, each in vars().items() if hasattr(each, "__qualname__") or n.isupper()]
