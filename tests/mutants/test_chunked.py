"""Statistics in blocks of classes: their size, and what was not asked for."""

import pytest
import torch

from largemargin.errors import LargeMarginError
from largemargin.ops import chunked, shards
from largemargin.ops.dense import dense_stats
from largemargin.ops.similarity import AffineForm

NAMES = ("target", "rival", "rest", "spread", "mean")


@pytest.mark.parametrize(
    ("samples", "classes", "device", "size"),
    [
        (1, 2**30, "cpu", 2**20),
        (1, 2**30, "cuda", 2**25),
        (0, 2**30, "cpu", 2**20),
        (2**10, 2**30, "cpu", 2**10),
        (2**20, 2**30, "cpu", 256),
        (1, 7, "cpu", 7),
    ],
)
def test_sizes_of_blocks(samples, classes, device, size):
    assert chunked.block_size(samples, classes, device) == size


def form(logits):
    """Of so many samples as rows: prototypes that give these logits."""
    return AffineForm(torch.eye(len(logits)), logits.T.contiguous(), None, None, False, None)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), ("rest", "mean"), NAMES], ids=str)
def test_nothing_is_returned_that_was_not_asked_for(names):
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 4, 2])
    found = chunked.chunked_stats(form(logits), labels, names)
    want = dense_stats(logits, labels, names)
    for got, value in zip(found, want, strict=True):
        assert (got is None) == (value is None)
        assert got is None or torch.allclose(got, value)


def test_logits_of_almost_any_size_are_above_the_hidden_target():
    """Down to a quarter of the range of float32, and up to three quarters of it."""
    logits = torch.tensor([[0.0, -8e37, -8.2e37], [0.0, 2e38, 1e38]])
    labels = torch.tensor([0, 0])
    _, rival, index, rest, spread, _ = chunked.chunked_stats(form(logits), labels, NAMES)
    for values in (rival, rest, spread):
        assert values.tolist() == pytest.approx([-8e37, 2e38], rel=1e-6)
    assert index.tolist() == [1, 1]


def test_of_equal_rivals_the_first_counts_in_whichever_block(monkeypatch):
    monkeypatch.setattr(chunked, "block_size", lambda *_: 1)
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    stats = chunked.chunked_stats(form(logits), torch.tensor([0]), ("rival",))
    assert stats[2].tolist() == [1]


def test_gradients_are_marked_where_somebody_may_differentiate_them_again(monkeypatch):
    marked = []
    unwatched = shards._Once.apply
    monkeypatch.setattr(
        shards._Once, "apply", lambda *given: marked.append(given) or unwatched(*given)
    )
    for again in (False, True):
        rows = torch.eye(2, requires_grad=True)
        given = AffineForm(rows, torch.ones(3, 2), None, None, False, None)
        rest = chunked.chunked_stats(given, torch.tensor([0, 1]), ("rest",))[3]
        torch.autograd.grad(rest.sum(), rows, create_graph=again)
        assert len(marked) == again


@pytest.mark.parametrize("function", [torch.square, torch.clone])
def test_second_derivatives_by_the_bias_alone_are_refused(function):
    """Also of a function that is linear in the statistics, whose gradients have no graph."""
    bias = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    given = AffineForm(torch.eye(2), torch.ones(3, 2), bias, None, False, None)
    rest = chunked.chunked_stats(given, torch.tensor([0, 1]), ("rest",))[3]
    (slope,) = torch.autograd.grad(function(rest).sum(), bias, create_graph=True)
    with pytest.raises(LargeMarginError, match="once only"):
        torch.autograd.grad(slope.sum(), bias)


def test_second_derivatives_by_what_a_loss_adds_are_refused():
    """The way to a factor of the statistics leads through their gradients alone."""
    rows, factor = torch.eye(2, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    given = AffineForm(rows, torch.ones(3, 2), None, None, False, None)
    rest = chunked.chunked_stats(given, torch.tensor([0, 1]), ("rest",))[3]
    (slope,) = torch.autograd.grad((factor * rest).sum(), rows, create_graph=True)
    with pytest.raises(LargeMarginError, match="once only"):
        torch.autograd.grad(slope.sum(), factor)


def test_no_gradient_is_made_for_what_needs_none(monkeypatch):
    made = []
    unwatched = chunked._backward
    monkeypatch.setattr(
        chunked, "_backward", lambda *given: made.append(unwatched(*given)) or made[-1]
    )
    rows, columns = torch.eye(2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    for given in ((rows, columns.detach()), (rows.detach(), columns)):
        form = AffineForm(*given, None, None, False, None)
        chunked.chunked_stats(form, torch.tensor([0, 1]), ("rest",))[3].sum().backward()
    assert [[each is None for each in results] for results in made] == [
        [False, True, True],
        [True, False, True],
    ]


def test_compiled_code_puts_gradients_together_from_parts(monkeypatch):
    """In the backward pass, where the forward pass was not compiled."""
    monkeypatch.setattr(chunked, "block_size", lambda *_: 2)
    columns = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0]], requires_grad=True)
    found = []
    for compiling in (False, True):
        given = AffineForm(torch.eye(2), columns, None, None, False, None)
        rest = chunked.chunked_stats(given, torch.tensor([0, 1]), ("rest",))[3]
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda known=compiling: known)
        found += torch.autograd.grad(rest.sum(), columns)
        monkeypatch.undo()
        monkeypatch.setattr(chunked, "block_size", lambda *_: 2)
    assert torch.equal(*found)
    assert found[0].abs().sum() > 1


@pytest.mark.parametrize("label", [2, 5])
def test_blocks_of_bias_minus_infinity_are_not_there(monkeypatch, label):
    """Before, around and after the others: as without these classes."""
    monkeypatch.setattr(chunked, "block_size", lambda *_: 2)
    logits = torch.tensor([[3.0, 1.0, 0.5, 2.0, 4.0, 1.5, 2.5, 0.0]])
    masked = torch.tensor([True, True, False, False, True, False, True, True])
    bias = torch.zeros(8).masked_fill(masked, -torch.inf)
    whole = form(logits)._replace(columns=logits.T.clone().requires_grad_(), column_bias=bias)
    want = ("target", "rival", "rest")
    target, rival, index, rest, _, _ = chunked.chunked_stats(whole, torch.tensor([label]), want)
    others = [place for place in (2, 3, 5) if place != label]
    assert target.item() == logits[0, label]
    assert rival.item() == logits[0, 3] == 2.0
    assert index.item() == 3
    assert rest.item() == pytest.approx(logits[0, others].logsumexp(0).item())
    (gradient,) = torch.autograd.grad(rest, whole.columns)
    assert gradient[others, 0].tolist() == pytest.approx(logits[0, others].softmax(0).tolist())
    assert not gradient[masked].any()


def test_many_gradients_at_once_are_refused():
    columns = torch.eye(3).requires_grad_()
    whole = form(torch.eye(3))._replace(columns=columns)
    rest = chunked.chunked_stats(whole, torch.tensor([0, 1, 2]), ("rest",))[3]
    with pytest.raises(LargeMarginError, match=r'one gradient at a time.*impl="dense"'):
        torch.autograd.grad(rest, columns, torch.eye(3), is_grads_batched=True)
