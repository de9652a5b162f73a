"""What the report looks at itself: angles, pictures, and the same on a GPU."""

import base64
import io
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image

import largemargin as lm
from largemargin.app.data import Samples
from largemargin.app.report.sample_views import SampleViews, ViewOptions, pictures, view_samples
from largemargin.app.training import Run

OPTIONS = ViewOptions("pca", max_samples=40)


@pytest.fixture(scope="module")
def seen(cosface: Run) -> SampleViews:
    return view_samples(cosface, cosface.geometry(), OPTIONS)


def test_angles_are_those_of_features_and_class_vectors(seen: SampleViews, cosface: Run) -> None:
    model, data = cosface.model(), cosface.data()
    assert data.test is not None
    images = torch.stack([data.test.image(at) for at in range(len(data.test))])
    entered = []
    hook = model.head.register_forward_hook(lambda module, args, output: entered.append(args[0]))
    with torch.no_grad():
        logits = model(images)
    hook.remove()
    unit = torch.nn.functional.normalize(entered[0].double(), dim=1)
    weight = torch.nn.functional.normalize(model.head.weight.detach().double(), dim=1)
    angles = torch.rad2deg(torch.arccos((unit @ weight.T).clamp(-1, 1)))
    own = angles[torch.arange(len(angles)), data.test.labels]
    assert seen.own_angle is not None
    assert seen.own_angle.mean == pytest.approx(float(own.mean()), abs=1e-6)
    rival = angles.scatter(1, data.test.labels[:, None], math.inf).amin(1)
    assert seen.rival_angle is not None
    assert seen.rival_angle.mean == pytest.approx(float(rival.mean()), abs=1e-6)
    right = (logits.argmax(1) == data.test.labels).double()
    for label, share in enumerate(seen.class_accuracy):
        assert share == pytest.approx(float(right[data.test.labels == label].mean()))


def test_worst_samples_have_pictures_and_names(seen: SampleViews, cosface: Run) -> None:
    found = cosface.geometry()
    assert found is not None
    wanted = {each.index for each in found.worst}
    assert set(seen.worst_pictures) == wanted
    assert all(seen.ids[index] == f"test/{index}" for index in wanted)
    assert seen.notes == ()


def test_the_loss_surface_starts_at_the_sample(seen: SampleViews) -> None:
    assert seen.surface is not None
    assert seen.surface.losses[10][10] == pytest.approx(seen.surface.loss)


def test_all_models_are_seen_around_the_same_sample(seen: SampleViews, cosface: Run) -> None:
    assert seen.surface_sample is not None
    assert seen.ids[seen.surface_sample] == f"test/{seen.surface_sample}"
    model, data = cosface.model(), cosface.data()
    assert data.test is not None
    images = torch.stack([data.test.image(at) for at in range(len(data.test))])
    with torch.no_grad():
        right = model(images).argmax(1) == data.test.labels
    first, last = right.nonzero()[0, 0].item(), right.nonzero()[-1, 0].item()
    wrong = int((~right).nonzero()[0, 0])
    assert seen.surface_sample == first
    assert view_samples(cosface, None, OPTIONS, around=int(last)).surface_sample == last
    # Where this model is wrong the loss is high already: it shows one of its own.
    assert view_samples(cosface, None, OPTIONS, around=wrong).surface_sample == first


def test_samples_on_the_sphere_have_names_and_pictures(cosface: Run) -> None:
    found = cosface.geometry()
    assert found is not None
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(found.samples) % 10
    features, weight = (torch.randn(n, 3, generator=generator) for n in (found.samples, 10))
    sphere = lm.measure_arrays(features, labels, weight, sphere=True).sphere
    there = view_samples(cosface, replace(found, sphere=sphere), OPTIONS)
    assert len(there.pictures) == found.samples
    assert len(there.ids) == found.samples


def test_photographs_are_small_and_drawings_exact() -> None:
    noise = torch.randint(0, 256, (1, 3, 28, 28), dtype=torch.uint8)
    drawing = torch.zeros(1, 3, 28, 28, dtype=torch.uint8)
    for pixels, kind in ((noise, "jpeg"), (drawing, "png")):
        samples = Samples(torch.zeros(1, dtype=torch.long), ("a",), pixels)
        (uri,) = pictures(samples, [0], 28).values()
        assert uri.startswith(f"data:image/{kind};base64,")
        assert len(uri) < 2500


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_the_images(channels: int) -> None:
    pixels = torch.randint(0, 256, (2, channels, 6, 8), dtype=torch.uint8)
    made = pictures(Samples(torch.zeros(2, dtype=torch.long), ("a", "b"), pixels), [1], 32)
    assert list(made) == [1]
    raw = base64.b64decode(made[1].removeprefix("data:image/png;base64,"))
    image = Image.open(io.BytesIO(raw))
    assert image.size == (8, 6)
    shown = torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(6, 8, channels)
    assert torch.equal(shown.permute(2, 0, 1), pixels[1])


def test_large_images_become_small() -> None:
    samples = Samples(torch.zeros(1, dtype=torch.long), ("a",), torch.rand(1, 3, 100, 50))
    (uri,) = pictures(samples, [0], 20).values()
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert image.size == (10, 20)


@pytest.mark.gpu
def test_the_same_on_a_gpu(seen: SampleViews, cosface: Run) -> None:
    there = view_samples(
        cosface, cosface.geometry(), ViewOptions("pca", max_samples=40, device="cuda")
    )
    assert seen.own_angle is not None
    assert there.own_angle is not None
    assert math.isclose(there.own_angle.mean, seen.own_angle.mean, abs_tol=0.01)
    assert seen.embeddings is not None
    assert there.embeddings is not None
    assert there.embeddings.index == seen.embeddings.index
    assert there.class_accuracy == pytest.approx(seen.class_accuracy, abs=0.03)
