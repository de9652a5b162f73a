"""The centroid bank against the definition of NGY-PM, written out class by class."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from largemargin import CenterLoss, CentroidBank, Discriminative, LargeMarginError

C, D, GAMMA = 5, 3, 0.75
STRATEGIES = ("none", "both", "partial")


def batch(seed: int, classes: list[int], num: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes)[torch.randint(len(classes), (num,), generator=generator)]
    labels[: len(classes)] = torch.tensor(classes)
    features = torch.randn(num, D, generator=generator, dtype=torch.float64)
    return features.requires_grad_(), labels


def make(**options: object) -> CentroidBank:
    return CentroidBank(C, D, **{"momentum": GAMMA, **options}).double()


def by_class(bank: CentroidBank, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(C, D) compact and margin centroids of a training forward, absent classes 0."""
    out = bank(features, labels)
    rows = torch.where(out.slots.present, 1.0, 0.0).double()[:, None]
    empty = torch.zeros(bank.num_classes, D, dtype=torch.float64)
    return (
        empty.index_add(0, out.slots.classes, rows * out.compact),
        empty.index_add(0, out.slots.classes, rows * out.margin),
    )


def reference(state: dict[int, Tensor], features: Tensor, labels: Tensor) -> dict[int, Tensor]:
    new = dict(state)
    for c in labels.unique().tolist():
        mean = features[labels == c].mean(0).detach()
        new[c] = GAMMA * state.get(c, mean) + (1 - GAMMA) * mean
    return new


SEQUENCE = [([0, 1], 12), ([1, 2, 4], 12), ([0, 1, 2, 4], 4), ([2], 2), ([0], 12)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sequence_of_batches_follows_the_definition(strategy: str) -> None:
    bank, state, counts = make(strategy=strategy), {}, torch.zeros(C, dtype=torch.long)
    for step, (classes, num) in enumerate(SEQUENCE):
        features, labels = batch(step, classes, num)
        bank(features, labels)
        state = reference(state, features, labels)
        counts += torch.bincount(labels, minlength=C)
        for c in range(C):
            want = state.get(c, torch.zeros(D, dtype=torch.float64))
            torch.testing.assert_close(bank.centroids[c], want)
        assert bank.seen.tolist() == [c in state for c in range(C)]
        assert torch.equal(bank.counts, counts)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num", [12, 3])
def test_which_centroid_serves_which_term_and_with_what_gradient(strategy: str, num: int) -> None:
    bank = make(strategy=strategy)
    bank(*batch(0, [0, 1, 2], num))
    before = bank.centroids.clone()
    features, labels = batch(1, [0, 1, 2], num)
    compact, margin = by_class(bank, features, labels)
    for c in range(3):
        current = features[labels == c].mean(0)
        blended = GAMMA * before[c] + (1 - GAMMA) * current
        torch.testing.assert_close(compact[c], current if strategy == "none" else blended)
        torch.testing.assert_close(margin[c], blended if strategy == "both" else current)
        share = (labels == c).double()[:, None] / (labels == c).sum()
        for tensor, is_momentum in ((compact, strategy != "none"), (margin, strategy == "both")):
            (got,) = torch.autograd.grad(tensor[c].sum(), features, retain_graph=True)
            want = share * ((1 - GAMMA) if is_momentum else 1.0)
            torch.testing.assert_close(got, want.expand_as(got))


@pytest.mark.parametrize(("rule", "factor"), [("scaled", 1 - GAMMA), ("full", 1.0)])
def test_first_sight_takes_the_current_centroid(rule: str, factor: float) -> None:
    bank = make(strategy="both", first_seen=rule)
    bank(*batch(0, [0]))
    features, labels = batch(1, [0, 1])
    known = bank.centroids[0].clone()
    compact, _ = by_class(bank, features, labels)
    mean = features[labels == 1].mean(0)
    torch.testing.assert_close(compact[1], mean)  # never blended with the zeros it starts from
    torch.testing.assert_close(bank.centroids[1], mean.detach())
    blended = GAMMA * known + (1 - GAMMA) * features[labels == 0].mean(0)
    torch.testing.assert_close(bank.centroids[0], blended.detach())
    for c, want in ((0, 1 - GAMMA), (1, factor)):
        (got,) = torch.autograd.grad(compact[c].sum(), features, retain_graph=True)
        torch.testing.assert_close(got.sum(0), torch.full((D,), want, dtype=torch.float64))


def test_absent_classes_keep_every_bit() -> None:
    for num in (12, 2):
        bank = make()
        bank(*batch(0, list(range(C))))
        before = bank.centroids.clone(), bank.counts.clone()
        bank(*batch(1, [1], num))
        others = [0, 2, 3, 4]
        assert torch.equal(bank.centroids[others], before[0][others])
        assert torch.equal(bank.counts[others], before[1][others])
        assert not torch.equal(bank.centroids[1], before[0][1])


def test_the_same_batch_twice() -> None:
    bank, (features, labels) = make(), batch(0, [0, 1])
    other, other_labels = batch(1, [0, 1])
    bank(other, other_labels)
    old = bank.centroids.clone()
    bank(features, labels)
    bank(features, labels)
    for c in range(2):
        m = features[labels == c].mean(0).detach()
        once = GAMMA * old[c] + (1 - GAMMA) * m
        torch.testing.assert_close(bank.centroids[c], GAMMA * once + (1 - GAMMA) * m)


def test_evaluation_reads_without_writing() -> None:
    bank = make(strategy="both")
    bank(*batch(0, [0, 1]))
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    features, labels = batch(1, [0, 1, 2])
    bank.eval()
    compact, _ = by_class(bank, features, labels)
    torch.testing.assert_close(
        compact[0], GAMMA * before["centroids"][0] + (1 - GAMMA) * features[labels == 0].mean(0)
    )
    torch.testing.assert_close(compact[2], features[labels == 2].mean(0))  # unseen: current
    for name, value in bank.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("num", [12, 3])
def test_no_gradient_reaches_the_bank_and_none_is_kept_in_it(num: int) -> None:
    bank = make(strategy="both")
    losses = []
    for step in range(3):
        features, labels = batch(step, [0, 1, 2], num)
        losses.append(by_class(bank, features, labels)[0].square().sum())
        for buffer in bank.buffers():
            assert not buffer.requires_grad
            assert buffer.grad_fn is None
    # Later writes must not disturb the graphs of earlier steps.
    for loss in losses:
        loss.backward()
    assert not list(bank.parameters())


def test_the_bank_is_the_same_under_every_strategy_and_they_can_be_switched() -> None:
    banks = [make(strategy=strategy) for strategy in STRATEGIES]
    switched = make(strategy="none")
    for step in range(3):
        features, labels = batch(step, [0, 2, step])
        for bank in [*banks, switched]:
            bank(features, labels)
    for bank in banks[1:]:
        assert torch.equal(bank.centroids, banks[0].centroids)
    switched.strategy = "both"
    features, labels = batch(9, [0, 2])
    got, want = by_class(switched, features, labels), by_class(banks[1], features, labels)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def discriminative(**options: object) -> Discriminative:
    return Discriminative(C, D, **{"momentum": GAMMA, **options}).double()


def test_without_momentum_all_strategies_are_one() -> None:
    weight = torch.randn(C, D, dtype=torch.float64)
    results = []
    for strategy in STRATEGIES:
        loss, rows = discriminative(strategy=strategy, momentum=0.0), []
        for step in range(3):
            features, labels = batch(step, [0, 1, 3])
            value = loss(features, weight, labels)
            rows += [value.detach(), *torch.autograd.grad(value, features), loss.bank.centroids]
        results.append(rows)
    for rows in results[1:]:
        for got, want in zip(rows, results[0], strict=True):
            torch.testing.assert_close(got, want)


def test_momentum_scales_the_margin_gradient_at_an_equal_bank() -> None:
    # Spec 14.8, strategies both and none: where the bank holds the current centroids.
    weight, gradients = torch.randn(C, D, dtype=torch.float64), {}
    features, labels = batch(0, [0, 1, 2])
    for strategy in STRATEGIES:
        loss = discriminative(strategy=strategy, alpha=0.0, gamma_reg=0.0)
        loss(features, weight, labels)
        (gradients[strategy],) = torch.autograd.grad(loss(features, weight, labels), features)
    assert gradients["none"].abs().max() > 0
    torch.testing.assert_close(gradients["both"], (1 - GAMMA) * gradients["none"])
    assert torch.equal(gradients["partial"], gradients["none"])


def test_momentum_one_freezes_what_was_seen() -> None:
    bank = make(momentum=1.0, strategy="both")
    features, labels = batch(0, [0, 1])
    bank(features, labels)
    before = bank.centroids.clone()
    compact, _ = by_class(bank, *batch(1, [0, 1]))
    assert torch.equal(bank.centroids, before)
    torch.testing.assert_close(compact.detach(), before)


def test_state_dict_round_trip_goes_on_where_it_stopped() -> None:
    loss, other = discriminative(), discriminative()
    weight = torch.randn(C, D, dtype=torch.float64)
    loss(batch(0, [0, 1])[0], weight, batch(0, [0, 1])[1])
    state = loss.state_dict()
    assert {"bank.centroids", "bank.seen", "bank.counts"} <= set(state)
    other.load_state_dict(copy.deepcopy(state))
    assert other.bank.seen.tolist() == [True, True, False, False, False]
    features, labels = batch(1, [0, 2])
    assert torch.equal(loss(features, weight, labels), other(features, weight, labels))
    assert torch.equal(loss.bank.centroids, other.bank.centroids)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_go_on_by_themselves(clone) -> None:
    for accumulate in (1, 2):
        bank = make(accumulate=accumulate)
        for step in range(3):
            bank(*batch(step, [0, 1]))
        other = clone(bank)
        before = bank.centroids.clone()
        other(*batch(3, [0, 2]))
        other(*batch(4, [0, 2]))
        assert torch.equal(bank.centroids, before)
        bank(*batch(3, [0, 2]))
        bank(*batch(4, [0, 2]))
        assert torch.equal(bank.centroids, other.centroids)
        assert torch.equal(bank.seen, other.seen)


def pieces(count: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(10 + i, [[0, 1], [1, 2], [4]][i % 3]) for i in range(count)]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([f for f, _ in parts]), torch.cat([y for _, y in parts])


def test_accumulated_micro_batches_write_the_bank_of_the_joined_batch() -> None:
    many, one = make(accumulate=3), make()
    for bank in (many, one):
        if bank is one:
            bank(*batch(0, [0, 1]))
        else:
            for _ in range(3):
                bank(*batch(0, [0, 1]))  # three times the same: the same mean
    one.counts *= 3
    for _ in range(2):
        parts = pieces(3)
        before = many.centroids.clone(), many.counts.clone()
        for part in parts[:2]:
            many(*part)
            assert torch.equal(many.centroids, before[0])
            assert torch.equal(many.counts, before[1])
        many(*parts[2])
        one(*joined(parts))
        torch.testing.assert_close(many.centroids, one.centroids)
        assert torch.equal(many.seen, one.seen)
        assert torch.equal(many.counts, one.counts)


def test_commit_writes_what_is_pending_and_says_when_it_cannot() -> None:
    bank, one = make(accumulate=None), make()
    parts = pieces(3)
    for part in parts:
        bank(*part)
    assert not bank.seen.any()
    bank.commit()
    one(*joined(parts))
    torch.testing.assert_close(bank.centroids, one.centroids)
    bank.commit()  # nothing pending: nothing changes
    torch.testing.assert_close(bank.centroids, one.centroids)
    with pytest.raises(LargeMarginError, match=r"accumulate"):
        make().commit()


def test_commit_with_an_optimizer_writes_once_per_step() -> None:
    weight = torch.nn.Parameter(torch.randn(C, D, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    loss, one = discriminative(), make()
    handle = loss.bank.commit_with(optimizer)
    for count in (1, 3, 2):
        parts = pieces(count)
        before = loss.bank.centroids.clone()
        for part in parts:
            loss(part[0], weight, part[1]).backward()
            assert torch.equal(loss.bank.centroids, before)
        optimizer.step()
        one(*joined(parts))
        torch.testing.assert_close(loss.bank.centroids, one.centroids)
        assert torch.equal(loss.bank.counts, one.counts)
    handle.remove()
    optimizer.step()
    torch.testing.assert_close(loss.bank.centroids, one.centroids)


def test_a_checkpoint_loads_before_and_after_commit_with() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    saved, after, before = make(), make(), make()
    saved.commit_with(optimizer)
    for part in pieces(3):
        saved(*part)
    saved.commit()
    after.commit_with(optimizer)
    after.load_state_dict(saved.state_dict())
    before.load_state_dict(saved.state_dict())
    before.commit_with(optimizer)
    for bank in (after, before):
        assert torch.equal(bank.centroids, saved.centroids)
        assert torch.equal(bank.seen, saved.seen)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_half_precision_models_keep_a_float32_bank(accumulate: int) -> None:
    exact = torch.tensor(1 + 2**-20)
    for cast in (torch.nn.Module.half, torch.nn.Module.bfloat16):
        loss = Discriminative(C, D, accumulate=accumulate)
        loss.bank.centroids.fill_(exact)
        cast(loss)
        assert {b.dtype for b in loss.buffers()} == {torch.float32, torch.bool, torch.long}
        assert (loss.bank.centroids == exact).all()
        features, labels = batch(0, [0, 1])
        dtype = torch.float16 if cast is torch.nn.Module.half else torch.bfloat16
        value = loss(features.to(dtype), torch.eye(C, D, dtype=dtype), labels)
        assert value.dtype == torch.float32
    wide = Discriminative(C, D, accumulate=accumulate).double()
    assert {b.dtype for b in wide.buffers()} == {torch.float64, torch.bool, torch.long}
    assert {b.dtype for b in wide.float().buffers()} == {torch.float32, torch.bool, torch.long}


def test_half_precision_models_keep_float32_centers() -> None:
    assert CenterLoss(C, D).half().centers.dtype == torch.float32
    assert CenterLoss(C, D).to(torch.bfloat16).centers.dtype == torch.float32
    assert CenterLoss(C, D).double().centers.dtype == torch.float64


def test_arguments_are_checked() -> None:
    bank = make()
    with pytest.raises(LargeMarginError, match=r"dim"):
        bank(torch.zeros(2, D + 1, dtype=torch.float64), torch.tensor([0, 1]))
    for wrong in ({"strategy": "half"}, {"first_seen": "zero"}, {"momentum": 1.5}):
        with pytest.raises(LargeMarginError, match=next(iter(wrong))):
            make(**wrong)
    with pytest.raises(LargeMarginError, match="accumulate"):
        make(accumulate=0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflowing_batch_does_not_spoil_the_bank(accumulate: int) -> None:
    bank = CentroidBank(3, 2, momentum=0.5, accumulate=accumulate)
    good = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    labels = torch.tensor([0, 1])
    for _ in range(accumulate):
        bank(good, labels)
    before = bank.centroids.clone()
    bank(torch.tensor([[torch.inf, 0.0], [5.0, 6.0]]), labels)
    for _ in range(accumulate - 1):
        bank(good, labels)
    assert bool(torch.isfinite(bank.centroids).all())
    assert not torch.equal(bank.centroids[1], before[1])
