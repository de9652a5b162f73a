"""What a trained model is worth on the split it is judged on."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.data.samples import Samples
from largemargin.app.training.processes import autocast
from largemargin.measuring.accuracy import accuracy_of
from largemargin.measuring.batches import need_labels, source_batches
from largemargin.measuring.confidence import OODScores, Scorer, detect_ood
from largemargin.measuring.logit_model import LogitModel
from largemargin.measuring.retrieval import head_inputs_of, retrieval_of
from largemargin.measuring.robust.perturbations import SCALED_32, Perturbation
from largemargin.measuring.robust_accuracy import perturbed_accuracy
from largemargin.measuring.sample_draws import seed_for
from largemargin_papers.benchmark.corruptions import SEVERITIES, TEST, VALIDATION, corrupted

BATCH = 1000
COVERAGES = (0.95, 0.9, 0.8, 0.7, 0.5)
SIGMA = 16 / 255
CORRUPTIONS = {"gaussian 16/255": Perturbation(sigma=SIGMA), "occlusion": SCALED_32["occlusion"]}
DRAWS = {"validation": 2, "test": 5}


def assess(
    model: nn.Module,
    judged: Samples,
    *,
    score: str,
    split: str,
    precision: str,
    validation: Samples | None = None,
    ood: Mapping[str, Mapping[str, Samples]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The numbers of a run; the one that is compared stands under ``score``.

    Args:
        model: trained, where it is to be evaluated.
        judged: images and labels; those of a retrieval need not be classes of the model.
        score: as in ``Situation``.
        split: "validation" gets what the choice needs, "test" calibration and rejection too.
        precision: of the forward passes.
        validation: of the same classes, for the choice of a score of confidence.
        ood: data of no known class, of the validation and of the split it is judged on.
    """
    device = next(model.parameters()).device
    with autocast(precision, device):
        if score == "mean_average_precision":
            found = _retrieval(model, judged, device)
        else:
            found = _accuracies(model, judged)
            if split == "test":
                found |= rejection(model, judged, device)
            if score == "corrupted_mean":
                found |= _corrupted(model, judged, found["accuracy"], DRAWS[split])
            if score == "common_corruptions":
                found |= _common(model, judged, split, device)
            if score == "ood_auroc":
                assert validation is not None
                found |= _ood(model, judged, validation, ood, split)
    return {name: _plain(value) for name, value in found.items()} | {"score": _plain(found[score])}


def _accuracies(model: nn.Module, judged: Samples) -> dict[str, Any]:
    found = accuracy_of(model, judged, batch_size=BATCH)
    return {
        "accuracy": found.accuracy,
        "balanced_accuracy": found.balanced,
        "worst_class_accuracy": found.worst,
        "loss": found.loss,
        "ece": found.ece,
    }


def _retrieval(model: nn.Module, judged: Samples, device: torch.device) -> dict[str, Any]:
    features, labels = head_inputs_of(model, judged, batch_size=BATCH)
    features = features.float()
    if not bool(features.isfinite().all()):
        return {"mean_average_precision": math.nan}
    found = retrieval_of(features.to(device), labels, at=(1, 5))
    return {
        "mean_average_precision": found.mean_average_precision,
        "recall_at_1": found.recall[1],
        "recall_at_5": found.recall[5],
    }


def _corrupted(model: nn.Module, judged: Samples, clean: float, draws: int) -> dict[str, Any]:
    found = perturbed_accuracy(model, judged, CORRUPTIONS, draws=draws, batch_size=BATCH)
    accuracies = {name: each.accuracy for name, each in found.items()}
    mean = (clean + sum(accuracies.values())) / (1 + len(accuracies))
    return {**accuracies, "corrupted_mean": mean}


def _common(model: nn.Module, judged: Samples, split: str, device: torch.device) -> dict[str, Any]:
    """Accuracies under common corruptions, and on test images under the papers' perturbations."""
    names, levels = (TEST, SEVERITIES) if split == "test" else (VALIDATION, (3,))
    right = dict.fromkeys(names, 0)
    reader, generator = LogitModel(model), torch.Generator(device)
    with reader.evaluating():
        batches = source_batches(judged, batch_size=BATCH, device=device, shared=False)
        for number, batch in enumerate(batches):
            for name, level in product(names, levels):
                generator.manual_seed(seed_for("corruption", name, level, number))
                images = corrupted(name, batch.inputs, level, generator)
                labels = need_labels(batch.labels)
                right[name] += int((reader.read(images)[0].argmax(1) == labels).sum())
    count = len(judged) * len(levels)
    found = {name: each / count for name, each in right.items()}
    if split == "test":
        others = perturbed_accuracy(model, judged, SCALED_32, draws=1, batch_size=BATCH)
        found |= {name: each.accuracy for name, each in others.items()}
    return {**found, "common_corruptions": sum(found.values()) / len(found)}


def _ood(
    model: nn.Module,
    judged: Samples,
    validation: Samples,
    ood: Mapping[str, Mapping[str, Samples]],
    split: str,
) -> dict[str, Any]:
    """AUROC and false positives by the score that is best on validation data, means over data."""
    found: dict[str, dict[str, OODScores]] = {"validation": {}, "test": {}}
    for part in {"validation", split}:
        known = validation if part == "validation" else judged
        for name, other in ood[part].items():
            found[part][name] = detect_ood(model, known, other, batch_size=BATCH)
    by = [each.auroc for each in found["validation"].values()]
    if any(math.isnan(each["energy"]) for each in by):
        return {"ood_auroc": math.nan}
    chosen = max(by[0], key=lambda name: sum(each[name] for each in by))
    scores = found[split]
    return {
        "ood_score": chosen,
        **{f"ood_auroc {name}": each.auroc[chosen] for name, each in scores.items()},
        "ood_auroc": sum(each.auroc[chosen] for each in scores.values()) / len(scores),
        "ood_fpr95": sum(each.fpr95[chosen] for each in scores.values()) / len(scores),
    }


def rejection(model: nn.Module, judged: Samples, device: torch.device) -> dict[str, Any]:
    """How well the margin, and the probability, say which predictions to hold back."""
    reader = LogitModel(model)
    scorer = Scorer(reader)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with reader.evaluating():
        for batch in source_batches(judged, batch_size=BATCH, device=device, shared=False):
            scored = scorer(batch.inputs)
            right = scored.predicted == need_labels(batch.labels)
            parts.append((scored.margin.cpu(), scored.probability.cpu(), right.cpu()))
    margin, probability, right = (torch.cat(each) for each in zip(*parts, strict=True))
    return {
        f"rejection_by_{name}": risk_coverage(values, right)
        for name, values in (("margin", margin), ("probability", probability))
    }


def risk_coverage(sureness: Tensor, right: Tensor) -> dict[str, float]:
    r"""Errors among the surest predictions.

    ``area`` is the mean over k of the error rate among the k surest of N (the area under the
    risk-coverage curve, Geifman and El-Yaniv 2017): 0 without errors. ``accuracy at 0.9`` is the
    accuracy of the surest 90 %. Equal sureness shares the mean of its places' errors.

    Example:
        >>> found = risk_coverage(torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.tensor([1, 1, 0, 1]))
        >>> round(found["area"], 4), found["accuracy at 0.5"]
        (0.1458, 1.0)
    """
    values = sureness.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    _, group = torch.unique(-values, return_inverse=True)
    wrong = 1 - right.double()
    sizes = torch.bincount(group).double()
    mean = torch.bincount(group, weights=wrong) / sizes
    ordered = mean[group.sort().values]
    count = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    risk = ordered.cumsum(0) / count
    at = {share: max(1, round(share * len(wrong))) - 1 for share in COVERAGES}
    return {
        "area": float(risk.mean()),
        **{f"accuracy at {share}": 1 - float(risk[row]) for share, row in at.items()},
    }


def _plain(value: Any) -> Any:
    """Ready for JSON, which knows no NaN."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
