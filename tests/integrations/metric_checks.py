"""The metrics under test with what ``measure_arrays`` calls them, and checks on two ranks."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import largemargin as lm

C, D, N = 4, 3, 40


def _ours(name: str, *arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        from largemargin.integrations import torchmetrics

        return getattr(torchmetrics, name)(*arguments)

    return make


METRICS: dict[str, Callable[[], Any]] = {
    "class_margin": _ours("ClassMargin"),
    "raw_min": _ours("SampleMargin", "raw", "minimum"),
    "cosine_mean": _ours("SampleMargin", "cosine", "mean"),
    "cosine_ratio": _ours("SampleMargin", "cosine", "ratio"),
    "cosine_quantile": _ours("SampleMargin", "cosine", 0.05),
    "distance_min": _ours("SampleMargin", "distance", "minimum"),
    "bias": _ours("ImplicitBias"),
    "auroc_raw": _ours("MarginRejectionAUROC"),
    "auroc_distance": _ours("MarginRejectionAUROC", "distance"),
    "auroc_confidence": _ours("MarginRejectionAUROC", "confidence"),
    "dispersion": _ours("Dispersion", C),
    "separation": _ours("Dispersion", C, "separation"),
    "ideal_ratio": _ours("Dispersion", C, "ratio"),
    "within": _ours("VarianceSplit", C, "within"),
    "variance_ratio": _ours("VarianceSplit", C),
    "nc1": _ours("NeuralCollapse", C),
    "nc2": _ours("NeuralCollapse", C, "simplex_gap"),
    "nc3": _ours("NeuralCollapse", C, "duality"),
}
CHECKS = ["halves", "a_rank_without_samples", "a_collection"]


def data(similarity: str = "dot") -> tuple[Tensor, Tensor, nn.Module]:
    """Features of overlapping classes far from the origin, and a head that makes mistakes."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(C, (N,), generator=generator)
    centers = torch.randn(C, D, generator=generator)
    features = centers[labels] + 0.7 * torch.randn(N, D, generator=generator) + 0.5
    torch.manual_seed(2)
    layer = nn.Linear(D, C) if similarity == "dot" else lm.ClassHead(D, C, similarity=similarity)
    with torch.no_grad():
        layer.weight.copy_(centers + 0.3)
    return features, labels, layer


def wanted(name: str, features: Tensor, labels: Tensor, layer: nn.Module) -> float:
    """The number of ``measure_arrays``."""
    return all_wanted(features, labels, layer)[name]


def all_wanted(features: Tensor, labels: Tensor, layer: nn.Module) -> dict[str, float]:
    found = lm.measure_arrays(
        features,
        labels,
        layer.weight,
        getattr(layer, "bias", None),
        similarity=getattr(layer, "similarity", "dot"),
        scale=float(getattr(layer, "scale", 1.0)),
        pairwise=True,
    )
    cosine = found.margins["cosine"].overall
    assert found.collapse is not None
    assert found.compactness is not None
    return {
        "class_margin": found.prototypes.class_margin,
        "raw_min": found.margins["raw"].overall.minimum,
        "cosine_mean": cosine.mean,
        "cosine_ratio": cosine.ratio,
        "cosine_quantile": cosine.quantiles[0.05],
        "distance_min": found.margins["distance"].overall.minimum,
        "bias": found.softmax_bias.mean,
        "auroc_raw": found.errors.auroc["lead_raw"],
        "auroc_distance": found.errors.auroc["lead_distance"],
        "auroc_confidence": found.errors.auroc["confidence"],
        "dispersion": found.compactness.largest_dispersion,
        "separation": found.compactness.separation,
        "ideal_ratio": found.compactness.ideal_ratio,
        "within": found.variance.within,
        "variance_ratio": found.variance.ratio,
        "nc1": found.collapse.variability,
        "nc2": found.collapse.simplex_gap,
        "nc3": found.collapse.duality,
    }


def _parts(cut: int) -> list[tuple[Tensor, Tensor]]:
    """What this rank sees: the samples before the cut, or those after it."""
    features, labels, _ = data()
    mine = slice(0, cut) if dist.get_rank() == 0 else slice(cut, N)
    pairs = zip(features[mine].split(6), labels[mine].split(6), strict=True)
    return [pair for pair in pairs if len(pair[0])]


def _differing(name: str, got: Tensor, *given: Tensor) -> Iterator[str]:
    expected = wanted(name, *(given or data()[:2]), data()[2])
    if abs(float(got) - expected) > 1e-9 * (1 + abs(expected)):
        yield f"{name}: {float(got)} instead of {expected}"


def check_halves() -> Iterator[str]:
    features, labels, head = data()
    for name, make in METRICS.items():
        metric = make()
        for x, y in _parts(14):
            metric.update(x, y, head)
        yield from _differing(name, metric.compute())
        # Each is back to its own part after they were joined: nothing counts twice.
        if dist.get_rank() == 0:
            metric.update(features[:30], labels[:30], head)
        else:
            metric.update(features[30:], labels[30:], head)
        twice = torch.cat([features, features]), torch.cat([labels, labels])
        yield from _differing(name, metric.compute(), *twice)


def check_a_rank_without_samples() -> Iterator[str]:
    for name, make in METRICS.items():
        metric = make()
        for features, labels in _parts(0 if name != "class_margin" else N):
            metric.update(features, labels, data()[2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from _differing(name, metric.compute())


def check_a_collection() -> Iterator[str]:
    from torchmetrics import MetricCollection

    collection = MetricCollection({name: make() for name, make in METRICS.items()})
    for features, labels in _parts(14):
        collection(features, labels, data()[2])
    for name, got in collection.compute().items():
        yield from _differing(name, got)
