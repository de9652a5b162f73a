"""Does low curvature go with robustness? Accuracy under noise by curvature (ROB 7.3)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from largemargin.geometry import curvature_by_robustness, low_curvature_accuracy
from largemargin.geometry.input_gradients import sample_groups
from largemargin.geometry.pairs import blocks
from largemargin.measuring.draws import SampleDraws
from largemargin.measuring.reading import Reader
from largemargin.measuring.records import Record
from largemargin.robust.perturbations import add_gaussian, add_uniform

NOISES = ("gaussian", "uniform")


@dataclass(frozen=True)
class CurvatureRobustness(Record):
    """Accuracy under noise on samples of low curvature, and curvature by robustness (NGR-7.3)."""

    noise: str
    amount: float
    """Standard deviation of Gaussian noise, amplitude of uniform noise."""
    draws: int
    accuracy: float
    """Under noise, mean over the draws."""
    accuracy_std: float
    """Standard deviation of the accuracy over the draws."""
    shares: tuple[float, ...]
    """p: the share of samples of lowest curvature that is kept."""
    strict: tuple[float, ...]
    """Accuracy on {curvature < quantile p}, as printed; NaN where that is empty."""
    weak: tuple[float, ...]
    """Accuracy on {curvature <= quantile p}."""
    kept_strict: tuple[int, ...]
    kept_weak: tuple[int, ...]
    group_curvature: tuple[float, ...]
    """Mean curvature of the samples that k = 0, 1, ... draws leave right; NaN for no sample."""
    group_size: tuple[int, ...]
    correlation: float
    """Pearson's, of k and the group means: negative where flat samples are robust ones."""


def count_correct(
    reader: Reader,
    images: Tensor,
    labels: Tensor,
    index: Tensor,
    *,
    kind: str,
    amount: float,
    draws: int,
    seed: int,
    batch_size: int,
) -> Tensor:
    """(n, draws) booleans: whether each noisy copy is classified right."""
    source = SampleDraws(seed, f"{kind} noise")
    parts = []
    for samples in sample_groups(images, draws, batch_size):
        x, which = images[samples], index[samples]
        if kind == "gaussian":
            noise = source.normal(which, draws, x).flatten(0, 1)
        else:
            noise = source.uniform(which, draws, x).flatten(0, 1)
        row = torch.arange(len(noise), device=x.device) // draws
        right = []
        for part in blocks(len(noise), batch_size):
            clean = x[row[part]]
            if kind == "gaussian":
                noisy = add_gaussian(clean, noise[part], sigma=amount)
            else:
                noisy = add_uniform(clean, noise[part], amplitude=amount)
            right.append(reader(noisy).argmax(1) == labels[samples][row[part]])
        parts.append(torch.cat(right).view(len(x), draws))
    return torch.cat(parts)


def describe_robustness(
    curvature: Tensor,
    correct: Tensor,
    kind: str,
    amount: float,
    shares: tuple[float, ...],
    notes: list[str],
) -> CurvatureRobustness:
    """Curves and correlation of (N,) curvatures and (N, draws) right predictions under noise."""
    hits = correct.double()
    curve = low_curvature_accuracy(curvature.double(), hits.mean(1), shares)
    draws = correct.shape[1]
    groups = curvature_by_robustness(curvature.double(), correct.sum(1), draws=draws)
    correlation = float(groups.pearson)
    if math.isnan(correlation):
        notes.append(
            f"curvature and robustness to {kind} noise have no correlation: "
            f"{int((groups.size > 0).sum())} group(s) of samples, or no spread between them"
        )
    by_draw = hits.mean(0)
    return CurvatureRobustness(
        kind,
        float(amount),
        draws,
        float(hits.mean()),
        float(by_draw.std(correction=0)),
        tuple(float(share) for share in shares),
        tuple(curve.strict.tolist()),
        tuple(curve.weak.tolist()),
        tuple(curve.size_strict.tolist()),
        tuple(curve.size_weak.tolist()),
        tuple(groups.mean.tolist()),
        tuple(groups.size.tolist()),
        correlation,
    )
