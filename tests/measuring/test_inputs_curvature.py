"""Curvature of models: against Hessians by hand, seeds and batches, robustness, Theorem 6.1."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.measuring.input_curvature import Curvature, CurvatureSettings, measure_curvature
from largemargin.measuring.input_space import InputSpace
from largemargin.measuring.probe import Probe
from largemargin.measuring.sample_draws import SampleDraws

PLAIN = {"noise": {}}


def network(inputs=5, classes=3):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, classes)
    ).double()


def data(n=9, inputs=5, classes=3, batch=4):
    x, y = torch.randn(n, inputs, dtype=torch.float64), torch.arange(n) % classes
    return x, y, list(zip(x.split(batch), y.split(batch), strict=True))


def hessians(model, x, y):
    model.eval()
    return torch.stack(
        [
            torch.autograd.functional.hessian(
                lambda z, label=label: F.cross_entropy(model(z[None]), label[None]), point
            )
            for point, label in zip(x, y, strict=True)
        ]
    )


def directions(settings, n, like):
    draws = SampleDraws(settings.seed, "directions")
    return draws.normal(torch.arange(n), settings.num_directions, like)


def test_products_are_those_of_the_hessian():
    model, (x, y, loader) = network(), data()
    settings = CurvatureSettings(method="products", num_directions=7, seed=3, **PLAIN)
    found = measure_curvature(model, loader, settings)
    vectors = directions(settings, len(x), x)
    want = torch.einsum("nij,nkj->nki", hessians(model, x, y), vectors).square().sum(2).mean(1)
    assert found.values == pytest.approx(want.tolist(), rel=1e-9)
    assert found.overall.mean == pytest.approx(float(want.mean()), rel=1e-9)
    by_class = [float(want[y == c].mean()) for c in range(3)]
    assert found.classes.mean == pytest.approx(by_class, rel=1e-9)
    assert found.relative_error == pytest.approx(math.sqrt(2 / 7))


def test_differences_are_those_of_gradients():
    model, (x, y, loader) = network(), data()
    settings = CurvatureSettings(step=0.3, num_directions=4, seed=1, **PLAIN)
    found = measure_curvature(model, loader, settings)
    model.eval()

    def gradient(points, labels):
        points = points.clone().requires_grad_()
        loss = F.cross_entropy(model(points), labels, reduction="sum")
        return torch.autograd.grad(loss, points)[0]

    here, total = gradient(x, y), 0.0
    for j in range(4):
        there = gradient(x + 0.3 * directions(settings, len(x), x)[:, j], y)
        total = total + ((there - here) / 0.3).square().sum(1)
    assert found.values == pytest.approx((total / 4).tolist(), rel=1e-9)


def test_many_directions_estimate_the_sum_of_squared_eigenvalues():
    model, (x, y, loader) = network(), data()
    exact = hessians(model, x, y).square().sum((1, 2))
    settings = CurvatureSettings(step=1e-4, num_directions=4000, **PLAIN)
    found = measure_curvature(model, loader, settings, batch_size=20_000)
    assert found.values == pytest.approx(exact.tolist(), rel=0.12)


@pytest.mark.parametrize("method", ["differences", "products"])
def test_the_seed_decides_and_batches_do_not(method):
    model, (x, y, loader) = network(), data()
    noise = {"gaussian": 1.0, "uniform": 2.0}
    settings = CurvatureSettings(
        method=method, num_directions=3, noise=noise, sigma=0.3, radius=0.1, stability_draws=8
    )
    whole = measure_curvature(model, [(x, y)], settings)
    for how in ({"batch_size": 1}, {"batch_size": 2}, {"batch_size": 1000}, {}):
        parts = measure_curvature(model, loader, settings, **how)
        assert parts.values == pytest.approx(whole.values, rel=1e-9)
        for kind in noise:
            assert parts.robustness[kind].group_size == whole.robustness[kind].group_size
            assert parts.robustness[kind].accuracy == whole.robustness[kind].accuracy
        assert parts.stability.eta == whole.stability.eta
        assert parts.stability.upper.mean == pytest.approx(whole.stability.upper.mean, rel=1e-9)
    other = measure_curvature(
        model, loader, CurvatureSettings(method=method, num_directions=3, seed=1, **PLAIN)
    )
    assert other.values != pytest.approx(whole.values, rel=1e-3)
    few = measure_curvature(model, loader, settings, max_samples=5)
    assert few.index == tuple(range(5))
    assert few.values == pytest.approx(whole.values[:5], rel=1e-9)


def test_samples_have_draws_of_their_own():
    draws, like = SampleDraws(0, "directions"), torch.zeros(3, 2, 2)
    first = draws.normal(torch.tensor([4, 5, 6]), 2, like)
    again = draws.normal(torch.tensor([6, 4]), 2, like[:2])
    assert torch.equal(first[[2, 0]], again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, SampleDraws(0, "other").normal(torch.tensor([4, 5, 6]), 2, like))
    even = draws.uniform(torch.arange(400), 5, torch.zeros(400, 4))
    assert float(even.abs().max()) <= 1
    assert abs(float(even.mean())) < 0.03
    assert float(even.var()) == pytest.approx(1 / 3, rel=0.05)
    normal = draws.normal(torch.arange(400), 5, torch.zeros(400, 4))
    assert float(normal.var()) == pytest.approx(1, rel=0.05)


def test_robustness_by_hand():
    """Curves, groups and correlation from explicit loops over samples and draws."""
    model, (x, y, _) = network(), data(n=40)
    y = model.eval()(x).argmax(1)  # all right without noise
    settings = CurvatureSettings(
        num_directions=3, noise={"gaussian": 1.5, "uniform": 2.5}, draws=6, shares=(0.25, 0.5, 1.0)
    )
    found = measure_curvature(model, [(x, y)], settings)
    curvatures = torch.tensor(found.values, dtype=torch.float64)
    for kind in ("gaussian", "uniform"):
        source = SampleDraws(0, f"{kind} noise")
        pick = source.normal if kind == "gaussian" else source.uniform
        correct = torch.zeros(40, 6, dtype=torch.bool)
        for i in range(40):
            noise = pick(torch.tensor([i]), 6, x[i : i + 1])[0]
            for k in range(6):
                noisy = x[i] + settings.noise[kind] * noise[k]
                correct[i, k] = model(noisy[None]).argmax() == y[i]
        got = found.robustness[kind]
        assert got.accuracy == pytest.approx(float(correct.double().mean()))
        spread = correct.double().mean(0).std(correction=0)
        assert got.accuracy_std == pytest.approx(float(spread))
        for position, share in enumerate(settings.shares):
            limit = torch.quantile(curvatures, share)
            low, weak = curvatures < limit, curvatures <= limit
            assert got.kept_strict[position] == int(low.sum())
            assert got.strict[position] == pytest.approx(float(correct[low].double().mean()))
            assert got.weak[position] == pytest.approx(float(correct[weak].double().mean()))
        counts = correct.sum(1)
        means = [float(curvatures[counts == k].mean()) for k in range(7)]
        assert got.group_size == tuple(int((counts == k).sum()) for k in range(7))
        assert got.group_curvature == pytest.approx(means, nan_ok=True)
        there = [k for k in range(7) if not math.isnan(means[k])]
        pairs = torch.tensor([[float(k) for k in there], [means[k] for k in there]])
        assert got.correlation == pytest.approx(float(torch.corrcoef(pairs)[0, 1]), abs=1e-5)


def test_no_correlation_is_said_not_made_up():
    model, (x, _, _) = network(), data()
    y, notes = model.eval()(x).argmax(1), []
    found = measure_curvature(
        model, [(x, y)], CurvatureSettings(noise={"gaussian": 0.0}), notes=notes
    )
    assert math.isnan(found.robustness["gaussian"].correlation)
    assert len(notes) == 1
    assert "no correlation" in notes[0]
    assert Curvature.from_json(found.to_json()) == found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("similarity", ["dot", "cosine", "cosine_prototypes", "euclidean"])
def test_every_head_is_linear_in_some_features(similarity, bias):
    head = lm.ClassHead(6, 3, similarity=similarity, scale=4.0, bias=bias).double()
    if bias:
        nn.init.normal_(head.bias)
    model, x = network().eval(), data()[0]
    model[4] = head
    space = InputSpace(Probe(model))
    weight, offset = space.linear_head()
    found = F.linear(space.backbone(x), weight, offset)
    shift = model(x) - found  # the same for all classes
    torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))


def test_a_lower_bound_of_0_says_nothing():
    """Where no input changes the features there is neither a gradient nor a way out of the ball."""
    model, (_, _, loader) = network(), data()
    nn.init.zeros_(model[1].weight)
    settings = CurvatureSettings(num_directions=2, noise={}, sigma=0.3, radius=0.5)
    found = measure_curvature(model, loader, settings).stability
    assert (found.lower.minimum, found.lower.maximum) == (0, 0)
    assert found.lower_informative == 0
    assert found.never_left == 9


@pytest.mark.parametrize("head", ["linear", "cosine"])
def test_theorem_six_one_by_hand(head):
    model, (x, y, loader) = network(), data()
    if head == "cosine":
        model[4] = lm.ClassHead(6, 3, similarity="cosine", scale=4.0).double()
    sigma, radius, draws = 0.4, 0.5, 30
    settings = CurvatureSettings(
        num_directions=5, noise={}, sigma=sigma, radius=radius, stability_draws=draws, exact=True
    )
    got = measure_curvature(model, loader, settings, batch_size=7).stability
    model.eval()
    body, top = model[:4], model[4]

    def features(z):
        found = body(z)
        return F.normalize(found, dim=1) if head == "cosine" else found

    W = top.weight.detach()
    W = 4.0 * F.normalize(W, dim=1) if head == "cosine" else W
    noise = SampleDraws(0, "stability noise").normal(torch.arange(len(x)), draws, x)
    etas, louts, uppers, lowers, largest = [], [], [], [], 0.0
    parts = []
    for i in range(len(x)):
        noisy = x[i] + sigma * noise[i]
        leaf = x[i : i + 1].clone().requires_grad_()
        loss = F.cross_entropy(model(leaf), y[i : i + 1])
        (slope,) = torch.autograd.grad(loss, leaf)
        away = (features(noisy) - features(x[i : i + 1])).norm(dim=1)
        losses = F.cross_entropy(model(noisy), y[i].expand(draws), reduction="none").detach()
        out = away > radius
        logits = torch.cat([model(noisy), model(x[i : i + 1])]).detach()
        largest = max(largest, float(logits.abs().max()))
        eta = 1 - float(out.double().mean())
        etas.append(eta)
        excess = 0.0
        if bool(out.any()):
            louts.append(float(losses[out].mean()))
            excess = (1 - eta) * (louts[-1] - float(loss.detach())) ** 2
        lowers.append(4 / sigma**4 * (excess - sigma**2 * float(slope.square().sum())))
        parts.append(eta)
    longest = float(W.norm(dim=1).max())
    for eta in parts:
        uppers.append(8 / sigma**4 * (eta * longest**2 * radius**2 + 4 * (1 - eta) * largest**2))
    eigenvalues = torch.linalg.eigvalsh(hessians(model, x, y))
    squares, absolutes = eigenvalues.square().sum(1), eigenvalues.abs().sum(1)
    assert got.eta.mean == pytest.approx(sum(etas) / len(etas))
    assert got.never_left == len(x) - len(louts)
    assert got.l_out.mean == pytest.approx(sum(louts) / len(louts))
    assert got.logit_bound == pytest.approx(largest)
    assert got.prototype_norm == pytest.approx(longest)
    assert got.upper.mean == pytest.approx(sum(uppers) / len(uppers))
    assert got.lower.minimum == pytest.approx(min(lowers))
    assert got.upper_kept == float((squares <= torch.tensor(uppers)).double().mean())
    left = 2 * squares + absolutes.square()
    assert got.lower_kept == float((left >= torch.tensor(lowers)).double().mean())
    assert got.lower_informative == float((torch.tensor(lowers) > 0).double().mean())
    assert "not a theorem" in got.assumes


def test_units_before_normalisation():
    """Curvature of x -> model((x - mean) / std) at the raw inputs."""
    model, (x, y, _) = network(), data()
    settings = CurvatureSettings(method="products", num_directions=4, **PLAIN)
    found = measure_curvature(model, [(x, y)], settings, normalization=(0.5, 0.25))
    assert found.units == "before normalisation"
    plain = measure_curvature(model, [(x, y)], settings)
    assert plain.units == "as the loader gives them"
    assert found.values == pytest.approx([value / 0.25**4 for value in plain.values], rel=1e-9)


@pytest.mark.parametrize(("method", "passes"), [("differences", 21), ("products", 1)])
def test_no_pass_is_smaller_or_more_than_needed(method, passes):
    """K + 1 passes of whole batches; products share one graph."""
    model, sizes = network(), []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    x, y, _ = data(n=8)
    settings = CurvatureSettings(method=method, **PLAIN)
    measure_curvature(model, [(x, y)], settings)
    assert sizes == [8] * passes


def test_no_gradient_of_a_parameter_is_computed():
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            needs.append(ctx.needs_input_grad)
            ctx.save_for_backward(weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.saved_tensors[0], None

    class Layer(nn.Linear):
        def forward(self, x):
            return Seen.apply(x, self.weight)

    needs = []
    model = nn.Sequential(Layer(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    _, _, loader = data()
    measure_curvature(model, loader, CurvatureSettings(**PLAIN))
    assert set(needs) == {(True, False)}


def test_the_model_is_left_alone():
    model = network().float().train()
    model[2].eval()
    x, y, _ = data()
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        measure_curvature(model, [(x.float(), y)], CurvatureSettings(sigma=0.1, step=1e-4))
    assert [module.training for module in model.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not model[4]._forward_hooks


def test_a_layer_with_two_names_keeps_its_precision():
    model = network().float()
    model.again = model[4]  # registered twice, called once
    model.forward = lambda x: model[:5](x)
    x, y, _ = data()
    measure_curvature(model, [(x.float(), y)], CurvatureSettings(step=1e-4, **PLAIN), layer="4")
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "guess"}, "method"),
        ({"step": 0.0}, "step"),
        ({"precision": "low"}, "precision"),
        ({"num_directions": 0}, "num_directions"),
        ({"noise": {"salt": 0.1}}, "noise"),
        ({"sigma": -1.0}, "sigma"),
        ({"draws": 0}, "draws"),
    ],
)
def test_bad_settings(settings, message):
    model, (_, _, loader) = network(), data()
    with pytest.raises(LargeMarginError, match=message):
        measure_curvature(model, loader, CurvatureSettings(**settings))


def test_bad_data():
    model, (x, y, _) = network(), data()
    for loader, message in (
        ([], "empty"),
        ([(x * math.nan, y)], "finite"),
        ([({"ids": x}, y)], "one floating point tensor"),
        ([(x.long(), y)], "one floating point tensor"),
    ):
        with pytest.raises(LargeMarginError, match=message):
            measure_curvature(model, loader)
