"""How fast are the class heads on two CPU threads, forward and backward, in float32?

Every provider gets the same inputs from one ``setup``; its value and its gradient to the features
are compared with a float64 reference written here before anything is timed. Rows go to
``results/cpu_heads.json``: medians over interleaved repetitions, ratios to a provider of the same
run, and the memory saved for backward in units of one float32 N x C buffer.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from rows import Row, environment, interleaved, spread_ms, verdict, write
from torch import Tensor, nn

import largemargin as lm

THREADS = 2
SCALE = 64.0
COS_MARGIN = 0.35
ARC_MARGIN = 0.5
RADIUS, MARGIN, NORM_WEIGHT, MOMENTUM = 0.5, 6.0, 1e-3, 0.99


@dataclass(frozen=True)
class Shape:
    name: str
    samples: int
    classes: int
    dim: int
    repetitions: int
    # provider -> (baseline, largest allowed ratio to it or None)
    providers: dict[str, tuple[str, float | None]]


SHAPES = (
    Shape(
        "1000 classes",
        samples=256,
        classes=1000,
        dim=512,
        repetitions=40,
        providers={
            "linear + CE": ("linear + CE", None),
            "PML ArcFace": ("linear + CE", None),
            "PML CosFace": ("linear + CE", None),
            "ArcFace": ("PML ArcFace", 0.5),
            "CosFace": ("PML CosFace", 0.8),
            "discriminative": ("linear + CE", 2.0),
            "discriminative, class loop": ("linear + CE", None),
        },
    ),
    Shape(
        "20000 classes",
        samples=512,
        classes=20000,
        dim=128,
        repetitions=20,
        providers={
            "PML CosFace": ("PML CosFace", None),
            "CosFace chunked": ("PML CosFace", 0.75),
            "CosFace dense": ("PML CosFace", None),
        },
    ),
)
# The chunked head must save no N x C buffer at all.
SAVES_NOTHING = "CosFace chunked"


@dataclass(frozen=True)
class Head:
    """One provider on one shape: ``loss()`` runs forward, ``features.grad`` is what is checked."""

    loss: Callable[[], Tensor]
    features: Tensor
    labels: Tensor
    parameters: tuple[Tensor, ...]

    def step(self) -> Tensor:
        for tensor in (self.features, *self.parameters):
            tensor.grad = None
        value = self.loss()
        value.backward()
        return value.detach()


def setup(provider: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Head:
    """The same features, labels, weight and bias for every provider; (D, C) weights for PML."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(shape.samples, shape.dim, generator=generator).to(dtype)
    start = torch.randn(shape.classes, shape.dim, generator=generator).to(dtype)
    bias = (0.1 * torch.randn(shape.classes, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(shape.classes, (shape.samples,), generator=generator)
    features.requires_grad_()

    if provider.startswith("PML"):
        head = (
            pml.ArcFaceLoss(shape.classes, shape.dim, math.degrees(ARC_MARGIN), SCALE)
            if provider == "PML ArcFace"
            else pml.CosFaceLoss(shape.classes, shape.dim, margin=COS_MARGIN, scale=SCALE)
        )
        with torch.no_grad():
            head.W.copy_(start.t())
        return Head(lambda: head(features, labels), features, labels, (head.W,))

    weight = nn.Parameter(start)
    if provider == "linear + CE":
        return Head(
            lambda: F.cross_entropy(F.linear(features, weight, bias), labels),
            features,
            labels,
            (weight, bias),
        )
    if provider == "discriminative, class loop":
        loop = ClassLoop(shape)
        return Head(lambda: loop(features, weight, bias, labels), features, labels, (weight, bias))
    if provider == "discriminative":
        ours = lm.Discriminative(
            shape.classes,
            shape.dim,
            gamma_reg=NORM_WEIGHT,
            radius=RADIUS,
            margin=MARGIN,
            momentum=MOMENTUM,
        )
        return Head(
            lambda: ours(features, weight, labels, bias=bias), features, labels, (weight, bias)
        )
    margins: dict[str, lm.Loss] = {
        "ArcFace": lm.ArcFace(margin=ARC_MARGIN, scale=SCALE),
        "CosFace": lm.CosFace(margin=COS_MARGIN, scale=SCALE),
        "CosFace chunked": lm.CosFace(margin=COS_MARGIN, scale=SCALE, impl="chunked"),
        "CosFace dense": lm.CosFace(margin=COS_MARGIN, scale=SCALE, impl="dense"),
    }
    loss = margins[provider]
    return Head(lambda: loss(features, weight, labels), features, labels, (weight,))


class ClassLoop:
    """The discriminative loss class by class, as the equations are printed (LMD 4.3 to 4.7)."""

    def __init__(self, shape: Shape) -> None:
        self.bank: dict[int, Tensor] = {}
        self.classes = shape.classes

    def __call__(self, features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        compact, margin, norm = [], [], []
        present = labels.unique().tolist()
        for c in present:
            own = features[labels == c]
            current = own.mean(0)
            bank = self.bank.get(c, current.detach())
            momentum = MOMENTUM * bank + (1 - MOMENTUM) * current
            self.bank[c] = momentum.detach()
            compact.append(F.relu((own - momentum).norm(dim=1) - RADIUS).square().mean())
            rivals = [i for i in range(self.classes) if i != c]
            normals = weight[rivals] - weight[c]
            signed = (normals @ current + bias[rivals] - bias[c]) / normals.norm(dim=1)
            margin.append(F.relu(MARGIN + signed).max())
            norm.append(current.norm())
        total = sum(compact) + sum(margin) + NORM_WEIGHT * sum(norm)
        return total / len(present)


def reference(provider: str, shape: Shape) -> tuple[Tensor, Tensor]:
    """Value and feature gradient in float64, from the equations, for what ``provider`` computes."""
    name = "discriminative, class loop" if "discriminative" in provider else "linear + CE"
    head = setup(name, shape, torch.float64)
    weight, labels = head.parameters[0], head.labels
    if "Face" in provider:
        cosine = F.normalize(head.features) @ F.normalize(weight).t()
        target = cosine.gather(1, labels[:, None])
        if "Cos" in provider:
            moved = target - COS_MARGIN
        else:
            moved = torch.cos(torch.acos(target) + ARC_MARGIN)
        value = F.cross_entropy(SCALE * cosine.scatter(1, labels[:, None], moved), labels)
        value.backward()
    else:
        value = head.step()
    assert head.features.grad is not None
    return value.detach(), head.features.grad


def check(provider: str, shape: Shape) -> None:
    value, gradient = reference(provider, shape)
    head = setup(provider, shape)
    found = head.step()
    torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-6)
    assert head.features.grad is not None
    error = (head.features.grad.double() - gradient).norm() / gradient.norm()
    assert error < 1e-4, f"{provider}: relative error {error:.1e} of the feature gradient"


def saved_units(head: Head, shape: Shape) -> tuple[float, float]:
    """Bytes saved for backward over N*C*4: in tensors of exactly N x C elements, and in all.

    Each storage counts once; inputs and parameters, which exist anyway, do not count.
    """
    existing = {t.untyped_storage().data_ptr() for t in (head.features, *head.parameters)}
    elements = shape.samples * shape.classes
    bytes_of: dict[int, int] = {}
    full: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in existing:
            bytes_of[address] = storage.nbytes()
            if tensor.numel() == elements:
                full.add(address)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = head.loss()
    in_full = sum(bytes_of[address] for address in full)
    total = sum(bytes_of.values())
    del value  # the graph kept every counted storage alive, so that no address was used twice
    return round(in_full / (4 * elements), 3), round(total / (4 * elements), 3)


def measure(shape: Shape, repetitions: int) -> list[Row]:
    for provider in shape.providers:
        check(provider, shape)
    heads = {provider: setup(provider, shape) for provider in shape.providers}
    seconds = interleaved(
        {provider: head.step for provider, head in heads.items()}, repetitions=repetitions
    )
    times = {provider: spread_ms(values) for provider, values in seconds.items()}
    rows = []
    for provider, (baseline, limit) in shape.providers.items():
        ratio = round(times[provider]["median_ms"] / times[baseline]["median_ms"], 4)
        full, total = saved_units(heads[provider], shape)
        met = None if limit is None else verdict(ratio, limit)
        if provider == SAVES_NOTHING and full > 0:
            met = "MISSED"
        rows.append(
            {
                "benchmark": "cpu_heads",
                "shape": {"N": shape.samples, "C": shape.classes, "D": shape.dim},
                "provider": provider,
                **times[provider],
                "baseline": baseline,
                "ratio": ratio,
                "target_ratio": limit,
                "saved_n_x_c_units": full,
                "saved_units": total,
                "target_saved_n_x_c_units": 0 if provider == SAVES_NOTHING else None,
                "verdict": met,
            }
        )
    return rows


def report(shape: Shape, rows: list[Row]) -> None:
    print(f"\n{shape.name}: N={shape.samples} C={shape.classes} D={shape.dim}, float32")
    print(
        f"{'provider':<28}{'median ms':>10}{'p20':>9}{'p80':>9}{'ratio':>8}  {'to':<13}"
        f"{'target':>8}{'saved NxC':>11}{'saved':>8}"
    )
    for row in rows:
        target = "" if row["target_ratio"] is None else f"<= {row['target_ratio']}"
        print(
            f"{row['provider']:<28}{row['median_ms']:>10.2f}{row['p20_ms']:>9.2f}"
            f"{row['p80_ms']:>9.2f}{row['ratio']:>8.2f}  {row['baseline']:<13}{target:>8}"
            f"{row['saved_n_x_c_units']:>11.2f}{row['saved_units']:>8.2f}  {row['verdict'] or ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, help="instead of 40 and 20")
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(THREADS)
    common = environment(THREADS)
    rows = []
    for shape in SHAPES:
        found = measure(shape, repetitions or shape.repetitions)
        report(shape, found)
        rows += found
    print(
        f"\nsaved: bytes kept for backward in units of N*C*4, without inputs and parameters "
        f"('saved NxC': in tensors of N x C elements).\n{common['cpu']}, {THREADS} threads,"
        f" torch {torch.__version__}; rows in {write('cpu_heads', rows, common)}"
    )


if __name__ == "__main__":
    main()
