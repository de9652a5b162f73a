"""Common corruptions of small images, after Hendrycks and Dietterich (2019), as tensor operations.

Noise, blur, weather and digital, five severities each, with the numbers of CIFAR-10-C where the
operation is the same. Fog, snow and JPEG are simpler than there; glass blur, frost and elastic
transforms are left out. So accuracies are not those of CIFAR-10-C.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Corruption = Callable[[Tensor, int, Generator], Tensor]
"""Of images (N, C, H, W) in [0, 1], at a severity of 1 to 5; draws come from the generator."""

SEVERITIES = (1, 3, 5)


def corrupted(name: str, images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Images in [0, 1] under one of ``CORRUPTIONS``.

    Example:
        >>> images = torch.full((1, 3, 8, 8), 0.5)
        >>> corrupted("brightness", images, 1, torch.Generator())[0, 0, 0, 0].item()
        0.550000011920929
    """
    return CORRUPTIONS[name](images.float(), severity, generator).clamp(0, 1)


def _normal(images: Tensor, generator: Generator) -> Tensor:
    return torch.randn(images.shape, generator=generator, device=generator.device).to(images)


def _uniform(shape: tuple[int, ...], images: Tensor, generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device).to(images)


def gaussian_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    return images + (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1] * _normal(images, generator)


def shot_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Poisson noise, by its normal approximation: the counts are 50 and more."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return images + (images / photons).sqrt() * _normal(images, generator)


def speckle_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    strength = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    return images + images * strength * _normal(images, generator)


def impulse_noise(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Values become 0 or 1."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    drawn = _uniform(tuple(images.shape), images, generator)
    return torch.where(drawn < share / 2, 0.0, torch.where(drawn < share, 1.0, images))


def _blur(images: Tensor, kernel: Tensor) -> Tensor:
    """Convolution of every channel with a kernel (k, k) of odd size, its sum made 1."""
    channels, half = images.shape[1], kernel.shape[-1] // 2
    weight = (kernel / kernel.sum()).to(images).expand(channels, 1, *kernel.shape)
    padded = F.pad(images, (half,) * 4, mode="replicate")
    return F.conv2d(padded, weight, groups=channels)


def _distances(half: int) -> Tensor:
    line = torch.arange(-half, half + 1).float()
    return (line[:, None].square() + line.square()).sqrt()


def gaussian_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    sigma = (0.4, 0.6, 0.7, 0.8, 1.0)[severity - 1]
    return _blur(images, (-(_distances(3) ** 2) / (2 * sigma**2)).exp())


def defocus_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """A disk with a soft edge."""
    radius = (0.6, 0.8, 1.0, 1.5, 2.0)[severity - 1]
    return _blur(images, (radius + 0.5 - _distances(3)).clamp(0, 1))


def motion_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Along one of four directions, drawn for the batch."""
    half = (1, 1, 2, 2, 3)[severity - 1]
    edge = (0.5, 1.0, 0.5, 1.0, 1.0)[severity - 1]
    line = torch.ones(2 * half + 1)
    line[[0, -1]] = edge
    row = torch.zeros(len(line), len(line))
    row[half] = line
    kernels = (row, row.T, torch.diag(line), torch.diag(line).flip(1))
    return _blur(images, kernels[int(4 * _uniform((1,), images, generator))])


def zoom_blur(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """The mean of the image and of its middle, enlarged step by step."""
    largest = (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1]
    steps = [1 + (largest - 1) * step / 5 for step in range(6)]
    return torch.stack([_enlarged(images, factor) for factor in steps]).mean(0)


def _enlarged(images: Tensor, factor: float) -> Tensor:
    change = torch.eye(2, 3).to(images) / factor
    grid = F.affine_grid(change.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


def fog(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Clouds of five octaves over the image, which loses contrast under them."""
    density, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    count, _, height, width = images.shape
    clouds = torch.zeros(count, 1, height, width).to(images)
    for octave in range(5):
        side = (2 ** (octave + 1),) * 2
        cells = _uniform((count, 1, *side), images, generator)
        smooth = F.interpolate(cells, (height, width), mode="bilinear", align_corners=True)
        clouds += smooth / decay**octave
    clouds = clouds / clouds.amax((1, 2, 3), keepdim=True)
    most = images.amax((1, 2, 3), keepdim=True)
    return (images + density * clouds) * most / (most + density)


def snow(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """White flakes that fall aslant, over a paler image."""
    share, pale = ((0.02, 0.95), (0.04, 0.9), (0.06, 0.85), (0.08, 0.8), (0.1, 0.75))[severity - 1]
    flakes = _uniform((len(images), 1, *images.shape[2:]), images, generator) < share
    fallen = (3 * _blur(flakes.to(images), torch.eye(3))).clamp(0, 1)
    grey = images.mean(1, keepdim=True)
    whiter = torch.maximum(images, grey * 1.5 + 0.5)
    return pale * images + (1 - pale) * whiter + 0.7 * fallen


def brightness(images: Tensor, severity: int, generator: Generator) -> Tensor:
    return images + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]


def contrast(images: Tensor, severity: int, generator: Generator) -> Tensor:
    share = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    mean = images.mean((2, 3), keepdim=True)
    return mean + share * (images - mean)


def saturate(images: Tensor, severity: int, generator: Generator) -> Tensor:
    grey = images.mean(1, keepdim=True)
    return grey + (0.3, 0.1, 1.5, 2.0, 5.0)[severity - 1] * (images - grey)


def pixelate(images: Tensor, severity: int, generator: Generator) -> Tensor:
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    small = [math.floor(share * each) for each in images.shape[2:]]
    coarse = F.interpolate(images, tuple(small), mode="area")
    return F.interpolate(coarse, images.shape[2:], mode="nearest")


LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
"""JPEG's table K.1."""


@cache
def _cosines() -> Tensor:
    """The orthonormal 8-point DCT."""
    place, wave = torch.arange(8).double(), torch.arange(8).double()[:, None]
    basis = torch.cos((2 * place + 1) * wave * math.pi / 16) / 2
    basis[0] /= math.sqrt(2)
    return basis.float()


def jpeg(images: Tensor, severity: int, generator: Generator) -> Tensor:
    """Every channel rounded in the DCT of its 8 x 8 blocks, by the luminance table."""
    quality = (80, 65, 58, 50, 40)[severity - 1]
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    table = ((torch.tensor(LUMINANCE).float() * scale + 50) / 100).floor().clamp(1, 255).to(images)
    basis = _cosines().to(images)
    high, wide = images.shape[2:]
    padded = F.pad(images, (0, -wide % 8, 0, -high % 8), mode="replicate") * 255 - 128
    count, channels, height, width = padded.shape
    blocks = padded.reshape(count, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    rounded = (basis @ blocks @ basis.T / table).round() * table
    back = (basis.T @ rounded @ basis).transpose(3, 4).reshape(padded.shape)
    return ((back + 128) / 255)[..., :high, :wide]


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "pixelate": pixelate,
    "jpeg": jpeg,
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "saturate": saturate,
}

VALIDATION = ("speckle_noise", "gaussian_blur", "saturate")
"""The settings are chosen under these, at severity 3; the test has the others."""

TEST = tuple(name for name in CORRUPTIONS if name not in VALIDATION)
