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
from largemargin.app.report.charts import Chart
from largemargin.app.report.report_models import ReportModel, ReportModels
from largemargin.app.report.sample_views import (
    WORST,
    SampleViews,
    ViewOptions,
    pictures,
    view_samples,
)
from largemargin.app.report.sections.features import features_section
from largemargin.app.training import Run

OPTIONS = ViewOptions("pca", max_samples=40)


@pytest.fixture(scope="module")
def seen(cosface: Run) -> SampleViews:
    return view_samples(cosface, cosface.geometry(), OPTIONS)


def test_mistakes_and_neighbours_are_those_of_the_model(seen: SampleViews, cosface: Run) -> None:
    model, data = cosface.model(), cosface.data()
    assert data.test is not None
    images = torch.stack([data.test.image(at) for at in range(len(data.test))])
    entered = []
    hook = model.head.register_forward_hook(lambda module, args, output: entered.append(args[0]))
    with torch.no_grad():
        logits = model(images)
    hook.remove()
    unit = torch.nn.functional.normalize(entered[0].double(), dim=1)
    guesses, labels = logits.argmax(1), data.test.labels
    for label, row in enumerate(seen.confusion):
        own = guesses[labels == label]
        assert list(row) == torch.bincount(own, minlength=10).tolist()
        assert seen.class_accuracy[label] == pytest.approx(row[label] / len(own))
    angles = torch.rad2deg(torch.arccos((unit @ unit.T).clamp(-1, 1)))
    angles.fill_diagonal_(math.inf)
    assert set(seen.neighbours) == set(seen.worst_pictures)
    for index, near in seen.neighbours.items():
        closest = angles[index].sort()
        assert [each.angle for each in near] == pytest.approx(closest.values[:4].tolist(), abs=0.05)
        assert near[0].index == int(closest.indices[0])
        assert [each.label for each in near] == labels[[each.index for each in near]].tolist()
        assert {each.index for each in near} <= set(seen.near_pictures)


def test_features_of_a_head_on_cosines_have_one_length(seen: SampleViews, softmax: Run) -> None:
    """Otherwise the lengths of features, which the head does not see, fill the picture."""
    assert seen.embeddings is not None
    assert "features of length 1" in seen.embeddings.assumed
    (layer,) = seen.embeddings.layers
    assert layer.feature_variance["clean"].total < 1
    dot = view_samples(softmax, None, OPTIONS).embeddings
    assert dot is not None
    assert "features of length 1" not in dot.assumed
    for views, said in ((seen, "by PCA, features of length 1."), (SampleViews(dot), "by PCA.")):
        page = features_section(ReportModels((ReportModel("a", None, (), views=views),)))
        maps = [each for each in page.blocks if isinstance(each, Chart)]
        assert [each.alt.endswith(said) for each in maps] == [True]


def test_worst_samples_have_pictures_and_names(seen: SampleViews, cosface: Run) -> None:
    found = cosface.geometry()
    assert found is not None
    wanted = {each.index for each in found.worst[:WORST]}
    assert set(seen.worst_pictures) == wanted
    assert all(seen.ids[index] == f"test/{index}" for index in wanted)
    assert seen.notes == ()


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
    assert seen.embeddings is not None
    assert there.embeddings is not None
    assert there.embeddings.index == seen.embeddings.index
    assert there.class_accuracy == pytest.approx(seen.class_accuracy, abs=0.03)
