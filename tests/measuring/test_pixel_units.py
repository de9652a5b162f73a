"""Noise, attacks and gradients are in pixels of [0, 1], whatever a loader does to them first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.models import Normalize
from largemargin.errors import LargeMarginError
from largemargin.measuring import EvaluationConfig, evaluate
from largemargin.measuring.input_curvature import measure_curvature, measure_surface
from largemargin.measuring.input_margins import measure_input_margins
from largemargin.measuring.robust import Attack, Perturbation
from largemargin.measuring.robust_accuracy import (
    attack_curve,
    attacked_accuracy,
    perturbed_accuracy,
)

MEAN, STD = (0.4, 0.6), (0.2, 0.3)
GIVEN = {"normalization": (MEAN, STD)}

Setting = tuple[nn.Module, Tensor, Tensor]


@pytest.fixture
def setting() -> Setting:
    """A model of normalised images, images in [0, 1], and labels that are mostly right."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(50, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    images = torch.rand(60, 2, 5, 5, dtype=torch.float64)
    labels = net(Normalize(MEAN, STD).double()(images)).argmax(1)
    labels[::5] = (labels[::5] + 1) % 3
    return net, images, labels


def normalised(images: Tensor) -> Tensor:
    return Normalize(MEAN, STD).double()(images)


SETTINGS = EvaluationConfig(
    gaussian=(0.1,), draws=2, attacks=("fgsm",), attack_samples=None, retrieval=False
)
NOISE = {"noise": Perturbation(sigma=0.15), "grey": Perturbation(amplitude=0.3, clip=True)}
FGSM = Attack("fgsm", epsilon=0.05)


MEASURED: dict[str, Callable[..., Any]] = {
    "perturbed_accuracy": lambda *given, **o: perturbed_accuracy(*given, NOISE, draws=3, **o),
    "attacked_accuracy": lambda *given, **o: attacked_accuracy(*given, [FGSM], **o),
    "attack_curve": lambda *given, **o: attack_curve(*given, FGSM, [0.01, 0.1], **o),
    "evaluate": lambda *given, **o: (
        lambda found: (found.clean.accuracy, found.perturbed, found.attacked)
    )(evaluate(*given, config=SETTINGS, **o)),
    "curvature": lambda *given, **o: measure_curvature(*given, **o).values,
    "input margins": lambda *given, **o: measure_input_margins(*given, **o).input.overall.mean,
    "measure": lambda *given, **o: (
        lambda found: (found.curvature.overall.mean, found.input_margins.overall.mean)
    )(lm.measure(*given, curvature=True, input_margins=True, **o)),
    "surface": lambda model, data, **o: measure_surface(model, *data[0], points=3, **o)[0].losses,
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_loader_that_normalises_gives_the_same(name: str, setting: Setting) -> None:
    net, images, labels = setting
    run = MEASURED[name]
    whole = nn.Sequential(Normalize(MEAN, STD).double(), net)
    wanted = run(whole, [(images, labels)])
    found = run(net, [(normalised(images), labels)], **GIVEN)
    assert flat(found) == pytest.approx(flat(wanted), rel=1e-6, nan_ok=True)


def flat(value: Any) -> list[float]:
    """Every number in a result."""
    if isinstance(value, int | float):
        return [float(value)]
    if isinstance(value, str):
        return []
    parts = value.values() if isinstance(value, dict) else value
    if hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, each) for each in value.__dataclass_fields__]
    return [number for part in parts for number in flat(part)]


@pytest.mark.parametrize("name", MEASURED)
def test_other_units_are_refused(name: str, setting: Setting) -> None:
    """Normalised images as such, and others said to be normalised."""
    net, images, labels = setting
    with pytest.raises(LargeMarginError, match=r"say how: normalization=\(mean, std\)"):
        MEASURED[name](net, [(normalised(images), labels)])
    with pytest.raises(LargeMarginError, match=r"but the images reach from"):
        MEASURED[name](net, [(images, labels)], normalization=(MEAN, (2.0, 3.0)))


def test_what_is_no_image_is_measured_as_it_is(setting: Setting) -> None:
    """Spectrograms have four axes, too: they say so. Other inputs have no range at all."""
    net, images, labels = setting
    data = [(10 * images, labels)]
    with pytest.raises(LargeMarginError, match=r"as they are with normalization=\(0, 1\)"):
        measure_curvature(net, data)
    with pytest.raises(LargeMarginError, match="images reach"):  # one channel as it is
        measure_curvature(net, data, normalization=((0, 0), (1, 2)))
    with pytest.raises(LargeMarginError, match="images reach"):
        measure_curvature(net, data, normalization=((0, 1), (1, 1)))
    found = measure_curvature(net, data, normalization=(0, 1))
    wanted = measure_curvature(net[1:], [(10 * images.flatten(1), labels)])
    assert found.values == pytest.approx(wanted.values)
    # Margins at a hidden layer do not depend on the units of the input.
    assert lm.measure(net, data, layer_margins=["1"]).layer_margins is not None
    assert lm.measure(net, data, bounds=True).bounds is not None
    with pytest.raises(LargeMarginError, match="images reach"):
        lm.measure(net, data, layer_margins=["input"])
    with pytest.raises(LargeMarginError, match="images reach"):  # noise always is in pixels
        perturbed_accuracy(net, data, NOISE, normalization=(0, 1))


def test_features_of_vectors_are_normalised_one_by_one(setting: Setting) -> None:
    """A mean and a standard deviation for each of the entries, as for channels of images."""
    _, images, labels = setting
    rows = images.flatten(1)
    mean, std = rows.mean(0), 1 + rows.std(0)
    net = nn.Linear(rows.shape[1], int(labels.max()) + 1).to(rows)
    found = measure_curvature(
        net, [((rows - mean) / std, labels)], normalization=(mean.tolist(), std.tolist())
    )
    with torch.no_grad():
        before = nn.Linear(rows.shape[1], net.out_features).to(rows)
        before.weight.copy_(net.weight / std)
        before.bias.copy_(net.bias - net.weight @ (mean / std))
    wanted = measure_curvature(before, [(rows, labels)], normalization=(0, 1))
    assert found.values == pytest.approx(wanted.values, rel=1e-4)


def test_embedded_noise_is_in_pixels(setting: Setting) -> None:
    net, images, labels = setting
    whole = nn.Sequential(Normalize(MEAN, STD).double(), net)
    wanted = lm.measuring.embed(whole, [(images, labels)], noise=0.1, method="pca")
    found = lm.measuring.embed(
        net, [(normalised(images), labels)], noise=0.1, method="pca", **GIVEN
    )
    for one, other in zip(found.layers, wanted.layers, strict=True):
        for points, others in zip(one.points.values(), other.points.values(), strict=True):
            torch.testing.assert_close(torch.tensor(points), torch.tensor(others))
    with pytest.raises(LargeMarginError, match="images reach"):
        lm.measuring.embed(net, [(normalised(images), labels)], noise=0.1, method="pca")


@pytest.mark.parametrize("what", [Perturbation(sigma=0.1), Perturbation(amplitude=0.1)])
def test_a_perturbation_refuses_other_units(what: Perturbation) -> None:
    images = torch.rand(4, 3, 8, 8)
    assert what(what(images)).shape == images.shape  # a little outside, from the first
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    for others in ((images - mean) / std, 255 * images, 2 * images - 1):
        with pytest.raises(LargeMarginError, match="before they are normalised"):
            what(others)
