"""Attacks beside torchattacks, on a network trained on scikit-learn's digits."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largemargin.measuring.robust import apgd, fgsm, pgd
from largemargin.measuring.robust.attacks import LOSSES

torchattacks = pytest.importorskip("torchattacks", reason="torchattacks is not installed")

Trained = tuple[nn.Module, Tensor, Tensor]


@pytest.fixture(scope="module")
def wide() -> Trained:
    """A convolutional network of 91 % accuracy, and test images it has not seen.

    In float64: 152 steps in float32 lead to another network on every kind of CPU, and rounding
    turns the sign of gradients that are almost 0.
    """
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float64)[:, None] / 16
    labels = torch.as_tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    ).double()  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        for rows in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    model.eval()
    return model, images[1200:], labels[1200:]


@pytest.fixture(scope="module")
def trained(wide: Trained) -> Trained:
    """The same in float32, as attacks are run."""
    model, images, labels = wide
    return deepcopy(model).float(), images.float(), labels


def robust_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def test_the_network_has_learned(trained: Trained) -> None:
    assert robust_accuracy(*trained) > 0.9


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.3])
def test_fgsm_is_the_same(wide: Trained, epsilon: float) -> None:
    model, images, labels = wide
    want = torchattacks.FGSM(model, eps=epsilon)(images, labels)
    torch.testing.assert_close(
        fgsm(model, images, labels, epsilon=epsilon), want, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("steps", [1, 7])
def test_pgd_from_the_image_is_the_same(wide: Trained, steps: int) -> None:
    model, images, labels = wide
    attack = torchattacks.PGD(model, eps=0.1, alpha=0.03, steps=steps, random_start=False)
    want = attack(images, labels)
    got = pgd(model, images, labels, epsilon=0.1, step_size=0.03, steps=steps, random_start=False)
    assert _share_alike(got, want) == 1


@pytest.mark.parametrize("steps", [1, 7])
def test_pgd_l2_from_the_image_is_the_same(wide: Trained, steps: int) -> None:
    model, images, labels = wide
    attack = torchattacks.PGDL2(model, eps=0.6, alpha=0.2, steps=steps, random_start=False)
    want = attack(images, labels)
    got = pgd(
        model, images, labels, epsilon=0.6, norm="l2", step_size=0.2, steps=steps,
        random_start=False,
    )  # fmt: skip
    # Steps amplify rounding where a kink is crossed, and theirs shrink where the loss is flat.
    assert _share_alike(got, want, 1e-3) > 0.98


@pytest.mark.parametrize("loss", ["ce", "dlr"])
@pytest.mark.parametrize(("norm", "theirs", "epsilon"), [("linf", "Linf", 0.12), ("l2", "L2", 0.7)])
def test_apgd_leaves_as_much(
    trained: Trained, norm: str, theirs: str, epsilon: float, loss: str
) -> None:
    model, images, labels = trained
    attack = torchattacks.APGD(
        model, norm=theirs, eps=epsilon, steps=30, n_restarts=1, seed=0, loss=loss
    )
    want = robust_accuracy(model, attack(images, labels), labels)
    found = apgd(
        model, images, labels, epsilon=epsilon, norm=norm, steps=30, loss=loss,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    got = robust_accuracy(model, found, labels)
    assert 0.1 < want < 0.8
    assert got == pytest.approx(want, abs=0.02)


@pytest.mark.parametrize(("norm", "theirs", "epsilon"), [("linf", "Linf", 0.12), ("l2", "L2", 0.7)])
def test_apgd_takes_the_same_steps(
    trained: Trained, norm: str, theirs: str, epsilon: float
) -> None:
    """From the same random numbers, for samples that fall: the others come back untouched there.

    With cross entropy only. At the first checkpoint torchattacks compares the first loss with 0
    where the one before it is meant: cross entropy is above 0 and passes for growing, DLR is not.
    """
    model, images, labels = trained
    right = model(images).argmax(1) == labels
    images, labels = images[right][:150], labels[right][:150]
    want = torchattacks.APGD(model, norm=theirs, eps=epsilon, steps=20, seed=5)(images, labels)
    torch.manual_seed(5)
    got = apgd(model, images, labels, epsilon=epsilon, norm=norm, steps=20)
    fell = model(want).argmax(1) != labels
    alike = (model(got).argmax(1) != labels) == fell
    assert float(alike.double().mean()) > 0.98  # one may fall by rounding
    assert 50 < int(fell.sum()) < 140
    assert _share_alike(got[fell], want[fell], 1e-4) > 0.95


def test_dlr_is_the_same(trained: Trained) -> None:
    model, images, labels = trained
    logits = model(images)
    want = torchattacks.APGD(model).dlr_loss(logits, labels)
    torch.testing.assert_close(LOSSES["dlr"](logits, labels), want)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_more_work_leaves_less(trained: Trained, norm: str) -> None:
    model, images, labels = trained[0], trained[1][:200], trained[2][:200]
    epsilon = {"linf": 0.12, "l2": 0.7}[norm]

    def left(attack: Any, **options: Any) -> float:
        if attack is not fgsm:
            options["generator"] = torch.Generator().manual_seed(0)
        found = attack(model, images, labels, epsilon=epsilon, norm=norm, **options)
        return robust_accuracy(model, found, labels)

    one, many = left(fgsm), left(pgd, steps=20)
    best = left(apgd, steps=40, restarts=3)
    assert robust_accuracy(model, images, labels) > one > many
    assert best <= left(apgd, steps=40) <= many + 0.005
    assert left(pgd, steps=20, restarts=3) <= many


def _share_alike(got: Tensor, want: Tensor, tolerance: float = 1e-6) -> float:
    """Share of images that are the same."""
    same = (got - want).flatten(1).abs().amax(1) <= tolerance
    return float(same.double().mean())
