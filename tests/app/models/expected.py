"""What is known about each network: image size, features, parameters with ten classes."""

from typing import Any, NamedTuple

from largemargin.app.models import Classifier, ModelConfig, build_model


class Expected(NamedTuple):
    size: int
    dim: int
    parameters: int
    """Counted by hand or published, with 10 classes and RGB images."""


def conv(before: int, after: int, kernel: int, bias: int) -> int:
    return before * after * kernel**2 + bias * after


def linear(before: int, after: int) -> int:
    return before * after + after


def normed(before: int, after: int, kernel: int = 3) -> int:
    """A convolution without bias and its batch norm."""
    return conv(before, after, kernel, 0) + 2 * after


EXPECTED = {
    "small_cnn": Expected(
        8, 32, normed(3, 16) + normed(16, 32) + normed(32, 32) + linear(128, 32) + linear(32, 10)
    ),
    "mlp": Expected(8, 256, linear(3 * 64, 256) + linear(256, 256) + linear(256, 10)),
    "mnist_cnn": Expected(
        28, 512, conv(3, 32, 5, 1) + conv(32, 64, 5, 1) + linear(64 * 49, 512) + linear(512, 10)
    ),
    "cnn13": Expected(
        32,
        128,
        normed(3, 128)
        + 2 * normed(128, 128)
        + normed(128, 256)
        + 2 * normed(256, 256)
        + normed(256, 512)
        + normed(512, 256, 1)
        + normed(256, 128, 1)
        + linear(128, 10),
    ),
    "alexnet": Expected(
        32,
        4096,
        conv(3, 64, 3, 1)
        + conv(64, 192, 3, 1)
        + conv(192, 384, 3, 1)
        + conv(384, 256, 3, 1)
        + conv(256, 256, 3, 1)
        + linear(256 * 16, 4096)
        + linear(4096, 4096)
        + linear(4096, 10),
    ),
    # Published for CIFAR-10 with the 3x3 stem.
    "resnet18": Expected(32, 512, 11_173_962),
    "resnet34": Expected(32, 512, 21_282_122),
    "wrn28_10": Expected(32, 640, 36_479_194),
    # 138,357,544 and 4,231,976 with 1000 classes.
    "vgg16": Expected(224, 4096, 138_357_544 - linear(4096, 1000) + linear(4096, 10)),
    "vgg16_mod": Expected(224, 512, 14_714_688 + linear(512, 10)),
    "mobilenet": Expected(224, 1024, 4_231_976 - linear(1024, 1000) + linear(1024, 10)),
}

SMALL_SIZES = {"mnist_cnn": 8, "cnn13": 12, "vgg16": 32, "vgg16_mod": 32, "mobilenet": 32}
"""Sizes at which a network is quick on a CPU; 8 for the others."""


def small(name: str, num_classes: int = 5, channels: int = 3, **settings: Any) -> Classifier:
    """A network on the smallest images it takes, made narrow where it is large."""
    options = {"wrn28_10": {"depth": 10, "width": 1}, "resnet34": {"width": 8}}.get(name, {})
    side = SMALL_SIZES.get(name, 8)
    config = ModelConfig(name, options=options, **settings)
    return build_model(config, num_classes, channels=channels, size=(side, side))


def side_of(name: str) -> int:
    return SMALL_SIZES.get(name, 8)
