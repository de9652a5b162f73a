"""Losses on class centroids: weights of classes, hard labels, what is known about a batch."""

import pytest
import torch

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.losses.base.terms import check_margin

FEATURES = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
PROTOTYPES = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 0, 1])
WEIGHT = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)


@pytest.mark.parametrize("name", ["Compactness", "CentroidMargin", "CentroidNorm"])
def test_classes_weigh_what_they_were_given(name):
    def value(**options):
        return getattr(lm, name)(**options).double()(FEATURES * 3, PROTOTYPES, LABELS)

    plain, weighed = (value(reduction="none", weight=w).tolist() for w in (None, WEIGHT))
    of_rows = [1, 1, 3] if name == "Compactness" else [1, 3, 7]
    assert any(plain)
    assert weighed == pytest.approx([w * x for w, x in zip(of_rows, plain, strict=True)])
    by_class = [sum(plain[:2]) / 2, plain[2]] if name == "Compactness" else plain[:2]
    assert value(weight=WEIGHT).item() == pytest.approx((by_class[0] + 3 * by_class[1]) / 4)
    assert value().item() == pytest.approx(sum(by_class) / 2)


def test_soft_targets_have_no_centroids():
    with pytest.raises(LargeMarginError, match="The centroid of a soft class"):
        lm.CentroidMargin().batch(FEATURES, PROTOTYPES, torch.ones(3, 3) / 3)


def test_rows_are_known_to_count_only_where_asking_is_free(monkeypatch):
    loss = lm.CentroidMargin()
    assert loss.batch(FEATURES, PROTOTYPES, LABELS).complete
    assert not loss.batch(FEATURES, PROTOTYPES, torch.tensor([0, -100, 1])).complete
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not loss.batch(FEATURES, PROTOTYPES, LABELS).complete


def test_margins_of_classes_have_limits():
    limits = {"at_least": 0, "below": 1, "hint": ""}
    check_margin("m", torch.tensor([0.0, 0.5]), limits)
    for bad in ([0.5, -0.1], [0.5, 1.0], [0.5, torch.nan]):
        with pytest.raises(LargeMarginError, match="entry 1 is"):
            check_margin("m", torch.tensor(bad), limits)
    check_margin("m", torch.full((2,), 9.0, device="meta"), limits)  # not looked at


def test_weights_of_classes_are_copies_without_a_gradient():
    given = torch.ones(3, requires_grad=True)
    loss = lm.CosFace(weight=given)
    assert not loss.weight.requires_grad
    assert loss.weight.data_ptr() != given.data_ptr()
