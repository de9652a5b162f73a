"""Common corruptions: in range, repeatable, stronger with every severity."""

import pytest
import torch
from largemargin_papers.benchmark.corruptions import (
    CORRUPTIONS,
    TEST,
    VALIDATION,
    _cosines,
    corrupted,
)
from torch import Tensor

ANY_SIZE = (4, 3, 32, 32)


def images() -> Tensor:
    """Smooth colours with edges."""
    draw = torch.Generator().manual_seed(3)
    coarse = torch.rand(4, 3, 5, 5, generator=draw)
    return torch.nn.functional.interpolate(coarse, (32, 32), mode="nearest")


def made(name: str, severity: int, seed: int = 0, given: Tensor | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return corrupted(name, images() if given is None else given, severity, draw)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption(name: str) -> None:
    found = [made(name, severity) for severity in range(1, 6)]
    for each in found:
        assert each.shape == ANY_SIZE
        assert float(each.min()) >= 0
        assert float(each.max()) <= 1
    assert torch.equal(found[2], made(name, 3))
    changes = [float((each - images()).abs().mean()) for each in found]
    assert min(changes) > 1e-4
    assert changes[4] > changes[0]
    odd = torch.rand(2, 1, 28, 27)
    assert made(name, 5, given=odd).shape == odd.shape


@pytest.mark.parametrize(
    "name",
    [
        "gaussian_blur",
        "defocus_blur",
        "motion_blur",
        "zoom_blur",
        "contrast",
        "pixelate",
        "jpeg",
        "saturate",
    ],
)
def test_what_leaves_one_colour_as_it_is(name: str) -> None:
    flat = torch.full((1, 3, 16, 16), 0.5)
    # 127.5 of 255 is between two of JPEG's steps.
    torch.testing.assert_close(made(name, 5, given=flat), flat, atol=0.02, rtol=0)


def test_noise_has_the_strength_it_says() -> None:
    grey = torch.full((50, 3, 32, 32), 0.5)
    assert float((made("gaussian_noise", 3, given=grey) - grey).std()) == pytest.approx(
        0.08, rel=0.02
    )
    assert float((made("speckle_noise", 5, given=grey) - grey).std()) == pytest.approx(
        0.1, rel=0.02
    )
    shot = float((made("shot_noise", 5, given=grey) - grey).std())
    assert shot == pytest.approx((0.5 / 50) ** 0.5, rel=0.02)
    hit = (made("impulse_noise", 5, given=grey) != grey).float().mean()
    assert float(hit) == pytest.approx(0.07, rel=0.05)


def test_contrast_and_brightness_by_hand() -> None:
    two = torch.tensor([0.2, 0.8]).reshape(1, 1, 1, 2)
    torch.testing.assert_close(made("contrast", 2, given=two).flatten(), torch.tensor([0.35, 0.65]))
    torch.testing.assert_close(made("brightness", 2, given=two).flatten(), torch.tensor([0.3, 0.9]))


def test_the_cosines_are_orthonormal() -> None:
    torch.testing.assert_close(_cosines() @ _cosines().T, torch.eye(8))


def test_a_shift_of_one_pixel_is_no_blur() -> None:
    """The kernels are centred: a point stays where it is."""
    point = torch.zeros(1, 1, 15, 15)
    point[..., 7, 7] = 1
    for name in ("gaussian_blur", "defocus_blur", "motion_blur"):
        found = made(name, 5, given=point)[0, 0]
        places = torch.arange(15.0)
        for axis in (0, 1):
            centre = (found.sum(axis) * places).sum() / found.sum()
            assert float(centre) == pytest.approx(7, abs=1e-4), name


def test_tuning_sees_no_corruption_of_the_test() -> None:
    assert not set(TEST) & set(VALIDATION)
    assert len(TEST) == 12
