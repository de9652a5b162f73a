"""Numbers that modules and classes are built with; documentation and measurements name them."""

import importlib
import math

import pytest
import torch

import largemargin as lm
from largemargin.heads.head_spec import HeadSpec, HeadView
from largemargin.losses.base.classwise import ClassWise
from largemargin.losses.base.loss import LogitLoss, Loss
from largemargin.ops.norms import _Normalize, _SafeNorm

CONSTANTS = {
    "losses.base.angles": {"NEAR": 0.99, "NOISE": {"bf16": 2.0**-8, "tf32": 2.0**-10}},
    "losses.input_margin": {"BRANCHES": ("below", "inside", "above"), "SHARE_OF_R": 7 / 12},
    "losses.adaface": {"STD_FLOOR": 1e-3},
    "losses.magface": {"PULL": 35 / 64},
    "losses.layer_margin": {"NORMS": (1, 2, math.inf)},
    "losses.base.scale": {"PROBABILITY": 0.9},
    "ops.chunked": {"BLOCK_ELEMENTS": 2**20, "GPU_BLOCK_ELEMENTS": 2**25, "MIN_BLOCK": 256},
    "ops.boundary": {
        "DEGENERATE": 1e-12,
        "MANY_POINTS": 64,
        "EXACT_LIMIT": 2**20,
        "BLOCK": 2**22,
        "GPU_BLOCK": 2**24,
        "GPU_NUMBERS": 2**23,
        "CANDIDATES": 2,
    },
    "ops.dense": {"DENSE_LIMIT": 2**22},
    "ops.norms": {"EPS": 1e-12, "SQUARABLE": (1e-15, 1e15), "BLOCK_NUMBERS": 2**22},
    "heads.centroid_bank": {"SHARED_SLOTS": 4096},
    "heads.packing": {"BLOCK_ELEMENTS": 2**22, "EXPLORE": 1e4, "POLISH": 1e9},
    "heads.memory_estimate": {
        "OPTIMIZERS": {
            "sgd": (0, 1),
            "sgd_momentum": (1, 1),
            "adagrad": (1, 2),
            "rmsprop": (1, 2),
            "adam": (2, 3),
            "adamw": (2, 2),
        },
        "HEAD_OPTIMIZERS": {"rowwise_adam": (2, 4), "head_sgd": (2, 0)},
        "WIDE": 4,
    },
    "heads.sharded_class_head": {"BLOCK": 4096},
    "heads.topk": {"CHUNK_ELEMENTS": 2**24},
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_modules(name):
    module = importlib.import_module(f"largemargin.{name}")
    assert {key: getattr(module, key) for key in CONSTANTS[name]} == CONSTANTS[name]


@pytest.mark.parametrize(
    ("loss", "uses_bias", "takes_logits"),
    [
        (Loss, False, False),
        (LogitLoss, True, True),
        (lm.CentroidMargin, True, False),
        (lm.Discriminative, True, False),
    ],
)
def test_what_losses_take(loss, uses_bias, takes_logits):
    assert (loss.uses_bias, loss.takes_logits) == (uses_bias, takes_logits)


def test_what_losses_change_and_refuse():
    assert ClassWise.defaults == {"sync": True}
    assert lm.CenterLoss.defaults == {"reduction": "sum", "sync": True}
    refused = ["prior", "soft_targets", "label_smoothing", "class_margin", "chunked"]
    assert list(lm.CenterLoss.refuses) == refused
    assert lm.Discriminative.has_norm
    assert not lm.StableDiscriminative.has_norm


def test_heads_without_settings():
    assert HeadSpec("dot") == ("dot", 1.0, False)
    view = HeadView(torch.eye(2))
    assert (view.bias, view.similarity, view.scale) == (None, "dot", 1.0)
    assert lm.SimplexHead.scale == 1


def test_norms_have_rules_for_vmap():
    assert _SafeNorm.generate_vmap_rule
    assert _Normalize.generate_vmap_rule
