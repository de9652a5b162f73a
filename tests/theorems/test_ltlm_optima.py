"""LTLM: the largest margins there are, and the features that reach them (Lemma 1, Thms 0, 2, 3)."""

import math

import pytest
import torch
from theorems.free_vectors import nearest_point_of_hull, random_unit, unit

import largemargin.functional as LF
from largemargin import geometry

FITTING = [(2, 1), (2, 3), (3, 2), (4, 3), (5, 6), (8, 7)]


def printed_feature(W, y):
    """z* of LTLM Theorem 2 as printed: w_y minus the centroid of its nearest prototypes."""
    cosines = W @ W[y]
    cosines[y] = -math.inf
    nearest = W[cosines > cosines.max() - 1e-4]
    return unit((W[y] - nearest.mean(0))[None])


def smallest_margin(z, W):
    labels = torch.arange(len(W))
    return float(geometry.sample_margins(z, W, labels, similarity="cosine").min())


def packing(num_classes, dim):
    return LF.best_packing(num_classes, dim, restarts=8, steps=400).prototypes


@pytest.mark.parametrize(("C", "D"), [*FITTING, (4, 2), (6, 2), (8, 3)])
def test_ltlm_lemma_1_no_prototypes_beat_the_simplex(C, D):
    ceiling = math.acos(-1 / (C - 1))
    for seed in range(60):
        W = random_unit(C, D, seed)
        assert float(geometry.class_margin(W)) <= ceiling + 1e-12
        # The same statement in distances (erratum Z1: the *smallest* one is maximised).
        assert float(geometry.min_distance(W)) <= math.sqrt(2 * C / (C - 1)) + 1e-12


@pytest.mark.parametrize(("C", "D"), FITTING)
def test_ltlm_lemma_1_the_simplex_reaches_the_ceiling(C, D):
    W = LF.simplex(C, D, dtype=torch.float64)
    assert float(geometry.class_margin(W)) == pytest.approx(math.acos(-1 / (C - 1)), abs=1e-7)
    assert float(geometry.min_distance(W)) == pytest.approx(math.sqrt(2 * C / (C - 1)), abs=1e-12)
    gram = torch.full((C, C), -1 / (C - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(W @ W.T, gram, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("C", "degrees", "margin"), [(10, 96.379, 1.1111), (100, 90.579, 1.0101)])
def test_ltlm_lemma_1_ceilings_of_the_tables(C, degrees, margin):
    optimum = geometry.simplex_optimum(C)
    assert math.degrees(optimum.class_margin) == pytest.approx(degrees, abs=5e-4)
    assert optimum.sample_margin == pytest.approx(margin, abs=5e-5)
    W = LF.simplex(C, C - 1, dtype=torch.float64)
    assert float(geometry.class_margin(W, degrees=True)) == pytest.approx(degrees, abs=5e-4)
    assert smallest_margin(W, W) == pytest.approx(margin, abs=5e-5)


@pytest.mark.parametrize(("C", "D"), [*FITTING, (5, 3), (8, 2)])
def test_ltlm_proposition_3(C, D):
    ceiling = C / (C - 1)
    for seed in range(60):
        W, spare = random_unit(C, D, seed), random_unit(C, D, seed + 1000)
        for z in (W, spare, unit(W + 0.3 * spare)):
            assert smallest_margin(z, W) <= ceiling + 1e-12
    if C - 1 <= D:
        W = LF.simplex(C, D, dtype=torch.float64)
        assert smallest_margin(W, W) == pytest.approx(ceiling, abs=1e-12)
    if C - 1 <= D and D > 1:
        assert smallest_margin(unit(W + 0.1 * spare), W) < ceiling - 1e-4


@pytest.mark.parametrize(("C", "D"), [(4, 3), (4, 2), (6, 3)], ids=["simplex", "square", "octa"])
def test_ltlm_theorem_2_printed_features_of_symmetric_packings(C, D):
    W = LF.best_packing(C, D).prototypes
    printed = torch.cat([printed_feature(W, y) for y in range(C)])
    expected = 1 - math.cos(float(geometry.class_margin(W)))
    assert smallest_margin(W, W) == pytest.approx(expected, abs=1e-12)
    assert smallest_margin(printed, W) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("C", "best", "of_printed"), [(7, 0.790, 0.562), (8, 0.739, 0.633)])
def test_ltlm_theorem_2_erratum_z9(C, best, of_printed):
    W = packing(C, 3)
    if C == 8:
        assert float(geometry.class_margin(W, degrees=True)) == pytest.approx(74.86, abs=5e-3)
    printed = torch.cat([printed_feature(W, y) for y in range(C)])
    assert smallest_margin(W, W) == pytest.approx(best, abs=5e-4)
    assert smallest_margin(W, W) == pytest.approx(1 - math.cos(float(geometry.class_margin(W))))
    assert smallest_margin(printed, W) == pytest.approx(of_printed, abs=5e-4)


def test_ltlm_theorem_2_a_rigid_packing_is_its_own_best_feature():
    W = packing(8, 3)
    for y in range(8):
        nearest = nearest_point_of_hull(W[y] - torch.cat([W[:y], W[y + 1 :]]))
        torch.testing.assert_close(unit(nearest[None])[0], W[y], rtol=0, atol=1e-4)
        assert float(nearest.norm()) == pytest.approx(smallest_margin(W, W), abs=1e-5)


@pytest.mark.parametrize(("C", "D"), [(3, 2), (5, 2), (4, 3), (6, 4)])
def test_ltlm_theorem_2_the_best_feature_is_the_nearest_point_of_a_hull(C, D):
    behind = 0
    for seed in range(12):
        W = random_unit(C, D, seed)
        y = seed % C
        label = torch.tensor([y])
        nearest = nearest_point_of_hull(W[y] - torch.cat([W[:y], W[y + 1 :]]))
        best = float(nearest.norm())

        def reached(z, W=W, label=label):
            labels = label.expand(len(z))
            return geometry.sample_margins(z, W, labels, similarity="cosine").max()

        assert float(reached(nearest[None])) == pytest.approx(best, abs=1e-9)
        assert float(reached(random_unit(200, D, seed + 50))) <= best + 1e-12
        assert float(reached(unit(nearest + 0.05 * random_unit(200, D, seed)))) <= best + 1e-12
        printed = float(reached(printed_feature(W, y)))
        assert printed <= best + 1e-12
        behind += printed < best - 1e-3
    assert behind > 0


@pytest.mark.parametrize(("C", "D"), [(4, 3), (5, 2), (8, 3)])
def test_ltlm_riesz_energy_erratum_z2(C, D):
    for W in (random_unit(C, D, 3), 3 * random_unit(C, D, 4)):
        smallest = float(geometry.min_distance(W))
        roots = [float(geometry.riesz_root(W, t)) for t in (1, 4, 16, 64, 256, 4096)]
        assert roots == sorted(roots)
        assert all(root <= smallest + 1e-12 for root in roots)
        assert roots[-1] == pytest.approx(smallest, rel=1e-2)
        # The printed limit of the energies themselves tells nothing: it is 0 or infinite.
        assert float(geometry.riesz_energy(W / smallest / 1.1, 4096)) > 1e100
        assert float(geometry.riesz_energy(W / smallest * 1.1, 4096)) < 1e-100


def test_ltlm_theorem_0_erratum_z10_the_infimum_is_not_attained():
    W = LF.simplex(4, 3, dtype=torch.float64)
    labels = torch.arange(4)
    values = [float(LF.cross_entropy(t * W, t * W, labels).mean()) for t in (1, 2, 3, 4, 5)]
    assert values == sorted(values, reverse=True)
    assert 0 < values[-1] < 1e-12
