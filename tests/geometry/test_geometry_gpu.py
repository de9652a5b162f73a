"""The same numbers on the GPU as on the CPU."""

import pytest
import torch
from torch import nn

from largemargin import geometry as g
from largemargin.measuring.robust import SCALED_32, Perturbation

pytestmark = pytest.mark.gpu


def flatten(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [part for part in result if isinstance(part, torch.Tensor)]


CALLS = {
    "class_margin": lambda q, W, y, b: g.class_margin(W),
    "angle_matrix": lambda q, W, y, b: g.angle_matrix(W),
    "magnitude_ratio": lambda q, W, y, b: g.magnitude_ratio(W),
    "sample_margins": lambda q, W, y, b: g.sample_margins(q, W, y, similarity="cosine"),
    "summary": lambda q, W, y, b: g.summarize_margins(q[:, 0], y, len(W)),
    "implicit_bias": lambda q, W, y, b: g.implicit_bias(q @ W.T, y),
    "class_dispersion": lambda q, W, y, b: g.class_dispersion(q, y, len(W)),
    "boundary_margins": lambda q, W, y, b: g.boundary_margins(q, W, y, bias=b),
    "ideal_feature_ratio": lambda q, W, y, b: g.ideal_feature_ratio(q, y, len(W)),
    "variance_split": lambda q, W, y, b: g.variance_split(q, y),
    "min_distance": lambda q, W, y, b: g.min_distance(W),
    "riesz_energy": lambda q, W, y, b: g.riesz_energy(W, 2.0),
    "lm_softmax_inequality": lambda q, W, y, b: g.lm_softmax_inequality(q, W, y),
    "gm_softmax_bound": lambda q, W, y, b: g.gm_softmax_bound(5, alpha1=1 + b.abs()),
    "linear_margin_bound": lambda q, W, y, b: g.linear_margin_bound(
        b, rho=1.0, weight_norm=1.0, radius=1.0, centroid_norm=1.0
    ),
    "jensen_shannon": lambda q, W, y, b: g.jensen_shannon(q.softmax(1), q.flip(1).softmax(1)),
    "spectral_complexity": lambda q, W, y, b: g.spectral_complexity([W, W.T]),
    "noise_cushions": lambda q, W, y, b: g.noise_cushions([W, W.T], q),
    "low_curvature_accuracy": lambda q, W, y, b: g.low_curvature_accuracy(
        q[:, 0], y > 1, [0.3, 0.9]
    ),
    "curvature_by_robustness": lambda q, W, y, b: g.curvature_by_robustness(q[:, 0], y),
    "curvature_bounds": lambda q, W, y, b: g.curvature_bounds(
        torch.tanh,
        W,
        q,
        y,
        bias=b,
        sigma=0.3,
        radius=0.4,
        generator=torch.Generator().manual_seed(0),
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_geometry_agrees(name):
    q, W, b = (torch.randn(*s, dtype=torch.float64) for s in ((30, 6), (5, 6), (5,)))
    y = torch.arange(30) % 5
    on_cpu = flatten(CALLS[name](q, W, y, b))
    on_gpu = flatten(CALLS[name](q.cuda(), W.cuda(), y.cuda(), b.cuda()))
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert gpu.is_cuda
        torch.testing.assert_close(gpu.cpu(), cpu, equal_nan=True)


@pytest.mark.parametrize("function", [g.curvature, g.curvature_limit])
def test_curvature_agrees_with_a_generator_of_either_device(function):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % 3
    cpu = function(model, x, y, generator=torch.Generator().manual_seed(0))
    gpu = function(model.cuda(), x.cuda(), y.cuda(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gpu.cpu(), cpu)
    own = torch.Generator("cuda").manual_seed(0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert function(model, x.cuda(), y.cuda(), generator=own).dtype == torch.float64


@pytest.mark.parametrize("name", list(SCALED_32))
def test_perturbations_agree(name):
    images = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    perturbation: Perturbation = SCALED_32[name]
    cpu = perturbation(images, generator=torch.Generator().manual_seed(0))
    gpu = perturbation(images.cuda(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gpu.cpu(), cpu)
    own = torch.Generator("cuda").manual_seed(0)
    assert perturbation(images.cuda(), generator=own).is_cuda
