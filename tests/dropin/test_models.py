"""Models people train: the attached loss is the loss by hand, value and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from dropin.nets import LABELS, C, ConvNet, by_hand, images, same, through_attach
from torch import Tensor, nn

import largemargin as lm

# timm's own names are deprecated one after the other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:timm", "ignore::FutureWarning")


def tv(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, num_classes=C, **settings)


def small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24,
        num_classes=C,
    )  # fmt: skip


def not_of_zeros(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    """torchvision's head begins with zeros, which attach fills: test_training_warnings.py."""

    def built() -> nn.Module:
        model: nn.Module = build()
        model.heads.head.reset_parameters()  # type: ignore[operator, union-attr]
        return model

    return built


def hf_vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        image_size=32, patch_size=16, num_labels=C,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def hf_bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, num_labels=C,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def tm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=C, **settings)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet18": (tv("resnet18"), "fc"),
    "mobilenet_v3_small": (tv("mobilenet_v3_small"), "classifier.3"),
    "efficientnet_b0": (tv("efficientnet_b0"), "classifier.1"),
    "vit small": (not_of_zeros(small_vit), "heads.head"),
    "timm vit": (
        tm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2),
        "head",
    ),
    "timm convnext": (tm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), "head.fc"),
    "timm resnet": (tm("resnet10t"), "fc"),
    "hf vit": (hf_vit, "classifier"),
    "sequential": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 9), nn.Linear(9, C)), "2"),
}
LARGE = {"vit_b_16": (not_of_zeros(tv("vit_b_16", image_size=32)), "heads.head")}
CONVOLUTIONAL = ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "timm resnet")


def objectives(dim: int) -> dict[str, Any]:
    return {
        "softmax": lm.CrossEntropy(),
        "cosface": lm.CosFace(scale=8.0),
        "lmd": lm.Objective(softmax=lm.CrossEntropy(), lmd=0.1 * lm.Discriminative(C, dim)),
    }


def check(make: Callable[[], nn.Module], head: str, names: Sequence[str] = ()) -> None:
    torch.manual_seed(0)
    model = make().eval()  # dropout off, so that two passes agree; batch norm per sample
    x: Any = images(size=32)
    if isinstance(model, transformers.PreTrainedModel):
        x = {"pixel_values": x}
    for name, objective in objectives(model.get_submodule(head).in_features).items():
        if name in names or not names:
            got = through_attach(model, objective, x, LABELS)
            same(got, by_hand(model, objective, x, LABELS, head), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_loss_by_hand(name: str) -> None:
    check(*MODELS[name], ["cosface"] if name in CONVOLUTIONAL else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONVOLUTIONAL, *LARGE])
def test_large_models(name: str) -> None:
    check(*(MODELS | LARGE)[name], ["softmax", "lmd"])


def test_token_ids_and_keyword_inputs() -> None:
    model = hf_bert().eval()
    x = {"input_ids": torch.randint(0, 20, (6, 7)), "attention_mask": torch.ones(6, 7).long()}
    for objective in objectives(16).values():
        same(
            through_attach(model, objective, x, LABELS),
            by_hand(model, objective, x, LABELS, "classifier"),
        )


def test_models_that_return_their_own_loss() -> None:
    """A Hugging Face model given labels returns its loss beside the logits."""
    model = hf_vit().eval()
    criterion = lm.attach(model, lm.CrossEntropy())
    outputs = model(pixel_values=images(size=32), labels=LABELS)
    torch.testing.assert_close(criterion(outputs, LABELS), outputs.loss)


@pytest.mark.parametrize("objective", [lm.CosFace(scale=8.0), lm.CrossEntropy()])
def test_an_optimizer_made_before_trains_the_head(objective: lm.Loss) -> None:
    model = ConvNet()
    weight, before = model.fc.weight, model.fc.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = lm.attach(model, objective)
    assert model.fc.weight is weight
    loss = criterion(model(images()), LABELS)
    loss.backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    assert criterion(model(images()), LABELS) < loss


def test_training_fits() -> None:
    """A few steps on a fixed batch: predictions by ``model(x).argmax`` become the labels."""
    for make in (
        lambda C, D: lm.CosFace(scale=8.0, margin=0.1),
        lambda C, D: lm.GaussianMixture(C, D, alpha=0.1),
        lambda C, D: lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(C, D, margin=1)),
    ):
        model = ConvNet()
        criterion = lm.attach(model, make)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(60):
            optimizer.zero_grad()
            criterion(model(images()), LABELS).backward()
            optimizer.step()
        assert torch.equal(model(images()).argmax(1), LABELS)


def test_param_groups_hold_every_parameter_once() -> None:
    model = ConvNet()
    criterion = lm.attach(
        model, lambda C, D: lm.Objective(lms=lm.LMSoftmax(), cen=lm.CenterLoss(C, D))
    )
    groups = criterion.param_groups(model, head={"lr": 1.0, "weight_decay": 0.0})
    given = [id(p) for group in groups for p in group["params"]]
    assert sorted(given) == sorted(id(p) for p in model.parameters())
    assert len(groups) == 2
    assert groups[1]["params"] == [model.fc.weight]
    torch.optim.SGD(groups, lr=0.1)


def test_evaluation_writes_nothing_and_follows_the_model() -> None:
    model = ConvNet()
    criterion = lm.attach(
        model,
        lambda C, D: lm.Objective(
            softmax=lm.CrossEntropy(), lmd=lm.Discriminative(C, D), cen=lm.CenterLoss(C, D)
        ),
    )
    criterion(model(images()), LABELS)

    def state() -> dict[str, Tensor]:
        return {k: v for k, v in criterion.state_dict().items() if isinstance(v, Tensor)}

    before = {name: value.clone() for name, value in state().items()}
    model.eval()
    with torch.no_grad():
        criterion(model(images(1)), LABELS)
    assert not criterion.training
    assert all(torch.equal(value, before[name]) for name, value in state().items())
    assert criterion.steps == 1
    model.train()
    criterion(model(images(1)), LABELS)
    assert criterion.training
    assert criterion.steps == 2
    assert any(not torch.equal(value, before[name]) for name, value in state().items())


def test_float64_models() -> None:
    model = ConvNet().double()
    objective = lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(C, 8))
    criterion = lm.attach(model, objective)
    loss = criterion(model(images().double()), LABELS)
    assert loss.dtype == torch.float64
    assert criterion.banks[0].centroids.dtype == torch.float64
    fresh = lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(C, 8)).double()
    features = model.pool(model.body(model.stem(images().double()))).flatten(1)
    torch.testing.assert_close(loss, fresh(features, model.fc, LABELS).total, rtol=1e-12, atol=0)
