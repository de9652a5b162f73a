"""The simplex: exact angles in any basis, and the head that scales it."""

import copy
import io
import math
import pickle

import pytest
import torch
from held_bytes import held_by_tensors
from hypothesis import given
from hypothesis import strategies as st
from operations import Operations
from torch.testing import assert_close

from largemargin.errors import LargeMarginError
from largemargin.heads.class_head import ClassHead
from largemargin.heads.simplex import SimplexHead, simplex


def rounding(C):
    """What C products of unit vectors, with entries rounded once, may be off by in float64."""
    return (C + 4) * 2.0**-53


def ideal_gram(C):
    return (C * torch.eye(C, dtype=torch.float64) - 1) / (C - 1)


@given(C=st.integers(2, 150), extra=st.integers(0, 5))
def test_inner_products_are_exact_to_rounding(C, extra):
    S = simplex(C, C - 1 + extra, dtype=torch.float64)
    assert S.shape == (C, C - 1 + extra)
    assert_close(S @ S.T, ideal_gram(C), rtol=0, atol=rounding(C))
    assert_close(S.sum(0), torch.zeros_like(S[0]), rtol=0, atol=1e-13)
    assert (S[:, C - 1 :] == 0).all()


@pytest.mark.parametrize("C", [2, 3, 10, 100])
def test_it_is_the_centred_identity_up_to_a_rotation(C):
    S = simplex(C, C - 1, dtype=torch.float64)
    centred = math.sqrt(C / (C - 1)) * (torch.eye(C, dtype=torch.float64) - 1 / C)
    rotation = torch.linalg.lstsq(centred, S).solution
    assert_close(centred @ rotation, S)
    assert_close(S @ S.T, centred @ centred.T, rtol=0, atol=2 * rounding(C))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_other_dtypes_are_the_float64_entries_rounded_once(dtype):
    assert torch.equal(simplex(7, 9, dtype=dtype), simplex(7, 9, dtype=torch.float64).to(dtype))


def test_default_dtype_and_device_follow_torch():
    assert simplex(3, 2).dtype == torch.get_default_dtype()
    assert simplex(3, 2, device="meta").device.type == "meta"


def test_many_classes_are_fast_and_exact():
    """Written once: no more operations than for five classes, and no second array of that size."""
    with Operations() as few:
        simplex(5, 4)
    with Operations() as many:
        S = simplex(4000, 3999)
    assert many.count == few.count
    assert held_by_tensors(lambda: simplex(4000, 3999)) < 1.01 * S.nbytes
    some = S[::191].double()
    gram = some @ some.T
    assert_close(gram.diagonal(), torch.ones_like(gram.diagonal()), rtol=0, atol=1e-6)
    off = gram[~torch.eye(len(some), dtype=torch.bool)]
    assert_close(off, torch.full_like(off, -1 / 3999), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: simplex(5, 3), r"dim must be >= num_classes - 1 = 4 .* but 3 was given"),
        (lambda: simplex(5, 3), r"best_packing\(5, 3\)"),
        (lambda: SimplexHead(3, 5), r"best_packing\(5, 3\)"),
        (lambda: simplex(1, 3), "at least 2 classes are needed, but 1 was given"),
        (lambda: simplex(2, 0), "dim must be a finite number >= 1, but 0 was given"),
        (lambda: simplex(3, 2, dtype=torch.int64), "dtype must be floating point, but torch.int64"),
    ],
)
def test_errors_name_the_argument_and_the_fix(build, message):
    with pytest.raises(LargeMarginError, match=message):
        build()


def test_head_logits_are_the_products_with_its_weight():
    head = SimplexHead(8, 5, dtype=torch.float64)
    torch.nn.init.constant_(head.log_scale, math.log(2.5))
    x = torch.randn(4, 8, dtype=torch.float64)
    assert_close(head.weight, 2.5 * simplex(5, 8, dtype=torch.float64))
    assert_close(head(x), x @ head.weight.T)
    assert_close(head.logits(x.reshape(2, 2, 8)), head(x).reshape(2, 2, 5))


def test_scale_starts_at_one_stays_positive_and_is_the_only_parameter():
    head = SimplexHead(4, 3)
    assert torch.equal(head.weight, simplex(3, 4))
    assert [name for name, _ in head.named_parameters()] == ["log_scale"]
    optimizer = torch.optim.SGD(head.param_groups(lr=1.0))
    for _ in range(5):
        optimizer.zero_grad()
        head(head.simplex).diagonal().sum().backward()  # pushes the scale down
        optimizer.step()
    assert 0 < head.weight.norm(dim=1).max() < 1
    assert torch.equal(head.simplex, simplex(3, 4))


def test_weight_and_logits_carry_the_gradient_of_the_scale():
    head = SimplexHead(4, 3, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    (through_logits,) = torch.autograd.grad(head(x).square().sum(), head.log_scale)
    (through_weight,) = torch.autograd.grad((x @ head.weight.T).square().sum(), head.log_scale)
    assert_close(through_logits, through_weight)
    assert_close(through_logits, 2 * head(x).square().sum().detach())


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_head_predicts_as_a_linear_head_with_the_same_weight(chunk_size):
    head = SimplexHead(9, 7, dtype=torch.float64)
    torch.nn.init.constant_(head.log_scale, -1.0)
    twin = ClassHead(9, 7, bias=False, dtype=torch.float64)
    twin.weight.data = head.weight.detach()
    x = torch.randn(6, 9, dtype=torch.float64)
    ours, theirs = head.predict(x, 3, chunk_size=chunk_size), twin.predict(x, 3)
    assert torch.equal(ours.classes, theirs.classes)
    assert_close(ours.scores, theirs.scores)
    assert torch.equal(head.predict(head.simplex).classes[:, 0], torch.arange(7))


def test_head_round_trips():
    head = SimplexHead(4, 3, dtype=torch.float64)
    torch.nn.init.constant_(head.log_scale, 0.3)
    assert set(head.state_dict()) == {"log_scale", "simplex"}
    fresh = SimplexHead(4, 3, dtype=torch.float64)
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer))
    for twin in (fresh, copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(twin.weight, head.weight)
    rebuilt = eval(repr(head), {"SimplexHead": SimplexHead, "torch": torch})
    assert repr(rebuilt) == repr(head)
    assert "dtype" not in repr(SimplexHead(4, 3))


def test_head_param_groups_do_not_decay_the_scale():
    head = SimplexHead(4, 3)
    assert head.param_groups() == [{"params": [head.log_scale], "weight_decay": 0.0}]
    assert head.param_groups(lr=0.1, weight_decay=None) == [{"params": [head.log_scale], "lr": 0.1}]


def test_head_compiles_and_keeps_its_dtype_under_autocast():
    torch.compiler.reset()
    head = SimplexHead(6, 5)
    x = torch.randn(4, 6)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), head(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(head(x), x @ head.weight.T.float(), rtol=0.05, atol=0.05, check_dtype=False)
    half = SimplexHead(6, 5, dtype=torch.float16)
    assert half(x.half()).dtype == torch.float32
    assert half.simplex.dtype == half.log_scale.dtype == torch.float16


def test_head_materialises_from_meta():
    head = SimplexHead(6, 5, device="meta").to_empty(device="cpu")
    head.reset_parameters()
    assert torch.equal(head.weight, simplex(5, 6))
