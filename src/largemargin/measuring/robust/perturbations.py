"""Input perturbations of ROB section 7: noise, occlusion, stripes, down-up sampling.

Inputs lie in [0, 1], before normalisation, and nothing is clipped unless asked (O6). Each
perturbation is a deterministic function of its random draws; :class:`Perturbation` combines them in
the order of the paper and makes the draws from a generator that the caller passes.

Images are (C, H, W) or batches (N, C, H, W). They keep their dtype, half precision too: what goes
into a half precision model must stay so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from largemargin.errors import LargeMarginError, check_choice, check_number
from largemargin.measuring.batches import check_range
from largemargin.tracing import values_are_checked

MODES = ("bilinear", "nearest")
"""Interpolations of :func:`down_up`, by torch's names."""

NOISED = 0.5
"""How far images may lie outside [0, 1]: those that were noised before do."""


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.dim() not in (3, 4):
        given = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise LargeMarginError(
            f"images must have shape (C, H, W) or (N, C, H, W), but {given} was given."
        )
    if not images.is_floating_point():
        raise LargeMarginError(
            f"images must be floating point in [0, 1], but their dtype is {images.dtype}. "
            "Divide bytes by 255."
        )


def _check_draws(name: str, draws: Tensor, images: Tensor) -> None:
    if draws.shape != images.shape:
        raise LargeMarginError(
            f"{name} must have the shape of the images, {tuple(images.shape)}, but theirs is "
            f"{tuple(draws.shape)}."
        )


def _check_fits(what: str, size: int, name: str, available: int) -> None:
    check_number(name, size, at_least=1)
    if size > available:
        raise LargeMarginError(
            f"{name} must be at most {available}, the {what} of the images, but {size} was given. "
            "SCALED_32 holds settings for 32 x 32 images."
        )


def _check_positions(name: str, positions: Tensor, images: Tensor, axes: tuple[int, ...]) -> None:
    """Positions are (K, *axes) for all images or (N, K, *axes) for each image of a batch."""
    tail = tuple(positions.shape[positions.dim() - len(axes) :])
    shared = positions.dim() == 1 + len(axes)
    own = images.dim() == 4 and positions.dim() == 2 + len(axes)
    if tail != axes or not (shared or (own and positions.shape[0] == images.shape[0])):
        each = "".join(f", {size}" for size in axes)
        raise LargeMarginError(
            f"{name} must have shape (K{each}), or (N, K{each}) for a batch of N images, but "
            f"{tuple(positions.shape)} was given with images of shape {tuple(images.shape)}."
        )
    if positions.is_floating_point():
        raise LargeMarginError(f"{name} must be integers, but their dtype is {positions.dtype}.")


def add_gaussian(images: Tensor, draws: Tensor, *, sigma: float) -> Tensor:
    r"""Gaussian noise :math:`x + \sigma\varepsilon` for given draws (NGR-GAUSS).

    Args:
        images: (C, H, W) or (N, C, H, W); in fact any shape.
        draws: :math:`\varepsilon \sim N(0, I)`, same shape.
        sigma: standard deviation, >= 0. Trained with 0.06 on CIFAR-10, 0.15 on SVHN, 40/255 on
            road images (ROB H.1, H.2).

    Example:
        >>> add_gaussian(torch.zeros(1, 1, 2), torch.tensor([[[1.0, -1.0]]]), sigma=0.5)
        tensor([[[ 0.5000, -0.5000]]])
    """
    _check_draws("draws", draws, images)
    check_number("sigma", sigma, at_least=0)
    return images + sigma * draws.to(images)


def add_uniform(images: Tensor, draws: Tensor, *, amplitude: float) -> Tensor:
    r"""Uniform noise :math:`x + a u` for given draws (NGR-UNIF).

    Args:
        images: (C, H, W) or (N, C, H, W); in fact any shape.
        draws: :math:`u \sim U(-1, 1)` per pixel and channel, same shape.
        amplitude: a >= 0: 0.06 on CIFAR-10, 0.15 on SVHN (ROB 7.3).

    Example:
        >>> add_uniform(torch.zeros(1, 1, 2), torch.tensor([[[1.0, -0.5]]]), amplitude=0.5)
        tensor([[[ 0.5000, -0.2500]]])
    """
    _check_draws("draws", draws, images)
    check_number("amplitude", amplitude, at_least=0)
    return images + amplitude * draws.to(images)


def occlude(
    images: Tensor, corners: Tensor, *, height: int, width: int, fill: float = 0.0
) -> Tensor:
    """Set patches to a constant in all channels (NGR-OCC).

    Args:
        images: (C, H, W) or (N, C, H, W).
        corners: (K, 2) top-left (row, column) of K patches, the same for all images, or
            (N, K, 2) for each. Patches may overlap, and are cut at the border.
        height, width: of a patch: 70 x 70 on 400 x 500 images in the paper, 6 x 4 on 32 x 32.
        fill: value inside. Default 0 (O7).

    Example:
        >>> occlude(torch.ones(1, 2, 3), torch.tensor([[0, 1]]), height=1, width=2)
        tensor([[[1., 0., 0.],
                 [1., 1., 1.]]])
    """
    _check_images(images)
    _check_positions("corners", corners, images, (2,))
    _check_fits("height", height, "height", images.shape[-2])
    _check_fits("width", width, "width", images.shape[-1])
    corners = corners.to(images.device)
    rows = torch.arange(images.shape[-2], device=images.device)
    columns = torch.arange(images.shape[-1], device=images.device)
    top, left = corners[..., 0, None], corners[..., 1, None]
    in_rows = ((rows >= top) & (rows < top + height)).float()
    in_columns = ((columns >= left) & (columns < left + width)).float()
    # The product counts the patches that cover a pixel without an (N, K, H, W) buffer.
    covered = in_rows.mT @ in_columns > 0
    return images.masked_fill(covered.unsqueeze(-3), fill)


def mask_stripes(images: Tensor, lefts: Tensor, *, thickness: int, fill: float = 0.0) -> Tensor:
    """Set full-height vertical stripes to a constant in all channels (NGR-STRIPE).

    Args:
        images: (C, H, W) or (N, C, H, W).
        lefts: (K,) left edges of K stripes, the same for all images, or (N, K) for each.
        thickness: width of a stripe: 6 on 400 x 500 images in the paper, 1 on 32 x 32.
        fill: value inside. Default 0 (O7).

    Example:
        >>> mask_stripes(torch.ones(1, 1, 4), torch.tensor([1]), thickness=2)
        tensor([[[1., 0., 0., 1.]]])
    """
    _check_images(images)
    _check_positions("lefts", lefts, images, ())
    _check_fits("width", thickness, "thickness", images.shape[-1])
    left = lefts.to(images.device)[..., None]
    columns = torch.arange(images.shape[-1], device=images.device)
    covered = ((columns >= left) & (columns < left + thickness)).any(-2)
    return images.masked_fill(covered[..., None, None, :], fill)


def down_up(images: Tensor, *, factor: int = 3, mode: str = "bilinear") -> Tensor:
    r"""Resize to :math:`(\lfloor H/k\rfloor, \lfloor W/k\rfloor)` and back (NGR-DU).

    Deterministic, so one run suffices. Target sizes, not scale factors, are passed on: 400 and 500
    are no multiples of 3.

    Args:
        images: (C, H, W) or (N, C, H, W).
        factor: k >= 1. Default 3 (ROB 7.2).
        mode: "bilinear" (default: half-pixel centres, no antialiasing) or "nearest" (the pixel at
            :math:`\lfloor i H/h \rfloor`); the paper does not state it.

    Example:
        >>> down_up(torch.tensor([[[0.0, 1.0, 2.0]] * 3]), factor=3)[0, 0]
        tensor([1., 1., 1.])
    """
    _check_images(images)
    check_choice("mode", mode, MODES)
    check_number("factor", factor, at_least=1, at_most=min(images.shape[-2:]))
    batch = images if images.dim() == 4 else images[None]
    size = images.shape[-2:]
    small = (size[0] // factor, size[1] // factor)
    batch = _resize(_resize(batch, small, mode), size, mode)
    return batch if images.dim() == 4 else batch[0]


def _resize(batch: Tensor, size: Sequence[int], mode: str) -> Tensor:
    if mode != "nearest":
        return F.interpolate(batch, tuple(size), mode=mode)
    # Whole numbers: i * (H / h) in float32, as interpolate has it, may fall below i * H / h.
    rows, columns = (
        torch.arange(to, device=batch.device) * given // to
        for to, given in zip(size, batch.shape[-2:], strict=True)
    )
    return batch[..., rows[:, None], columns]


class DownUp(NamedTuple):
    """Settings of :func:`down_up`."""

    factor: int = 3
    mode: str = "bilinear"


class Patches(NamedTuple):
    """Settings of :func:`occlude`: how many patches of which size."""

    number: int
    height: int
    width: int


class Stripes(NamedTuple):
    """Settings of :func:`mask_stripes`: how many stripes of which width."""

    number: int
    thickness: int


class PerturbationDraws(NamedTuple):
    """The random part of a perturbation; ``None`` where it has no such part."""

    corners: Tensor | None = None
    lefts: Tensor | None = None
    gaussian: Tensor | None = None
    uniform: Tensor | None = None


@dataclass(frozen=True)
class Perturbation:
    """A perturbation and how its parts combine (NGR-COMB).

    Present parts are applied in the order down-up sampling, occlusion, stripes, Gaussian noise,
    uniform noise: masks stay sharp, noise covers them too. That is the listed order of the paper's
    three combinations, occlusion + Gaussian, DU + occlusion and DU + stripes. The published code
    of ROB masks last (``mask_last``).

    Args:
        down_up: resize down and up.
        occlusion: random patches; top-left corners uniform over the positions where they fit.
        stripes: random stripes; left edges uniform in 0 .. W - thickness.
        sigma: standard deviation of Gaussian noise.
        amplitude: of uniform noise.
        fill: value of patches and stripes. Default 0 (O7).
        clip: clip the result to [0, 1]. Default False (O6).
        mask_last: patches and stripes come after the noise, which then does not cover them. Default
            False (O7).

    Example:
        >>> perturbation = Perturbation(stripes=Stripes(1, 2), sigma=0.0)
        >>> generator = torch.Generator().manual_seed(0)
        >>> float(perturbation(torch.ones(3, 4, 8), generator=generator).mean())
        0.75
    """

    down_up: DownUp | None = None
    occlusion: Patches | None = None
    stripes: Stripes | None = None
    sigma: float | None = None
    amplitude: float | None = None
    fill: float = 0.0
    clip: bool = False
    mask_last: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("down_up", DownUp), ("occlusion", Patches), ("stripes", Stripes)):
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                raise LargeMarginError(
                    f"{name} must be {kind.__name__}({', '.join(kind._fields)}), but {part!r} was "
                    "given."
                )
            if isinstance(part, Patches | Stripes):
                check_number(f"{name}.number", part.number, at_least=0)
        check_number("fill", self.fill)

    @property
    def random(self) -> bool:
        """Whether it has a random part: report mean and deviation over 10 runs, else one run."""
        parts = (self.occlusion, self.stripes, self.sigma, self.amplitude)
        return any(part is not None for part in parts)

    def draw(
        self, images: Tensor, *, generator: torch.Generator | None = None
    ) -> PerturbationDraws:
        """Draw what :meth:`apply` needs for these images, independently for each of a batch.

        The numbers are made on the generator's device and moved to the images.
        """
        _check_images(images)
        device = images.device if generator is None else generator.device
        batch, (height, width) = images.shape[:-3], images.shape[-2:]
        dtype = torch.promote_types(images.dtype, torch.float32)

        def integers(limit: int, number: int) -> Tensor:
            shape = (*batch, number)
            return torch.randint(limit, shape, generator=generator, device=device).to(images.device)

        corners = lefts = gaussian = uniform = None
        if self.occlusion is not None:
            number, patch_height, patch_width = self.occlusion
            _check_fits("height", patch_height, "occlusion.height", height)
            _check_fits("width", patch_width, "occlusion.width", width)
            rows = integers(height - patch_height + 1, number)
            corners = torch.stack([rows, integers(width - patch_width + 1, number)], dim=-1)
        if self.stripes is not None:
            _check_fits("width", self.stripes.thickness, "stripes.thickness", width)
            lefts = integers(width - self.stripes.thickness + 1, self.stripes.number)
        if self.sigma is not None:
            gaussian = torch.randn(images.shape, generator=generator, device=device, dtype=dtype)
        if self.amplitude is not None:
            uniform = torch.rand(images.shape, generator=generator, device=device, dtype=dtype)
            uniform = 2 * uniform - 1
        return PerturbationDraws(corners, lefts, gaussian, uniform)

    def apply(self, images: Tensor, draws: PerturbationDraws) -> Tensor:
        """The deterministic part: perturb images with given draws."""
        _check_images(images)
        if values_are_checked(images, None):
            check_range(images, " Or perturb them before they are normalised.", beyond=NOISED)
        if self.down_up is not None:
            images = down_up(images, factor=self.down_up.factor, mode=self.down_up.mode)
        if not self.mask_last:
            images = self._masked(images, draws)
        if self.sigma is not None:
            images = add_gaussian(images, _required("gaussian", draws.gaussian), sigma=self.sigma)
        if self.amplitude is not None:
            uniform = _required("uniform", draws.uniform)
            images = add_uniform(images, uniform, amplitude=self.amplitude)
        if self.mask_last:
            images = self._masked(images, draws)
        return images.clamp(0, 1) if self.clip else images

    def _masked(self, images: Tensor, draws: PerturbationDraws) -> Tensor:
        if self.occlusion is not None:
            _, height, width = self.occlusion
            corners = _required("corners", draws.corners)
            images = occlude(images, corners, height=height, width=width, fill=self.fill)
        if self.stripes is not None:
            lefts = _required("lefts", draws.lefts)
            thickness = self.stripes.thickness
            images = mask_stripes(images, lefts, thickness=thickness, fill=self.fill)
        return images

    def __call__(self, images: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw and apply."""
        return self.apply(images, self.draw(images, generator=generator))


def _required(name: str, draws: Tensor | None) -> Tensor:
    if draws is None:
        raise LargeMarginError(
            f"draws.{name} must be given for this perturbation, but it is None. Make draws with "
            "Perturbation.draw."
        )
    return draws


def _road_suite(patches: Patches, stripes: Stripes) -> MappingProxyType[str, Perturbation]:
    sampling = DownUp(3)
    return MappingProxyType(
        {
            "occlusion": Perturbation(occlusion=patches),
            "occlusion_gaussian": Perturbation(occlusion=patches, sigma=40 / 255),
            "down_up": Perturbation(down_up=sampling),
            "down_up_occlusion": Perturbation(down_up=sampling, occlusion=patches),
            "stripes": Perturbation(stripes=stripes),
            "down_up_stripes": Perturbation(down_up=sampling, stripes=stripes),
        }
    )


ROAD_400X500 = _road_suite(Patches(20, 70, 70), Stripes(10, 6))
"""The six columns of ROB Table 4, for 400 x 500 road images; sigma as in its caption."""

SCALED_32 = _road_suite(Patches(20, 6, 4), Stripes(4, 1))
"""The same for 32 x 32 images: 70/400 of the height is 5.6 and 70/500 of the width 4.5 pixels; a
stripe of the paper would be thinner than one, and 4 keep about its masked share."""

GAUSSIAN_CIFAR10 = Perturbation(sigma=0.06)
"""Training noise of ROB on CIFAR-10."""

GAUSSIAN_SVHN = Perturbation(sigma=0.15)
"""Training noise of ROB on SVHN."""

GAUSSIAN_ROAD = Perturbation(sigma=40 / 255)
"""Training noise of ROB on road images."""

UNIFORM_CIFAR10 = Perturbation(amplitude=0.06)
"""Uniform test noise of ROB 7.3 on CIFAR-10."""

UNIFORM_SVHN = Perturbation(amplitude=0.15)
"""Uniform test noise of ROB 7.3 on SVHN."""
