"""Every network of the library: size, shape, gradients, layouts, compilers, losses."""

import pytest
import torch
from app.models.expected import EXPECTED, side_of, small
from torch import nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.app.models import MODELS, ModelConfig, Normalize, build_model, list_models

NAMES = list(MODELS)
LARGE = {"vgg16", "alexnet"}
"""Over 50 million parameters: a whole backward pass takes seconds."""


def images_for(name: str, count: int = 4, channels: int = 3) -> torch.Tensor:
    side = side_of(name)
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def test_every_network_is_expected() -> None:
    assert EXPECTED.keys() == MODELS.keys()
    listed = list_models()
    assert {*MODELS, "torchvision/NAME", "timm/NAME"} == listed.keys()
    assert all(listed.values())
    assert {name: each.smallest for name, each in MODELS.items()} == {
        "small_cnn": 4,
        "mlp": 1,
        "mnist_cnn": 4,
        "cnn13": 12,
        **dict.fromkeys(("alexnet", "resnet18", "resnet34", "wrn28_10"), 8),
        **dict.fromkeys(("vgg16", "vgg16_mod", "mobilenet"), 32),
    }


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_features_of_the_full_size(name: str) -> None:
    expected = EXPECTED[name]
    with torch.device("meta"):
        model = build_model(ModelConfig(name), 10, size=(expected.size, expected.size))
        images = torch.empty(2, 3, expected.size, expected.size)
        features = model.features(images)
        logits = model(images)
    assert sum(each.numel() for each in model.parameters()) == expected.parameters
    assert features.shape == (2, expected.dim)
    assert logits.shape == (2, 10)


def test_the_wide_network_has_36_million_parameters() -> None:
    assert round(EXPECTED["wrn28_10"].parameters / 1e6, 1) == 36.5


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = small(name, feature_dim=7)
    assert model.features(images_for(name)).shape == (4, 7)
    images = images_for(name, 2 if name in LARGE else 8)
    model(images).square().sum().backward()
    silent = [key for key, each in model.named_parameters() if not _moves(each)]
    assert silent == []


def _moves(parameter: nn.Parameter) -> bool:
    grad = parameter.grad
    return grad is not None and bool(grad.isfinite().all()) and bool(grad.count_nonzero())


@pytest.mark.parametrize("name", NAMES)
def test_attach_finds_the_head(name: str) -> None:
    for feature_dim in (None, 6):
        model = small(name, feature_dim=feature_dim)
        head = model.head
        criterion = lm.attach(model, lm.CosFace(scale=8.0))
        assert model.head is criterion.layer
        assert model.head.weight is head.weight
        labels = torch.tensor([0, 1, 2, 3])
        assert criterion(model(images_for(name)), labels).isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_gives_the_same(name: str) -> None:
    model = small(name).eval()
    images = images_for(name)
    plain = model(images)
    last = model.to(memory_format=torch.channels_last)(
        images.contiguous(memory_format=torch.channels_last)
    )
    torch.testing.assert_close(last, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("resnet18", "small_cnn") else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_compiles_as_one_graph(name: str) -> None:
    model = build_small_normalised(name).eval()
    images = images_for(name)
    torch.compiler.reset()  # blocks of all networks share code, and its cache has a limit
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images))


def build_small_normalised(name: str) -> nn.Module:
    model = small(name, feature_dim=5)
    model.normalize = Normalize((0.5,) * 3, (0.25,) * 3)
    return model


@pytest.mark.parametrize("name", ["small_cnn", "resnet18", "mobilenet"])
def test_weights_come_from_the_global_generator_alone(name: str) -> None:
    torch.manual_seed(3)
    first = small(name).state_dict()
    after = torch.rand(1)
    torch.manual_seed(3)
    second = small(name).state_dict()
    assert torch.equal(after, torch.rand(1))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_grey_images_and_oblongs(name: str) -> None:
    side = side_of(name)
    options = {"wrn28_10": {"depth": 10, "width": 1}}.get(name, {})
    size = (side, 2 * side)
    model = build_model(ModelConfig(name, options=options), 3, channels=1, size=size).eval()
    assert model(torch.rand(2, 1, *size)).shape == (2, 3)


@pytest.mark.parametrize("name", [each for each in NAMES if MODELS[each].smallest > 1])
def test_images_that_are_too_small_are_refused(name: str) -> None:
    smallest = MODELS[name].smallest
    with pytest.raises(LargeMarginError, match=f"{name} needs images of at least {smallest}x"):
        build_model(ModelConfig(name), 10, size=(smallest - 1, 64))
    options = {"wrn28_10": {"depth": 10, "width": 1}}.get(name, {})
    config = ModelConfig(name, options=options)
    model = build_model(config, 10, size=(smallest, smallest)).eval()
    assert model(torch.rand(1, 3, smallest, smallest)).isfinite().all()


def test_dropout_and_batch_norm_switch() -> None:
    def kinds(**settings: object) -> tuple[list[float], int]:
        model = small("mnist_cnn", **settings)
        dropouts = [each.p for each in model.modules() if isinstance(each, nn.Dropout)]
        return dropouts, sum(isinstance(each, nn.BatchNorm2d) for each in model.modules())

    assert kinds() == ([0.0], 0)
    assert kinds(dropout=0.5, batch_norm=True) == ([0.5], 2)
    with torch.device("meta"):
        regimes = {
            (dropout, norm): build_model(
                ModelConfig("alexnet", dropout=dropout, batch_norm=norm), 10
            )
            for dropout in (0.0, 0.5)
            for norm in (False, True)
        }
    for (dropout, norm), model in regimes.items():
        assert {each.p for each in model.modules() if isinstance(each, nn.Dropout)} == {dropout}
        count = sum(isinstance(each, nn.BatchNorm2d) for each in model.modules())
        assert count == (5 if norm else 0)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("cnn13", (128, 6, 6)),  # 32 / 4, and a layer without padding
        ("resnet18", (512, 4, 4)),
        ("resnet34", (512, 4, 4)),
        ("wrn28_10", (640, 8, 8)),
        ("mobilenet", (1024, 7, 7)),
    ],
)
def test_the_mean_is_over_a_map_of_the_published_size(
    name: str, last: tuple[int, int, int]
) -> None:
    side = EXPECTED[name].size
    seen: list[torch.Size] = []
    with torch.device("meta"):
        model = build_model(ModelConfig(name), 10, size=(side, side))
        for each in model.modules():
            if isinstance(each, nn.AdaptiveAvgPool2d):
                each.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
        model(torch.empty(2, 3, side, side))
    assert seen == [(2, *last)]


def test_the_feature_layer_of_the_papers() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig("resnet18", feature_dim=30), 10)
        plain = build_model(ModelConfig("resnet18", feature_dim=30, feature_activation="none"), 10)
    assert [type(each).__name__ for each in model.feature_layer] == ["ReLU", "Linear"]
    assert [type(each).__name__ for each in plain.feature_layer] == ["Linear"]
    assert model.head.in_features == 30


def test_a_fixed_simplex_as_head() -> None:
    model = small("cnn13", num_classes=100, head="simplex")
    assert isinstance(model.head, lm.SimplexHead)
    criterion = lm.attach(model, lm.CrossEntropy())
    criterion(model(images_for("cnn13")), torch.tensor([0, 1, 2, 99])).backward()
    assert model.head.log_scale.grad is not None
    with pytest.raises(LargeMarginError, match="num_classes - 1"):
        small("cnn13", num_classes=200, head="simplex")


def test_normalisation_is_the_first_layer() -> None:
    model = build_model(
        ModelConfig("small_cnn"), 10, size=(8, 8), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0)
    )
    images = images_for("small_cnn")
    by_hand = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.5, 0.25, 1.0]
    ).view(3, 1, 1)
    torch.testing.assert_close(model.normalize(images), by_hand)
    assert "normalize.mean" in model.state_dict()
    bare = small("small_cnn")
    assert bare.normalize(images) is images


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_model(ModelConfig("resnet"), 10), "Did you mean resnet"),
        (lambda: build_model(ModelConfig("small_cnn"), 1), "at least 2 classes"),
        (lambda: build_model(ModelConfig("resnet18", dropout=0.5), 10), "no choice of dropout"),
        (lambda: build_model(ModelConfig("cnn13", batch_norm=False), 10), "no choice of batch"),
        (lambda: build_model(ModelConfig("cnn13", dropout=1.0), 10), "dropout must be"),
        (lambda: build_model(ModelConfig("mlp", options={"depth": 3}), 10), "'hidden'"),
        (
            lambda: build_model(ModelConfig("wrn28_10", options={"depth": 27}), 10),
            "must be 6 n \\+ 4",
        ),
        (lambda: build_model(ModelConfig("small_cnn", feature_dim=0), 10), "feature_dim"),
        (lambda: build_model(ModelConfig("small_cnn", weights="default"), 10), "published"),
        (lambda: build_model(ModelConfig("small_cnn"), 10, mean=(0.5,), std=(1.0,)), "channel"),
        (lambda: Normalize((0.5,), (0.0,)), "positive"),
        (lambda: Normalize((0.5, 0.5), (0.5, 0.0)), "positive in every channel"),
        (lambda: Normalize((0.5,)), "together"),
        (lambda: build_model(ModelConfig("small_cnn"), 10, size=32), "size must be"),
    ],
)
def test_bad_settings_say_what_to_do(call, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LargeMarginError, match=message):
        call()


def test_a_side_of_no_pixel_is_refused() -> None:
    with pytest.raises(LargeMarginError, match="each side of size must be"):
        build_model(ModelConfig("mlp"), 10, size=(0, 8))
