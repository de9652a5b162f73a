"""``model(x)`` predicts with the geometry its loss trains; distances are to its own boundaries."""

from typing import Any

import pytest
import torch
from dropin.nets import LABELS, C, D, Mlp, N, vectors
from torch import Tensor, nn

import largemargin as lm
from largemargin.heads.head_spec import HeadView
from largemargin.ops.boundary import signed_boundary_distance

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "adacos": (C,),
    "gaussian_mixture": (C, D),
    "ldam": ([10] * C,),
    "logit_adjustment": ([10] * C,),
    "vs_loss": ([10] * C,),
    "center": (C, D),
    "discriminative": (C, D),
    "robust_discriminative": (C, D),
    "stable_discriminative": (C, D),
}
MARGINS = {
    "adaface": {"margin": 0.0},
    "arcface": {"margin": 0.0},
    "cosface": {"margin": 0.0},
    "elasticface": {"margin": 0.0, "std": 0.0},
    "gaussian_mixture": {"alpha": 0.0, "likelihood_weight": 0.0},
    "ldam": {"max_margin": 1e-12},
    "lsoftmax": {"margin": 1},
    "magface": {"min_margin": 0.0, "max_margin": 0.0, "strength": 0.0},
    "sphereface": {"margin": 1},
}


def made(name: str, **settings: Any) -> lm.Loss:
    return lm.LOSSES[name](*ARGUMENTS.get(name, ()), **settings)


def shaped() -> list[str]:
    return [name for name in lm.LOSSES if made(name).head_form(C) is not None]


def test_which_losses_shape_the_head() -> None:
    assert {"arcface", "cosface", "ldam", "lm_softmax", "normface", "sphereface"} <= set(shaped())
    assert {"gaussian_mixture", "lsoftmax", "gm_softmax", "unified_margin"} <= set(shaped())


@pytest.mark.parametrize("name", shaped())
def test_the_head_gives_the_logits_of_the_loss(name: str) -> None:
    """Without its margin, the loss is the cross entropy of what the model returns."""
    model = Mlp()
    loss = made(name, **MARGINS.get(name, {}))
    criterion = lm.attach(model, loss)
    form = loss.head_form(C)
    assert (model.fc.similarity, model.fc.scale) == (form.similarity, form.scale)
    assert form.bias or model.fc.bias is None
    outputs = model(vectors())
    features = model.body(vectors())
    if name in MARGINS or name == "normface":
        want = nn.functional.cross_entropy(outputs, LABELS)
        torch.testing.assert_close(criterion(outputs, LABELS), want, rtol=1e-4, atol=1e-5)
    view = criterion.head
    torch.testing.assert_close(view(features), outputs)
    torch.testing.assert_close(model.fc.to_linear()(features).argmax(1), outputs.argmax(1))


@pytest.mark.parametrize("name", [n for n in lm.LOSSES if n not in shaped()])
def test_other_losses_leave_the_layer_alone(name: str) -> None:
    model = Mlp()
    layer, bias = model.fc, model.fc.bias
    layers = ["body"] if name == "layer_margin" else []
    criterion = lm.attach(model, made(name), layers=layers)
    assert model.fc is layer
    assert criterion.layer is layer
    assert model.fc.bias is bias


def test_losses_that_go_by_norms_get_features_that_are_not_normalised() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.AdaFace(rate=1.0))
    criterion(model(vectors()), LABELS)
    norms = model.body(vectors()).norm(dim=1)
    found = criterion.objective.terms["adaface"].norms.values
    torch.testing.assert_close(found, torch.stack([norms.mean(), norms.std()]))


def test_a_head_of_the_right_form_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, D), lm.ClassHead(D, C, similarity="cosine", scale=9.0))
    head = model[1]
    lm.attach(model, lm.CosFace(scale=9.0)).undo()
    assert model[1] is head
    criterion = lm.attach(model, lm.CosFace(scale=30.0))
    assert model[1] is head
    assert head.scale == 30.0
    criterion.undo()
    assert head.scale == 9.0


def test_similarity_may_be_chosen() -> None:
    model = Mlp()
    criterion = lm.attach(model, lm.CrossEntropy(), similarity="euclidean")
    distance = torch.cdist(model.body(vectors()), model.fc.weight).square() / 2
    want = nn.functional.cross_entropy(-distance, LABELS)
    torch.testing.assert_close(criterion(model(vectors()), LABELS), want)
    two = lm.Objective(a=lm.CosFace(), b=lm.GaussianMixture(C, D))
    with pytest.raises(lm.LargeMarginError, match=r"different geometry.*similarity="):
        lm.attach(Mlp(), two)
    model = Mlp()
    lm.attach(model, two, similarity="cosine")
    assert (model.fc.similarity, model.fc.scale) == ("cosine", two.terms["a"].scale_for(C))
    with pytest.raises(lm.LargeMarginError, match="similarity"):
        lm.attach(Mlp(), lm.CrossEntropy(), similarity="cos")


def test_learned_variances_are_refused() -> None:
    with pytest.raises(lm.LargeMarginError, match="learn_variances"):
        lm.attach(Mlp(), lm.GaussianMixture(C, D, learn_variances=True))


def test_a_fixed_head_is_not_reshaped() -> None:
    model = nn.Sequential(nn.Linear(4, D), lm.SimplexHead(D, C))
    with pytest.raises(lm.LargeMarginError, match="SimplexHead, which is always 'dot'"):
        lm.attach(model, lm.CosFace())


def boundaries(head: HeadView, features: Tensor, classes: Tensor) -> Tensor:
    """Distances to the nearest boundary, found by walking along the normals."""
    weight = {
        "cosine": nn.functional.normalize(head.weight),
        "cosine_prototypes": nn.functional.normalize(head.weight),
    }.get(head.similarity, head.weight)
    offset = torch.zeros(len(weight)) if head.bias is None else head.bias
    if head.similarity == "euclidean":
        offset = offset - 0.5 * weight.square().sum(1)
    signed = signed_boundary_distance(features, weight, offset)
    own = signed[torch.arange(len(classes)), classes]
    return own.scatter(1, classes[:, None], -torch.inf).amax(1)


@pytest.mark.parametrize("similarity", ["dot", "cosine", "cosine_prototypes", "euclidean"])
@pytest.mark.parametrize("name", ["centroid_margin", "discriminative", "stable_discriminative"])
def test_distances_are_to_the_boundaries_of_the_head(similarity: str, name: str) -> None:
    torch.manual_seed(1)
    head = lm.ClassHead(D, C, similarity=similarity, scale=3.0, bias=False)
    with torch.no_grad():
        head.weight.mul_(torch.linspace(0.5, 3.0, C)[:, None])
    features, labels = vectors(2, C, D), torch.arange(C)  # each sample is its class's centroid
    loss = made(name, margin=50.0 if name != "stable_discriminative" else 0.9)
    nearest = boundaries(HeadView(head.weight, None, similarity), features, labels)
    # On the boundary the two logits are equal: the definition of what is measured.
    step = nearest.detach()
    if name == "centroid_margin":
        got = loss(features, head, labels)
        torch.testing.assert_close(got, (50 + step).mean())
        view = HeadView(head.weight, None, similarity, 3.0)
        torch.testing.assert_close(loss(features, view, labels), got)
    elif name == "discriminative":
        got = loss.named_terms(features, head, labels).terms["margin"]
        torch.testing.assert_close(got, (50 + step).mean())
    else:
        plain = lm.HeadView if hasattr(lm, "HeadView") else HeadView
        got = loss.named_terms(features, head, labels).terms["margin"]
        want = (
            loss.eval()
            .named_terms(features, plain(*_linear(head.weight, similarity)), labels)
            .terms["margin"]
        )
        torch.testing.assert_close(got, want)


def _linear(weight: Tensor, similarity: str) -> tuple[Tensor, Tensor | None]:
    if similarity.startswith("cosine"):
        return nn.functional.normalize(weight), None
    return weight, -0.5 * weight.square().sum(1) if similarity == "euclidean" else None


@pytest.mark.parametrize("similarity", ["dot", "cosine", "euclidean"])
def test_a_point_moved_by_its_distance_is_on_the_boundary(similarity: str) -> None:
    """Not by formula: the head itself gives two classes the same logit there."""
    torch.manual_seed(2)
    head = lm.ClassHead(D, 2, similarity=similarity, scale=3.0, bias=False).double()
    point, label = vectors(3, 1, D).double().requires_grad_(), torch.tensor([0])
    value = lm.CentroidMargin(margin=100.0)(point, head, label) - 100.0
    (normal,) = torch.autograd.grad(value, point)
    torch.testing.assert_close(normal.norm(), torch.ones((), dtype=torch.float64))
    there = head(point - value * normal)[0]
    torch.testing.assert_close(there[0], there[1])
    assert (head(point)[0, 1] > head(point)[0, 0]) == (value > 0)


def test_sizes_are_checked_at_attach() -> None:
    with pytest.raises(lm.LargeMarginError, match=f"num_classes=7.*{C} classes in dimension {D}"):
        lm.attach(Mlp(), lm.Discriminative(7, D))
    with pytest.raises(lm.LargeMarginError, match="dim=9"):
        lm.attach(Mlp(), lm.Objective(c=lm.CenterLoss(C, 9)))


def test_a_class_and_other_things_are_no_objective() -> None:
    for given in (lm.Discriminative, lm.CosFace):
        with pytest.raises(lm.LargeMarginError, match=f"class {given.__name__} was given"):
            lm.attach(Mlp(), given)
    with pytest.raises(lm.LargeMarginError, match="CrossEntropyLoss was given"):
        lm.attach(Mlp(), nn.CrossEntropyLoss())
    with pytest.raises(lm.LargeMarginError, match="order is"):
        lm.attach(lm.CosFace, Mlp())
    criterion = lm.attach(Mlp(), 0.5 * lm.CosFace())
    assert criterion.objective.term_weights == {"cosface": 0.5}


def test_calls_that_cannot_be_right() -> None:
    model, other = Mlp(), Mlp()
    criterion = lm.attach(model, lm.CrossEntropy())
    with pytest.raises(lm.LargeMarginError, match="no forward pass"):
        criterion(other(vectors()), LABELS)
    outputs = model(vectors())
    for bad, match in (
        (other(vectors()), "not made by"),
        (torch.randn(N, C), "not made by"),
        (torch.randn(N, C + 1), f"no tensor with {C} columns"),
        ({"loss": None}, "holds no tensor"),
        (3.0, "holds no tensor"),
    ):
        with pytest.raises(lm.LargeMarginError, match=match):
            criterion(bad, LABELS)
    with pytest.raises(lm.LargeMarginError, match=r"6 samples.*4 labels"):
        criterion(outputs, LABELS[:4])
    with pytest.raises(lm.LargeMarginError, match="labels must be a tensor"):
        criterion(outputs, [0, 1, 2, 3, 4, 1])
    with pytest.raises(lm.LargeMarginError, match="no term of the objective uses it"):
        criterion(outputs, LABELS, noisy=outputs)
    robust = lm.attach(model, lm.RobustDiscriminative(C, D))
    with pytest.raises(lm.LargeMarginError, match="noisy=model"):
        robust(model(vectors()), LABELS)
    criterion(outputs, LABELS)  # still fine after all that
