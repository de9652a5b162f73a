"""What a report measures by itself, with the model and the images of a run.

Samples in the plane, which classes are taken for which, neighbours of hard samples, small pictures.
"""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from largemargin.app.data.samples import Batches, Samples
from largemargin.app.training.runs import Run
from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.embed import Embeddings, embed
from largemargin.measuring.feature_geometry import Sphere
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.probe import Probe

METHODS = {"tsne": "t-SNE", "pca": "PCA", "none": "none"}
MOST_SAMPLES = 10_000
"""Among which neighbours are looked for and mistakes counted; of more, every k-th."""
NEIGHBOURS = 4
CONFUSION_CLASSES = 2048
HOVER_PICTURES = 600
"""Of the samples in the plane and on the sphere; of more, every k-th has a picture. With the sizes
below, five runs on five data sets of pure noise stay below 7 MB of pictures."""
HOVER_SIDE, WORST_SIDE = 28, 64
JPEG_QUALITY = 85
WORST = 12
SPHERE_POINTS = 1500
"""Of one sphere; more would only hide each other."""
MATRIX_CLASSES = 64
"""Classes of a matrix of angles that can still be read."""
ROWS = 1024
"""Class vectors compared with all others at a time."""


@dataclass(frozen=True)
class ViewOptions:
    """What a report measures by itself: arguments of ``largemargin.report``."""

    features: str = "tsne"
    layers: tuple[str, ...] = ("penultimate",)
    max_samples: int = 500
    noise: float = 0.06
    device: str = "cpu"

    def check(self) -> None:
        check_choice("features", self.features, METHODS)
        check_number("max_samples", self.max_samples, at_least=2)
        check_number("noise", self.noise, at_least=0)


@dataclass(frozen=True)
class Rivals:
    """Angles in degrees between class vectors."""

    nearest: tuple[int, ...]
    """By class: the class whose vector is closest."""
    angle: tuple[float, ...]
    """By class: the angle to it."""
    classes: tuple[int, ...]
    """Those with the closest rivals, at most 64, in their order."""
    matrix: tuple[tuple[float, ...], ...]
    """Angles between these."""


@dataclass(frozen=True)
class Neighbour:
    """A sample close to another one, by the angle between their features."""

    index: int
    label: int
    angle: float
    """Degrees."""


@dataclass(frozen=True)
class SampleViews:
    """A model on the images it was measured on."""

    embeddings: Embeddings | None = None
    confusion: tuple[tuple[int, ...], ...] = ()
    """Samples by label and prediction; empty for very many classes."""
    class_accuracy: tuple[float, ...] = ()
    rivals: Rivals | None = None
    neighbours: dict[int, tuple[Neighbour, ...]] = field(default_factory=dict)
    """Of the worst samples, closest first."""
    ids: dict[int, str] = field(default_factory=dict)
    pictures: dict[int, str] = field(default_factory=dict)
    worst_pictures: dict[int, str] = field(default_factory=dict)
    near_pictures: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def sample_id(self, index: int) -> str:
        return self.ids.get(index, f"sample {index}")


def view_samples(run: Run, geometry: Geometry | None, options: ViewOptions) -> SampleViews:
    """Run a run's model on its own images; what fails is said in ``notes``."""
    options.check()
    try:
        data = run.data()
        model = run.model().to(options.device)
    except (LargeMarginError, OSError, ImportError, RuntimeError) as error:
        return SampleViews(notes=(f"the model or its images could not be loaded: {error}",))
    samples = data.test or data.validation
    if not samples:
        return SampleViews(notes=("the data has no test or validation images to look at",))
    notes: list[str] = []
    embeddings = _embeddings(model, samples, options, notes)
    worst, drawn = _geometry_samples(geometry, samples, notes)
    drawn |= set(embeddings.index if embeddings else ())
    hovered = sorted(drawn)[:: -(-len(drawn) // HOVER_PICTURES) or 1]
    views = _read_samples(model, samples, worst, options.device)
    near = {each.index for found in views.neighbours.values() for each in found}
    return replace(
        views,
        embeddings=embeddings,
        ids={index: str(samples.ids[index]) for index in sorted({*drawn, *worst, *near})},
        pictures=pictures(samples, hovered, HOVER_SIDE),
        worst_pictures=pictures(samples, worst, WORST_SIDE),
        near_pictures=pictures(samples, sorted(near), HOVER_SIDE),
        notes=tuple(notes),
    )


def _geometry_samples(
    geometry: Geometry | None, samples: Samples, notes: list[str]
) -> tuple[list[int], set[int]]:
    """The worst samples of a geometry, and those drawn on its sphere."""
    if geometry is None:
        return [], set()
    if geometry.samples != len(samples):
        notes.append(
            f"the geometry is of {geometry.samples:,} samples and the run's images are "
            f"{len(samples):,}: worst samples are shown without pictures"
        )
        return [], set()
    sphere = geometry.sphere
    drawn = {sphere.index[at] for at in drawn_points(sphere)} if sphere else set()
    return [sample.index for sample in geometry.worst[:WORST]], drawn


def _embeddings(
    model: nn.Module, samples: Samples, options: ViewOptions, notes: list[str]
) -> Embeddings | None:
    if options.features == "none":
        return None
    try:
        return embed(
            model,
            Batches(samples, 256, device=options.device, shuffle=False),
            layers=options.layers,
            method=options.features,
            noise=options.noise or None,
            max_samples=options.max_samples,
            device=options.device,
        )
    except (LargeMarginError, ImportError) as error:
        notes.append(f"features were not placed in the plane: {error}")
        return None


def drawn_points(sphere: Sphere) -> range:
    """Positions of the points of a sphere that are drawn."""
    return range(0, len(sphere.points), -(-len(sphere.points) // SPHERE_POINTS) or 1)


def _read_samples(
    model: nn.Module, samples: Samples, worst: Sequence[int], device: str
) -> SampleViews:
    """Mistakes of at most 10,000 samples, rivals of classes, neighbours of the worst samples."""
    stride = -(-len(samples) // MOST_SAMPLES)
    index = torch.tensor(sorted({*range(0, len(samples), stride), *worst}))
    probe = Probe(model)
    features, predicted = [], []
    with probe.evaluating():
        weight = probe.view().weight.cpu()
        chosen = samples.subset(index.tolist())
        for images, _ in Batches(chosen, 256, device=device, shuffle=False):
            entered, logits, _ = probe.read(images)
            features.append(torch.nn.functional.normalize(entered.float().cpu(), dim=1))
            predicted.append(logits.argmax(1).cpu())
    labels, even = samples.labels[index], index % stride == 0
    guesses, known, classes = torch.cat(predicted)[even], labels[even], len(weight)
    sizes = torch.bincount(known, minlength=classes).double()
    right = torch.bincount(known[guesses == known], minlength=classes)
    confusion: tuple[tuple[int, ...], ...] = ()
    if classes <= CONFUSION_CLASSES:
        pairs = torch.bincount(known * classes + guesses, minlength=classes**2)
        confusion = tuple(map(tuple, pairs.view(classes, classes).tolist()))
    return SampleViews(
        confusion=confusion,
        class_accuracy=tuple((right / sizes).tolist()),
        rivals=rivals_of(weight),
        neighbours=neighbours_of(worst, torch.cat(features), index, labels),
    )


def neighbours_of(
    wanted: Sequence[int], unit: Tensor, index: Tensor, labels: Tensor
) -> dict[int, tuple[Neighbour, ...]]:
    """The closest others of some samples, from features (N, D) of length 1."""
    found = {}
    for sample in wanted:
        cosines = (unit @ unit[index == sample][0]).masked_fill(index == sample, -torch.inf)
        best = cosines.topk(min(NEIGHBOURS, len(index) - 1))
        angles = _degrees(best.values).tolist()
        places = (index[best.indices].tolist(), labels[best.indices].tolist())
        found[sample] = tuple(map(Neighbour, *places, angles))
    return found


def rivals_of(weight: Tensor) -> Rivals:
    """From class vectors (C, D), a part of the rows at a time."""
    unit = torch.nn.functional.normalize(weight.double(), dim=1)
    nearest, cosines = [], []
    for start in range(0, len(unit), ROWS):
        block = unit[start : start + ROWS] @ unit.T
        rows = torch.arange(len(block))
        block[rows, start + rows] = -torch.inf
        best = block.max(1)
        cosines.append(best.values)
        nearest.append(best.indices)
    angle = _degrees(torch.cat(cosines))
    return _rivals(torch.cat(nearest), angle, lambda some: _degrees(unit[some] @ unit[some].T))


def rivals_in(angles: Sequence[Sequence[float]]) -> Rivals:
    """From a whole matrix of angles."""
    matrix = torch.tensor(angles, dtype=torch.float64)
    angle, nearest = matrix.clone().fill_diagonal_(torch.inf).min(1)
    return _rivals(nearest, angle, lambda some: matrix[some][:, some])


def _rivals(nearest: Tensor, angle: Tensor, between: Callable[[Tensor], Tensor]) -> Rivals:
    """With the angles ``between`` the classes that have the closest rivals, in their order."""
    closest = angle.argsort(stable=True)[:MATRIX_CLASSES].sort().values
    return Rivals(
        tuple(nearest.tolist()),
        tuple(angle.tolist()),
        tuple(closest.tolist()),
        tuple(map(tuple, between(closest).tolist())),
    )


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(torch.arccos(cosines.clamp(-1, 1)))


def pictures(samples: Samples, wanted: Iterable[int], side: int) -> dict[int, str]:
    """Data URIs of samples, no side longer than ``side``; empty without pillow.

    PNG where it is the smaller one (drawings, digits, few pixels), else JPEG (photographs).
    """
    try:
        from PIL import Image
    except ImportError:
        return {}
    made = {}
    for index in wanted:
        pixels = (samples.image(index).clamp(0, 1) * 255).round().byte()
        grey = pixels.shape[0] != 3
        image = Image.fromarray((pixels[0] if grey else pixels.permute(1, 2, 0)).numpy())
        scale = side / max(image.size)
        if scale < 1:
            width, height = (max(1, round(length * scale)) for length in image.size)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        exact, small = io.BytesIO(), io.BytesIO()
        image.save(exact, "PNG", optimize=True)
        image.save(small, "JPEG", quality=JPEG_QUALITY)
        file, kind = min((exact, "png"), (small, "jpeg"), key=lambda choice: choice[0].tell())
        made[index] = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return made
