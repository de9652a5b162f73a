"""Curvature on a GPU: the same numbers as on a CPU, and products as precise as asked for."""

import pytest
import torch
from torch import nn

from largemargin import geometry as g
from largemargin.geometry.input_gradients import evaluation
from largemargin.measuring.input_curvature import CurvatureSettings, measure_curvature

pytestmark = pytest.mark.gpu


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).eval()


def test_the_numbers_of_a_cpu():
    model, x, y = network(), torch.rand(6, 3, 8, 8), torch.arange(6) % 4
    eps = torch.randn(6, 5, 3, 8, 8)
    here = g.curvature(model, x, y, directions=eps, step=0.1)
    limit = g.curvature_limit(model, x, y, directions=eps)
    model.cuda()
    there = [each.cuda() for each in (x, y)]
    found = g.curvature(model, *there, directions=eps.cuda(), step=0.1)
    torch.testing.assert_close(found.cpu(), here, rtol=1e-3, atol=1e-6)
    found = g.curvature_limit(model, *there, directions=eps.cuda())
    torch.testing.assert_close(found.cpu(), limit, rtol=1e-3, atol=1e-6)


def test_precision_is_set_inside_and_restored():
    places = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    x = torch.rand(2, 3, device="cuda")
    for precision, word in (("highest", "ieee"), ("high", "tf32")):
        with evaluation(nn.Linear(3, 2), x, precision):
            assert [place.fp32_precision for place in places] == [word, word]
        assert [place.fp32_precision for place in places] == before


def test_seeds_and_batches():
    model = network().cuda()
    x, y = torch.rand(12, 3, 8, 8), torch.arange(12) % 4
    settings = CurvatureSettings(num_directions=4, step=0.1)
    whole = measure_curvature(model, [(x, y)], settings)
    parts = measure_curvature(
        model, list(zip(x.split(5), y.split(5), strict=True)), settings, batch_size=7
    )
    assert parts.values == pytest.approx(whole.values, rel=1e-3)
    assert parts.robustness["gaussian"].group_size == whole.robustness["gaussian"].group_size
