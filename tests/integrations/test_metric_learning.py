"""Converted losses of pytorch-metric-learning: its values and gradients, where PML is right."""

import doctest
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.integrations import metric_learning
from largemargin.integrations.metric_learning import from_pml, from_pml_state_dict

pytest.importorskip(
    "pytorch_metric_learning",
    reason="compares with pytorch-metric-learning, which is not installed",
)
from pytorch_metric_learning import distances, losses, reducers, regularizers

# PML hands torch tensors to scipy, which numpy 2 will not unwrap some day.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

N, D, C = 12, 6, 5

CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "arcface": (losses.ArcFaceLoss, {}),
    "arcface, past pi - m": (losses.ArcFaceLoss, {"margin": 100.0, "scale": 8}),
    "sub-center arcface": (losses.SubCenterArcFaceLoss, {"sub_centers": 3, "scale": 16}),
    "cosface": (losses.CosFaceLoss, {}),
    "cosface, small scale": (losses.CosFaceLoss, {"margin": 0.1, "scale": 4}),
    "softmax": (losses.NormalizedSoftmaxLoss, {}),
    "softmax, free norms": (
        losses.NormalizedSoftmaxLoss,
        {
            "temperature": 0.5,
            "distance": distances.DotProductSimilarity(normalize_embeddings=False),
        },
    ),
    "sphereface": (losses.SphereFaceLoss, {}),
    "sphereface, m = 3": (losses.SphereFaceLoss, {"margin": 3}),
    "lsoftmax": (losses.LargeMarginSoftmaxLoss, {}),
    "lsoftmax, m = 2": (losses.LargeMarginSoftmaxLoss, {"margin": 2}),
}


def problem() -> tuple[Tensor, Tensor]:
    features = 2 * torch.randn(N, D, dtype=torch.float64)
    return features.requires_grad_(), torch.arange(N) % C


def pml(kind: type[nn.Module], **options: Any) -> Any:
    return kind(num_classes=C, embedding_size=D, **options).double()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reducer", [None, reducers.SumReducer()], ids=["mean", "sum"])
def test_values_and_gradients_are_those_of_pml(case: str, reducer: Any) -> None:
    kind, options = CASES[case]
    theirs = pml(kind, reducer=reducer, **options)
    loss, head = from_pml(theirs)
    features, labels = problem()
    expected = theirs(features, labels)
    found = loss(features, head, labels)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    to_features, to_weight = torch.autograd.grad(expected, (features, theirs.W))
    mine = torch.autograd.grad(found, (features, head.weight))
    torch.testing.assert_close(mine[0], to_features, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(mine[1].reshape(-1, D), to_weight.t(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_head_predicts_the_logits_of_pml(case: str) -> None:
    kind, options = CASES[case]
    theirs = pml(kind, **options)
    _, head = from_pml(theirs)
    features, _ = problem()
    torch.testing.assert_close(head(features), theirs.get_logits(features), rtol=1e-10, atol=1e-10)


def test_the_case_past_pi_minus_m_reaches_its_branch() -> None:
    theirs = pml(*CASES["arcface, past pi - m"][:1], **CASES["arcface, past pi - m"][1])
    features, labels = problem()
    cosine = theirs.get_cosine(features)[torch.arange(N), labels]
    past = cosine.arccos() > math.pi - theirs.margin
    assert past.any()
    assert not past.all()


def test_the_head_owns_its_weight() -> None:
    theirs = pml(losses.ArcFaceLoss)
    _, head = from_pml(theirs)
    assert head.weight.shape == (C, D)
    assert head.weight.is_contiguous()
    with torch.no_grad():
        head.weight.zero_()
    assert theirs.W.abs().sum() > 0
    theirs.W.requires_grad_(False)
    assert not from_pml(theirs).head.weight.requires_grad


def test_outliers_and_dominant_centers_are_those_of_pml() -> None:
    theirs = pml(losses.SubCenterArcFaceLoss, sub_centers=3)
    _, head = from_pml(theirs)
    features = torch.randn(200, D, dtype=torch.float64)
    labels = torch.arange(200) % C
    outliers, centers = theirs.get_outliers(features, labels)
    found = head.dominant(head.own_cosines(features, labels), labels)
    mine = (found.angles > math.radians(75)).nonzero().flatten()
    assert mine.tolist() == sorted(outliers.tolist())
    assert 0 < len(mine) < 200
    torch.testing.assert_close(found.head.weight, centers.t(), rtol=0, atol=0)


def test_degrees_become_radians() -> None:
    assert from_pml(pml(losses.ArcFaceLoss, margin=45)).loss.margin == pytest.approx(math.pi / 4)


def test_the_converted_loss_trains_a_model_by_attach() -> None:
    loss, head = from_pml(losses.CosFaceLoss(num_classes=C, embedding_size=D, scale=8))
    model = nn.Sequential(nn.Linear(4, D), head)
    criterion = lm.attach(model, loss)
    assert criterion.layer is head
    criterion(model(torch.randn(N, 4)), torch.arange(N) % C).backward()
    assert head.weight.grad is not None


def test_a_margin_in_radians_is_pointed_out() -> None:
    """PML reads ArcFace's margin as degrees: 0.5 is 0.0087 radians, next to nothing."""
    with pytest.warns(UserWarning, match=r"0\.5 degrees, 0\.008727 radians") as seen:
        loss, _ = from_pml(pml(losses.ArcFaceLoss, margin=0.5))
    assert loss.margin == pytest.approx(math.radians(0.5))
    assert seen[0].filename == __file__


@pytest.mark.parametrize("kind", [losses.SphereFaceLoss, losses.LargeMarginSoftmaxLoss])
def test_a_margin_cut_down_to_one_is_pointed_out(kind: type[nn.Module]) -> None:
    """PML computes int(1.35) = 1, no margin at all, without a word; ours with 1.35 differs."""
    theirs = pml(kind, margin=1.35)
    with pytest.warns(UserWarning, match="no margin") as seen:
        loss, head = from_pml(theirs)
    assert seen[0].filename == __file__
    features, labels = problem()
    plain = lm.CrossEntropy()(features, head, labels)
    torch.testing.assert_close(theirs(features, labels), plain)
    torch.testing.assert_close(loss(features, head, labels), plain)
    unit = nn.functional.normalize(features)
    meant = lm.UnifiedMargin(m1=1.35, scale=1.0)(unit, head, labels)
    none = lm.UnifiedMargin(m1=1.0, scale=1.0)(unit, head, labels)
    assert meant > none + 0.01


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (lambda: pml(losses.ProxyAnchorLoss), "all samples of a batch"),
        (lambda: losses.TripletMarginLoss(), "ArcFaceLoss, CosFaceLoss"),
        (
            lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), D, memory_size=8),
            "convert the loss inside",
        ),
        (
            lambda: pml(losses.ArcFaceLoss, weight_regularizer=regularizers.LpRegularizer()),
            "weight_regularizer=LpRegularizer",
        ),
        (
            lambda: pml(losses.CosFaceLoss, embedding_regularizer=regularizers.LpRegularizer()),
            "embedding_regularizer=LpRegularizer",
        ),
        (
            lambda: pml(losses.CosFaceLoss, reducer=reducers.AvgNonZeroReducer()),
            "AvgNonZeroReducer",
        ),
        (
            lambda: pml(losses.CosFaceLoss, reducer=reducers.ClassWeightedReducer(torch.ones(C))),
            "divides by the weights' sum",
        ),
        (
            lambda: pml(losses.NormalizedSoftmaxLoss, distance=distances.LpDistance()),
            "LpDistance",
        ),
        (
            lambda: pml(losses.CosFaceLoss, distance=distances.CosineSimilarity(power=2)),
            "power=1",
        ),
        (lambda: pml(losses.SphereFaceLoss, scale=4), "Multiply the features"),
        (lambda: pml(losses.LargeMarginSoftmaxLoss, scale=2), "scale=2"),
        (lambda: losses.SoftTripleLoss(C, D), r"averages.*SubCenterHead"),
        (lambda: nn.CrossEntropyLoss(), "pytorch-metric-learning itself"),
    ],
)
def test_what_has_no_counterpart_is_refused(theirs: Any, message: str) -> None:
    with pytest.raises(lm.LargeMarginError, match=message):
        from_pml(theirs())


def test_subclasses_are_refused() -> None:
    class Mine(losses.ArcFaceLoss):
        pass

    with pytest.raises(lm.LargeMarginError, match="subclass"):
        from_pml(pml(Mine))


@pytest.mark.parametrize("prefix", ["", "criterion.", "module.criterion."])
def test_state_dicts(prefix: str) -> None:
    theirs = pml(losses.ArcFaceLoss)
    state = {f"{prefix}{name}": value for name, value in theirs.state_dict().items()}
    state["backbone.weight"] = torch.ones(2, 2)
    head = lm.ClassHead(D, C, similarity="cosine", dtype=torch.float64)
    head.load_state_dict(from_pml_state_dict(state))
    assert torch.equal(head.weight, theirs.W.t())
    assert torch.equal(from_pml_state_dict(state, prefix)["weight"], theirs.W.t())


def test_state_dicts_without_class_vectors_or_with_two() -> None:
    with pytest.raises(lm.LargeMarginError, match="no entry 'W'"):
        from_pml_state_dict({"weight": torch.ones(2, 2)})
    two = {"a.W": torch.ones(3, 2), "b.W": torch.ones(4, 2)}
    with pytest.raises(lm.LargeMarginError, match=r"\['a.W', 'b.W'\]"):
        from_pml_state_dict(two)
    assert from_pml_state_dict(two, "b.")["weight"].shape == (2, 4)
    with pytest.raises(lm.LargeMarginError, match=r"\(D, C\)"):
        from_pml_state_dict({"W": torch.ones(3)})


def test_examples() -> None:
    assert doctest.testmod(metric_learning, extraglobs={"torch": torch}).failed == 0
