"""What a report looks at itself: samples in the plane, angles, small pictures of samples."""

import base64
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from largemargin.app.data.epoch_batches import Batches
from largemargin.app.data.samples import Samples
from largemargin.app.report.class_rivals import Rivals, rivals_of
from largemargin.app.training.runs import Run
from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.batches import call
from largemargin.measuring.distributions import Distribution, describe
from largemargin.measuring.embed import Embeddings, embed
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.loss_surface import LossSurface, measure_surface
from largemargin.measuring.probe import Capture
from largemargin.measuring.sphere import Sphere

METHODS = ("tsne", "pca", "none")
ANGLE_SAMPLES = 10_000
HOVER_PICTURES = 600
"""Of the samples in the plane and on the sphere; of more, every k-th has a picture. With the sizes
below, five runs on five data sets of pure noise stay below 7 MB of pictures."""
HOVER_SIDE, WORST_SIDE = 28, 64
JPEG_QUALITY = 85
WORST = 20
SPHERE_POINTS = 1500
"""Of one sphere; more would only hide each other."""


@dataclass(frozen=True)
class Look:
    """How much a report looks at by itself.

    Args:
        features: how samples are placed in the plane: tsne, pca or none (no such section).
        layers: names of modules to show, "penultimate" for what enters the head.
        max_samples: how many samples to place.
        noise: standard deviation of the noise of the noisy picture, in units of [0, 1] pixels; 0
            leaves it out.
        device: where the passes run.
    """

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
class Observed:
    """Of one run, on the images it was measured on."""

    embeddings: Embeddings | None = None
    own_angle: Distribution | None = None
    """Of features to the vector of their class, degrees."""
    rival_angle: Distribution | None = None
    """To the nearest vector of another class."""
    angle_samples: int = 0
    class_accuracy: tuple[float, ...] = ()
    rivals: Rivals | None = None
    surface: LossSurface | None = None
    surface_of: int | None = None
    """The sample it is around."""
    ids: dict[int, str] = field(default_factory=dict)
    pictures: dict[int, str] = field(default_factory=dict)
    worst_pictures: dict[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def drawn_points(found: Sphere) -> range:
    """Places of the points of a sphere that are drawn."""
    return range(0, len(found.points), -(-len(found.points) // SPHERE_POINTS) or 1)


def observe(
    run: Run, geometry: Geometry | None, look: Look, *, around: int | None = None
) -> Observed:
    """Look at a run's model with its own images; what fails is said in ``notes``.

    Args:
        around: the sample whose loss surface to draw if it is classified right; default the first
            that is.
    """
    look.check()
    try:
        data = run.data()
        model = run.model().to(look.device)
    except (LargeMarginError, OSError, ImportError, RuntimeError) as error:
        return Observed(notes=(f"the model or its images could not be loaded: {error}",))
    samples = data.test or data.validation
    if not samples:
        return Observed(notes=("the data has no test or validation images to look at",))
    notes: list[str] = []
    batches = Batches(samples, 256, device=look.device, shuffle=False)
    embeddings: Embeddings | None = None
    if look.features != "none":
        try:
            embeddings = embed(
                model,
                batches,
                layers=look.layers,
                method=look.features,
                noise=look.noise or None,
                max_samples=look.max_samples,
                device=look.device,
            )
        except (LargeMarginError, ImportError) as error:
            notes.append(f"features were not placed in the plane: {error}")
    own, rival, seen, right, rivals = _angles(model, samples, look.device)
    index = () if embeddings is None else embeddings.index
    worst = _worst(geometry, samples, notes)
    pointed = sorted({*index, *_on_sphere(geometry, samples)})
    hover = pointed[:: -(-len(pointed) // HOVER_PICTURES) or 1]
    surface, at = _surface(model, samples, look.device, around, notes)
    shown = {*pointed, *worst, *(() if at is None else (at,))}
    return Observed(
        embeddings=embeddings,
        own_angle=own,
        rival_angle=rival,
        angle_samples=seen,
        class_accuracy=right,
        rivals=rivals,
        surface=surface,
        surface_of=at,
        ids={index: str(samples.ids[index]) for index in sorted(shown)},
        pictures=pictures(samples, hover, HOVER_SIDE),
        worst_pictures=pictures(samples, worst, WORST_SIDE),
        notes=tuple(notes),
    )


def _worst(geometry: Geometry | None, samples: Samples, notes: list[str]) -> list[int]:
    if geometry is None:
        return []
    if geometry.samples != len(samples):
        notes.append(
            f"the geometry is of {geometry.samples:,} samples and the test images are "
            f"{len(samples):,}: worst samples are shown without pictures"
        )
        return []
    return [each.index for each in geometry.worst[:WORST]]


def _on_sphere(geometry: Geometry | None, samples: Samples) -> list[int]:
    if geometry is None or geometry.sphere is None or geometry.samples != len(samples):
        return []
    return [geometry.sphere.index[at] for at in drawn_points(geometry.sphere)]


def _angles(
    model: torch.nn.Module, samples: Samples, device: str
) -> tuple[Distribution, Distribution, int, tuple[float, ...], Rivals]:
    """Angles of at most 10,000 features to class vectors; accuracy and rivals by class."""
    stride = -(-len(samples) // ANGLE_SAMPLES)
    chosen = samples if stride == 1 else samples.subset(range(0, len(samples), stride))
    capture = Capture(model, layer=None, features=None)
    own, rival, labels, right = [], [], [], []
    with capture.running(), torch.no_grad():
        weight = torch.nn.functional.normalize(capture.view().weight.double().cpu(), dim=1)
        for images, label in Batches(chosen, 256, device=device, shuffle=False):
            features, logits = capture.read(images)
            unit = torch.nn.functional.normalize(features.double().cpu(), dim=1)
            angles = torch.rad2deg(torch.arccos((unit @ weight.T).clamp(-1, 1)))
            at = label.cpu()[:, None]
            own.append(angles.gather(1, at)[:, 0])
            rival.append(angles.scatter(1, at, torch.inf).amin(1))
            labels.append(at[:, 0])
            right.append(logits.argmax(1).cpu() == at[:, 0])
    label, correct = torch.cat(labels), torch.cat(right).double()
    sizes = torch.bincount(label, minlength=len(weight)).double()
    counted = torch.zeros_like(sizes).index_add_(0, label, correct)
    return (
        describe(torch.cat(own)),
        describe(torch.cat(rival)),
        len(label),
        tuple((counted / sizes).tolist()),
        rivals_of(weight),
    )


def _surface(
    model: torch.nn.Module, samples: Samples, device: str, around: int | None, notes: list[str]
) -> tuple[LossSurface | None, int | None]:
    """The loss around an image that is classified right, and which it is."""
    tried = list(dict.fromkeys([*(() if around is None else (around,)), *range(64)]))
    tried = [index for index in tried if index < len(samples)]
    images = torch.stack([samples.image(index) for index in tried]).to(device)
    labels = samples.labels[tried]
    with torch.no_grad():
        logits = call(model, images)
    correct = (logits.argmax(1).cpu() == labels).nonzero()[:, 0].tolist()
    if not correct:
        notes.append("no loss surface: none of the first images is classified right")
        return None, None
    at = correct[0]
    try:
        (found,) = measure_surface(
            model, images[at : at + 1], labels[at : at + 1], seed=0, points=21
        )
    except LargeMarginError as error:
        notes.append(f"no loss surface: {error}")
        return None, None
    if not all(math.isfinite(loss) for row in found.losses for loss in row):
        notes.append("no loss surface: the loss around a sample is not finite")
        return None, None
    return found, tried[at]


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
        image = Image.fromarray(_pixels(samples.image(index)))
        scale = side / max(image.size)
        if scale < 1:
            size = tuple(max(1, round(each * scale)) for each in image.size)
            image = image.resize((size[0], size[1]), Image.Resampling.BILINEAR)
        exact, small = io.BytesIO(), io.BytesIO()
        image.save(exact, "PNG", optimize=True)
        image.save(small, "JPEG", quality=JPEG_QUALITY)
        file, kind = min((exact, "png"), (small, "jpeg"), key=lambda one: one[0].tell())
        made[index] = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return made


def _pixels(image: Tensor) -> Any:
    """(H, W) or (H, W, 3) bytes for pillow."""
    whole = (image.clamp(0, 1) * 255).round().byte()
    if whole.shape[0] not in (1, 3):
        whole = whole[:1]
    array = whole[0] if whole.shape[0] == 1 else whole.permute(1, 2, 0)
    return array.contiguous().numpy()
