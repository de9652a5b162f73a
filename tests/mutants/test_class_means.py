"""Means of classes over the batches of several ranks, which are threads here."""

import importlib
import types

import pytest
import torch
from mutants.threads import Ranks

from largemargin.errors import LargeMarginError
from largemargin.heads.centroid_bank import CentroidBank, class_means

module = importlib.import_module("largemargin.heads.centroid_bank")

FEATURES = torch.tensor([[1.0], [2.0], [4.0], [7.0], [5.0]])
LABELS = torch.tensor([3, 5, 0, 3, 5])
SIZES = (1, 2, 0, 2)


@pytest.mark.parametrize("slots", [9, 2], ids=["by class", "by sample"])
def test_ranks_have_the_means_of_the_joined_batch(monkeypatch, slots):
    monkeypatch.setattr(module, "SHARED_SLOTS", slots)
    ranks = Ranks(len(SIZES), monkeypatch)

    def task(rank):
        mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        features = FEATURES[mine].clone().requires_grad_()
        valid = torch.ones(SIZES[rank], dtype=torch.bool)
        found = class_means(features, LABELS[mine], 9, valid, sync=True)
        assert found.by_class == (slots == 9)
        (found.means.square().sum() / len(SIZES)).backward()
        return found, features.grad

    found = ranks.run(task)
    for rank, (each, _) in enumerate(found):
        mine = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        want = {3: 4.0, 5: 3.5, 0: 4.0}
        assert each.means[each.of_sample, 0].tolist() == [want[y] for y in LABELS[mine].tolist()]
        assert each.classes[each.of_sample].tolist() == LABELS[mine].tolist()
        assert each.counts[each.of_sample].tolist() == [1 if y == 0 else 2 for y in LABELS[mine]]
        assert each.present.sum() == 3
    # The joined batch is 3 - | 5 0 | - - | 3 5: a rank that has fewer has rows that hold nothing.
    if slots == 2:
        rows = [each.of_sample.tolist() for each, _ in found]
        assert rows == [[0], [2, 3], [], [0, 2]]
    slopes = torch.cat([grad for _, grad in found]).flatten()
    assert slopes.tolist() == pytest.approx([4.0, 3.5, 8.0, 4.0, 3.5])


def test_what_passes_have_read_is_found_by_the_batch_most_like_it(monkeypatch):
    replay = module.Replay()
    batches = [torch.tensor([[float(n), -1.0]]) for n in range(10)]
    for batch in batches:
        replay.remember(batch, (batch,))
    assert len(replay.entries) == 8
    shape = batches[0].shape
    assert replay.recall(batches[5], shape) is None  # not in a backward pass
    monkeypatch.setattr(module, "recomputing", lambda: True)
    for number in (2, 5, 9):
        assert replay.recall(batches[number] + 0.1, shape)[0] is batches[number]
    assert replay.recall(batches[5], torch.Size((2, 2))) is None


def test_a_bank_leaves_out_labels_that_do_not_exist_even_where_they_are_called_valid():
    features = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    for given in (None, torch.ones(4, dtype=torch.bool)):
        bank = CentroidBank(3, 1)
        bank(features, torch.tensor([0, 3, -1, 7]), given)
        assert bank.centroids.flatten().tolist() == [1, 0, 0]
        assert bank.counts.tolist() == [1, 0, 0]


def test_settings_of_a_bank():
    assert CentroidBank(2, 1).sync is True
    with pytest.raises(LargeMarginError, match="dim"):
        CentroidBank(2, 0)


def never(*_):
    raise AssertionError("the ranks were asked")


def test_banks_ask_other_ranks_in_training_and_where_told_to(monkeypatch):
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module, "all_reduce_sum", never)
    given = torch.ones(2, 1), torch.tensor([0, 1])
    CentroidBank(2, 1, sync=False)(*given)
    CentroidBank(2, 1).eval()(*given)
    with pytest.raises(AssertionError, match="the ranks were asked"):
        CentroidBank(2, 1)(*given)


@pytest.mark.parametrize("classes", [2, 9])
def test_a_pass_that_is_computed_again_reads_what_it_read_before(monkeypatch, classes):
    bank = CentroidBank(classes, 1, momentum=0.5)
    labels = torch.tensor([0, 0, 1])
    batches = [torch.tensor([[x], [x], [-2 * x]]) for x in (1.0, 5.0, 9.0)]
    first = [bank(batch, labels).compact for batch in batches]
    kept = bank.centroids.clone()
    monkeypatch.setattr(module, "recomputing", lambda: True)
    for batch, compact in zip(batches, first, strict=True):
        assert torch.equal(bank(batch, labels).compact, compact)
    assert torch.equal(bank.centroids, kept)


class OnDevice(torch.Tensor):
    """Takes itself for a tensor on a GPU, where asking would wait."""

    device = types.SimpleNamespace(type="cuda")

    def all(self):
        raise AssertionError("the flags were waited for")


def test_flags_on_a_gpu_are_not_waited_for():
    known = torch.ones(2, dtype=torch.bool).as_subclass(OnDevice)
    blended = CentroidBank(2, 1, momentum=0.5)._blend(torch.ones(2, 1), torch.zeros(2, 1), known)
    assert blended.tolist() == [[0.5], [0.5]]


def test_one_sample_of_a_class_is_enough_to_write_it():
    bank = CentroidBank(2, 1, accumulate=2)
    for label in (0, 1):
        bank(torch.tensor([[3.0 + label]]), torch.tensor([label]))
    assert bank.centroids.flatten().tolist() == [3, 4]


def test_what_is_pending_is_loaded_or_empty():
    collecting = CentroidBank(2, 1, accumulate=3)
    collecting(torch.tensor([[3.0]]), torch.tensor([1]))
    other = CentroidBank(2, 1, accumulate=3)
    other.load_state_dict(collecting.state_dict())
    assert other.pending_sums.flatten().tolist() == [0, 3]
    assert other.pending_steps == 1
    other.load_state_dict(CentroidBank(2, 1).state_dict())
    assert other.pending_sums.flatten().tolist() == [0, 0]
    assert other.pending_steps == 0
    plain = CentroidBank(2, 1)
    plain.load_state_dict(collecting.state_dict())
    assert plain.pending_sums.flatten().tolist() == [0, 3]


def test_rows_that_count_have_hard_labels():
    with pytest.raises(LargeMarginError, match="soft"):
        module.valid_rows(torch.ones(3, 2) / 2, 2, None, None)
