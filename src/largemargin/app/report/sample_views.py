"""What a report measures by itself, with the model and the images of a run.

Samples in the plane, angles to class vectors, the loss around a sample, small pictures.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from largemargin.app.data.samples import Batches, Samples
from largemargin.app.training.runs import Run
from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.batches import call
from largemargin.measuring.distributions import Distribution, describe
from largemargin.measuring.embed import Embeddings, embed
from largemargin.measuring.feature_geometry import Sphere
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.input_curvature import LossSurface, measure_surface
from largemargin.measuring.probe import Probe

METHODS = {"tsne": "t-SNE", "pca": "PCA", "none": "none"}
ANGLE_SAMPLES = 10_000
HOVER_PICTURES = 600
"""Of the samples in the plane and on the sphere; of more, every k-th has a picture. With the sizes
below, five runs on five data sets of pure noise stay below 7 MB of pictures."""
HOVER_SIDE, WORST_SIDE = 28, 64
JPEG_QUALITY = 85
WORST = 20
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
class SampleViews:
    """A model on the images it was measured on."""

    embeddings: Embeddings | None = None
    own_angle: Distribution | None = None
    """Of features to the vector of their class, degrees."""
    rival_angle: Distribution | None = None
    """To the nearest vector of another class."""
    class_accuracy: tuple[float, ...] = ()
    rivals: Rivals | None = None
    surface: LossSurface | None = None
    surface_sample: int | None = None
    """The sample at the centre of the surface."""
    ids: dict[int, str] = field(default_factory=dict)
    pictures: dict[int, str] = field(default_factory=dict)
    worst_pictures: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def sample_id(self, index: int) -> str:
        return self.ids.get(index, f"sample {index}")


def view_samples(
    run: Run, geometry: Geometry | None, options: ViewOptions, *, around: int | None = None
) -> SampleViews:
    """Run a run's model on its own images; what fails is said in ``notes``.

    Args:
        around: the sample whose loss surface to draw if it is classified correctly; default the
            first that is.
    """
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
    surface, surface_sample = _surface(model, samples, options.device, around, notes)
    named = {*drawn, *worst, *(() if surface_sample is None else (surface_sample,))}
    return SampleViews(
        embeddings=embeddings,
        **_angles(model, samples, options.device),
        surface=surface,
        surface_sample=surface_sample,
        ids={index: str(samples.ids[index]) for index in sorted(named)},
        pictures=pictures(samples, hovered, HOVER_SIDE),
        worst_pictures=pictures(samples, worst, WORST_SIDE),
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


def _angles(model: nn.Module, samples: Samples, device: str) -> dict[str, Any]:
    """Angles of at most 10,000 features to class vectors; accuracy and rivals by class."""
    stride = -(-len(samples) // ANGLE_SAMPLES)
    chosen = samples if stride == 1 else samples.subset(range(0, len(samples), stride))
    probe = Probe(model)
    own, rival, labels, right = [], [], [], []
    with probe.evaluating():
        weight = torch.nn.functional.normalize(probe.view().weight.double().cpu(), dim=1)
        for images, label in Batches(chosen, 256, device=device, shuffle=False):
            features, logits, _ = probe.read(images)
            unit = torch.nn.functional.normalize(features.double().cpu(), dim=1)
            angles = _degrees(unit @ weight.T)
            column = label.cpu()[:, None]
            own.append(angles.gather(1, column)[:, 0])
            rival.append(angles.scatter(1, column, torch.inf).amin(1))
            labels.append(column[:, 0])
            right.append(logits.argmax(1).cpu() == column[:, 0])
    label, correct = torch.cat(labels), torch.cat(right).double()
    sizes = torch.bincount(label, minlength=len(weight)).double()
    counted = torch.zeros_like(sizes).index_add_(0, label, correct)
    return {
        "own_angle": describe(torch.cat(own)),
        "rival_angle": describe(torch.cat(rival)),
        "class_accuracy": tuple((counted / sizes).tolist()),
        "rivals": rivals_of(weight),
    }


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
    chosen = _closest(angle)
    matrix = _degrees(unit[chosen] @ unit[chosen].T)
    return Rivals(
        tuple(torch.cat(nearest).tolist()),
        tuple(angle.tolist()),
        tuple(chosen.tolist()),
        tuple(map(tuple, matrix.tolist())),
    )


def rivals_in(angles: Sequence[Sequence[float]]) -> Rivals:
    """From a whole matrix of angles."""
    matrix = torch.tensor(angles, dtype=torch.float64)
    angle, nearest = matrix.clone().fill_diagonal_(torch.inf).min(1)
    chosen = _closest(angle)
    return Rivals(
        tuple(nearest.tolist()),
        tuple(angle.tolist()),
        tuple(chosen.tolist()),
        tuple(map(tuple, matrix[chosen][:, chosen].tolist())),
    )


def _closest(angle: Tensor) -> Tensor:
    """Classes with the closest rivals, in their order."""
    return angle.argsort(stable=True)[:MATRIX_CLASSES].sort().values


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(torch.arccos(cosines.clamp(-1, 1)))


def _surface(
    model: nn.Module, samples: Samples, device: str, around: int | None, notes: list[str]
) -> tuple[LossSurface | None, int | None]:
    """The loss around an image that is classified correctly, and which it is."""
    first = () if around is None else (around,)
    tried = [index for index in dict.fromkeys((*first, *range(64))) if index < len(samples)]
    images = torch.stack([samples.image(index) for index in tried]).to(device)
    labels = samples.labels[tried]
    with torch.no_grad():
        logits = call(model, images)
    correct = (logits.argmax(1).cpu() == labels).nonzero()[:, 0].tolist()
    if not correct:
        notes.append("no loss surface: none of the first images is classified correctly")
        return None, None
    at = correct[0]
    try:
        (surface,) = measure_surface(
            model, images[at : at + 1], labels[at : at + 1], seed=0, points=21
        )
    except LargeMarginError as error:
        notes.append(f"no loss surface: {error}")
        return None, None
    if not all(math.isfinite(loss) for row in surface.losses for loss in row):
        notes.append("no loss surface: the loss around a sample is not finite")
        return None, None
    return surface, tried[at]


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
