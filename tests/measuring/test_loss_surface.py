"""Loss surfaces: what each grid point is, directions, flat losses, bad input."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from largemargin.errors import LargeMarginError
from largemargin.measuring.input_curvature import LossSurface, measure_surface


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3))


def test_every_point_is_the_loss_there():
    model = network().double()
    x, y = torch.rand(2, 2, 2, 2).double(), torch.tensor([1, 2])
    found = measure_surface(model, x, y, extent=1.5, points=5, seed=4, batch_size=7)
    assert model.training
    model.eval()
    for n, surface in enumerate(found):
        assert surface.along == surface.across == pytest.approx((-1.5, -0.75, 0.0, 0.75, 1.5))
        leaf = x[n : n + 1].clone().requires_grad_()
        loss = F.cross_entropy(model(leaf), y[n : n + 1])
        (gradient,) = torch.autograd.grad(loss, leaf)
        u = gradient / gradient.norm()
        assert surface.gradient_norm == pytest.approx(float(gradient.norm()))
        assert surface.loss == surface.losses[2][2] == pytest.approx(float(loss.detach()))
        for i, a in enumerate(surface.along):  # the middle column lies on the gradient
            logits = model(x[n : n + 1] + a * u).detach()
            want = float(F.cross_entropy(logits, y[n : n + 1]))
            assert surface.losses[i][2] == pytest.approx(want, rel=1e-9)
            assert surface.predicted[i][2] == int(logits.argmax())


def test_the_other_axis_is_orthogonal_and_of_length_one():
    """For l = |x|^2 / 2 the loss at x + a u + b v says what u and v are."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 2, bias=False)
            self.fc.weight.data.copy_(torch.tensor([[0.0], [1.0]]))

        def forward(self, x):
            # cross entropy of (0, z) with label 0 is softplus(z): inverted, it is |x|^2 / 2.
            half = x.square().sum(1, keepdim=True) / 2
            return self.fc(torch.log(torch.expm1(half)))

    x = torch.randn(1, 6).double()
    (surface,) = measure_surface(Half().double(), x, torch.tensor([0]), extent=1.0, points=3)
    size = float(x.norm())
    for i, a in enumerate(surface.along):
        for j, b in enumerate(surface.across):
            assert surface.losses[i][j] == pytest.approx(((size + a) ** 2 + b**2) / 2, rel=1e-9)


def test_seed_extent_and_neighbours():
    model = network()
    x, y = torch.rand(3, 2, 2, 2), torch.tensor([0, 1, 2])
    first = measure_surface(model, x, y, points=3)
    assert first == measure_surface(model, x, y, points=3)
    (alone,) = measure_surface(model, x[:1], y[:1], points=3)
    for row, wanted in zip(alone.losses, first[0].losses, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)
    assert first != measure_surface(model, x, y, points=3, seed=1)
    assert first[0].along[-1] == pytest.approx(0.06 * math.sqrt(8))
    assert LossSurface.from_json(first[1].to_json()) == first[1]


def test_a_flat_loss_has_random_axes():
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    (surface,) = measure_surface(model, torch.randn(1, 4), torch.tensor([0]), points=3)
    assert surface.gradient_norm == 0
    assert len({value for row in surface.losses for value in row}) == 1


def test_bad_input():
    model, x, y = nn.Linear(4, 2), torch.randn(1, 4), torch.tensor([0])
    for how, message in (({"points": 4}, "odd"), ({"extent": 0.0}, "extent")):
        with pytest.raises(LargeMarginError, match=message):
            measure_surface(model, x, y, **how)
    with pytest.raises(LargeMarginError, match="label"):
        measure_surface(model, x, torch.tensor([2]))
    with pytest.raises(LargeMarginError, match="two numbers"):
        measure_surface(nn.Linear(1, 2), x[:, :1], y)
