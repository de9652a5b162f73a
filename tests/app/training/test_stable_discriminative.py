"""The stable discriminative loss trains every backbone at every ordinary learning rate.

Real images (scikit-learn's digits), networks whose features start between 0.01 and 100 in size, the
loss with its defaults, plain SGD with momentum and no clipping. The printed form is there to show
that these settings are hard: it diverges in several of them.
"""

import importlib
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm

pytest.importorskip("sklearn", reason="the images come with scikit-learn")
from sklearn.datasets import load_digits

CLASSES = 10
DIMS = (8, 64)
RATES = (0.001, 0.01, 0.1)


def images(channels: int = 1) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return ((x - x.mean()) / x.std()).expand(-1, channels, -1, -1), torch.tensor(labels)


def batch_norm(dim: int) -> nn.Module:
    """Batch norm and a linear feature layer: features of size 1."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, dim), nn.Linear(dim, CLASSES)),
    )


def tiny_features(dim: int) -> nn.Module:
    """No normalisation, linear layers of size 0.01 as torchvision's VGG: features below 0.1."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, dim), nn.ReLU(), nn.Linear(dim, CLASSES)),
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
    return model


def large_features(dim: int) -> nn.Module:
    """Layer norm with a gain of 10 as the last step: features of size 10 sqrt(dim)."""
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, dim)),
        *(nn.LayerNorm(dim), nn.Linear(dim, CLASSES)),
    )
    nn.init.constant_(model[4].weight, 10.0)
    return model


SMALL = {"batch norm": batch_norm, "tiny features": tiny_features, "large features": large_features}


class End(NamedTuple):
    finite: bool
    accuracy: float
    scale: tuple[float, float]
    """Of the features, before and after."""


def stable(num_classes: int, dim: int) -> lm.Objective:
    return lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.StableDiscriminative(num_classes, dim))


def printed(num_classes: int, dim: int) -> lm.Objective:
    return lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(num_classes, dim))


def train(
    model: nn.Module, objective: Any, rate: float, steps: int, channels: int = 1, size: int = 64
) -> End:
    """Finite: every loss, every parameter and the bank."""
    x, y = images(channels)
    criterion = lm.attach(model, objective, warn=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    start = scale_of(model, criterion, x[:200])
    for _ in range(steps):
        index = torch.randint(len(x), (size,))
        loss = criterion(model(x[index]), y[index])
        if not bool(torch.isfinite(loss)):
            return End(False, math.nan, (start, math.nan))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = [*model.parameters(), *criterion.buffers()]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in state)
    end = scale_of(model, criterion, x[:200])
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(400)]) == y
    return End(finite, float(right.float().mean()), (start, end))


@torch.no_grad()
def scale_of(model: nn.Module, criterion: lm.Criterion, x: Tensor) -> float:
    features = criterion.read(model(x)).features
    return float(features.square().sum(1).mean().sqrt())


def diverged(end: End) -> bool:
    """Not a number, or features a thousand times as large as any classifier needs."""
    return not end.finite or end.scale[1] > 1e3 * max(1.0, end.scale[0])


def assert_trains(end: End) -> None:
    assert end.finite
    assert not diverged(end)
    assert end.scale[1] > 1e-3, "the features died"


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("backbone", SMALL)
def test_the_stable_form_trains(backbone: str, dim: int, rate: float) -> None:
    torch.manual_seed(0)
    assert_trains(train(SMALL[backbone](dim), stable, rate, 30))


def test_the_backbones_differ_in_feature_scale() -> None:
    x, _ = images()
    for dim in DIMS:
        scales = []
        for make in SMALL.values():
            torch.manual_seed(0)
            model = make(dim)
            scales.append(scale_of(model, lm.attach(model, stable, warn=False), x[:200]))
        assert max(scales) > 100 * min(scales), scales


@pytest.mark.parametrize("dim", DIMS)
def test_the_printed_form_diverges_where_the_stable_form_trains(dim: int) -> None:
    torch.manual_seed(0)
    assert diverged(train(batch_norm(dim), printed, 0.1, 60))
    torch.manual_seed(0)
    assert_trains(train(batch_norm(dim), stable, 0.1, 60))


@pytest.mark.parametrize(
    ("change", "trains"),
    [
        ({"margin": 1.0}, False),
        ({"detach_classifier": True}, False),
        ({"compact_power": 1}, True),
        ({"strategy": "none"}, True),
        ({"alpha": 0.0}, True),
    ],
    ids=str,
)
def test_what_makes_the_printed_form_diverge(change: dict[str, Any], trains: bool) -> None:
    """The squared distance to centroids that stay behind; not the margin."""
    torch.manual_seed(0)
    objective = lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(CLASSES, 8, **change))
    assert diverged(train(batch_norm(8), objective, 0.1, 60)) != trains


def test_it_learns_as_well_as_the_softmax_loss() -> None:
    ends = {}
    for objective in (lm.CrossEntropy(), stable):
        torch.manual_seed(0)
        ends[objective is stable] = train(batch_norm(64), objective, 0.03, 100)
    assert ends[True].accuracy > 0.95
    assert ends[True].accuracy > ends[False].accuracy - 0.02


def resnet18(dim: int) -> nn.Module:
    torchvision = pytest.importorskip("torchvision", reason="the large grid trains its networks")
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.fc = nn.Sequential(nn.Linear(512, dim), nn.Linear(dim, CLASSES))
    return model


def mobilenet(dim: int) -> nn.Module:
    torchvision = pytest.importorskip("torchvision", reason="the large grid trains its networks")
    model = torchvision.models.mobilenet_v3_small(num_classes=CLASSES)
    model.classifier = nn.Sequential(nn.Linear(576, dim), nn.Hardswish(), nn.Linear(dim, CLASSES))
    return model


def transformer(dim: int) -> nn.Module:
    """Its head starts at zero: prototypes coincide, and there are no boundaries yet."""
    torchvision = pytest.importorskip("torchvision", reason="the large grid trains its networks")
    return torchvision.models.VisionTransformer(
        image_size=8, patch_size=2, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128,
        num_classes=CLASSES, representation_size=dim,
    )  # fmt: skip


LARGE = {"resnet18": resnet18, "mobilenet_v3_small": mobilenet, "vit": transformer}


@pytest.mark.slow
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dim", [30, 512])
@pytest.mark.parametrize("backbone", LARGE)
def test_the_stable_form_trains_known_backbones(backbone: str, dim: int, rate: float) -> None:
    torch.manual_seed(0)
    assert_trains(train(LARGE[backbone](dim), stable, rate, 30, channels=3, size=32))


@pytest.mark.slow
def test_the_printed_form_diverges_on_resnet18() -> None:
    torch.manual_seed(0)
    assert diverged(train(resnet18(30), printed, 0.1, 60, channels=3, size=32))


PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "discriminative.md"


def test_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, PAGE.name, "exec"), names)
    assert bool(torch.isfinite(names["loss"]))
    assert float(names["accuracy"]) > 0.85
    names = {}
    exec(compile(block.replace("lm.Stable", "lm."), PAGE.name, "exec"), names)
    assert not bool(torch.isfinite(names["loss"])), "the page says NaN"


def test_the_figure_and_every_file_the_page_names_exist() -> None:
    text = PAGE.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (PAGE.parent / target).exists(), target


def test_the_tables_of_the_page_are_made_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision", reason="the benchmark's backbones are torchvision's")
    monkeypatch.syspath_prepend(str(PAGE.parents[2] / "benchmarks"))
    benchmark = importlib.import_module("discriminative_stability")
    text = PAGE.read_text(encoding="utf-8")
    assert benchmark.with_tables(text) == text, "run the benchmark with --plot"
    assert "| backbone, dim |" in text
    assert "stable 'stable, weights 0.3'" in text, "a reader copies the command"
    typed = "x.py --data cifar10.npz --forms stable 'stable, weights 3'"
    assert benchmark.copyable(typed) == typed
