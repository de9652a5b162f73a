"""Which kernel makes the statistics, statistics of logits, boundaries, and numbers of ranks."""

import importlib
import types

import pytest
import torch
from mutants.threads import Ranks

from largemargin import CosFace
from largemargin.errors import LargeMarginError
from largemargin.ops import class_stats, class_stats_from_logits
from largemargin.ops.boundary import paired_boundary_distance
from largemargin.ops.distributed import gather_ragged, world_size

# The function of this name hides the module of this name.
module = importlib.import_module("largemargin.ops.class_stats")

LOGITS = torch.tensor([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]])
LABELS = torch.tensor([0, 2])


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_soft_targets_are_refused_where_logits_are_not_kept(impl):
    with pytest.raises(LargeMarginError, match=f'impl="{impl}" was asked for with soft targets'):
        class_stats(torch.ones(2, 3), torch.eye(3), torch.ones(2, 3) / 3, impl=impl)


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_transforms_of_torch_func_are_refused_where_they_cannot_look_inside(monkeypatch, impl):
    monkeypatch.setattr(module, "missing", lambda *_: None)

    def rest(rows, how):
        return class_stats(rows, LOGITS, LABELS, impl=how).rest.sum()

    with pytest.raises(LargeMarginError, match=f'impl="{impl}" was asked for under a torch.func'):
        torch.func.grad(rest)(LOGITS, impl)
    want = torch.func.grad(rest)(LOGITS, "dense")
    monkeypatch.setattr(
        module, "dense_limit", lambda *_: 1
    )  # too many logits for "dense" otherwise
    assert torch.equal(torch.func.grad(rest)(LOGITS, "auto"), want)


def test_smoothed_labels_are_soft_targets_too():
    with pytest.raises(LargeMarginError, match=r"label_smoothing.*lm\.LabelSmoothing"):
        CosFace(label_smoothing=0.1, impl="chunked")(LOGITS, LOGITS, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("precision", "reason", "want"),
    [("bf16", None, "triton"), (None, None, "chunked"), ("bf16", "it is a test", "chunked")],
)
def test_kernels_are_taken_for_bfloat16_where_they_run(monkeypatch, precision, reason, want):
    monkeypatch.setattr(module, "missing", lambda *_: reason)
    device = types.SimpleNamespace(type="cuda")
    many = types.SimpleNamespace(shape=(2**14, 8), is_cuda=True, device=device)
    assert module._choose(many, many, False, precision) == want


def test_kernels_that_do_not_run_here_are_refused(monkeypatch):
    monkeypatch.setattr(module, "missing", lambda *_: None)
    module._check_impl("triton", LOGITS, LOGITS, torch.tensor([0, 1]))
    monkeypatch.setattr(module, "missing", lambda *_: "it is a test")
    with pytest.raises(LargeMarginError, match='impl="triton" was asked for, but it is a test'):
        class_stats(LOGITS, LOGITS, torch.tensor([0, 1]), impl="triton")


@pytest.mark.parametrize("scale", [1, 1.0, 2.0, torch.tensor(0.5), torch.tensor(1.0)], ids=str)
def test_logits_are_scaled_first(scale):
    stats = class_stats_from_logits(LOGITS, LABELS, scale=scale)
    factor = float(scale)
    assert stats.target.tolist() == pytest.approx([factor * 1, factor * 3])
    assert stats.rival.tolist() == pytest.approx([factor * 2, factor * 0.5])


def test_infinity_in_logits_is_only_looked_for_where_that_was_asked_for():
    logits = torch.tensor([[torch.nan, 1.0]])
    assert class_stats_from_logits(logits, torch.tensor([1])).rival.isnan().all()
    with pytest.raises(LargeMarginError, match="finite"):
        class_stats_from_logits(logits, torch.tensor([1]), check_finite=True)


def test_prototypes_at_a_distance_of_just_the_limit_have_no_boundary():
    points, own, other = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
    assert paired_boundary_distance(points, own, other, eps=5.0).item() == 0
    assert paired_boundary_distance(points, own, other, eps=4.9).item() == pytest.approx(1.4)


def test_one_process_is_a_world():
    assert world_size() == 1


def test_ranks_gather_vectors_of_any_length(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    found = ranks.run(lambda rank: gather_ragged(torch.arange(rank), -1).tolist())
    assert found == [[-1, -1, 0, -1, 0, 1]] * 3


def test_a_bias_is_a_tensor():
    with pytest.raises(LargeMarginError, match=r"bias must be a tensor of shape \(C,\), but list"):
        class_stats(LOGITS, LOGITS, torch.tensor([0, 1]), bias=[0.0, 0.0])
