"""MixUp and CutMix are torchvision's; what they draw depends on seed, epoch and step alone."""

from typing import Any

import pytest
import torch

from largemargin.app.data.augment import Augment, Mix
from largemargin.app.data.samples import Batches, Samples
from largemargin.errors import LargeMarginError

SIZE = (7, 10)


def batch(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, 3, *SIZE), torch.arange(count) % 4


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_it_is_what_torchvision_does(kind: Any) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="the reference is torchvision's")
    mix, (images, labels) = Mix(4, **{kind: 1.0}), batch()
    for step in range(20):
        weight, top, bottom, left, right = mix.draw(SIZE, (0, 0, step))
        given: dict[str, Any] = {"labels": labels, "batch_size": len(labels)}
        if kind == "mixup":
            theirs: Any = v2.MixUp(num_classes=4)
            given["lam"] = 1 - weight
        else:
            theirs = v2.CutMix(num_classes=4)
            area = (bottom - top) * (right - left) / (SIZE[0] * SIZE[1])
            given |= {"box": (left, top, right, bottom), "lam_adjusted": 1 - area}
        theirs.make_params = lambda _, given=given: given
        expected = theirs(images, labels)
        drawn = torch.tensor([weight, top, bottom, left, right])
        for mine, other in zip(mix.apply(images, labels, drawn), expected, strict=True):
            torch.testing.assert_close(mine, other)


def test_shares_follow_the_beta_distribution() -> None:
    """Of strength 1 it is uniform; small ones leave most images nearly alone."""
    for mix in (Mix(4, mixup=1.0), Mix(4, cutmix=1.0)):
        drawn = torch.tensor([mix.draw((64, 64), (0, 0, step)) for step in range(2000)])
        share = drawn[:, 0] * (drawn[:, 2] - drawn[:, 1]) * (drawn[:, 4] - drawn[:, 3]) / 64**2
        assert float(share.min()) >= 0
        if mix.mixup:
            assert float(share.mean()) == pytest.approx(0.5, abs=0.03)
            assert float(share.std()) == pytest.approx(12**-0.5, abs=0.02)
        else:  # rectangles are cut off at the edges
            assert 0.2 < float(share.mean()) < 0.4
    weak = torch.tensor([Mix(4, mixup=0.1).draw(SIZE, (0, 0, step))[0] for step in range(500)])
    assert float(((weak < 0.05) | (weak > 0.95)).float().mean()) > 0.6


def test_both_kinds_take_turns_by_chance() -> None:
    both = Mix(4, mixup=1.0, cutmix=1.0)
    cut = [both.draw(SIZE, (1, 2, step))[0] == 1.0 for step in range(400)]
    assert 150 < sum(cut) < 250


def batches(mix: Mix | None, *, twice: bool = False, seed: int = 3) -> Batches:
    pixels = torch.randint(0, 256, (22, 3, *SIZE), dtype=torch.uint8)
    samples = Samples(torch.arange(22) % 4, [str(i) for i in range(22)], pixels)
    return Batches(samples, 8, seed=seed, augment=Augment("flip"), mix=mix, twice=twice)


def test_a_step_is_a_function_of_seed_epoch_and_step() -> None:
    source = batches(Mix(4, mixup=0.4, cutmix=1.0))
    whole, resumed = list(source.epoch(5)), list(source.epoch(5, start=1))
    for one, other in zip(whole[1:], resumed, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert not torch.equal(source.mixtures(5), source.mixtures(6))
    assert not torch.equal(source.mixtures(5), batches(source.mix, seed=4).mixtures(5))
    for each in whole:
        assert each.labels.shape == (len(each.indices), 4)
        torch.testing.assert_close(each.labels.sum(1), torch.ones(len(each.indices)))
    hard = next(batches(None).epoch(5))
    assert hard.labels.dtype == torch.int64


def test_two_images_of_a_label_are_mixed_alike() -> None:
    source = batches(Mix(4, cutmix=1.0), twice=True)
    plain = Batches(source.samples, 8, seed=3, augment=source.augment, twice=True)
    for mixed, before, drawn in zip(
        source.epoch(1), plain.epoch(1), source.mixtures(1), strict=True
    ):
        for mine, old in zip(mixed.images.chunk(2), before.images.chunk(2), strict=True):
            expected, targets = Mix(4).apply(old, before.labels, drawn)
            assert torch.equal(mine, expected)
            assert torch.equal(mixed.labels, targets)


@pytest.mark.parametrize("settings", [{"mixup": -1.0}, {"cutmix": -0.1}])
def test_negative_strengths_are_refused(settings: Any) -> None:
    with pytest.raises(LargeMarginError, match=r"data\.(mixup|cutmix) must be"):
        Mix(4, **settings)
