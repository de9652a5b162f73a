"""What a loss remembers of its batches, and the margins it draws: against the oracles, in order."""

import math

import numpy as np
import pytest
import torch
from oracles import cosine_family
from oracles.numgrad import numerical_gradient

import largemargin as lm
import largemargin.functional as LF
from contract.problems import IGNORED, Sizes, assert_close, call, random_problem
from largemargin import LargeMarginError

SIZES = Sizes(7, 5, 3)
BATCHES = [random_problem(Sizes(n, 5, 3), seed=180 + n) for n in (7, 4, 1, 9)]


def kept_of(problem, ignored):
    """Labels with some rows ignored, and the arrays of the others."""
    labels = problem.labels.clone()
    if ignored and len(labels) > 2:
        labels[1::3] = IGNORED
    a = problem.arrays()
    rows = labels.numpy() != IGNORED
    return labels, a.features[rows], a.prototypes, labels.numpy()[rows]


@pytest.mark.parametrize("ignored", [False, True])
def test_norms_of_adaface(ignored):
    start = {"norm_mean": 3.0, "norm_std": 0.7}
    loss = lm.AdaFace(margin=0.4, rate=0.3, scale=6.0, **start).double()
    batches = []
    for problem in BATCHES:
        labels, *given = kept_of(problem, ignored)
        batches.append(given[0])
        mean, std = cosine_family.norm_statistics(batches, rate=0.3, **start)
        want = cosine_family.adaface(*given, scale=6.0, norm_mean=mean, norm_std=std)
        assert_close(call(loss, problem, labels), want.mean(), 1e-7, "value")
        assert_close(loss.norms.values, torch.tensor([mean, std]).double(), 1e-6, "statistics")
        held = loss.norms.values.clone()
        call(loss.eval(), problem, labels)
        assert torch.equal(loss.train().norms.values, held)


@pytest.mark.parametrize("ignored", [False, True])
def test_progress_of_curricularface(ignored):
    loss, t = lm.CurricularFace(rate=0.3, scale=6.0).double(), 0.0
    for problem in BATCHES:
        labels, q, W, y = kept_of(problem, ignored)
        own = [cosine_family.cosine(W[c], x) for x, c in zip(q, y, strict=True)]
        t = 0.7 * t + 0.3 * np.mean(own)
        want = cosine_family.curricularface(q, W, y, scale=6.0, progress=t)
        assert_close(call(loss, problem, labels), want.mean(), 1e-9, "value")
        assert loss.progress.values.item() == pytest.approx(t, abs=1e-9)
    assert abs(t) > 0.1


@pytest.mark.parametrize("ignored", [False, True])
def test_scale_of_adacos(ignored):
    loss, scale = lm.AdaCos(5).double(), cosine_family.adacos_scale(5)
    assert loss.running.values.item() == pytest.approx(scale)
    for problem in BATCHES:
        labels, *given = kept_of(problem, ignored)
        before = cosine_family.adacos_step(*given, scale=scale)
        scale = before if before > 0 else scale
        want = cosine_family.normface(*given, scale=scale)
        assert_close(call(loss, problem, labels), want.mean(), 1e-6, "value")
        assert loss.running.values.item() == pytest.approx(scale, abs=1e-6)


def test_the_median_angle_of_adacos_counts_up_to_45_degrees():
    W = torch.eye(6, dtype=torch.float64)
    for degrees in (30.0, 44.0, 50.0, 80.0):
        angle = math.radians(degrees)
        features = math.cos(angle) * W[:3] + math.sin(angle) * W[3:]
        loss = lm.AdaCos(6).double()
        loss(features, W, torch.arange(3))
        a, s = features.numpy(), cosine_family.adacos_scale(6)
        want = cosine_family.adacos_step(a, W.numpy(), np.arange(3), scale=s)
        assert loss.running.values.item() == pytest.approx(want, abs=1e-6)
        mass = math.log(4 + math.exp(s * math.sin(angle)))
        assert want == pytest.approx(mass / math.cos(math.radians(min(degrees, 45.0))))


def test_the_scale_of_adacos_waits_where_it_would_vanish():
    """Rivals at cosines near -1 give a B below 1: its logarithm is no scale."""
    W = torch.eye(3)[:, :1] * 0 + torch.tensor([[1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1]])
    loss = lm.AdaCos(3)
    before = loss.running.values.clone()
    loss(W[:1], W, torch.tensor([0]))
    assert torch.equal(loss.running.values, before)
    with pytest.raises(LargeMarginError, match=r"num_classes.*2.*two classes"):
        lm.AdaCos(2)


@pytest.mark.parametrize("loss", [lm.AdaFace(), lm.CurricularFace(), lm.AdaCos(5)], ids=repr)
def test_a_batch_that_is_not_finite_is_forgotten(loss):
    problem = random_problem(SIZES, dtype=torch.float32, seed=181)
    call(loss, problem)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    features = problem.features.clone()
    features[2, 0] = math.inf
    call(loss, problem.but(features=features))
    for key, value in loss.state_dict().items():
        assert torch.equal(value, before[key])
    half = loss.to(torch.bfloat16)
    assert all(buffer.dtype == torch.float32 for buffer in half.buffers())


def test_the_norm_is_a_constant_of_adaface_gradient():
    problem = random_problem(SIZES, seed=182)
    hyper = {"margin": 0.4, "scale": 6.0, "norm_mean": 2.0, "norm_std": 0.5}
    a = problem.arrays()

    def value(features, frozen):
        rows = features, a.prototypes, a.labels
        return cosine_family.adaface(*rows, frozen_features=frozen, **hyper).sum()

    features = problem.features.clone().requires_grad_()
    LF.adaface(features, problem.prototypes, problem.labels, **hyper).sum().backward()
    wanted = numerical_gradient(lambda q: value(q, a.features), a.features)
    assert_close(features.grad, wanted, 1e-6, "features")
    through = numerical_gradient(lambda q: value(q, q), a.features)
    assert np.abs(through - wanted).max() > 1e-2
    along = (features.grad * problem.features).sum(1)
    assert_close(along, torch.zeros_like(along), 1e-12, "length of the features")


def test_qualities_make_adaface_arcface_and_cosface():
    problem = random_problem(SIZES, seed=183)
    rows = (problem.features, problem.prototypes, problem.labels)
    plain = {"margin": 0.4, "scale": 6.0}
    worst = LF.adaface(*rows, norm_mean=1e3, norm_std=1.0, **plain)
    assert_close(worst, LF.arcface(*rows, **plain), 1e-12, "ArcFace")
    average = LF.adaface(*rows, norm_std=1e12, **plain)
    assert_close(average, LF.cosface(*rows, **plain), 1e-9, "CosFace")


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("form", ["arc", "cos"])
def test_drawn_margins_of_elasticface(form, plus):
    problem = random_problem(SIZES, seed=184)
    hyper = {"margin": 0.4, "std": 0.3, "form": form, "plus": plus, "scale": 6.0}
    loss = lm.ElasticFace(reduction="none", **hyper)
    torch.manual_seed(3)
    noise = torch.randn(SIZES.samples, dtype=torch.float64)
    torch.manual_seed(3)
    a = problem.arrays()
    given = (a.features, a.prototypes, a.labels)
    rows = (problem.features, problem.prototypes, problem.labels)
    value = loss(*rows)
    want = cosine_family.elasticface(*given, noise=noise.numpy(), **hyper)
    assert_close(value, want, 1e-10, "drawn")
    assert not torch.equal(loss(*rows), value)
    state = torch.get_rng_state()
    still = loss.eval()(*rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(still, cosine_family.elasticface(*given, **hyper), 1e-10, "evaluation")
    with pytest.raises(LargeMarginError, match="noise"):
        LF.elasticface(*rows, noise=noise[:3])


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("form", ["arc", "cos"])
def test_ignored_rows_take_no_draw_from_others(form, plus):
    problem = random_problem(SIZES, seed=186)
    labels, *given = kept_of(problem, True)
    rows = labels != IGNORED
    hyper = {"margin": 0.4, "std": 0.3, "form": form, "plus": plus, "scale": 6.0}
    loss = lm.ElasticFace(**hyper)
    features = problem.features.where(rows[:, None], torch.nan).requires_grad_()
    torch.manual_seed(3)
    noise = torch.randn(SIZES.samples, dtype=torch.float64)[rows]
    torch.manual_seed(3)
    value = loss(features, problem.prototypes, labels)
    want = cosine_family.elasticface(*given, noise=noise.numpy(), **hyper)
    assert_close(value, want.mean(), 1e-10)
    value.backward()
    assert bool(features.grad.isfinite().all())
    assert not features.grad[~rows].any()


def test_plus_gives_the_widest_margin_to_the_furthest_sample():
    W = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    q = torch.tensor([[1.0, 0.0], [1.0, 0.9], [1.0, 0.3]])
    labels, noise = torch.zeros(3, dtype=torch.long), torch.tensor([0.5, -1.0, 2.0])
    how = {"margin": 0.4, "std": 0.1, "form": "cos", "scale": 4.0}
    value = LF.elasticface(q, W, labels, noise=noise, plus=True, **how)
    handed = LF.elasticface(q, W, labels, noise=torch.tensor([-1.0, 2.0, 0.5]), **how)
    assert_close(value, handed, 1e-6)


def test_magface_pulls_and_pushes_the_norm():
    """A sample on its prototype is drawn to a longer feature, one far off to a shorter."""
    W = torch.eye(3, dtype=torch.float64)
    near = torch.tensor([[50.0, 0.1, 0.0]], dtype=torch.float64, requires_grad=True)
    far = torch.tensor([[35.0, 36.0, 1.0]], dtype=torch.float64, requires_grad=True)
    for features, sign in ((near, -1), (far, 1)):
        lm.MagFace(scale=64.0)(features, W, torch.tensor([0])).backward()
        assert sign * (features.grad * features).sum() > 0


def test_dynamic_margins_are_margins_per_class():
    counts = [1000, 100, 10, 1, 3]
    problem = random_problem(SIZES, seed=185)
    margins = LF.dynamic_margins(counts, dtype=torch.float64)
    assert margins.argsort().tolist() == [0, 1, 2, 4, 3]
    value = call(lm.ArcFace(margin=margins, scale=6.0), problem)
    a = problem.arrays()
    want = cosine_family.arcface(
        *(a.features, a.prototypes, a.labels),
        margin=cosine_family.dynamic_margins(counts),
        scale=6.0,
    )
    assert_close(value, want.mean(), 1e-10)
    with pytest.raises(LargeMarginError, match=r"power.*-1"):
        LF.dynamic_margins(counts, power=-1.0)
