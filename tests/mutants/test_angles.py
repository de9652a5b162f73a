"""Angles to the targets, down to those that are rounding errors."""

import math

import pytest
import torch
import torch.nn.functional as F

import largemargin.functional as LF
from largemargin.errors import LargeMarginError
from largemargin.losses.arcface import penalised_cosine
from largemargin.losses.base.angles import (
    NOISE,
    clipped,
    continued_cosine,
    multiplied_angle,
    sine_of_target,
)

LOSSES = {
    "arcface": lambda *given: LF.arcface(*given, margin=0.5, scale=2.0, mode="none"),
    "unified_margin": lambda *given: LF.unified_margin(*given, m2=0.5, scale=2.0),
}
LABELS = torch.tensor([0, 1, 2, 3])


def at_angle(theta, dtype=torch.float32, opposite=False):
    """Features at an angle from their prototypes, of length 3."""
    draw = torch.Generator().manual_seed(0)
    prototypes, other = (torch.randn(n, 16, generator=draw, dtype=torch.float64) for n in (5, 4))
    own = F.normalize(prototypes[LABELS], dim=1)
    across = F.normalize(other - (other * own).sum(1, keepdim=True) * own, dim=1)
    along = -1 if opposite else 1
    features = 3 * (along * math.cos(theta) * own + math.sin(theta) * across)
    return features.to(dtype), prototypes.to(dtype)


@pytest.mark.parametrize("opposite", [False, True], ids=["near 0", "near pi"])
@pytest.mark.parametrize("theta", [1e-5, 1e-4, 1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("name", LOSSES)
def test_small_angles_keep_their_digits_in_float32(name, theta, opposite):
    """sqrt(1 - cos^2) would be off by 4e-4, and its gradient by 70 %."""
    found = []
    given = at_angle(theta, opposite=opposite)
    for dtype in (torch.float32, torch.float64):
        features, prototypes = (x.to(dtype).requires_grad_() for x in given)
        value = LOSSES[name](features, prototypes, LABELS)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), (features, prototypes))))
    for got, want in zip(found[0], found[1], strict=True):
        assert float((got - want).norm()) < (1e-6 + 1e-6 / theta) * float(want.norm())
    assert float((found[0][0] - found[1][0]).abs().max()) < 2e-6


@pytest.mark.parametrize(
    ("precision", "least"),
    [(None, 8 * 2.0**-23), ("bf16", NOISE["bf16"]), ("tf32", NOISE["tf32"])],
    ids=str,
)
def test_angles_below_rounding_errors_are_constants(precision, least):
    """The rows of the product then point elsewhere, and -cos / sin would make much of that."""
    assert NOISE == {"bf16": 2.0**-8, "tf32": 2.0**-10}
    for factor in (0.7, 1.4):
        features, prototypes = at_angle(math.asin(factor * least))
        cosine = torch.full((4,), math.cos(factor * least), requires_grad=True)
        sine = sine_of_target(cosine, features, prototypes, LABELS, precision)
        assert torch.allclose(sine, torch.tensor(factor * least), rtol=0.3, atol=0)
        (slope,) = torch.autograd.grad(sine.sum(), cosine)
        assert torch.allclose(slope, -cosine / sine if factor > 1 else torch.zeros(4))


@pytest.mark.parametrize("theta", [1e-6, 0.14, 0.4, 2.0, math.pi - 0.14, math.pi - 1e-6])
def test_derivatives_of_the_sine_of_every_order(theta):
    given = at_angle(theta, torch.float64)
    cosine = torch.full((4,), math.cos(theta), dtype=torch.float64, requires_grad=True)
    value = sine_of_target(cosine, *given, LABELS)
    first = torch.autograd.grad(value.sum(), cosine, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), cosine)[0]
    for got, want in (
        (value, math.sin(theta)),
        (first, -1 / math.tan(theta)),
        (second, -1 / math.sin(theta) ** 3),
    ):
        assert got.tolist() == pytest.approx([want] * 4, rel=1e-8)


def test_the_gradient_of_a_sine_goes_through_its_cosine_alone():
    features, prototypes = (x.requires_grad_() for x in at_angle(0.1))
    cosine = torch.full((4,), math.cos(0.1), requires_grad=True)
    sine = sine_of_target(cosine, features, prototypes, LABELS)
    got = torch.autograd.grad(sine.sum(), (cosine, features, prototypes), allow_unused=True)
    assert [gradient is None for gradient in got] == [False, True, True]


@pytest.mark.parametrize("zero", ["features", "prototypes"])
def test_rows_without_a_direction_are_at_right_angles(zero):
    features, prototypes = at_angle(0.1)
    for x in (features, prototypes)[zero == "prototypes" :][:1]:
        x.zero_()
    sine = sine_of_target(torch.zeros(4), features, prototypes, LABELS)
    assert sine.tolist() == [1, 1, 1, 1]


def test_a_sample_does_not_change_with_its_batch():
    """Chords are only made where a sample is near its prototype, and only its own are used."""
    (near, prototypes), (far, _) = at_angle(1e-3), at_angle(1.0)
    cosine = torch.tensor([math.cos(1e-3), *[math.cos(1.0)] * 3])
    mixed = sine_of_target(cosine, torch.cat([near[:1], far[1:]]), prototypes, LABELS)
    alone = sine_of_target(cosine[1:], far[1:], prototypes, LABELS[1:])
    assert torch.equal(mixed[1:], alone)
    assert torch.equal(alone, torch.sqrt(1 - cosine[1:] * cosine[1:]))
    assert mixed[0].item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("size", [1e-8, 1e18])
def test_lengths_do_not_matter(size):
    features, prototypes = at_angle(0.01)
    cosine = torch.full((4,), math.cos(0.01))
    sine = sine_of_target(cosine, features * size, prototypes * size, LABELS)
    assert sine.tolist() == pytest.approx([math.sin(0.01)] * 4, rel=1e-4)


def test_soft_targets_have_sines_of_all_classes():
    cosine = torch.tensor([[0.6, -0.8, 1.0, -1.0, 1 - 1e-7]], requires_grad=True)
    sine = sine_of_target(cosine, torch.ones(1, 3), torch.ones(5, 3), torch.eye(5)[:1])
    assert sine[0].tolist() == pytest.approx([0.8, 0.6, 0, 0, 0])
    (slope,) = torch.autograd.grad(sine.sum(), cosine)
    assert slope[0].tolist() == pytest.approx([-0.75, 4 / 3, 0, 0, 0])


def test_cosines_beyond_one_are_clipped_and_keep_their_gradient():
    cosine = torch.tensor([1 + 1e-6, -1 - 1e-6, 0.3], requires_grad=True)
    found = clipped(cosine)
    assert found.tolist() == pytest.approx([1, -1, 0.3], abs=1e-7)
    assert found.abs().max() <= 1
    assert torch.autograd.grad(found.sum(), cosine)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 1e-12), (torch.float32, 4e-7)])
def test_sines_of_soft_targets_that_are_rounding_errors(dtype, least):
    cosine = torch.sqrt(1 - least * torch.tensor([[0.6, 1.5]], dtype=torch.float64)).to(dtype)
    sine = sine_of_target(cosine, torch.ones(1, 3), torch.ones(2, 3), torch.eye(2)[:1])
    assert sine[0, 0] == 0
    assert float(sine[0, 1]) == pytest.approx(math.sqrt(1.5 * least), rel=0.2)


def test_unified_margin_at_the_end_of_the_angles():
    """theta = pi in float64, not in float32."""
    features, prototypes = torch.eye(2, dtype=torch.float64)[:1], torch.eye(2, dtype=torch.float64)
    value = LF.unified_margin(-features, prototypes, torch.tensor([0]), m1=1.5, scale=1.0)
    want = math.log1p(math.exp(0 - (-math.cos(1.5 * math.pi) - 2)))
    assert value.item() == pytest.approx(want, rel=1e-14)


def test_the_continued_cosine_goes_on_falling():
    phi = math.pi * torch.tensor([0.5, 1.0, 1.5, 2.25, 3.25, 4.25], requires_grad=True)
    half = math.sqrt(0.5)
    want = [0, -1, -2, half - 4, half - 6, half - 8]
    assert continued_cosine(phi).tolist() == pytest.approx(want, abs=1e-5)
    (slope,) = torch.autograd.grad(continued_cosine(phi).sum(), phi)
    assert slope.tolist() == pytest.approx([-1, 0, -1, -half, -half, -half], abs=1e-5)


@pytest.mark.parametrize("margin", [2, 3, 4])
def test_the_multiplied_angle_at_both_ends(margin):
    """Value 1 and 1 - 2m, slope m^2: that of a monotone function."""
    cosine = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    found = multiplied_angle(cosine, margin)
    assert found.tolist() == pytest.approx([1, 1 - 2 * margin])
    (slope,) = torch.autograd.grad(found.sum(), cosine)
    assert slope.tolist() == pytest.approx([margin**2] * 2)


@pytest.mark.parametrize("loss", [LF.arcface, LF.unified_margin])
def test_labels_that_do_not_exist_have_no_angle(loss):
    features, prototypes = at_angle(0.05)
    values = loss(features, prototypes, torch.tensor([5, 1, -1, 3]), validate=False)
    assert values.isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("mode", "cosines", "want"),
    [
        ("hard", [1.0, -math.cos(0.5), -1.0], [None, -math.cos(0.5) - 0.5 * math.sin(0.5), None]),
        ("easy", [0.5, 0.0, -0.5], [None, 0.0, -0.5]),
        ("none", [0.5, 0.0, -0.5], [None, None, None]),
    ],
)
def test_where_the_angle_of_arcface_is_no_longer_turned(mode, cosines, want):
    """None stands for cos(theta + m)."""
    cosine = torch.tensor(cosines, dtype=torch.float64)
    turned = torch.cos(torch.arccos(cosine) + 0.5).tolist()
    want = [t if w is None else w for t, w in zip(turned, want, strict=True)]
    if mode == "hard":
        want[2] = -1 - 0.5 * math.sin(0.5)
    found = penalised_cosine(cosine, torch.sqrt(1 - cosine**2), 0.5, mode)
    assert found.tolist() == pytest.approx(want, abs=1e-12)


def test_the_factor_of_an_angle_is_above_zero():
    features, prototypes = at_angle(0.2)
    for m1 in (0.0, -0.5):
        with pytest.raises(LargeMarginError, match="m1 must be"):
            LF.unified_margin(features, prototypes, LABELS, m1=m1)
    assert bool(LF.unified_margin(features, prototypes, LABELS, m1=1e-3).isfinite().all())
