"""``SubCenterHead``: logits, first values, dominant sub-centers, wrong labels, many classes."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from oracles.cosine_family import dominant_centers, nearest_centers
from torch import nn

import largemargin as lm
from largemargin import LargeMarginError
from largemargin.measuring import find_wrong_labels
from largemargin.ops import chunked

N, C, K, D = 40, 5, 3, 4


def head_and_data(**options):
    torch.manual_seed(3)
    head = lm.SubCenterHead(D, C, centers=K, **options).double()
    return head, torch.randn(N, D, dtype=torch.float64), torch.arange(N) % C


@pytest.mark.parametrize("similarity", ["dot", "cosine", "cosine_prototypes", "euclidean"])
def test_logits_and_predictions(similarity):
    head, features, _ = head_and_data(similarity=similarity, scale=3.0)
    every = lm.functional.similarity_logits(
        features, head.weight.flatten(0, 1), similarity=similarity, scale=3.0
    )
    want = every.reshape(N, C, K).amax(2) + (0 if head.bias is None else 3.0 * head.bias)
    torch.testing.assert_close(head(features), want)
    torch.testing.assert_close(head(features.reshape(2, 20, D)), want.reshape(2, 20, C))
    best = head.predict(features, k=2, chunk_size=2)
    torch.testing.assert_close(best.scores, want.topk(2).values)
    assert torch.equal(best.classes, want.topk(2).indices)


def test_initial_rows_and_those_of_a_linear_layer():
    torch.manual_seed(0)
    head = lm.SubCenterHead(64, 50)
    assert head.weight.shape == (50, 3, 64)
    assert head.weight.norm(dim=2).mean().item() == pytest.approx(1, abs=0.05)
    assert lm.SubCenterHead(64, 50, similarity="dot").weight.abs().max() <= 1 / 8
    linear = nn.Linear(64, 50)
    made = lm.SubCenterHead.from_linear(linear, centers=2, similarity="dot")
    assert torch.equal(made.weight[:, 0], linear.weight)
    assert torch.equal(made.bias, linear.bias)
    assert not torch.equal(made.weight[:, 1], linear.weight)
    assert eval(repr(head), {"SubCenterHead": lm.SubCenterHead}).weight.shape == head.weight.shape
    again = copy.deepcopy(head)
    again.load_state_dict(head.state_dict())


def test_dominant_sub_centers_are_those_of_the_oracle():
    head, features, labels = head_and_data()
    labels = labels.clamp(max=C - 2)  # no sample of the last class
    parts = [
        head.own_cosines(*part) for part in zip(features.split(7), labels.split(7), strict=True)
    ]
    found = head.dominant(torch.cat(parts), labels)
    weight = head.weight.detach().numpy()
    centers, angles = dominant_centers(features.numpy(), weight, labels.numpy())
    assert found.centers.tolist() == centers.tolist()
    torch.testing.assert_close(found.angles, torch.as_tensor(angles))
    assert type(found.head) is lm.ClassHead
    assert torch.equal(found.head.weight, head.weight[torch.arange(C), found.centers])
    assert found.head.similarity == "cosine"


def test_a_maximum_over_sub_centers_is_no_linear_layer():
    head, features, labels = head_and_data()
    with pytest.raises(LargeMarginError, match=r"one vector per class.*3.*dominant"):
        head.to_linear()
    with pytest.raises(LargeMarginError, match=r"cosines must have shape \(N, K\) = \(40, 3\)"):
        head.dominant(features[:, :2], labels)
    own = head.own_cosines(features, labels)
    for wrong in (-100, C):
        with pytest.raises(LargeMarginError, match=rf"holds {wrong}.*leave their samples out"):
            head.dominant(own, labels.where(labels > 0, wrong))
    with pytest.raises(LargeMarginError, match="centers"):
        lm.SubCenterHead(D, C, centers=0)
    with pytest.raises(LargeMarginError, match=r"row 1 .*5|5.*row 1"):
        head.own_cosines(features[:2], torch.tensor([0, 5]))


def test_wrong_labels_gather_at_a_sub_center_of_their_own():
    """The paper's procedure: what is labelled wrongly is far from the dominant sub-center."""
    torch.manual_seed(0)
    truth = torch.arange(600) % 6
    inputs = torch.eye(6, 16)[truth] + 0.05 * torch.randn(600, 16)
    labels, wrong = truth.clone(), torch.rand(600) < 0.2
    labels[wrong] = (labels[wrong] + 1) % 6
    right = {}
    for centers in (1, 3):
        torch.manual_seed(0)
        head, loss = lm.SubCenterHead(16, 6, centers=centers), lm.ArcFace(margin=0.2, scale=16.0)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        for _ in range(60):
            optimizer.zero_grad()
            loss(inputs, head, labels).backward()
            optimizer.step()
        loader = [(inputs[i : i + 100], labels[i : i + 100]) for i in range(0, 600, 100)]
        found = find_wrong_labels(nn.Sequential(nn.Identity(), head), loader)
        doubted = torch.zeros(600, dtype=torch.bool).index_fill(0, found.rows, True)
        assert torch.equal(doubted, found.angles > math.radians(75))
        assert (found.angles[found.rows].diff() <= 0).all()
        right[centers] = (doubted == wrong).float().mean()
    assert right[3] > 0.98 > 0.95 > right[1]
    assert (found.head(inputs).argmax(1) == truth).all()


def test_labels_are_doubted_by_sub_center_heads_alone():
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    with pytest.raises(LargeMarginError, match=r"SubCenterHead.*its head is a Linear"):
        find_wrong_labels(nn.Linear(3, 2), data)
    model = nn.Sequential(lm.SubCenterHead(3, 2))
    with pytest.raises(LargeMarginError, match=r"max_angle.*radians"):
        find_wrong_labels(model, data, max_angle=75.0)
    with pytest.raises(LargeMarginError, match="empty"):
        find_wrong_labels(model, [])


def test_sub_centers_of_many_classes_keep_no_logits(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", 300)
    monkeypatch.setattr(chunked, "MIN_BLOCK", 1)
    head, features, labels = head_and_data()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], id):
        lm.functional.cosface(features, head.weight, labels, impl="chunked").sum()
    assert max(kept) <= N * D
    bias = torch.randn(C, dtype=torch.float64, requires_grad=True)
    found = []
    for impl in ("dense", "chunked"):
        value = lm.functional.kobayashi(
            *(features, head.weight, labels), bias=bias, similarity="euclidean", impl=impl
        )
        found.append([value.detach(), *torch.autograd.grad(value.sum(), (head.weight, bias))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_what_cannot_have_sub_centers_says_why():
    head, features, labels = head_and_data()
    with pytest.raises(LargeMarginError, match=r"triton.*sub-centers.*chunked"):
        lm.CosFace(impl="triton")(features, head, labels)
    model = nn.Sequential(nn.Linear(D, D).double(), head)
    with pytest.raises(LargeMarginError, match=r"weight must have shape \(C, D\).*dominant"):
        lm.measure(model, [(features, labels)])


def test_nearest_of_the_oracle_breaks_ties_as_the_head_does():
    rows = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    features = torch.eye(2).requires_grad_()
    weight = rows.clone().requires_grad_()
    for impl in ("dense", "chunked"):
        (slope,) = torch.autograd.grad(
            lm.functional.normface(features, weight, torch.tensor([1, 0]), impl=impl).sum(), weight
        )
        assert slope[:, 0].any(1).all()
        assert not slope[:, 1].any()
    assert nearest_centers(features.detach().numpy(), rows.numpy()).tolist() == [[0, 0], [0, 0]]


def test_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "wrong_labels.md"
    names = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    doubted = torch.zeros(600, dtype=torch.bool).index_fill(0, names["found"].rows, True)
    assert (doubted == names["wrong"]).float().mean() > 0.95
    assert type(names["model"][1]) is lm.ClassHead
