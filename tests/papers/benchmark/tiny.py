"""A protocol that takes seconds: digits, three trials, two rungs, two seeds."""

from pathlib import Path
from typing import Any

import yaml
from largemargin_papers.benchmark import Protocol, read_protocol

TINY: dict[str, Any] = {
    "trials": 3,
    "draws_seed": 1,
    "rungs": [
        {"keep": 3, "epochs": 0.5, "seeds": [101]},
        {"keep": 1, "epochs": 1.0, "seeds": [102, 103]},
    ],
    "seeds": [0, 1],
    "level": 0.05,
    "power": 0.8,
    "run": {"gradients_every": 0, "measure": False, "compile": False},
    "space": {"optimizer.lr": [0.01, 0.2], "optimizer.clip_norm": [None, 1.0, 5.0]},
    "methods": {
        "softmax": {"objective": "cross_entropy"},
        "label_smoothing": {
            "objective": "label_smoothing",
            "space": {"objective.label_smoothing.smoothing": [0.02, 0.3]},
        },
        "cosface": {
            "objective": "cosface + 0.5*sample_margin",
            "margin": True,
            "space": {"objective.cosface.scale": [2.0, 32.0]},
        },
        "kobayashi": {
            "objective": "kobayashi",
            "margin": True,
            "space": {"objective.kobayashi.strength": [0.03, 3.0]},
        },
    },
    "situations": {
        "digits_few": {
            "title": "Digits, 100 images",
            "data": {"name": "digits", "augment": "none", "validation": 0.1},
            "images": 100,
            "model": {"name": "mlp", "options": {"hidden": [16]}},
            "epochs": 2,
            "batch_size": 50,
            "score": "accuracy",
            "methods": ["softmax", "label_smoothing", "cosface", "kobayashi"],
        }
    },
    "presets": {"few_labels": ["digits_few"]},
}


def tiny_protocol(folder: Path, **changes: Any) -> Protocol:
    """Written and read again, with some of its entries replaced."""
    path = folder / "protocol.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return read_protocol(path)
