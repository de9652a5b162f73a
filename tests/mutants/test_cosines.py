"""Losses on cosines at the ends of their range, and of rows of any length."""

import math

import pytest
import torch

import largemargin as lm
import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.heads.head_spec import HeadSpec
from largemargin.losses.sphereface import _annealed, sphereface_psi


def test_margins_of_sphereface_count_from_one():
    given = torch.eye(2)[:1], torch.eye(2), torch.tensor([0])
    assert LF.sphereface(*given, margin=1).isfinite().all()
    for margin in (0, -1, 1.5):
        with pytest.raises(LargeMarginError, match="margin"):
            LF.sphereface(*given, margin=margin)
    with pytest.raises(LargeMarginError, match="margin"):
        lm.SphereFace(margin=0)


def test_psi_multiplies_the_angle_by_four_unless_told_otherwise():
    theta = torch.tensor([math.pi / 12, math.pi], dtype=torch.float64)
    assert sphereface_psi(theta).tolist() == pytest.approx([0.5, -7])
    assert sphereface_psi(theta, 2).tolist() == pytest.approx([math.cos(math.pi / 6), -3])


@pytest.mark.parametrize("cosine", [1.0, -1.0, 0.3])
def test_annealing_mixes_the_cosine_with_that_of_the_multiplied_angle(cosine):
    given = torch.tensor([cosine], dtype=torch.float64, requires_grad=True)
    found = _annealed(given, 2, 3.0)
    twice = 2 * cosine**2 - 1
    psi, slope = (twice, 4 * cosine) if cosine >= 0 else (-twice - 2, -4 * cosine)
    assert found.item() == pytest.approx((3 * cosine + psi) / 4)
    (gradient,) = torch.autograd.grad(found, given)
    assert gradient.item() == pytest.approx((3 + slope) / 4)


@pytest.mark.parametrize("sizes", [(1e25, 1.0, 1e-5), (1e25, 1e25, 1e28), (1e-10, 1e-9, 1e-11)])
def test_prototypes_of_any_length_have_gradients_across_it(sizes):
    """By rows, each times its length: that is what a unit prototype would have."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor(sizes, dtype=torch.float64)[:, None]
    prototypes = torch.randn(3, 4, generator=draw, dtype=torch.float64) * lengths
    features = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1])
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = prototypes.to(dtype).requires_grad_()
        value = LF.cosface(features.to(dtype), leaf, labels, scale=8.0).sum()
        (gradient,) = torch.autograd.grad(value, leaf)
        found.append((value.detach().double(), gradient.double() * lengths))
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_heads_of_sphereface_have_its_scale_or_the_length_of_the_features():
    assert lm.SphereFace().head_form(3) == HeadSpec("cosine_prototypes")
    assert lm.SphereFace(scale=8.0).head_form(3) == HeadSpec("cosine", 8.0)
