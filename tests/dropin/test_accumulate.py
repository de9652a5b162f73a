"""Micro-batches, mixed precision, and what bank, batch norm and weight decay do to each other."""

import copy
from typing import Any

import pytest
import torch
from dropin.nets import LABELS, C, ConvNet, D, Mlp, N, images, vectors
from torch import Tensor, nn

import largemargin as lm
from largemargin.losses.base.schedules import Schedule


class Counting(Schedule):
    """Notes the steps it was applied at."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def apply(self, objective: lm.Objective, step: int, **how: Any) -> None:
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def both(C: int, D: int) -> lm.Objective:
    return lm.Objective(softmax=lm.CrossEntropy(), lmd=lm.Discriminative(C, D, momentum=0.5))


def test_micro_batches_are_one_step() -> None:
    """Twice the same half: gradients, bank and schedules as after one batch of both."""
    model = ConvNet()
    twin = copy.deepcopy(model)
    counting = Counting()
    criterion = lm.attach(model, both, accumulate=2, schedule=counting)
    single = lm.attach(twin, both)
    for step in range(3):
        model.zero_grad()
        twin.zero_grad()
        for _ in range(2):
            (criterion(model(images(step)), LABELS) / 2).backward()
        single(twin(images(step)), LABELS).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(criterion.banks[0].centroids, single.banks[0].centroids)
    assert counting.steps == [0, 1, 2, 3]
    assert criterion.steps == single.steps == 3
    assert criterion.banks[0].counts.sum() == 2 * single.banks[0].counts.sum()


def test_softmax_over_micro_batches_is_softmax_over_the_batch() -> None:
    model = ConvNet()
    twin = copy.deepcopy(model)
    criterion = lm.attach(model, lm.CosFace(scale=8.0), accumulate=3)
    single = lm.attach(twin, lm.CosFace(scale=8.0))
    for x, labels in zip(images().chunk(3), LABELS.chunk(3), strict=True):
        (criterion(model(x), labels) / 3).backward()
    single(twin(images()), LABELS).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_manual_stepping() -> None:
    model, counting = Mlp(), Counting()
    criterion = lm.attach(model, lm.CrossEntropy(), schedule=[counting], stepping="manual")
    criterion(model(vectors()), LABELS)
    assert criterion.steps == 0
    criterion.step()
    assert counting.steps == [0, 1]


def test_float16_with_a_grad_scaler() -> None:
    model = ConvNet()
    exact = copy.deepcopy(model)
    criterion, reference = lm.attach(model, both), lm.attach(exact, both)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, exact)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(images(step))
            loss = criterion(outputs, LABELS)
        assert outputs.dtype == torch.float16
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        want = reference(exact(images(step)), LABELS)
        want.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, want, rtol=0.02, atol=0.02)
    assert criterion.banks[0].centroids.dtype == torch.float32
    torch.testing.assert_close(model.fc.weight, exact.fc.weight, rtol=0.02, atol=0.02)


def test_an_overflow_does_not_spoil_the_bank() -> None:
    model = Mlp()
    criterion = lm.attach(model, both)
    criterion(model(vectors()), LABELS)
    before = criterion.banks[0].centroids.clone()
    x = vectors(1)
    x[0] = torch.inf  # class 0 overflows in this batch
    criterion(model(x), LABELS)
    after = criterion.banks[0].centroids
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("loss", [lm.CosFace(scale=8.0), lm.CrossEntropy()])
def test_bfloat16_autocast(inside: bool, loss: lm.Loss) -> None:
    """The criterion may be called inside or outside of the autocast region."""
    model = ConvNet()
    want = copy.deepcopy((model, loss))
    reference = lm.attach(*want)(want[0](images()), LABELS)
    criterion = lm.attach(model, loss)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(images())
        got = criterion(outputs, LABELS) if inside else None
    got = criterion(outputs.float(), LABELS) if got is None else got
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference, rtol=0.03, atol=0.03)
    got.backward()
    assert model.fc.weight.grad.dtype == torch.float32


def test_half_precision_models() -> None:
    model = ConvNet().bfloat16()
    criterion = lm.attach(model, both)
    loss = criterion(model(images().bfloat16()), LABELS)
    loss.backward()
    assert loss.dtype == torch.float32
    assert criterion.banks[0].centroids.dtype == torch.float32
    assert model.fc.weight.grad.dtype == torch.bfloat16


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, D), nn.BatchNorm1d(D))
        self.fc = nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def test_the_bank_holds_features_of_training_mode() -> None:
    """Batch norm makes other features in evaluation; the bank keeps those of training."""
    model = Normed()
    criterion = lm.attach(model, both)
    outputs = model(vectors())
    seen = criterion.read(outputs).features
    criterion(outputs, LABELS)
    first = seen[LABELS == 0].mean(0)
    torch.testing.assert_close(criterion.banks[0].centroids[0], first)
    model.eval()
    evaluated = model.body(vectors())[LABELS == 0].mean(0)
    assert (evaluated - first).abs().max() > 0.05
    criterion(model(vectors()), LABELS)
    torch.testing.assert_close(criterion.banks[0].centroids[0], first)


def test_weight_decay_on_a_cosine_head_changes_norms_only() -> None:
    """Decay shortens prototypes: logits stay, the step in angle grows by 1 / norm squared."""
    model = Mlp()
    criterion = lm.attach(model, lm.CosFace(scale=8.0))
    before = model(vectors()).detach()
    optimizer = torch.optim.SGD([model.fc.weight], lr=0.5, weight_decay=1.0)
    model.fc.weight.grad = torch.zeros_like(model.fc.weight)
    optimizer.step()  # decay alone: every row is halved
    torch.testing.assert_close(model(vectors()), before)

    def turned(factor: float) -> Tensor:
        twin, loss = copy.deepcopy((model, criterion))
        with torch.no_grad():
            twin.fc.weight.mul_(factor)
        start = nn.functional.normalize(twin.fc.weight.detach())
        loss(twin(vectors()), LABELS).backward()
        assert (twin.fc.weight.grad * twin.fc.weight).sum(1).abs().max() < 1e-5
        with torch.no_grad():
            twin.fc.weight -= 1e-4 * twin.fc.weight.grad
        return (nn.functional.normalize(twin.fc.weight.detach()) - start).norm()

    torch.testing.assert_close(turned(0.5) / turned(1.0), torch.tensor(4.0), rtol=0.01, atol=0)


def test_weight_decay_on_a_linear_head_changes_the_logits() -> None:
    model = Mlp()
    lm.attach(model, lm.CrossEntropy())
    before = model(vectors()).detach()
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.5, weight_decay=1.0)
    for p in model.fc.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model(vectors()), before / 2)


def test_classes_the_batch_lacks_keep_their_centroid() -> None:
    model = Mlp()
    criterion = lm.attach(model, both)
    criterion(model(vectors()), LABELS)
    before = criterion.banks[0].centroids.clone()
    criterion(model(vectors(1)), torch.zeros(N, dtype=torch.long))
    after = criterion.banks[0].centroids
    assert torch.equal(after[1:], before[1:])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("stepping", ["automatic", "manual"])
def test_centers_move_once_per_step_by_all_micro_batches(stepping: Any) -> None:
    """Halves of a batch: the centers, and what they ask for, are those of the whole batch."""

    def centers(C: int, D: int) -> lm.Objective:
        return lm.Objective(softmax=lm.CrossEntropy(), center=lm.CenterLoss(C, D, strength=0.1))

    model = ConvNet()
    twin = copy.deepcopy(model)
    criterion = lm.attach(model, centers, accumulate=2, stepping=stepping)
    single = lm.attach(twin, centers)
    half = N // 2
    for step in range(3):
        x = images(step)
        parts = [
            criterion(model(x[rows]), LABELS[rows]) for rows in (slice(half), slice(half, None))
        ]
        if stepping == "manual":
            criterion.step()
        single(twin(x), LABELS)
        got, want = criterion.objective.terms["center"], single.objective.terms["center"]
        torch.testing.assert_close(got.centers, want.centers)
        assert all(bool(torch.isfinite(part)) for part in parts)
    assert criterion.steps == 3


def test_an_early_end_of_a_step_moves_the_centers() -> None:
    model = ConvNet()
    criterion = lm.attach(model, lm.CenterLoss(C, D), accumulate=4, stepping="manual")
    loss = criterion.objective.terms["center"]
    criterion(model(images()), LABELS)
    assert not loss.centers.any()
    state = copy.deepcopy(criterion.state_dict())
    criterion.step()
    assert loss.centers.any()
    again = lm.attach(ConvNet(), lm.CenterLoss(C, D), accumulate=4, stepping="manual")
    again.load_state_dict(state)
    again.step()
    assert torch.equal(again.objective.terms["center"].centers, loss.centers)
    plain = lm.CenterLoss(C, D)
    plain.load_state_dict(loss.state_dict())
    assert torch.equal(plain.centers, loss.centers)
    loss.load_state_dict(lm.CenterLoss(C, D).state_dict())
    assert not loss.centers.any()
    with pytest.raises(lm.LargeMarginError, match="accumulate is 1"):
        plain.commit()


def test_the_bank_of_a_model_that_is_double_later_is_double() -> None:
    model = ConvNet()
    twin = copy.deepcopy(model).double()
    late, early = lm.attach(model, both), lm.attach(twin, both)
    model.double()
    for step in range(2):
        x = images(step).double()
        torch.testing.assert_close(
            late(model(x), LABELS), early(twin(x), LABELS), rtol=1e-12, atol=0
        )
    assert late.banks[0].centroids.dtype == torch.float64
    assert torch.equal(late.banks[0].centroids, early.banks[0].centroids)
