"""Accuracy under perturbations: the suites, the draws, the counting."""

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largemargin.app.data import Samples
from largemargin.errors import LargeMarginError
from largemargin.measuring.robust import (
    ROAD_400X500,
    SCALED_32,
    Perturbation,
    PerturbationDraws,
    Stripes,
)
from largemargin.measuring.robust_accuracy import (
    PairedDraws,
    level,
    perturbation_suite,
    perturbed_accuracy,
    scaled_suite,
)

N, SIZE = 150, 9


def data() -> Samples:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(N, 2, SIZE, SIZE, generator=generator)
    return Samples(torch.randint(3, (N,), generator=generator), [str(i) for i in range(N)], pixels)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * SIZE * SIZE, 3))


class Recorder(nn.Module):
    """Keeps every image it is shown, and calls each of class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3)


def shown(perturbation: Perturbation, source: Any, **options: Any) -> Tensor:
    """All images a model sees in one run."""
    model = Recorder()
    options = {"draws": 1, "num_classes": 3} | options
    perturbed_accuracy(model, source, {"it": perturbation}, **options)
    return torch.cat(model.seen)


def test_suites() -> None:
    assert scaled_suite(400, 500) == dict(ROAD_400X500)
    assert scaled_suite(32, 32) == dict(SCALED_32)
    assert perturbation_suite("small", (64, 64)) == dict(SCALED_32)
    assert perturbation_suite("road", (64, 64)) == dict(ROAD_400X500)
    assert perturbation_suite("none", (8, 8)) == {}
    digits = scaled_suite(8, 8)
    assert digits["stripes"].stripes == Stripes(1, 1)
    noise = perturbation_suite("none", (8, 8), gaussian=[8 / 255, 0.06], uniform=[0.15])
    assert list(noise) == ["gaussian 8/255", "gaussian 0.06", "uniform 0.15"]
    assert noise["uniform 0.15"] == Perturbation(amplitude=0.15)


@pytest.mark.parametrize(
    ("value", "text"), [(0.06, "0.06"), (20 / 255, "20/255"), (1.0, "1"), (0.2, "0.2"), (0, "0")]
)
def test_levels(value: float, text: str) -> None:
    assert level(value) == text


@pytest.mark.parametrize("name", list(scaled_suite(SIZE, SIZE)))
def test_every_perturbation_does_what_it_says(name: str) -> None:
    """What a model sees are the images of ``Perturbation.apply`` with the draws of the run."""
    samples, what = data(), scaled_suite(SIZE, SIZE)[name]
    seen = shown(what, samples)
    assert samples.pixels is not None
    drawn = PairedDraws(0, torch.device("cpu"))(what, 0, samples.pixels, torch.arange(N))
    assert torch.equal(seen, what.apply(samples.pixels, drawn))
    assert not torch.equal(seen, samples.pixels)


@pytest.mark.parametrize("name", ["occlusion_gaussian", "down_up_stripes"])
def test_draws_belong_to_samples(name: str) -> None:
    """Neither batch size, nor kind of source, nor order changes what is drawn for a sample."""
    samples, what = data(), scaled_suite(SIZE, SIZE)[name]
    want = shown(what, samples)
    for batch_size in (1, 50, 64, 100):
        assert torch.equal(shown(what, samples, batch_size=batch_size), want)
    assert samples.pixels is not None
    loader = list(zip(samples.pixels.split(37), samples.labels.split(37), strict=True))
    assert torch.equal(shown(what, loader), want)
    order = torch.randperm(N)
    draw = PairedDraws(0, torch.device("cpu"))
    mixed, plain = (draw(what, 0, samples.pixels, each) for each in (order, torch.arange(N)))
    assert_rows(mixed, plain, order)


def assert_rows(mixed: PerturbationDraws, plain: PerturbationDraws, order: Tensor) -> None:
    for one, other in zip(mixed, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other[order])


def test_runs_and_samples_have_draws_of_their_own() -> None:
    what, flat = Perturbation(sigma=1.0), Samples(*blank(200))
    noise = {
        (seed, run): PairedDraws(seed, torch.device("cpu"))(
            what, run, torch.zeros(200, 1, 4, 4), torch.arange(200)
        ).gaussian
        for seed in (0, 1)
        for run in (0, 1)
    }
    drawn = [each for each in noise.values() if each is not None]
    rows = torch.cat([each.flatten(1) for each in drawn])
    assert len(torch.unique(rows, dim=0)) == 4 * 200
    assert abs(float(rows.mean())) < 0.05
    assert float(rows.std()) == pytest.approx(1, abs=0.05)
    weak, strong = (shown(Perturbation(sigma=each), flat) for each in (0.1, 0.2))
    assert torch.allclose(strong, 2 * weak)


def blank(n: int) -> tuple[Tensor, list[str], Tensor]:
    return torch.zeros(n, dtype=torch.long), [str(i) for i in range(n)], torch.zeros(n, 1, 4, 4)


def test_counting() -> None:
    """Mean and sample deviation over runs of what the model gets right."""
    samples, model = data(), net()
    suite = perturbation_suite("auto", (SIZE, SIZE), gaussian=[0.3])
    got = perturbed_accuracy(model, samples, suite, draws=4, seed=5)
    assert samples.pixels is not None
    assert list(got) == list(suite)
    for name, what in suite.items():
        runs = []
        for run in range(4 if what.random else 1):
            draws = PairedDraws(5, torch.device("cpu"))
            drawn = draws(what, run, samples.pixels, torch.arange(N))
            with torch.no_grad():
                predicted = model(what.apply(samples.pixels, drawn)).argmax(1)
            runs.append(float((predicted == samples.labels).double().mean()))
        assert got[name].runs == pytest.approx(tuple(runs))
        assert got[name].accuracy == pytest.approx(statistics.fmean(runs))
        if len(runs) > 1:
            assert got[name].std == pytest.approx(statistics.stdev(runs))
    assert len(got["down_up"].runs) == 1
    assert str(got["down_up"].std) == "nan"
    assert len(set(got["gaussian 0.3"].runs)) > 1
    assert perturbed_accuracy(model, samples, suite, draws=4, seed=5) == got
    assert perturbed_accuracy(model, samples, suite, draws=4, seed=6) != got


def test_other_random_numbers_are_left_alone() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    model = net()
    torch.manual_seed(1)
    perturbed_accuracy(model, data(), scaled_suite(SIZE, SIZE), draws=2)
    assert torch.equal(torch.rand(3), want)


def test_bad_perturbations() -> None:
    model, samples = net(), data()
    noise = {"noise": Perturbation(sigma=0.1)}
    with pytest.raises(LargeMarginError, match=r"occlusion\.height must be at most 9"):
        perturbed_accuracy(model, samples, dict(ROAD_400X500))
    with pytest.raises(LargeMarginError, match="perturbations must be one of"):
        perturbation_suite("big", (8, 8))
    with pytest.raises(LargeMarginError, match="every level of gaussian noise"):
        perturbation_suite("none", (8, 8), gaussian=[-0.1])
    with pytest.raises(LargeMarginError, match=r"16 was given\. Pixels are in .* 8 / 255"):
        perturbation_suite("none", (8, 8), gaussian=[16])
    for levels, said in ((0.1, "a list of levels, but 0.1"), (["8"], "every level of gaussian")):
        with pytest.raises(LargeMarginError, match=said):
            perturbation_suite("none", (8, 8), gaussian=levels)  # type: ignore[arg-type]
    for wrong in (Perturbation(sigma=0.1), ["gaussian"], {"noise": 0.1}):
        with pytest.raises(LargeMarginError, match=r"dict of perturbations by name.* was given"):
            perturbed_accuracy(model, samples, wrong)  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match="at least 3 x 3"):
        perturbation_suite("auto", (2, 8))
    for draws in (0, 2.5):
        with pytest.raises(LargeMarginError, match="draws must be"):
            perturbed_accuracy(model, samples, noise, draws=draws)  # type: ignore[arg-type]
    with pytest.raises(LargeMarginError, match=r"images of shape \(N, C, H, W\)"):
        perturbed_accuracy(model, [(torch.zeros(2, 162), torch.zeros(2).long())], noise)
    with pytest.raises(LargeMarginError, match="data is empty"):
        perturbed_accuracy(model, [], noise)


@pytest.mark.parametrize("change", [lambda x: 255 * x, lambda x: (x - 0.5) / 0.25])
def test_images_in_other_units_are_refused(change: Any) -> None:
    # Noise of 0.1 would be nothing to bytes, and another noise to normalised images.
    images = torch.rand(6, 2, SIZE, SIZE)
    batches = [(images, torch.zeros(6).long()), (change(images), torch.zeros(6).long())]
    with pytest.raises(LargeMarginError, match=r"units of \[0, 1\] pixels, but the images reach"):
        perturbed_accuracy(net(), batches, {"noise": Perturbation(sigma=0.1)}, draws=1)


@pytest.mark.gpu
def test_on_the_device() -> None:
    model, samples = net().cuda(), data()
    suite = perturbation_suite("auto", (SIZE, SIZE), gaussian=[0.3])
    got = perturbed_accuracy(model, samples, suite, draws=3)
    assert perturbed_accuracy(model, samples, suite, draws=3, batch_size=17) == got
    here = perturbed_accuracy(model.cpu(), samples, suite, draws=3)
    assert got["down_up"] == here["down_up"]
