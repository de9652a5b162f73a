"""LMD sections 5 and 6: generalization bounds and the divergence of classes at earlier layers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import largemargin as lm
import largemargin.functional as LF
from largemargin import geometry

QUICK = settings(deadline=None, max_examples=40, derandomize=True)


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@QUICK
@given(st.integers(0, 10**6), st.floats(0.05, 20))
def test_lmd_theorem_5_2_erratum_n7_the_union_form_is_above_one(seed, rho):
    features, parameters = draw(seed, 30, 3), draw(seed + 1, 4)
    center = features.mean(0)
    radius = float((features - center).norm(dim=1).max())
    sign = torch.sign(draw(seed + 2, 30))
    h = sign * (features @ parameters[:3] + parameters[3])
    weight_norm, centroid_norm = float(parameters.norm()), float(center.norm())
    bound = geometry.linear_margin_bound(
        h, rho=rho, weight_norm=weight_norm, radius=radius, centroid_norm=centroid_norm
    )
    largest = weight_norm * math.sqrt((radius + centroid_norm) ** 2 + 1)
    assert float(h.abs().max()) <= largest
    assert float(bound.empirical) >= 1 - largest / rho
    assert float(bound.union) >= 1 + largest / rho
    assert float(bound.empirical) >= float((h <= 0).double().mean())


def test_lmd_theorem_5_2_with_given_features_can_be_informative():
    bound = geometry.linear_margin_bound(
        torch.full((10**5,), 2.0),
        rho=1.0,
        weight_norm=3.0,
        radius=0.5,
        centroid_norm=2.0,
    )
    assert float(bound.fixed) < 0.1 < 1 < float(bound.union)


@pytest.mark.parametrize("radius", [0.9, 1.5, 4.0])
def test_lmd_theorem_5_3_no_empirical_error_at_zero_compactness(radius):
    delta_v = 0.8
    labels = torch.zeros(40).long()
    features = draw(0, 40, 3)
    features = features - features.mean(0)
    features = 0.999 * delta_v * features / features.norm(dim=1).max() + 5
    loss = lm.Compactness(radius=delta_v)(features, torch.zeros(2, 3).double(), labels)
    assert float(loss) == 0
    h = radius**2 - (features - features.mean(0)).square().sum(1)
    norms = {"feature_norm": 9.0, "centroid_norm": 9.0, "radius": radius}
    at_limit = geometry.ball_bound(h, rho=radius**2 - delta_v**2, **norms)
    assert float(at_limit.empirical) == 0
    assert float(geometry.ball_bound(h, rho=radius**2, **norms).empirical) > 0


@QUICK
@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.floats(0.1, 30))
def test_lmd_theorem_5_3_erratum_n8_never_informative_for_a_centroid_of_features(seed, share, rho):
    features = draw(seed, 20, 3) + 3 * draw(seed + 1, 3)
    center = features.mean(0)
    feature_norm, centroid_norm = float(features.norm(dim=1).max()), float(center.norm())
    radius = share * (feature_norm + centroid_norm)
    bound = geometry.ball_bound(
        radius**2 - (features - center).square().sum(1),
        rho=rho,
        feature_norm=feature_norm,
        centroid_norm=centroid_norm,
        radius=radius,
    )
    assert not bound.informative
    assert float(bound.bound) >= 1


@QUICK
@given(st.floats(1e-3, 3), st.floats(0.1, 3), st.floats(0.01, 0.999))
def test_lmd_theorem_5_3_erratum_n8_the_condition(feature_norm, centroid_norm, share):
    radius = share * (feature_norm + centroid_norm)
    bound = geometry.ball_bound(
        torch.ones(4),
        rho=1.0,
        feature_norm=feature_norm,
        centroid_norm=centroid_norm,
        radius=radius,
    )
    limit = 2 * feature_norm**2 + 4 * centroid_norm * feature_norm
    assert bound.informative == (radius**2 > limit)
    if bound.informative:
        assert feature_norm < (math.sqrt(2) - 1) * centroid_norm


def test_lmd_theorem_5_3_what_stays_when_data_grow():
    settings_ = {"rho": 2.0, "feature_norm": 0.5, "centroid_norm": 3.0, "radius": 2.0}
    gaps = []
    for samples in (10**2, 10**4, 10**12):
        bound = geometry.ball_bound(torch.ones(5).double(), num_samples=samples, **settings_)
        gaps.append(float(bound.bound - bound.empirical))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == pytest.approx(2 / 2.0 * (0.5**2 + 2 * 3.0 * 0.5), rel=1e-4)


def with_mass(seed, inside, size, tau):
    """A distribution with mass at least ``tau`` on the outcomes ``inside``."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(size, dtype=torch.float64, generator=generator) ** 4 + 1e-12
    mass = tau + (1 - tau) * float(torch.rand((), generator=generator)) ** 2
    outside = torch.ones(size, dtype=torch.bool)
    outside[inside] = False
    p[inside] *= mass / p[inside].sum()
    p[outside] *= (1 - mass) / p[outside].sum()
    return p


@QUICK
@given(st.integers(0, 10**6), st.floats(0.5, 0.9999))
def test_lmd_theorem_6_3_divergence_of_two_classes(seed, tau):
    p, q = with_mass(seed, [0, 1], 6, tau), with_mass(seed + 1, [2, 3, 4], 6, tau)
    bound = geometry.jsd_lower_bound(tau)
    divergence = float(geometry.jensen_shannon(p, q))
    assert bound.paper <= bound.tight + 1e-15
    assert bound.tight <= divergence + 1e-12
    assert divergence <= math.log(2) + 1e-12
    # A later layer merges outcomes: it cannot see more than the earlier one.
    merge = torch.tensor([0, 0, 1, 1, 1, 1])
    later = [torch.zeros(2, dtype=torch.float64).index_add(0, merge, each) for each in (p, q)]
    assert float(geometry.jensen_shannon(*later)) <= divergence + 1e-12


@pytest.mark.parametrize("tau", [0.5, 0.6, 0.75, 0.9, 0.99, 1.0])
def test_lmd_theorem_6_3_the_sharper_bound_is_reached(tau):
    p = torch.tensor([tau, 1 - tau], dtype=torch.float64)
    divergence = float(geometry.jensen_shannon(p, p.flip(0)))
    assert divergence == pytest.approx(geometry.jsd_lower_bound(tau).tight, abs=1e-12)
    assert geometry.jsd_lower_bound(tau).paper == pytest.approx((2 * tau - 1) ** 2 / 2)
    if tau > 0.5:
        assert divergence > geometry.jsd_lower_bound(tau).paper


def test_lmd_theorem_6_3_erratum_n9():
    p = torch.tensor([0.9, 0.1], dtype=torch.float64)
    middle = torch.tensor([0.5, 0.5], dtype=torch.float64)
    half_kl = float(geometry.kl_divergence(p, middle)) / 2
    distance = float(geometry.total_variation(p, middle))
    assert half_kl == pytest.approx(0.184, abs=5e-4)
    assert distance == pytest.approx(0.4)
    assert half_kl < distance  # printed the other way round
    assert half_kl >= distance**2 == pytest.approx(0.16)
    assert distance**2 >= (2 * 0.9 - 1) ** 2 / 4 - 1e-12


@QUICK
@given(st.integers(0, 10**6))
def test_lmd_theorem_6_3_erratum_n9_pinsker(seed):
    p, q = with_mass(seed, [0], 4, 0.5), with_mass(seed + 1, [1], 4, 0.5)
    assert float(geometry.kl_divergence(p, q)) / 2 >= float(geometry.total_variation(p, q)) ** 2


def test_lmd_equation_4_7_balances_the_margin():
    """Without the norm the margin term can always be paid by growing the features."""
    W = LF.simplex(3, 2, dtype=torch.float64)
    labels = torch.arange(3)
    sizes = (1.0, 5.0, 20.0)
    margins = [float(lm.CentroidMargin(margin=6.0)(t * W, W, labels)) for t in sizes]
    norms = [float(lm.CentroidNorm()(t * W, W, labels)) for t in sizes]
    assert margins == sorted(margins, reverse=True)
    assert margins[-1] == 0
    assert norms == pytest.approx(sizes)
