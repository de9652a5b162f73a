"""``check_finite`` of a loss: what it watches, when, and what its messages name."""

import pytest
import torch

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.losses.base import loss as finite

LARGE = torch.full((2, 3), 1e25)
PROTOTYPES = torch.tensor([[1e20, 0, 0], [0, -1e20, 0]])
LABELS = torch.tensor([1, 0])


def overflowing(loss, *given, **named):
    """What the message says about sizes."""
    with pytest.raises(LargeMarginError, match="not finite, though its inputs are") as caught:
        loss(*given, **named)
    said = str(caught.value)
    return said[said.index("entries are ") + len("entries are ") : said.index(". Numbers")]


def test_messages_name_what_was_given():
    softmax = lm.CrossEntropy(check_finite=True)
    assert overflowing(softmax, LARGE, PROTOTYPES, LABELS) == "features 1e+25, prototypes 1e+20"
    assert overflowing(softmax, LARGE, PROTOTYPES, labels=LABELS) == (
        "features 1e+25, prototypes 1e+20"
    )
    logits = torch.tensor([[3e38, -3e38]])
    assert overflowing(softmax, logits, torch.tensor([1])) == "logits 3e+38"
    compact = lm.Compactness(check_finite=True)
    opposite = LARGE * torch.tensor([[1.0], [-1.0]])
    same = torch.tensor([0, 0])
    assert overflowing(compact, opposite, PROTOTYPES, labels=same) == (
        "features 1e+25, prototypes 1e+20"
    )


def test_one_value_of_many_is_enough():
    loss = lm.CrossEntropy(check_finite=True, reduction="none")
    logits = torch.tensor([[0.0, 0.0], [3e38, -3e38]])
    assert overflowing(loss, logits, torch.tensor([0, 1])) == "logits 3e+38"


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")],
)
def test_the_way_out_is_a_wider_dtype(dtype, wider):
    assert finite._numbers_end(torch.ones(1, dtype=getattr(torch, dtype))).endswith(f"in {wider}.")


def test_a_gradient_that_overflows_names_its_row():
    """Only the last row has one, and there only in one column; the value is finite."""
    features = torch.tensor([[1.0, 0], [1.0, 0], [1e-4, 0]]).half().requires_grad_()
    prototypes = torch.tensor([[0, 1.0], [0, -1]]).half()
    labels = torch.tensor([0, 0, 0])
    loss = lm.CosFace(scale=64.0, reduction="sum", check_finite=True)
    with pytest.raises(LargeMarginError, match="CosFace on features is not finite in row 2"):
        loss(features, prototypes, labels).backward()
    kept = torch.tensor([0, 0, -100])
    loss(features, prototypes, kept).backward()
    assert features.grad.isfinite().all()


def test_only_tensors_that_get_a_gradient_are_watched(monkeypatch):
    features = torch.ones(2, 2, requires_grad=True)
    weight = torch.ones(2, requires_grad=True)
    loss = lm.CosFace()
    given = features, torch.eye(2), LABELS
    seen, named = finite._watched(loss, given, {"sample_weight": weight})
    assert [new is old for new, old in zip(seen, given, strict=True)] == [False, True, True]
    assert named["sample_weight"] is weight
    assert seen[0]._base is features
    short, _ = finite._watched(loss, given[:2], {"labels": LABELS})
    assert len(short) == 2
    with torch.no_grad():
        assert finite._watched(loss, given, {})[0][0] is features
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert finite._watched(loss, given, {}) is None


def test_losses_that_differentiate_logits_see_the_logits_themselves():
    logits = torch.ones(2, 2, requires_grad=True)
    assert finite._watched(lm.MarginHinge(), (logits, LABELS, logits), {}) is None
