"""Curvature: quadratics, agreement of the estimators, modes and memory, groups, bounds."""

import inspect
import math
import sys
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from largemargin import geometry as g
from largemargin.errors import LargeMarginError
from largemargin.geometry import input_gradients
from largemargin.geometry.input_gradients import searched


class Recorder(nn.Module):
    """A network that says how many rows and in which mode it was called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.rows, self.modes = [], []

    def forward(self, x):
        self.rows.append(len(x))
        self.modes.append(any(module.training for module in self.modules()))
        return self.head(self.body(x.flatten(1)))


def quadratic(matrix, slope):
    def loss(outputs, labels):
        bent = torch.einsum("ni,nij,nj->n", outputs, matrix[labels], outputs) / 2
        return bent + (outputs * slope[labels]).sum(1)

    return loss


@given(st.floats(1e-2, 10.0), st.integers(0, 10**6))
def test_a_quadratic_has_the_same_estimate_at_every_step(step, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(2, 3, 3, generator=generator).double()
    matrix = matrix + matrix.mT
    slope, x = (torch.randn(2, 3, generator=generator).double() for _ in range(2))
    eps = torch.randn(5, 3, generator=generator).double()
    y, loss = torch.tensor([1, 0]), quadratic(matrix, slope)
    want = (matrix[y] @ eps.T).square().sum(1).mean(1)
    identity = nn.Identity()
    found = g.curvature(identity, x, y, directions=eps, step=step, loss=loss)
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(g.curvature_limit(identity, x, y, directions=eps, loss=loss), want)
    trace = g.hessian_trace(identity, x, y, directions=eps, loss=loss)
    torch.testing.assert_close(trace, torch.einsum("ki,nij,kj->n", eps, matrix[y], eps) / 5)
    torch.testing.assert_close(g.input_hessian(identity, x, y, loss=loss), matrix[y])
    exact = g.exact_curvature(identity, x, y, loss=loss)
    torch.testing.assert_close(exact.sum_of_squares, matrix[y].square().sum((1, 2)))
    eigenvalues = torch.linalg.eigvalsh(matrix[y])
    torch.testing.assert_close(exact.eigenvalues, eigenvalues)
    torch.testing.assert_close(exact.sum_of_absolutes, eigenvalues.abs().sum(1))
    torch.testing.assert_close(exact.estimator_variance, eigenvalues.pow(4).sum(1) / 10)


def test_estimator_mean_and_variance():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    exact = g.exact_curvature(model, x, y, num_directions=20)
    many = x.expand(4000, 3), y.expand(4000)
    generator = torch.Generator().manual_seed(0)
    found = g.curvature_limit(model, *many, generator=generator, chunk_size=100_000)
    assert float(found.mean()) == pytest.approx(float(exact.sum_of_squares), rel=0.03)
    assert float(found.var()) == pytest.approx(float(exact.estimator_variance), rel=0.15)
    relative = exact.estimator_variance.sqrt() / exact.sum_of_squares
    assert float(relative) <= math.sqrt(2 / 20)


def test_trace_mean_and_variance():
    """Normal directions, and random signs, which do not see the diagonal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    hessian = g.input_hessian(model, x, y)[0]
    many = x.expand(4000, 3), y.expand(4000)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (4000, 20, 3), generator=generator).double().mul(2).sub(1)
    beside = hessian - hessian.diag().diag()
    for directions, varied in ((None, hessian), (signs, beside)):
        found = g.hessian_trace(
            model, *many, directions=directions, generator=generator, chunk_size=100_000
        )
        spread = math.sqrt(float(2 * varied.square().sum() / 20))
        assert float(found.mean()) == pytest.approx(float(hessian.trace()), abs=4 * spread / 63)
        assert float(found.std()) == pytest.approx(spread, rel=0.1)


def test_small_steps_approach_the_limit():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y, eps = torch.randn(6, 3).double(), torch.arange(6) % 3, torch.randn(6, 4, 3).double()
    limit = g.curvature_limit(model, x, y, directions=eps)
    close = g.curvature(model, x, y, directions=eps, step=1e-5)
    torch.testing.assert_close(close, limit, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 1000])
def test_chunks_do_not_change_the_result(chunk_size):
    model = Recorder().double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    calls = [
        lambda **how: g.curvature(model, x, y, generator=torch.Generator().manual_seed(1), **how),
        lambda **how: g.curvature_limit(
            model, x, y, generator=torch.Generator().manual_seed(1), num_directions=6, **how
        ),
        lambda **how: g.input_hessian(model, x, y, **how),
        lambda **how: g.input_gradient(model, x, y, **how).gradient,
        lambda **how: (
            g.curvature_bounds(
                lambda z: model.body.eval()(z),
                model.head.weight,
                x,
                y,
                sigma=0.3,
                radius=0.2,
                generator=torch.Generator().manual_seed(1),
                draws=9,
                **how,
            ).lower
        ),
    ]
    for call in calls:
        whole = call(chunk_size=256)
        model.rows.clear()
        torch.testing.assert_close(call(chunk_size=chunk_size), whole)
        assert max(model.rows, default=0) <= chunk_size


def test_samples_are_independent():
    model = Recorder().double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    eps = torch.randn(3, 4, dtype=torch.float64)
    together = g.curvature(model, x, y, directions=eps)
    alone = torch.cat(
        [g.curvature(model, x[i : i + 1], y[i : i + 1], directions=eps) for i in range(5)]
    )
    torch.testing.assert_close(together, alone)
    own = eps.expand(5, 3, 4)
    torch.testing.assert_close(g.curvature(model, x, y, directions=own), together)
    order = torch.tensor([3, 1, 4, 0, 2])
    permuted = g.curvature(model, x[order], y[order], directions=eps)
    torch.testing.assert_close(permuted, together[order])


def test_images_are_as_good_as_vectors():
    model = Recorder().double()
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.arange(3)
    eps = torch.randn(2, 4, dtype=torch.float64)
    images, directions = x.view(3, 1, 2, 2), eps.view(2, 1, 2, 2)
    torch.testing.assert_close(
        g.curvature(model, images, y, directions=directions),
        g.curvature(model, x, y, directions=eps),
    )
    assert g.input_hessian(model, images, y).shape == (3, 4, 4)
    assert g.input_gradient(model, images, y).gradient.shape == images.shape


def test_the_model_is_left_as_it_was():
    model = Recorder()
    model.train()
    model.body[1].eval()  # a frozen batch norm must stay frozen, the rest training
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.randn(4, 4, requires_grad=True), torch.arange(4) % 3
    with torch.no_grad():
        g.curvature(model, x, y)
        g.curvature_limit(model, x, y)
        g.exact_curvature(model, x, y)
        g.input_gradient(model, x, y)
    assert not any(model.modes)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is None
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_modes_are_restored_after_an_error():
    model = Recorder()
    with pytest.raises(LargeMarginError, match="one value per sample"):
        g.curvature(model, torch.randn(2, 4), torch.tensor([0, 1]), loss=nn.CrossEntropyLoss())
    assert all(module.training for module in model.modules())


def test_inference_mode_and_autocast_do_not_matter():
    model = Recorder()
    x, y, eps = torch.randn(4, 4), torch.arange(4) % 3, torch.randn(3, 4)
    want = g.curvature(model, x, y, directions=eps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(g.curvature(model, x, y, directions=eps), want)
    with torch.inference_mode():
        inside = g.curvature(model, x.clone(), y.clone(), directions=eps.clone())
    torch.testing.assert_close(inside.clone(), want)


def test_a_flat_model_has_no_curvature():
    x, y = torch.randn(3, 4), torch.zeros(3).long()
    flat = torch.zeros(3, 2)
    for model in (
        lambda inputs: flat[: len(inputs)].expand(len(inputs), 2),
        lambda z: z[:, :2] * 0,
    ):
        x_few = x[:1]
        assert g.curvature(model, x_few, y[:1], num_directions=1).tolist() == [0]
        assert g.curvature_limit(model, x_few, y[:1], num_directions=1).tolist() == [0]
    linear = g.curvature_limit(nn.Identity(), x, y, loss=lambda outputs, labels: outputs.sum(1))
    assert linear.tolist() == [0, 0, 0]


def test_byte_labels_and_soft_labels():
    model, x, y = Recorder(), torch.randn(3, 4), torch.tensor([0, 2, 1])
    want = g.input_gradient(model, x, y)
    for dtype in (torch.int16, torch.int32):
        assert torch.equal(g.input_gradient(model, x, y.to(dtype)).gradient, want.gradient)
    byte = g.input_gradient(model, x, y.to(torch.uint8))
    soft = g.input_gradient(model, x, nn.functional.one_hot(y).float())
    torch.testing.assert_close(byte.gradient, want.gradient)
    torch.testing.assert_close(soft.gradient, want.gradient)


def test_empty_batch():
    model, x, y = Recorder(), torch.zeros(0, 4), torch.zeros(0).long()
    assert g.curvature(model, x, y).shape == (0,)
    assert g.exact_curvature(model, x, y).eigenvalues.shape == (0, 4)


def test_bounds_report_their_parts():
    body = nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double()
    head = nn.Linear(5, 3).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    how = {"bias": head.bias, "sigma": 0.4, "radius": 0.3, "draws": 50}
    found = g.curvature_bounds(
        body, head.weight, x, y, generator=torch.Generator().manual_seed(0), **how
    )
    assert ((found.eta >= 0) & (found.eta <= 1)).all()
    assert (found.l_out.isnan() == (found.eta == 1)).all()
    assert torch.isfinite(found.lower).all()
    whole = nn.Sequential(body, head)
    exact = g.exact_curvature(whole, x, y)
    torch.testing.assert_close(found.lhs_upper, exact.sum_of_squares)
    torch.testing.assert_close(found.loss, g.input_gradient(whole, x, y).loss)
    noise = torch.randn(50, 4).double()
    calls = [
        g.curvature_bounds(body, head.weight, x, y, noise=noise, logit_bound=k, **how)
        for k in (None, 1e3)
    ]
    assert (calls[0].upper <= calls[1].upper).all()
    cheap = g.curvature_bounds(body, head.weight, x, y, left_sides=False, **how)
    assert cheap.lhs_upper is None
    assert cheap.lhs_lower is None


def test_bounds_need_two_classes_and_one_feature():
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    how = {"sigma": 0.1, "radius": 1.0}
    found = g.curvature_bounds(lambda z: z[:, :1], torch.randn(2, 1), x, y, **how)
    assert found.upper.shape == (4,)
    with pytest.raises(LargeMarginError, match="at least 2 classes"):
        g.curvature_bounds(lambda z: z, torch.randn(1, 3), x, 0 * y, **how)


def test_every_draw_inside_and_every_draw_outside():
    x, y, W = torch.zeros(2, 2), torch.tensor([0, 1]), torch.eye(2)
    inside = g.curvature_bounds(nn.Identity(), W, x, y, sigma=0.1, radius=50.0)
    assert inside.eta.tolist() == [1, 1]
    assert inside.l_out.isnan().all()
    outside = g.curvature_bounds(nn.Identity(), W, x, y, sigma=1.0, radius=1e-9)
    assert outside.eta.tolist() == [0, 0]
    assert torch.isfinite(outside.l_out).all()
    edge = torch.tensor([[3.0, 4.0], [-6.0, 8.0]])  # at the radius and beyond it
    found = g.curvature_bounds(nn.Identity(), W, x, y, sigma=1.0, radius=5.0, noise=edge)
    assert found.eta.tolist() == [0.5, 0.5]


def test_settings_that_are_not_given():
    def defaults(function):
        taken = inspect.signature(function).parameters.items()
        return {name: each.default for name, each in taken if each.default is not each.empty}

    shared = {"directions": None, "num_directions": 20, "generator": None, "loss": None}
    end = {"chunk_size": 256, "precision": "highest"}
    assert defaults(g.curvature) == {**shared, "step": 1e-2, **end}
    assert defaults(g.curvature_bounds) == {
        **dict.fromkeys(("bias", "logit_bound", "noise", "generator")),
        "draws": 100,
        "left_sides": True,
        "chunk_size": 256,
    }
    x, y, W = torch.zeros(2, 2), torch.tensor([0, 1]), torch.eye(2)
    found = g.curvature_bounds(nn.Identity(), W, x, y, sigma=1.0, radius=1.0)
    hits = 100 * found.eta  # of as many draws
    torch.testing.assert_close(hits, hits.round())


def test_groups_of_samples_hold_no_more_directions_than_fit(monkeypatch):
    monkeypatch.setattr(input_gradients, "DIRECTION_NUMBERS", 40)
    x = torch.zeros(9, 4)
    groups = input_gradients.sample_groups(x, 5, 256)
    sizes = [part.stop - part.start for part in groups]
    assert sizes == [2, 2, 2, 2, 1]
    assert len(list(input_gradients.sample_groups(x, 11, 256))) == 9  # one at a time at least
    assert len(list(input_gradients.sample_groups(x[:, :0], 5, 3))) == 3


def test_passes_of_a_full_chunk_are_counted_for_the_search(monkeypatch):
    passes = []

    def counted(device, number):
        passes.append(number)
        return nullcontext()

    monkeypatch.setattr(sys.modules["largemargin.geometry.curvature"], "searched", counted)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    g.curvature(Recorder(), x, y, num_directions=2, chunk_size=4)
    assert passes == [2, 2, 2, 1, 1]  # four samples and eight directions, one sample and two


def test_low_curvature_accuracy_is_the_definition():
    curvature = torch.rand(50, dtype=torch.float64)
    correct = torch.rand(50) < 0.6
    shares = torch.linspace(0, 1, 7, dtype=torch.float64)
    found = g.low_curvature_accuracy(curvature, correct, shares)
    for k, share in enumerate(shares):
        limit = torch.quantile(curvature, share)
        assert int(found.size_strict[k]) == int((curvature < limit).sum())
        assert int(found.size_weak[k]) == int((curvature <= limit).sum())
        torch.testing.assert_close(found.weak[k], correct[curvature <= limit].double().mean())
    assert int(found.size_strict[0]) == 0
    assert int(found.size_strict[-1]) == 49
    assert int(found.size_weak[-1]) == 50
    assert g.low_curvature_accuracy(curvature, correct, []).strict.shape == (0,)
    assert int(g.low_curvature_mask(curvature).sum()) == 45


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shares_of_a_narrow_dtype_are_those_of_a_list(dtype):
    """0.9 of 11 samples is the tenth of them, although 0.9 in float32 is less."""
    curvature, correct = torch.arange(11.0), torch.arange(11) % 2 == 0
    shares = [0.1, 0.3, 0.5, 0.7, 0.9, 1.0]
    want = g.low_curvature_accuracy(curvature, correct, shares)
    found = g.low_curvature_accuracy(curvature, correct, torch.tensor(shares, dtype=dtype))
    assert want.size_weak.tolist() == [2, 4, 6, 8, 10, 11]
    for field in want._fields:
        assert getattr(found, field).tolist() == getattr(want, field).tolist()
    between = g.low_curvature_accuracy(curvature, correct, torch.tensor([0.88], dtype=dtype))
    assert int(between.size_strict) == 9


def test_groups_without_a_correlation():
    one_group = g.curvature_by_robustness(torch.rand(4), torch.full((4,), 3))
    assert one_group.size.tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    assert one_group.pearson.isnan()
    level = g.curvature_by_robustness(torch.ones(3), torch.tensor([0, 1, 2]), draws=2)
    assert level.pearson.isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, y: g.curvature(m, x[0], y), "inputs must be a floating point batch"),
        (lambda m, x, y: g.curvature(m, x.long(), y), "inputs must be a floating point batch"),
        (lambda m, x, y: g.curvature(m, x, y[:1]), "one entry per sample"),
        (lambda m, x, y: g.curvature(m, x, y + 1), "labels must lie"),
        (lambda m, x, y: g.curvature(lambda z: z[:, 0], x, y), "logits must have shape"),
        (lambda m, x, y: g.curvature(m, x, y, step=0.0), "step must be"),
        (lambda m, x, y: g.curvature(m, x, y, num_directions=0), "num_directions must be"),
        (lambda m, x, y: g.curvature(m, x, y, chunk_size=0), "chunk_size must be"),
        (lambda m, x, y: g.curvature(m, x, y, directions=x[:, :3]), "directions must have shape"),
        (lambda m, x, y: g.curvature(m.half(), x, y), "float32 or float64"),
        (lambda m, x, y: g.exact_curvature(m, x, y, num_directions=0), "num_directions must be"),
        (
            lambda m, x, y: g.curvature_bounds(m, torch.eye(4), x, y, sigma=1.0, radius=1.0),
            "backbone must return features",
        ),
        (
            lambda m, x, y: g.curvature_bounds(m, torch.eye(3), x, y, sigma=0.0, radius=1.0),
            "sigma must be",
        ),
        (lambda m, x, y: g.low_curvature_mask(x), r"curvature must be .* but \(3, 4\) was given"),
        (lambda m, x, y: g.low_curvature_mask([0.1]), "curvature must be .* but list was given"),
        (lambda m, x, y: g.low_curvature_mask(x[0], 1.5), "share must be"),
        (lambda m, x, y: g.low_curvature_accuracy(x[0], y, [0.5]), "correct must have shape"),
        (lambda m, x, y: g.low_curvature_accuracy(x[0], x[0], 0.5), "shares must be a list"),
        (lambda m, x, y: g.low_curvature_accuracy(x[0], x[0], 1), "shares must be a list"),
        (lambda m, x, y: g.low_curvature_accuracy(x[0], x[0], x[0, 0]), "shares must be a list"),
        (lambda m, x, y: g.curvature_by_robustness(x[0], y), "correct_counts must have shape"),
        (lambda m, x, y: g.curvature_by_robustness(x[:, 0], y + 10), "at most draws"),
        (lambda m, x, y: g.curvature_by_robustness(x[:, 0], y - 2), "integers >= 0"),
    ],
)
def test_errors(call, message):
    with pytest.raises(LargeMarginError, match=message):
        call(Recorder(), torch.randn(3, 4), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("device", "passes", "deterministic", "expected"),
    [
        ("cuda", 8, False, True),
        ("cuda", 7, False, False),
        ("cuda", 20, True, False),
        ("cpu", 20, False, False),
    ],
)
def test_cudnn_searches_where_it_pays(device, passes, deterministic, expected, monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", deterministic)
    assert not cudnn.benchmark
    with searched(torch.device(device), passes):
        assert cudnn.benchmark == expected
    assert not cudnn.benchmark
