"""Omniglot: embeddings that distinguish characters of unknown alphabets.

Trains a network on 964 characters of 30 alphabets with an ArcFace head, discards the head, and
searches the nearest neighbour of each drawing among drawings of unseen characters: recall@1.
Without an argument it generates random characters, which takes seconds;

    python docs/how-to/omniglot_embeddings.py FOLDER

downloads Omniglot (10 MB) into the folder and needs a GPU, or an hour. `benchmarks/omniglot.py`
compares this with the ArcFace of pytorch-metric-learning, tuned and trained in the same way.
"""

import math
import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import largemargin as lm
from largemargin.measuring import retrieval_of

SIDE = 32


def embedding_network(dim: int = 128, width: int = 64) -> nn.Sequential:
    """From 32 x 32 pixels to ``dim`` numbers: four convolutions that each halve the side."""
    layers: list[nn.Module] = []
    before = 1
    for wide in (width, 2 * width, 4 * width, 4 * width):
        convolution = nn.Conv2d(before, wide, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(2)]
        before = wide
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * (SIDE // 16) ** 2, dim))


def shifted_and_turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Drawings rotated by up to 15 degrees, moved by up to 2 pixels, scaled by up to 15 %."""
    draws = torch.rand(4, len(images), generator=generator, device=images.device) * 2 - 1
    angle, size = draws[0] * math.radians(15), 1 + 0.15 * draws[1]
    cosine, sine, moves = size * angle.cos(), size * angle.sin(), draws[2:] * 4 / SIDE
    rows = (cosine, -sine, moves[0], sine, cosine, moves[1])
    maps = torch.stack(rows, 1).view(-1, 2, 3)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train(
    network: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    head: Iterable[nn.Parameter],
    images: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    lr: float,
    batch: int = 256,
    seed: int = 0,
) -> None:
    """Train network and head together, with AdamW and one cycle of the learning rate."""
    generator = torch.Generator(images.device).manual_seed(seed)
    optimizer = torch.optim.AdamW([*network.parameters(), *head], lr=lr, weight_decay=1e-4)
    steps = epochs * (len(images) // batch)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator, device=images.device)
        for rows in order.split(batch)[: len(images) // batch]:
            drawings = shifted_and_turned(images[rows], generator)
            optimizer.zero_grad()
            loss(network(drawings), labels[rows]).backward()
            optimizer.step()
            cycle.step()


@torch.no_grad()
def recall_at_1(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of drawings whose nearest neighbour, by cosine, shows the same character."""
    network.eval()
    features = torch.cat([network(part) for part in images.split(1024)])
    return retrieval_of(features, labels, at=[1]).recall[1]


def omniglot(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drawings (N, 1, 32, 32), ink 1 on paper 0, and their characters: training, then test."""
    from torchvision.datasets import Omniglot
    from torchvision.transforms.functional import InterpolationMode, pil_to_tensor, resize

    found: list[Tensor] = []
    for background in (True, False):
        drawings = Omniglot(folder, background=background, download=True)
        pixels = [pil_to_tensor(image) for image, _ in drawings]
        small = resize(torch.stack(pixels), [SIDE, SIDE], InterpolationMode.BILINEAR)
        found += [1 - small / 255, torch.tensor([label for _, label in drawings])]
    return found[0], found[1], found[2], found[3]


def own_characters(count: int, drawings: int, seed: int) -> tuple[Tensor, Tensor]:
    """Characters of three random strokes, each drawn several times with random distortions."""
    generator = torch.Generator().manual_seed(seed)
    strokes = torch.rand(count, 1, 3, 2, 2, generator=generator) * 20 + 6
    shaken = strokes + 1.2 * torch.randn(count, drawings, 3, 2, 2, generator=generator)
    shaken = shaken + 2 * torch.randn(count, drawings, 1, 1, 2, generator=generator)
    along = torch.linspace(0, 1, 24)[:, None]
    start, end = shaken[..., 0, :].unsqueeze(-2), shaken[..., 1, :].unsqueeze(-2)
    points = (start + along * (end - start)).flatten(2, 3)  # (count, drawings, points, 2)
    places = torch.arange(SIDE)
    # The closer a pixel is to points of a stroke, in row and column, the darker it is.
    down, across = (
        torch.exp(-((points[..., axis, None] - places).square()) / 2) for axis in (0, 1)
    )
    ink = torch.einsum("ndph,ndpw->ndhw", down, across).clamp(max=1)
    labels = torch.arange(count).repeat_interleave(drawings)
    return ink.reshape(-1, 1, SIDE, SIDE), labels


def main(folder: str | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    if folder is None:
        device, dim, width, epochs = torch.device("cpu"), 32, 8, 8
        images, labels = own_characters(120, 12, seed=0)
        new_images, new_labels = own_characters(30, 8, seed=1)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dim, width, epochs = 128, 64, 30
        images, labels, new_images, new_labels = (part.to(device) for part in omniglot(folder))
    network = embedding_network(dim, width).to(device)
    untrained = recall_at_1(network, new_images, new_labels)

    # 964 class vectors here; the same two lines work for a million.
    head = lm.ClassHead(dim, int(labels.max()) + 1, similarity="cosine").to(device)
    arcface = lm.ArcFace(margin=0.35, scale=32.0, impl="auto")
    batch = 256 if folder else 64
    train(
        network,
        lambda features, classes: arcface(features, head, classes),
        head.parameters(),
        images,
        labels,
        epochs=epochs,
        lr=3e-3,
        batch=batch,
    )
    found = recall_at_1(network, new_images, new_labels)
    print(f"recall@1 on new characters: {found:.3f} (untrained {untrained:.3f})")
    return {"accuracy": found, "untrained": untrained}


if __name__ == "__main__":
    main(*sys.argv[1:2])
