"""One step of training against what it says: noise, gradients, clipping, skipping, averaging."""

import math
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import largemargin as lm
from largemargin.app.training import NoiseConfig
from largemargin.app.training.journal import EpochTotals
from largemargin.app.training.step import (
    AveragedModel,
    BufferSnapshot,
    Step,
    noisy_images,
    set_rate,
)
from largemargin.errors import LargeMarginError

RATE = 0.1


class Made:
    """A small network, its step, and images."""

    def __init__(self, noise: NoiseConfig | None = None, ema: float | None = None, **how: Any):
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.seen: list[Tensor] = []
        self.network[0].register_forward_pre_hook(lambda _, given: self.seen.append(given[0]))
        use = noise or NoiseConfig()
        criterion = lm.attach(self.network, lm.CrossEntropy(), accumulate=use.losses_per_step)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=RATE, momentum=0.9)
        self.average = None if ema is None else AveragedModel(self.network, ema)
        self.totals = EpochTotals(torch.device("cpu"))
        settings = {"clip_norm": None, "average": self.average, **how}
        self.step = Step(
            self.network, criterion, self.optimizer, noise=use, totals=self.totals, **settings
        )
        self.images, self.labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 3

    def weights(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.network.parameters()).detach().clone()

    def moved(self, images: Tensor | None = None) -> Tensor:
        """How far one step moves the weights."""
        before = self.weights()
        self.step(self.images if images is None else images, self.labels)
        return self.weights() - before

    def gradient(self) -> Tensor:
        """Of cross entropy on the images, by the network alone."""
        network = deepcopy(self.network)
        loss = nn.functional.cross_entropy(network(self.images), self.labels)
        return torch.cat(
            [each.flatten() for each in torch.autograd.grad(loss, network.parameters())]
        )


def test_steps_go_down_the_gradient_of_their_own_images() -> None:
    made = Made()
    first = made.gradient()
    torch.testing.assert_close(made.moved(), -RATE * first)
    second = made.gradient()  # nothing of the first is left in it
    torch.testing.assert_close(made.moved(), -RATE * (0.9 * first + second))
    norms = float(first.norm() + second.norm())
    assert made.totals.read().gradient_norm == pytest.approx(norms, rel=1e-5)
    assert made.totals.read().steps == 2


@pytest.mark.parametrize("share", [0.1, 10.0])
def test_a_gradient_is_clipped_where_it_is_too_long(share: float) -> None:
    """And the sums tell how long it was before."""
    gradient = Made().gradient()
    norm = float(gradient.norm())
    made = Made(clip_norm=share * norm)
    torch.testing.assert_close(
        made.moved(), -RATE * min(share, 1.0) * gradient, rtol=1e-4, atol=1e-7
    )
    assert made.totals.read().gradient_norm == pytest.approx(norm, rel=1e-5)


def test_a_step_that_is_not_finite_moves_nothing() -> None:
    """Neither weights nor momentum; the next one is as if it had not been."""
    made, calm = Made(), Made()
    made.moved(), calm.moved()
    assert made.moved(torch.full_like(made.images, math.nan)).count_nonzero() == 0
    assert torch.equal(made.moved(), calm.moved())
    assert (made.totals.read().steps, made.totals.read().bad) == (2, 1)


@pytest.mark.parametrize("how", [{}, {"alone": False}], ids=["alone", "of several"])
def test_processes_agree_by_the_gradient(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process looks at its loss, too; of several each has another, and all have to move."""
    made = Made(**how)
    weight = next(made.network.parameters())
    totals = {"loss": weight.sum() + math.inf, "gradient": (0 * weight).sum().sqrt()}
    moved = {}
    for what, total in totals.items():
        monkeypatch.setattr(made.step, "plain_losses", lambda *_, total=total: (total, {}))
        moved[what] = bool(made.moved().count_nonzero())
    assert moved == {"loss": bool(how), "gradient": False}
    assert made.totals.read().bad == 2 - bool(how)


class OnDevice:
    """A truth that says it lies on an accelerator."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, value: bool) -> None:
        self.value = torch.tensor(value)

    def __invert__(self) -> Tensor:
        return ~self.value


@pytest.mark.parametrize(
    ("clip", "unit"), [(None, 1.0), (0.5, 1.0), (20.0, 1.0), (5e-6, 1e-6)], ids=str
)
def test_fused_optimizers_clip_and_skip_by_themselves(clip: float | None, unit: float) -> None:
    """As on an accelerator, where nobody looks at the numbers in between; and as torch clips."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=RATE, fused=True)
    sums = EpochTotals(torch.device("cpu"))
    criterion: Any = None
    step = Step(
        nn.Identity(), criterion, optimizer, noise=NoiseConfig(), clip_norm=clip, totals=sums
    )
    weight.grad = unit * torch.tensor([3.0, 4.0])
    step._update(torch.tensor(5 * unit), OnDevice(False))  # type: ignore[arg-type]
    assert weight.tolist() == [0.0, 0.0]
    weight.grad = unit * torch.tensor([3.0, 4.0])
    step._update(torch.tensor(5 * unit), OnDevice(True))  # type: ignore[arg-type]
    other = nn.Parameter(torch.zeros(2))
    other.grad = unit * torch.tensor([3.0, 4.0])
    nn.utils.clip_grad_norm_(other, clip or math.inf)
    torch.testing.assert_close(weight.detach(), -RATE * other.grad, atol=0, rtol=1e-5)


def test_groups_of_an_older_release_get_the_rate_itself() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "factor": 10.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    set_rate(optimizer, 0.3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 3.0]


def test_only_full_batches_are_given_to_the_compiled_function() -> None:
    made = Made()
    compiled: list[int] = []

    def losses(images: Tensor, noisy: Tensor | None, labels: Tensor) -> Any:
        compiled.append(len(labels))
        return made.step.plain_losses(images, noisy, labels)

    made.step.losses, made.step.usual_size = losses, 6
    made.step(made.images, made.labels)
    assert compiled == [6]
    made.step(made.images[:4], made.labels[:4])
    made.step(made.images, made.labels, plain=True)
    assert compiled == [6]
    assert made.totals.read().steps == 3


def test_the_network_runs_in_the_precision_of_the_run() -> None:
    made = Made(autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    kinds: list[torch.dtype] = []
    made.network[1].register_forward_hook(lambda *seen: kinds.append(seen[-1].dtype))
    assert made.moved().count_nonzero() > 0
    assert kinds == [torch.bfloat16]


def test_a_scaled_loss_gives_the_same_step() -> None:
    """Gradients are unscaled before they are measured and clipped; after an overflow the scale
    falls and nothing moves."""
    gradient = Made().gradient()
    norm = float(gradient.norm())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    made = Made(
        clip_norm=norm / 2, scaler=scaler, backward=lambda loss: scaler.scale(loss).backward()
    )
    torch.testing.assert_close(made.moved(), -RATE * gradient / 2, rtol=1e-4, atol=1e-7)
    assert made.totals.read().gradient_norm == pytest.approx(norm, rel=1e-5)
    assert made.moved(torch.full_like(made.images, math.inf)).count_nonzero() == 0
    assert scaler.get_scale() == 512.0
    assert made.moved().count_nonzero() > 0


def test_the_average_follows_every_step() -> None:
    made = Made(ema=0.75)
    assert made.average is not None
    average = made.weights()
    for _ in range(2):
        made.moved()
        average = average + 0.25 * (made.weights() - average)
        found = nn.utils.parameters_to_vector(made.average.model.parameters())
        torch.testing.assert_close(found, average)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_an_average_has_to_move_and_to_stay(decay: float) -> None:
    with pytest.raises(LargeMarginError, match="ema must be"):
        AveragedModel(nn.Linear(1, 1), decay)


@pytest.mark.parametrize("use", ["none", "noisy", "clean_and_noisy"])
def test_the_network_sees_the_images_that_were_asked_for(use: Any) -> None:
    made = Made(NoiseConfig(use, level=0.5))
    made.moved()
    clean = [torch.equal(each, made.images) for each in made.seen]
    assert clean == {"none": [True], "noisy": [False], "clean_and_noisy": [True, False]}[use]


def test_noise_is_of_the_kind_and_level_that_was_asked_for() -> None:
    images = torch.full((4, 1, 50, 50), 0.5)
    gaussian = noisy_images(images, NoiseConfig("noisy", "gaussian", level=0.4)) - images
    assert gaussian.std().item() == pytest.approx(0.4, rel=0.05)
    assert gaussian.mean().item() == pytest.approx(0.0, abs=0.03)
    assert gaussian.abs().max() > 1.0
    uniform = noisy_images(images, NoiseConfig("noisy", "uniform", level=0.4)) - images
    assert [uniform.min().item(), uniform.max().item()] == pytest.approx([-0.4, 0.4], abs=1e-3)
    assert uniform.mean().item() == pytest.approx(0.0, abs=0.03)
    clipped = noisy_images(images, NoiseConfig("noisy", "gaussian", level=0.4, clip=True))
    assert [clipped.min().item(), clipped.max().item()] == [0.0, 1.0]


def test_a_noisy_image_may_have_a_crop_of_its_own() -> None:
    """The second half of the images is what noise comes on top of, with the labels of the first."""
    made = Made(NoiseConfig("clean_and_noisy", level=1e-6, crop="own"))
    clean, copies = made.images, made.images + 10
    made.step(torch.cat([clean, copies]), made.labels)
    assert len(made.seen) == 2
    assert torch.equal(made.seen[0], clean)
    assert torch.allclose(made.seen[1], copies, atol=1e-4)


def test_buffers_go_back_to_where_they_were_kept() -> None:
    model = nn.BatchNorm1d(2)
    average = AveragedModel(model, 0.5)
    snapshot = BufferSnapshot(model, None, average=average)
    model(torch.randn(4, 2) + 1)
    snapshot.keep()
    kept = {name: each.clone() for name, each in model.named_buffers()}
    states = {name: each.clone() for name, each in snapshot.states().items()}
    model(torch.full((4, 2), math.nan))
    average.update()
    assert average.model.running_mean.isnan().all()
    snapshot.restore()
    for module in (model, average.model):
        for name, each in module.named_buffers():
            assert torch.equal(each, kept[name]), name
    later = BufferSnapshot(nn.BatchNorm1d(2))
    later.load(states)
    later.restore()
    assert [each.tolist() for each in later.buffers] == [each.tolist() for each in kept.values()]
