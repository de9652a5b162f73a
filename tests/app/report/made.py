"""Runs and geometries for tests of the report: small, and as nasty as their names can be."""

import json
import shutil
from pathlib import Path

import torch

import largemargin as lm
from largemargin.app.training import ObjectiveConfig, Run, RunConfig, train
from largemargin.measuring import EvaluationConfig, evaluate

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "%{x}<b>bold</b>",
    '=HYPERLINK("x")',
    "{{ 7 * 7 }}",
    "a\nb & 'c'",
    "\u202eright to left",
    "$\\alpha$",
    "<img src=x onerror=alert(1)>",  # the same name twice
)
"""Ten names for the ten classes of digits."""


def geometry(seed: int = 0, dim: int = 4, *, samples: int = 60, classes: int = 3) -> lm.Geometry:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, dim, generator=generator)
    labels = torch.arange(samples) % classes
    features = weight[labels] + 0.5 * torch.randn(samples, dim, generator=generator)
    few = samples <= 1000
    return lm.measure_arrays(features, labels, weight, sphere=dim == 3, pairwise=few)


def trained(folder: Path, objective: str = "cross_entropy", **changes: object) -> Run:
    config = RunConfig(
        name=objective.split()[0],
        objective=ObjectiveConfig(objective),
        epochs=1,
        batch_size=256,
        device="cpu",
        gradients_every=2,
        **changes,  # type: ignore[arg-type]
    )
    return train(config, folder=folder, progress=False)


def evaluated(run: Run) -> Run:
    data = run.data()
    assert data.test is not None
    config = EvaluationConfig(
        perturbations="none",
        gaussian=(0.05, 0.1),
        draws=2,
        attacks=("fgsm",),
        attack_samples=20,
        retrieval=False,
    )
    found = evaluate(
        run.model(), data.test, class_names=data.classes, config=config, progress=False
    )
    found.save(run.folder / "evaluation.json")
    return run


def renamed(run: Run, folder: Path, names: tuple[str, ...] = HOSTILE) -> Run:
    """A copy of the run whose classes, objective settings and command are hostile."""
    shutil.copytree(run.folder, folder)
    path = folder / "data.json"
    facts = json.loads(path.read_text())
    facts["classes"] = list(names)
    facts["licence"] = names[0]
    facts["record"]["modifiers"] = [{"name": names[1], "share": names[2]}]
    path.write_text(json.dumps(facts))
    path = folder / "environment.json"
    facts = json.loads(path.read_text())
    facts["command"] = ["train", *names]
    path.write_text(json.dumps(facts))
    path = folder / "evaluation.json"
    if path.is_file():
        facts = json.loads(path.read_text())
        facts["classes"] = list(names)
        path.write_text(json.dumps(facts))
    return Run(folder)
