"""An attached loss keeps every option of the loss itself: value and gradients of a direct call."""

import copy

import pytest
import torch
from torch import nn

import largemargin as lm
from largemargin.losses.base.loss import Loss

CLASSES, DIM = 5, 6
OF_ROWS = sorted(
    key
    for key, kind in lm.LOSSES.items()
    if kind.row_loss is not Loss.row_loss and not kind.is_penalty
)
"""Losses that a criterion computes from rows of the head's logits, unless an option forbids it."""
SETTINGS = {
    "plain": {},
    "a class is ignored": {"ignore_index": 2},
    "a class below all is ignored": {"ignore_index": -1},
    "nothing is ignored": {"ignore_index": None},
    "smoothed": {"label_smoothing": 0.1},
    "class weights": {"weight": torch.arange(1.0, CLASSES + 1)},
    "sum": {"reduction": "sum"},
    "prior": {"prior": torch.arange(1.0, CLASSES + 1)},
    "chunked": {"impl": "chunked"},
    "validated": {"validate": True},
}


def labels_for(setting):
    labels = torch.tensor([0, 1, 2, 2, 4, 3, 1, 0])
    return (
        torch.where(labels == 3, -1, labels)
        if setting == "a class below all is ignored"
        else labels
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("key", OF_ROWS)
def test_attached_as_called(key, setting, dtype):
    options = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) else value
        for name, value in SETTINGS[setting].items()
    }
    scale = {"scale": 4.0} if lm.LOSSES[key].head_similarity == "cosine" else {}
    loss = lm.LOSSES[key](**scale, **options).to(dtype)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, DIM), nn.Linear(DIM, CLASSES)).to(dtype)
    criterion = lm.attach(model, copy.deepcopy(loss), warn=False)
    inputs, labels = torch.randn(8, 4, dtype=dtype), labels_for(setting)

    criterion(model(inputs), labels).backward()
    found = [model[0].weight.grad.clone(), model[1].weight.grad.clone()]
    value = sum(term.detach() for term in criterion.terms.values())

    model.zero_grad()
    criterion.undo()
    head = model[1] if loss.takes_logits else model[1].weight
    wanted = loss(model[0](inputs), head, labels)
    wanted.backward()
    close = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(value, wanted.detach(), **close)
    for mine, theirs in zip(found, (model[0].weight.grad, model[1].weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("key", OF_ROWS)
def test_ignored_samples_are_not_there(key):
    """The direct call may share a mistake with the attached one: here the samples are left out."""
    scale = {"scale": 4.0} if lm.LOSSES[key].head_similarity == "cosine" else {}
    loss = lm.LOSSES[key](ignore_index=2, **scale)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, DIM), nn.Linear(DIM, CLASSES))
    criterion = lm.attach(model, loss, warn=False)
    inputs, labels = torch.randn(8, 4), labels_for("plain")
    kept = labels != 2
    with_ignored = criterion(model(inputs), labels)
    without = criterion(model(inputs[kept]), labels[kept])
    torch.testing.assert_close(with_ignored, without)
    direct = loss(inputs[:, :4] @ torch.eye(4, DIM), torch.eye(CLASSES, DIM), labels)
    alone = loss((inputs @ torch.eye(4, DIM))[kept], torch.eye(CLASSES, DIM), labels[kept])
    torch.testing.assert_close(direct, alone)
