"""Image classifiers of very different feature scale, and the data they are trained on."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import mobilenet_v3_small
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.vision_transformer import VisionTransformer

CLASSES = 10


class Images(NamedTuple):
    """Normalised images (N, 3, S, S) and labels, on the device that trains."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def digits(device: str) -> Images:
    """scikit-learn's 1797 digits (8 x 8, no download), upscaled to 16 x 16."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
    pixels = F.interpolate(pixels, 16, mode="bilinear").expand(-1, 3, -1, -1)
    pixels = (pixels - pixels.mean()) / pixels.std()
    train, test = train_test_split(
        np.arange(len(labels)), test_size=500, random_state=0, stratify=labels
    )
    target = torch.tensor(labels)
    parts = (pixels[train], target[train], pixels[test], target[test])
    return Images(*(part.contiguous().to(device) for part in parts))


def from_file(path: Path, train_size: int, device: str) -> Images:
    """``train_x``, ``test_x`` (uint8, NHWC), ``train_y``, ``test_y`` of an .npz file."""
    arrays = np.load(path)
    train = torch.from_numpy(arrays["train_x"][:train_size]).to(device)
    test = torch.from_numpy(arrays["test_x"]).to(device)
    mean = train.float().mean((0, 1, 2))
    std = train.float().std((0, 1, 2))
    images = [
        ((x.float() - mean) / std).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        for x in (train, test)
    ]
    labels = [
        torch.from_numpy(arrays[name]).long().view(-1).to(device) for name in ("train_y", "test_y")
    ]
    return Images(images[0], labels[0][:train_size], images[1], labels[1])


def head(wide: int, dim: int) -> nn.Module:
    """The classifier on features of ``dim`` numbers."""
    if wide == dim:
        return nn.Linear(dim, CLASSES)
    return nn.Sequential(nn.Linear(wide, dim), nn.Linear(dim, CLASSES))


def resnet18(dim: int) -> nn.Module:
    """torchvision's ResNet-18 with the 3 x 3 stem for small images; batch norm, ReLU features."""
    model = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    model.fc = head(512, dim)
    return model


def small_resnet(dim: int) -> nn.Module:
    """Three of its blocks with 16, 32 and 64 channels: what a CPU trains in seconds."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
    before = 16
    layers.append(nn.ReLU())
    for wide, stride in ((16, 1), (32, 2), (64, 2)):
        shortcut = None
        if stride > 1:
            shortcut = nn.Sequential(
                nn.Conv2d(before, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )
        layers.append(BasicBlock(before, wide, stride, shortcut))
        before = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(64, dim))


def convnet(dim: int, size: int) -> nn.Module:
    """Two convolutions with batch norm, flattened into a linear feature layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 4, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), head(16 * (size // 4) ** 2, dim)),
    )


def plain(width: int, dim: int) -> nn.Module:
    """VGG-like, without batch norm, torchvision's VGG initialisation: features of size 0.01."""
    layers: list[nn.Module] = []
    before = 3
    for wide in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(before, wide, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before = wide
    features = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, dim), nn.ReLU()]
    model = nn.Sequential(*layers, *features, nn.Linear(dim, CLASSES))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.zeros_(module.bias)
    return model


def vit(layers: int, dim: int, size: int) -> nn.Module:
    """torchvision's vision transformer: layer norm, tanh features, prototypes that start at 0."""
    return VisionTransformer(
        image_size=size,
        patch_size=4,
        num_layers=layers,
        num_heads=4,
        hidden_dim=128,
        mlp_dim=256,
        num_classes=CLASSES,
        representation_size=dim,
    )


def mobilenet(dim: int) -> nn.Module:
    """torchvision's MobileNetV3 (small): batch norm, hardswish features."""
    model = mobilenet_v3_small(num_classes=CLASSES)
    model.features[0][0].stride = (1, 1)
    model.classifier = nn.Sequential(nn.Linear(576, dim), nn.Hardswish(), nn.Linear(dim, CLASSES))
    return model


def build(name: str, dim: int, size: int) -> nn.Module:
    """A backbone by name with features of ``dim`` numbers, for images of ``size`` pixels."""
    makers = {
        "resnet18": lambda: resnet18(dim),
        "convnet": lambda: convnet(dim, size),
        "small_resnet": lambda: small_resnet(dim),
        "plain": lambda: plain(64 if size > 16 else 16, dim),
        "vit": lambda: vit(6 if size > 16 else 2, dim, size),
        "mobilenet": lambda: mobilenet(dim),
    }
    return makers[name]()
