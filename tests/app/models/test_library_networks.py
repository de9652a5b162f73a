"""Networks of torchvision and timm, and pretrained weights without a network connection."""

from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.app.models import Classifier, ModelConfig, build_model
from largemargin.app.models.library_networks import width_of

safetensors = pytest.importorskip("safetensors.torch", reason="weights are safetensors files")
pytest.importorskip("torchvision", reason="torchvision's networks are tested")
pytest.importorskip("timm", reason="timm's networks are tested")

RESNET, VIT = "torchvision/resnet18", "timm/vit_tiny_patch16_224"
TIMM = "timm/test_resnet"  # timm's smallest, made for tests


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise URLError("no network in tests")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)


def make(name: str, *, channels: int = 3, size: int = 32, **settings: Any) -> Classifier:
    return build_model(ModelConfig(name, **settings), 7, channels=channels, size=(size, size))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (RESNET, 512),
        ("torchvision/mobilenet_v3_small", 1024),
        ("torchvision/efficientnet_b0", 1280),
        (TIMM, 96),
        ("timm/mobilenetv3_small_050", 1024),
    ],
)
def test_the_head_is_replaced(name: str, dim: int) -> None:
    model = make(name, feature_dim=9)
    images = torch.rand(3, 3, 32, 32)
    assert model.backbone.eval()(images).shape == (3, dim)
    assert model.train()(images).shape == (3, 7)
    assert model.notes == ()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    assert criterion.layer is model.head
    loss = criterion(model(images), torch.tensor([0, 1, 2]))
    loss.backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("name", [RESNET, TIMM])
def test_grey_images_change_the_first_layer_and_it_is_said(name: str) -> None:
    model = make(name, channels=1)
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 7)
    assert len(model.notes) == 1
    assert "1 channel" in model.notes[0]
    assert name in model.notes[0]


@pytest.mark.parametrize("name", [RESNET, TIMM])
def test_weights_of_a_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    donor = make(name)
    whole, backbone = tmp_path / "whole.safetensors", tmp_path / "backbone.safetensors"
    safetensors.save_file(donor.state_dict(), whole)
    safetensors.save_file(donor.backbone.state_dict(), backbone)
    for path in (whole, backbone):
        loaded = make(name, weights=str(path))
        assert_equal(loaded.backbone.state_dict(), donor.backbone.state_dict())
        assert not torch.equal(loaded.head.weight, donor.head.weight)


@pytest.mark.parametrize(("name", "key"), [(RESNET, "fc"), (TIMM, "fc")])
def test_a_published_file_with_its_head(name: str, key: str, tmp_path: Path) -> None:
    donor = make(name)
    state = donor.backbone.state_dict() | {
        f"{key}.weight": torch.zeros(1000, donor.head.in_features),
        f"{key}.bias": torch.zeros(1000),
    }
    safetensors.save_file(state, tmp_path / "published.safetensors")
    loaded = make(name, weights=str(tmp_path / "published.safetensors"))
    assert_equal(loaded.backbone.state_dict(), donor.backbone.state_dict())


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("name", [RESNET, TIMM])
def test_colour_weights_for_grey_images_answer_alike(
    name: str, channels: int, tmp_path: Path
) -> None:
    """Also for equal images of several sensors."""
    donor = make(name).eval()
    safetensors.save_file(donor.state_dict(), tmp_path / "w.safetensors")
    grey = make(name, channels=channels, weights=str(tmp_path / "w.safetensors")).eval()
    image = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(
        grey.backbone(image.expand(-1, channels, -1, -1)),
        donor.backbone(image.expand(-1, 3, -1, -1)),
        rtol=1e-3,
        atol=1e-4,
    )


def test_weights_of_an_own_network(tmp_path: Path) -> None:
    donor = make("small_cnn")
    safetensors.save_file(donor.state_dict(), tmp_path / "w.safetensors")
    loaded = make("small_cnn", weights=str(tmp_path / "w.safetensors"))
    assert_equal(loaded.backbone.state_dict(), donor.backbone.state_dict())
    with pytest.raises(LargeMarginError, match=r"do not fit: 0\.weight is \(16, 3"):
        make("small_cnn", weights=str(tmp_path / "w.safetensors"), options={"width": 8})
    with pytest.raises(LargeMarginError, match="belong to another network: unknown are"):
        make("mlp", weights=str(tmp_path / "w.safetensors"))


@pytest.mark.parametrize(("name", "weights"), [(RESNET, "default"), (RESNET, "IMAGENET1K_V1")])
def test_torchvision_without_network_names_the_file(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(LargeMarginError) as caught:
        make(name, weights=weights)
    place = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    assert f"place it as {place}" in str(caught.value)
    assert "safetensors" in str(caught.value)


def test_a_file_that_is_fetched_must_be_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name holds the first characters of its checksum."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    asked: list[str | None] = []

    def fetch(url: str, place: str, checksum: str | None = None, **_: Any) -> None:
        asked.append(checksum)
        raise RuntimeError("invalid hash value")

    monkeypatch.setattr("torch.hub.download_url_to_file", fetch)
    with pytest.raises(LargeMarginError, match="invalid hash value"):
        make(RESNET, weights="default")
    assert asked == ["f37072fd"]


def test_timm_without_network_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: Any, **options: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(LargeMarginError, match=r"model.safetensors of timm/test_resnet.r160_in1k"):
        make(TIMM, weights="default")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("torchvision/resnet99"), "Did you mean resnet"),
        (lambda: make("torchvision/"), "written torchvision/NAME"),
        (lambda: make("keras/vgg"), "written torchvision/NAME"),
        (lambda: make("timm/resnet9999"), "timm has no network"),
        (lambda: make("torchvision/squeezenet1_1"), "ends in a convolution"),
        (lambda: make(VIT), "cannot take images of 32x32 .*img_size"),
        (lambda: make("torchvision/alexnet", size=16), "cannot take images of 16x16"),
        (lambda: make(RESNET, weights="IMAGENET"), "It has default, IMAGENET1K_V1"),
        (lambda: make(TIMM, weights="laion"), "It has default, r160_in1k"),
        (lambda: make(RESNET, weights="missing.safetensors"), "there is no file missing"),
        (lambda: make(RESNET, weights="resnet18.pth"), "must be a .safetensors"),
        (lambda: make(RESNET, batch_norm=True), "decides itself"),
        (lambda: make(RESNET, options={"depth": 3}), r"take the options \{'depth': 3\}: "),
        (
            lambda: make(RESNET, options={"depth": 3}, dropout=0.5),
            r"take the options \{'depth': 3, 'dropout': 0\.5\}: ",
        ),
        (lambda: make(TIMM, options={"depthh": 3}), "does not take the options"),
    ],
)
def test_bad_names_and_weights_say_what_to_do(call: Any, message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        call()


def test_features_that_are_no_rows_are_refused() -> None:
    with pytest.raises(LargeMarginError, match=r"an own network gives \(1, 3, 6, 5\) where feat"):
        width_of(nn.Conv2d(2, 3, 3), "an own network", 2, (8, 7))


def test_damaged_weights(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"no tensors")
    with pytest.raises(LargeMarginError, match="damaged"):
        make("small_cnn", weights=str(tmp_path / "w.safetensors"))


def test_dropout_is_handed_on() -> None:
    model = make("torchvision/mobilenet_v3_small", dropout=0.35)
    assert 0.35 in {each.p for each in model.modules() if isinstance(each, nn.Dropout)}
