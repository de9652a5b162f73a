"""Perturbations: golden values of the deterministic part, and properties of the random part."""

import json

import numpy as np
import pytest
import torch
from oracles.golden import FOLDER, decode_all

from largemargin.errors import LargeMarginError
from largemargin.measuring.robust import (
    GAUSSIAN_CIFAR10,
    GAUSSIAN_ROAD,
    GAUSSIAN_SVHN,
    ROAD_400X500,
    SCALED_32,
    UNIFORM_CIFAR10,
    UNIFORM_SVHN,
    DownUp,
    Patches,
    Perturbation,
    PerturbationDraws,
    Stripes,
    add_gaussian,
    down_up,
    mask_stripes,
    occlude,
)

CASES = json.loads((FOLDER / "NGR-PERT.json").read_text())["cases"]


def golden(case, dtype):
    x, p = decode_all(case["inputs"]), decode_all(case["params"])
    image = torch.from_numpy(x.pop("img")).to(dtype)
    x = {name: torch.from_numpy(array) for name, array in x.items()}
    perturbation = Perturbation(
        down_up=DownUp(p["factor"], p["mode"]) if "factor" in p else None,
        occlusion=Patches(len(x["coords"]), p["patch_h"], p["patch_w"]) if "coords" in x else None,
        stripes=Stripes(len(x["lefts"]), p["thickness"]) if "lefts" in x else None,
        sigma=p.get("sigma"),
        amplitude=p.get("a"),
        fill=p.get("fill", 0.0),
    )
    draws = PerturbationDraws(x.get("coords"), x.get("lefts"), x.get("eps"), x.get("u"))
    return perturbation, image, draws, decode_all(case["expected"])["image"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_values(case, dtype):
    perturbation, image, draws, want = golden(case, dtype)
    before = image.clone()
    got = perturbation.apply(image, draws)
    assert got.dtype == dtype
    limit = 1e-9 if dtype == torch.float64 else 2e-5
    np.testing.assert_allclose(got.numpy(), want, rtol=limit, atol=limit)
    assert torch.equal(image, before)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_batch_is_its_images(case):
    perturbation, image, draws, want = golden(case, torch.float64)
    batch = torch.stack([image, image / 2])
    own = PerturbationDraws(
        *(None if part is None else torch.stack([part, part]) for part in draws)
    )
    got = perturbation.apply(batch, own)
    torch.testing.assert_close(got[0], torch.from_numpy(want))
    torch.testing.assert_close(got[1], perturbation.apply(image / 2, draws))
    if draws.gaussian is None and draws.uniform is None:  # positions may be shared by a batch
        torch.testing.assert_close(perturbation.apply(batch, draws), got)


@pytest.mark.parametrize("name", list(SCALED_32))
@pytest.mark.parametrize("shape", [(3, 32, 32), (5, 3, 32, 32)])
def test_the_generator_decides(name, shape):
    perturbation = SCALED_32[name]
    images = torch.rand(shape)
    first, again = (
        perturbation(images, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, again)
    other = perturbation(images, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first, other) != perturbation.random
    torch.manual_seed(0)
    perturbation(images, generator=torch.Generator().manual_seed(3))
    untouched = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(untouched, torch.rand(1))


def test_images_of_a_batch_get_their_own_draws():
    images = torch.ones(2, 1, 32, 32)
    for name in ("occlusion", "stripes"):
        first, second = SCALED_32[name](images, generator=torch.Generator().manual_seed(0))
        assert not torch.equal(first, second)


def test_draws_stay_inside_and_reach_the_border():
    images = torch.ones(400, 1, 8, 9)
    generator = torch.Generator().manual_seed(0)
    perturbation = Perturbation(occlusion=Patches(2, 3, 4), stripes=Stripes(2, 2), amplitude=1.0)
    draws = perturbation.draw(images, generator=generator)
    assert draws.corners[..., 0].unique().tolist() == list(range(6))
    assert draws.corners[..., 1].unique().tolist() == list(range(6))
    assert draws.lefts.unique().tolist() == list(range(8))
    assert -1 <= float(draws.uniform.min()) < -0.99
    assert 0.99 < float(draws.uniform.max()) <= 1
    masked = Perturbation(occlusion=Patches(1, 3, 4))(images, generator=generator)
    assert (masked == 0).sum((1, 2, 3)).unique().tolist() == [12]


def test_paper_settings_fit_their_images():
    images = torch.rand(1, 3, 400, 500)
    for perturbation in ROAD_400X500.values():
        assert (
            perturbation(images, generator=torch.Generator().manual_seed(0)).shape == images.shape
        )
    assert not ROAD_400X500["down_up"].random
    assert sum(p.random for p in ROAD_400X500.values()) == 5
    assert down_up(images).shape == images.shape


@pytest.mark.parametrize(
    ("noise", "sigma"),
    [
        (GAUSSIAN_CIFAR10, 0.06),
        (GAUSSIAN_SVHN, 0.15),
        (GAUSSIAN_ROAD, 40 / 255),
        (UNIFORM_CIFAR10, 0.06 / 3**0.5),
        (UNIFORM_SVHN, 0.15 / 3**0.5),
    ],
)
def test_noise_has_the_stated_size(noise, sigma):
    images = torch.full((40, 3, 32, 32), 0.5)
    added = noise(images, generator=torch.Generator().manual_seed(0)) - images
    assert float(added.std()) == pytest.approx(sigma, rel=0.01)
    if noise.amplitude is not None:
        assert float(added.abs().max()) <= noise.amplitude + 1e-6


def test_the_columns_of_the_paper():
    patches, stripes = Patches(20, 70, 70), Stripes(10, 6)
    assert dict(ROAD_400X500) == {
        "occlusion": Perturbation(occlusion=patches),
        "occlusion_gaussian": Perturbation(occlusion=patches, sigma=40 / 255),
        "down_up": Perturbation(down_up=DownUp(3)),
        "down_up_occlusion": Perturbation(down_up=DownUp(3), occlusion=patches),
        "stripes": Perturbation(stripes=stripes),
        "down_up_stripes": Perturbation(down_up=DownUp(3), stripes=stripes),
    }
    assert SCALED_32["occlusion"] == Perturbation(occlusion=Patches(20, 6, 4))
    assert SCALED_32["stripes"] == Perturbation(stripes=Stripes(4, 1))


def test_clipping_only_when_asked():
    image = torch.ones(1, 2, 2)
    draws = PerturbationDraws(gaussian=torch.ones(1, 2, 2))
    assert float(Perturbation(sigma=1.0).apply(image, draws).max()) == 2
    assert float(Perturbation(sigma=1.0, clip=True).apply(image, draws).max()) == 1


def test_factor_one_changes_nothing_and_a_constant_stays():
    image = torch.rand(2, 7, 5, dtype=torch.float64)
    for mode in ("bilinear", "nearest"):
        torch.testing.assert_close(down_up(image, factor=1, mode=mode), image)
        torch.testing.assert_close(down_up(torch.ones(2, 7, 5), mode=mode), torch.ones(2, 7, 5))


@pytest.mark.parametrize(("height", "factor"), [(74, 3), (106, 4), (82, 5), (32, 3)])
def test_nearest_pixels_are_counted_in_whole_numbers(height, factor):
    """In float32 i * (74 / 24) can fall below the whole number that i * 74 / 24 is."""
    small = height // factor
    rows = [(i * small // height) * height // small for i in range(height)]
    image = torch.arange(height, dtype=torch.float64)[None, :, None].expand(1, height, factor)
    assert down_up(image, factor=factor, mode="nearest")[0, :, 0].tolist() == rows


def test_settings_that_are_not_given():
    """Thirds, bilinear: those of the function and those of its settings."""
    image = torch.rand(3, 12, 12)
    usual = down_up(image, factor=3, mode="bilinear")
    assert torch.equal(down_up(image), usual)
    assert torch.equal(Perturbation(down_up=DownUp())(image), usual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_images_stay_half(dtype):
    images = torch.rand(2, 3, 32, 32).to(dtype)
    for perturbation in SCALED_32.values():
        assert perturbation(images).dtype == dtype


def test_no_patch_is_no_change():
    image = torch.rand(1, 4, 4)
    none = torch.zeros(0, 2, dtype=torch.long)
    assert torch.equal(occlude(image, none, height=2, width=2), image)
    assert torch.equal(mask_stripes(image, none[:, 0], thickness=1), image)
    assert torch.equal(
        Perturbation(occlusion=Patches(0, 2, 2), stripes=Stripes(0, 1))(image), image
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: down_up(torch.rand(4, 4)), "images must have shape"),
        (lambda: down_up(torch.zeros(1, 4, 4, dtype=torch.uint8)), "Divide bytes by 255"),
        (lambda: down_up(torch.rand(1, 4, 4), factor=5), "factor must be"),
        (lambda: down_up(torch.rand(1, 4, 4), mode="cubic"), "mode must be one of"),
        (lambda: ROAD_400X500["occlusion"](torch.rand(3, 32, 32)), "SCALED_32"),
        (lambda: ROAD_400X500["stripes"](torch.rand(3, 4, 4)), "stripes.thickness must be"),
        (
            lambda: occlude(
                torch.rand(1, 4, 4), torch.zeros(3, dtype=torch.long), height=1, width=1
            ),
            "corners must have shape",
        ),
        (
            lambda: occlude(torch.rand(1, 4, 4), torch.zeros(3, 2), height=1, width=1),
            "corners must be integers",
        ),
        (
            lambda: mask_stripes(torch.rand(2, 1, 4, 4), torch.zeros(3, 1).long(), thickness=1),
            "lefts must have shape",
        ),
        (
            lambda: add_gaussian(torch.rand(1, 4, 4), torch.rand(4, 4), sigma=0.1),
            "draws must have the shape",
        ),
        (lambda: add_gaussian(torch.rand(2), torch.rand(2), sigma=-1.0), "sigma must be"),
        (lambda: Perturbation(occlusion=0.3), r"occlusion must be Patches\(number, height, width"),
        (lambda: Perturbation(stripes=(4, 1)), r"stripes must be Stripes\(number, thickness\)"),
        (lambda: Perturbation(down_up=3), r"down_up must be DownUp\(factor, mode\), but 3"),
        (lambda: Perturbation(occlusion=Patches(-1, 2, 2)), r"occlusion\.number must be"),
        (lambda: Perturbation(fill="black"), "fill must be"),
        (
            lambda: Perturbation(sigma=0.1).apply(torch.rand(1, 2, 2), PerturbationDraws()),
            "draws.gaussian",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call()


def test_masks_may_come_last():
    """Noise covers masks that come before it, and not those that come after it."""
    image = torch.full((1, 8, 8), 0.5)
    draws = PerturbationDraws(
        corners=torch.tensor([[0, 0]]), lefts=torch.tensor([6]), gaussian=torch.ones(1, 8, 8)
    )
    parts = {"occlusion": Patches(1, 4, 4), "stripes": Stripes(1, 2), "sigma": 0.75}
    before = Perturbation(**parts).apply(image, draws)[0]
    after = Perturbation(**parts, mask_last=True).apply(image, draws)[0]
    assert (before[0, 0], before[7, 7], before[5, 5]) == (0.75, 0.75, 1.25)
    assert (after[0, 0], after[7, 7], after[5, 5]) == (0.0, 0.0, 1.25)
    clipped = Perturbation(**parts, mask_last=True, clip=True).apply(image, draws)[0]
    assert (clipped[0, 0], clipped[5, 5]) == (0.0, 1.0)
