"""Attacks: where they may go, what they leave alone, and models whose answer is known."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largemargin import errors
from largemargin.errors import LargeMarginError
from largemargin.measuring.robust import Attack, apgd, fgsm, pgd
from largemargin.measuring.robust.attacks import LOSSES

STEPS = 12
ATTACKS: dict[str, Callable[..., Tensor]] = {
    "fgsm": fgsm,
    "pgd": lambda *a, **k: pgd(*a, steps=STEPS, **k),
    "pgd still": lambda *a, **k: pgd(*a, steps=STEPS, random_start=False, **k),
    "pgd restarts": lambda *a, **k: pgd(*a, steps=4, restarts=3, **k),
    "apgd": lambda *a, **k: apgd(*a, steps=STEPS, **k),
    "apgd restarts": lambda *a, **k: apgd(*a, steps=8, restarts=3, **k),
    "apgd dlr": lambda *a, **k: apgd(*a, steps=STEPS, loss="dlr", **k),
}
EPSILON = {"linf": 8 / 255, "l2": 0.5}


class Net(nn.Module):
    """A small network with dropout and batch norm, so that its mode matters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.5),
        )  # fmt: skip
        self.head = nn.Linear(6 * 25, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


def problem(dtype: torch.dtype = torch.float32, count: int = 7) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    images = torch.rand(count, 2, 5, 5)
    images[0, 0], images[0, 1] = 0.0, 1.0  # at the border of the box
    return Net().to(dtype), images.to(dtype), torch.arange(count) % 4


def seeded(device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(3)


def options(name: str) -> dict[str, Any]:
    return {} if name in ("fgsm", "pgd still") else {"generator": seeded()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ATTACKS)
def test_stays_in_the_ball_and_the_box_to_the_last_bit(
    name: str, norm: str, dtype: torch.dtype
) -> None:
    model, images, labels = problem(dtype)
    before = images.clone()
    epsilon = EPSILON[norm]
    found = ATTACKS[name](model, images, labels, epsilon=epsilon, norm=norm, **options(name))
    assert found.dtype == dtype
    assert not found.requires_grad
    assert torch.equal(images, before)
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    apart = (found.double() - images.double()).flatten(1)
    size = apart.abs().amax(1) if norm == "linf" else apart.norm(dim=1)
    assert bool((size <= epsilon).all())
    assert float(size.max()) > 0.9 * epsilon


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ATTACKS)
def test_makes_predictions_worse(name: str, norm: str) -> None:
    model, images, _ = problem(count=40)
    model.eval()
    labels = model(images).argmax(1)
    found = ATTACKS[name](model, images, labels, epsilon=4 * EPSILON[norm], norm=norm)
    assert float((model(found).argmax(1) == labels).float().mean()) < 0.3


@pytest.mark.parametrize("name", ATTACKS)
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, images, labels = problem()
    model.body[1].eval()
    model.head.bias.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model)
    modes = [module.training for module in model.modules()]
    ATTACKS[name](model, images, labels, epsilon=0.1, **options(name))
    assert [module.training for module in model.modules()] == modes
    for now, then in zip(model.parameters(), before.parameters(), strict=True):
        assert now.requires_grad == then.requires_grad
        if now is model.head.weight:
            assert torch.equal(now.grad, torch.ones_like(now))
        else:
            assert now.grad is None
    for now, then in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_sample_does_not_depend_on_its_batch(name: str, norm: str) -> None:
    """The others are exchanged, with the same random numbers for all."""
    model, images, labels = problem(torch.float64)
    call = ATTACKS[name]
    one = call(model, images, labels, epsilon=0.05, norm=norm, **options(name))
    others, wrong = images.flip(0).clone(), labels.flip(0).clone()
    others[2], wrong[2] = images[2], labels[2]
    two = call(model, others, wrong, epsilon=0.05, norm=norm, **options(name))
    torch.testing.assert_close(one[2], two[2], rtol=0, atol=1e-12)
    assert not torch.equal(one[1], two[1])


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["pgd", "pgd restarts", "apgd", "apgd restarts"])
def test_one_by_one_with_a_generator_for_each(name: str, norm: str) -> None:
    model, images, labels = problem(torch.float64)

    def generators(rows: range) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(row) for row in rows]

    own = generators(range(len(images)))
    together = ATTACKS[name](model, images, labels, epsilon=0.05, norm=norm, generator=own)
    for row in range(len(images)):
        part = slice(row, row + 1)
        alone = ATTACKS[name](
            model, images[part], labels[part], epsilon=0.05, norm=norm,
            generator=generators(range(row, row + 1)),
        )  # fmt: skip
        # Rounding decides which points of the l2 ball are drawn in a little; starts are 0.05 apart.
        torch.testing.assert_close(alone, together[part], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["fgsm", "pgd still"])
def test_one_by_one_without_random_numbers(name: str) -> None:
    model, images, labels = problem(torch.float64)
    together = ATTACKS[name](model, images, labels, epsilon=0.05)
    for row in range(len(images)):
        part = slice(row, row + 1)
        alone = ATTACKS[name](model, images[part], labels[part], epsilon=0.05)
        torch.testing.assert_close(alone, together[part], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["pgd", "pgd restarts", "apgd", "apgd restarts"])
def test_random_numbers_come_from_the_generator(name: str) -> None:
    model, images, labels = problem()
    state = torch.get_rng_state()
    call = ATTACKS[name]
    first, again = (call(model, images, labels, epsilon=0.05, generator=seeded()) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    other = call(model, images, labels, epsilon=0.05, generator=torch.Generator().manual_seed(9))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_callers_without_gradients(name: str, context: Callable[[], Any]) -> None:
    model, images, labels = problem()
    want = ATTACKS[name](model, images, labels, epsilon=0.05, **options(name))
    with context():
        got = ATTACKS[name](model, images.clone(), labels.clone(), epsilon=0.05, **options(name))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_autocast(name: str, norm: str) -> None:
    model, images, labels = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ATTACKS[name](model, images, labels, epsilon=0.1, norm=norm, **options(name))
    assert found.dtype == torch.float32
    apart = (found.double() - images.double()).flatten(1)
    size = apart.abs().amax(1) if norm == "linf" else apart.norm(dim=1)
    assert bool((size <= 0.1).all())


class Linear(nn.Module):
    """Two classes, logits (score, -score) / 2 with score = w x + b: the answer is known."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.randn(dim, dtype=torch.float64)
        self.shift = -0.5 * self.weight.sum()

    def score(self, images: Tensor) -> Tensor:
        return images @ self.weight + self.shift

    def forward(self, images: Tensor) -> Tensor:
        score = self.score(images)
        return torch.stack([score, -score], 1) / 2


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["fgsm", "pgd", "pgd still", "pgd restarts", "apgd"])
def test_a_linear_model_is_moved_by_epsilon_times_the_dual_norm(name: str, norm: str) -> None:
    r"""Away from the box, :math:`\min w x = w x_0 - \epsilon\|w\|_*`, reached exactly."""
    model = Linear(9)
    images = 0.5 + 0.02 * torch.randn(20, 9, dtype=torch.float64)
    labels = (model.score(images) < 0).long()
    epsilon = 0.1
    found = ATTACKS[name](model, images, labels, epsilon=epsilon, norm=norm, **options(name))
    reach = epsilon * (model.weight.abs().sum() if norm == "linf" else model.weight.norm())
    sign = 1 - 2 * labels.double()
    margin, left = sign * model.score(images), sign * model.score(found)
    # From a random point l2 steps turn towards the best one without ever being there.
    near = 0.05 * float(reach) if name in ("pgd", "pgd restarts") else 1e-6
    tolerance = 1e-12 if norm == "linf" else near
    if name == "apgd":  # stops at the first wrong point it likes; only who stands goes to the end
        standing = margin > reach
        assert bool(((left < 0) == (margin < reach)).all())
        margin, left = margin[standing], left[standing]
    torch.testing.assert_close(left, margin - reach, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["fgsm", "pgd", "apgd"])
def test_the_margin_decides_who_falls(name: str) -> None:
    """A sample falls exactly where epsilon exceeds its linf distance to the boundary."""
    model = Linear(9)
    images = 0.5 + 0.1 * torch.randn(50, 9, dtype=torch.float64)
    labels = (model.score(images) < 0).long()
    distance = model.score(images).abs() / model.weight.abs().sum()
    for share in (0.99, 1.01):
        for row in range(0, 50, 10):
            part = slice(row, row + 1)
            epsilon = share * float(distance[row])
            found = ATTACKS[name](model, images[part], labels[part], epsilon=epsilon)
            fell = bool(model(found).argmax(1) != labels[part])
            assert fell == (share > 1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_steps_of_pgd_are_two_and_a_half_radii_in_all(norm: str) -> None:
    model, images, labels = problem(torch.float64)

    def found(**options: Any) -> Tensor:
        return pgd(model, images, labels, epsilon=0.1, norm=norm, generator=seeded(), **options)

    assert torch.equal(found(steps=5), found(steps=5, step_size=0.05))
    assert not torch.equal(found(steps=5), found(steps=5, step_size=0.1))


@pytest.mark.parametrize("loss", ["ce", "dlr", "margin"])
@pytest.mark.parametrize("name", ["fgsm", "pgd", "apgd"])
def test_a_model_that_is_very_sure_is_attacked_all_the_same(name: str, loss: str) -> None:
    """Softmax probabilities are 1 to the last bit: cross entropy itself has no gradient there."""
    model, images, _ = problem(count=20)
    model.eval()
    with torch.no_grad():
        model.head.weight.mul_(1e4)
        labels = model(images).argmax(1)
    attack = Attack(name, epsilon=0.2, steps=STEPS, loss=loss)
    found = attack(model, images, labels, seeded())
    assert float((model(found).argmax(1) == labels).float().mean()) < 0.5


def test_the_ratio_of_logits_is_largest_where_three_others_lead() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0], [2.0, 1.9, 1.8, 0.0]])
    equal, apart = LOSSES["dlr"](logits, torch.tensor([3, 3])).tolist()
    assert apart == pytest.approx(2 / 0.2)
    assert equal > 1e6


class Treacherous(nn.Module):
    """The loss is largest in the middle, where the prediction is right; above 0.7 it is wrong."""

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)[:, 0]
        own = 0.38 + 0.4 * (x - 0.5) ** 2
        other = torch.where(x > 0.7, 0.99, 0.5) * (1 - own)
        return torch.stack([own, other, 1 - own - other], 1).log()


@pytest.mark.parametrize("steps", [3, 8])
def test_of_a_model_that_stands_the_point_of_the_largest_loss_is_kept(steps: int) -> None:
    """The loss is largest inside the ball, at 0.62: steps go past it."""
    losses = []

    def model(images: Tensor) -> Tensor:
        own = 1 + (images.flatten(1)[:, 0] - 0.62) ** 2
        losses.append(-own.detach())
        return torch.stack([own, torch.zeros_like(own)], 1)

    images, labels = torch.linspace(0.3, 0.9, 20)[:, None], torch.zeros(20).long()
    found = apgd(model, images, labels, epsilon=0.5, steps=steps, generator=seeded())
    largest = torch.stack(losses[1:]).amax(0)  # the first are those of the images themselves
    assert bool((losses[-1] < largest).any())
    model(found)
    torch.testing.assert_close(losses[-1], largest, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("steps", "restarts"), [(2, 1), (4, 1), (30, 3)])
def test_what_fooled_the_model_is_kept_though_another_point_has_a_higher_loss(
    steps: int, restarts: int
) -> None:
    images, labels = torch.full((20, 1, 1, 1), 0.5), torch.zeros(20).long()
    model = Treacherous()
    found = apgd(
        model, images, labels, epsilon=0.5, steps=steps, restarts=restarts, generator=seeded()
    )
    assert (model(found).argmax(1) != labels).all()


def test_the_ratio_of_logits_takes_three_classes_and_no_fewer() -> None:
    model, images, labels = problem(count=4)
    model.head = nn.Linear(model.head.in_features, 3)
    found = fgsm(model, images, labels % 3, epsilon=0.2, loss="dlr")
    assert float((found - images).abs().max()) == pytest.approx(0.2, rel=1e-5)
    model.head = nn.Linear(model.head.in_features, 2)
    with pytest.raises(LargeMarginError, match="difference of three logits"):
        fgsm(model, images, labels % 2, epsilon=0.2, loss="dlr")


def test_restarts_find_what_one_run_misses() -> None:
    """A wrong class in one corner only, behind a flat plain: the start decides."""

    def model(images: Tensor) -> Tensor:
        near = torch.relu(images[:, :2].sum(1) - 1.1)
        return torch.stack([torch.full_like(near, 0.05), near], 1)

    images, labels = torch.full((200, 2), 0.5), torch.zeros(200, dtype=torch.long)
    fallen = []
    for restarts in (1, 4):
        found = pgd(
            model, images, labels, epsilon=0.3, steps=3, restarts=restarts, loss="margin",
            generator=seeded(),
        )  # fmt: skip
        fallen.append(int((model(found).argmax(1) == 1).sum()))
    assert 0 < fallen[0] < fallen[1]


def test_of_several_starts_a_wrong_one_is_kept_though_others_have_a_higher_loss() -> None:
    """Steps of size 0: what is found are the starts, of which those above 0.7 are wrong."""
    images, labels, model = torch.full((60, 1, 1, 1), 0.5), torch.zeros(60).long(), Treacherous()
    options: dict[str, Any] = {"epsilon": 0.5, "steps": 1, "step_size": 0.0}
    generator = seeded()
    starts = [pgd(model, images, labels, generator=generator, **options) for _ in range(6)]
    wrong = torch.stack([model(each).argmax(1) != labels for each in starts])
    assert 0 < int(wrong.any(0).sum()) < 60
    found = pgd(model, images, labels, restarts=6, generator=seeded(), **options)
    assert torch.equal(model(found).argmax(1) != labels, wrong.any(0))


def test_what_is_wrong_already_comes_back_as_it_is() -> None:
    model, images, _ = problem()
    model.eval()
    labels = (model(images).argmax(1) + 1) % 4
    assert torch.equal(apgd(model, images, labels, epsilon=0.1, steps=3), images)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: {"features": torch.zeros(len(logits), 9), "logits": logits},
        lambda logits: (logits, None),
        lambda logits: Outputs(logits),
    ],
)
def test_logits_are_found_in_outputs(wrap: Callable[[Tensor], Any]) -> None:
    model, images, labels = problem()
    model.eval()
    want = pgd(model, images, labels, epsilon=0.05, generator=seeded())
    got = pgd(lambda x: wrap(model(x)), images, labels, epsilon=0.05, generator=seeded())
    assert torch.equal(got, want)


class Outputs:
    """As Hugging Face models return them."""

    def __init__(self, logits: Tensor) -> None:
        self.hidden_states, self.logits = None, logits


def test_nothing_in_nothing_out() -> None:
    model, images, labels = problem()
    for call in ATTACKS.values():
        assert call(model, images[:0], labels[:0], epsilon=0.1).shape == (0, 2, 5, 5)
        assert torch.equal(call(model, images, labels, epsilon=0.0), images)


def test_names() -> None:
    assert Attack("fgsm").name == "fgsm linf 8/255"
    assert Attack("pgd", "l2", 0.5, steps=10).name == "pgd-10 l2 0.5"
    assert Attack("apgd", restarts=5, loss="dlr").name == "apgd-20x5 dlr linf 8/255"


def test_an_attack_is_its_function() -> None:
    model, images, labels = problem()
    made = Attack("pgd", "l2", 0.3, steps=4, restarts=2, loss="margin", step_size=0.1)
    want = pgd(
        model, images, labels, epsilon=0.3, norm="l2", steps=4, restarts=2, loss="margin",
        step_size=0.1, generator=seeded(),
    )  # fmt: skip
    assert torch.equal(made(model, images, labels, seeded()), want)
    made = Attack("apgd", "l2", 0.3, steps=4, restarts=2, loss="dlr")
    want = apgd(
        model, images, labels, epsilon=0.3, norm="l2", steps=4, restarts=2, loss="dlr",
        generator=seeded(),
    )  # fmt: skip
    assert torch.equal(made(model, images, labels, seeded()), want)


M, X, Y = problem()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pgd(M, X * 3 - 1, Y, epsilon=0.1), r"must lie in \[0, 1\].*before normalisation"),
        (lambda: pgd(M, X * math.nan, Y, epsilon=0.1), r"must lie in \[0, 1\]"),
        (lambda: pgd(M, (X * 255).byte(), Y, epsilon=0.1), "divide bytes by 255"),
        (lambda: pgd(M, X, Y + 1, epsilon=0.1), r"lie in \[0, 4\)"),
        (lambda: pgd(M, X, Y[:3], epsilon=0.1), "one entry per"),
        (lambda: pgd(M, X, Y, epsilon=-0.1), "epsilon must be"),
        (lambda: pgd(M, X, Y, epsilon=0.1, norm="l1"), "norm must be one of"),
        (lambda: pgd(M, X, Y, epsilon=0.1, loss="hinge"), "loss must be one of"),
        (lambda: pgd(M, X, Y, epsilon=0.1, steps=0), "steps must be"),
        (lambda: pgd(M, X, Y, epsilon=0.1, generator=[seeded()]), "7, one for each image.*of 1 w"),
        (lambda: apgd(M, X, Y, epsilon=0.1, generator=3), "torch.Generator.*int was given"),
        (lambda: pgd(M, X, Y, epsilon=0.1, restarts=2, random_start=False), "random_start=True"),
        (lambda: apgd(M, X, Y, epsilon=0.1, rho=1.5), "rho must be"),
        (lambda: apgd(X, M, Y, epsilon=0.1), "model, images, labels"),
        (lambda: pgd(lambda x: x.flatten(1)[:, :2], X, Y % 2, epsilon=0.1, loss="dlr"), "'dlr'"),
        (lambda: pgd(lambda x: M(x).detach(), X, Y, epsilon=0.1), "do not depend on the images"),
        (lambda: pgd(lambda x: M(x) * math.nan, X, Y, epsilon=0.1), "NaN or infinite logits"),
        (lambda: apgd(lambda x: M(x) / 0, X, Y, epsilon=0.1), "NaN or infinite logits"),
        (lambda: fgsm(lambda x: M((x - x).sqrt() + x), X, Y, epsilon=0.1), "NaN gradients"),
        (lambda: fgsm(lambda x: x, X, Y, epsilon=0.1), "one row of logits per image"),
        (lambda: fgsm(lambda x: None, X, Y, epsilon=0.1), "must return logits"),
        (lambda: Attack("cw"), "kind must be one of"),
        (lambda: Attack(steps=0), "steps must be"),
        (lambda: Attack(restarts=0), "restarts must be"),
        (lambda: Attack(epsilon=math.inf), "8 / 255"),
        (lambda: Attack(epsilon=8), "<= 1, but 8 was given. Pixels are in .* 8 / 255"),
        (lambda: fgsm(M, X, Y, epsilon=8), "<= 1, but 8 was given. Pixels are in .* 8 / 255"),
        (lambda: Attack(norm="l1"), "norm must be one of"),
    ],
)
def test_wrong_use_says_what_to_do(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        call()


@pytest.mark.parametrize("name", ["pgd", "apgd"])
def test_labels_are_looked_at_where_others_leave_values_unread(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where losses do not."""
    monkeypatch.setattr(errors, "values_are_checked", lambda tensor, validate: bool(validate))
    with pytest.raises(LargeMarginError, match=r"lie in \[0, 4\)"):
        ATTACKS[name](M, X, Y + 1, epsilon=0.1)


def test_a_model_that_broke_is_left_as_it_was() -> None:
    model, images, labels = problem()
    broken = nn.Sequential(model, nn.Threshold(math.inf, math.nan))
    with pytest.raises(LargeMarginError, match="NaN"):
        pgd(broken, images, labels, epsilon=0.1)
    assert all(module.training for module in broken.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ATTACKS)
def test_on_an_accelerator(name: str, norm: str) -> None:
    model, images, labels = problem(torch.float64, count=30)
    want = ATTACKS[name](model, images, labels, epsilon=0.05, norm=norm, **options(name))
    got = ATTACKS[name](
        model.cuda(), images.cuda(), labels.cuda(), epsilon=0.05, norm=norm, **options(name)
    )
    assert got.device.type == "cuda"
    same = torch.isclose(got.cpu(), want, atol=1e-6).flatten(1).all(1)
    assert float(same.double().mean()) > 0.9  # a sign at 0 may fall either way
