"""Clean and noisy images, one after the other or as one batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.training import NoiseConfig, ObjectiveConfig
from largemargin.app.training.journal import EpochTotals
from largemargin.app.training.objective import objective_of
from largemargin.app.training.step import Step, noisy_images

CASES = {
    "softmax": ("clean_and_noisy", "cross_entropy"),
    "lm_softmax": ("clean_and_noisy", "lm_softmax"),
    "stability": ("pair", "cross_entropy + stability"),
    "robust": ("pair", "robust_discriminative"),
}


def model(*, normalised: bool) -> nn.Module:
    torch.manual_seed(0)
    inside = [nn.BatchNorm1d(8)] if normalised else []
    return nn.Sequential(nn.Linear(5, 8), *inside, nn.ReLU(), nn.Linear(8, 3)).double()


def losses(
    name: str, *, joined: bool, normalised: bool
) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    use, objective = CASES[name]
    noise = NoiseConfig(use, joined=joined)  # type: ignore[arg-type]
    network = model(normalised=normalised)
    torch.manual_seed(1)
    criterion = lm.attach(
        network,
        objective_of(ObjectiveConfig(objective), [4, 4, 4]),
        accumulate=noise.losses_per_step,
    )
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(12, 5, dtype=torch.float64, generator=generator)
    noisy = images + 2 + torch.randn(12, 5, dtype=torch.float64, generator=generator)
    labels = torch.arange(12) % 3
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    sums = EpochTotals(torch.device("cpu"))
    step = Step(network, criterion, optimizer, noise=noise, clip_norm=None, totals=sums)
    total, terms = step.plain_losses(images, noisy, labels)
    total.backward()  # type: ignore[no-untyped-call]
    return network, total, terms


@pytest.mark.parametrize("name", CASES)
def test_without_batch_normalisation_it_is_the_same(name: str) -> None:
    one, joined, joined_terms = losses(name, joined=True, normalised=False)
    two, apart, terms = losses(name, joined=False, normalised=False)
    torch.testing.assert_close(joined, apart)
    assert joined_terms.keys() == terms.keys()
    for key, value in terms.items():
        torch.testing.assert_close(joined_terms[key], value, msg=key)
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", ["softmax", "robust"])
def test_statistics_are_those_of_both_kinds(name: str) -> None:
    one, joined, _ = losses(name, joined=True, normalised=True)
    two, apart, _ = losses(name, joined=False, normalised=True)
    assert not torch.isclose(joined, apart)
    normalisation, other = one[1], two[1]  # type: ignore[index]
    assert normalisation.num_batches_tracked == 1
    assert other.num_batches_tracked == 2
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(12, 5, dtype=torch.float64, generator=generator)
    noisy = images + 2 + torch.randn(12, 5, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        inputs = one[0](torch.cat([images, noisy]))  # type: ignore[index]
    torch.testing.assert_close(normalisation.running_mean, 0.1 * inputs.mean(0))
    torch.testing.assert_close(normalisation.running_var, 0.9 + 0.1 * inputs.var(0))


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_noise_is_the_next_that_the_generator_draws(kind: Any) -> None:
    images = torch.rand(3, 2, 4, 4)
    torch.manual_seed(5)
    drawn = torch.randn(images.shape) if kind == "gaussian" else 2 * torch.rand(images.shape) - 1
    for clip in (False, True):
        torch.manual_seed(5)
        found = noisy_images(images, NoiseConfig("noisy", kind=kind, level=0.5, clip=clip))
        wanted = images + 0.5 * drawn
        torch.testing.assert_close(found, wanted.clamp(0, 1) if clip else wanted)
