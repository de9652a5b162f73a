"""ClassHead: logits, prediction in chunks, conversion to and from nn.Linear, module manners."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from largemargin.errors import LargeMarginError
from largemargin.heads.class_head import ClassHead
from largemargin.heads.topk import top_classes
from largemargin.ops import SIMILARITIES

similarities = pytest.mark.parametrize("similarity", SIMILARITIES)
biases = pytest.mark.parametrize("bias", [True, False])


def make(similarity="dot", *, D=6, C=5, scale=3.0, bias=True, dtype=torch.float64):
    head = ClassHead(D, C, similarity=similarity, scale=scale, bias=bias, dtype=dtype)
    if bias:
        nn.init.normal_(head.bias)
    return head


def expected_logits(head, x):
    """The table of the four similarities, written with explicit (N, C, D) differences."""
    W = head.weight
    if head.similarity == "euclidean":
        similarity = -0.5 * (x[:, None] - W[None]).square().sum(-1)
    else:
        if head.similarity != "dot":
            W = W / W.norm(dim=1, keepdim=True)
        if head.similarity == "cosine":
            x = x / x.norm(dim=1, keepdim=True)
        similarity = (x[:, None] * W[None]).sum(-1)
    return head.scale * (similarity + (0 if head.bias is None else head.bias))


@similarities
@biases
def test_logits_are_scale_times_similarity_plus_bias(similarity, bias):
    head = make(similarity, bias=bias)
    x = torch.randn(7, 6, dtype=torch.float64)
    assert_close(head.logits(x), expected_logits(head, x))
    assert_close(head(x), head.logits(x), rtol=0, atol=0)


@similarities
def test_gradients_reach_features_weight_and_bias(similarity):
    head = make(similarity)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def run(x, weight, bias):
        return torch.func.functional_call(head, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(run, (x, head.weight, head.bias))


@pytest.mark.parametrize(
    ("similarity", "bias", "has_bias"),
    [("dot", None, True), ("cosine", None, False), ("dot", False, False), ("cosine", True, True)],
)
def test_bias_defaults_to_dot_only(similarity, bias, has_bias):
    assert (ClassHead(3, 2, similarity=similarity, bias=bias).bias is not None) == has_bias


def test_dot_is_a_drop_in_for_linear():
    torch.manual_seed(0)
    head = ClassHead(6, 5)
    torch.manual_seed(0)
    linear = nn.Linear(6, 5)
    x = torch.randn(2, 3, 6)
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)
    assert_close(head(x), linear(x))
    head.load_state_dict(nn.Linear(6, 5).state_dict())


@pytest.mark.parametrize("shape", [(6,), (0, 6), (4, 6), (2, 3, 6), (2, 0, 6)])
def test_leading_dimensions_are_kept(shape):
    head = make(dtype=torch.float32)
    x = torch.randn(shape)
    assert head(x).shape == (*shape[:-1], 5)
    scores, classes = head.predict(x, k=2)
    assert scores.shape == classes.shape == (*shape[:-1], 2)


@pytest.mark.parametrize("similarity", ["cosine", "cosine_prototypes", "euclidean"])
def test_other_heads_start_with_unit_sized_rows(similarity):
    norms = ClassHead(256, 100, similarity=similarity).weight.norm(dim=1)
    assert norms.min() > 0.8
    assert norms.max() < 1.2


@given(
    similarity=st.sampled_from(SIMILARITIES),
    C=st.integers(2, 23),
    chunk_size=st.integers(1, 30),
    data=st.data(),
)
def test_predict_equals_dense_topk_for_ragged_chunks(similarity, C, chunk_size, data):
    k = data.draw(st.integers(1, C))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    head = make(similarity, C=C, bias=data.draw(st.booleans()))
    x = torch.randn(5, 6, dtype=torch.float64)
    scores, classes = head.predict(x, k, chunk_size=chunk_size)
    dense = head(x)
    assert_close(scores, dense.topk(k).values)
    assert torch.equal(classes, dense.argsort(dim=1, descending=True)[:, :k])
    assert classes.dtype == torch.int64
    assert not scores.requires_grad


@given(
    rows=st.lists(st.integers(0, 2), min_size=2, max_size=12),
    chunk_size=st.integers(1, 12),
    data=st.data(),
)
def test_ties_go_to_the_lower_class_whatever_the_chunks(rows, chunk_size, data):
    k = data.draw(st.integers(1, len(rows)))
    W = torch.tensor(rows, dtype=torch.float32)[:, None]
    best = top_classes(torch.ones(3, 1), W, k=k, chunk_size=chunk_size)
    order = sorted(range(len(rows)), key=lambda c: (-rows[c], c))[:k]
    assert best.classes.tolist() == [order] * 3
    assert best.scores.tolist() == [[float(rows[c]) for c in order]] * 3


def test_classes_with_bias_minus_infinity_come_last():
    head = make(C=4)
    with torch.no_grad():
        head.bias[1:3] = -torch.inf
    classes = head.predict(torch.randn(6, 6, dtype=torch.float64), k=4, chunk_size=3).classes
    assert classes[:, 2:].tolist() == [[1, 2]] * 6
    assert set(classes[:, :2].flatten().tolist()) == {0, 3}


def test_predict_never_holds_all_logits(monkeypatch):
    widths = []
    from largemargin.heads import topk as module

    def spy(features, prototypes, **how):
        widths.append(prototypes.shape[0])
        return original(features, prototypes, **how)

    original = module.similarity_logits
    monkeypatch.setattr(module, "similarity_logits", spy)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 4096)
    ClassHead(3, 1000).predict(torch.randn(8, 3), k=3)
    assert widths == [512, 488]


@pytest.mark.parametrize("similarity", ["dot", "cosine_prototypes"])
@biases
def test_to_linear_gives_the_same_logits(similarity, bias):
    head = make(similarity, bias=bias)
    x = torch.randn(7, 6, dtype=torch.float64)
    assert_close(head.to_linear()(x), head(x))


@biases
def test_to_linear_of_distances_differs_by_half_the_square_of_the_feature(bias):
    head = make("euclidean", bias=bias)
    x = torch.randn(7, 6, dtype=torch.float64)
    constant = head.scale * 0.5 * x.square().sum(1, keepdim=True)
    assert_close(head.to_linear()(x), head(x) + constant)


def test_to_linear_of_cosines_differs_by_the_feature_norm():
    head = make("cosine", bias=False)
    x = torch.randn(7, 6, dtype=torch.float64)
    assert_close(head.to_linear()(x), head(x) * x.norm(dim=1, keepdim=True))


def test_to_linear_refuses_a_cosine_head_with_bias():
    with pytest.raises(LargeMarginError, match=r"needs bias=None under similarity='cosine'"):
        make("cosine").to_linear()


def test_to_linear_owns_copies_in_the_heads_dtype_and_mode():
    head = make("euclidean", dtype=torch.bfloat16).eval()
    before = copy.deepcopy(head.state_dict())
    linear = head.to_linear()
    assert linear.weight.dtype == linear.bias.dtype == torch.bfloat16
    assert not linear.training
    with torch.no_grad():
        linear.weight.zero_()
    assert all(torch.equal(head.state_dict()[name], value) for name, value in before.items())


@similarities
def test_from_linear_shares_the_parameters(similarity):
    linear = nn.Linear(6, 5).eval()
    head = ClassHead.from_linear(linear, similarity=similarity, scale=2.0)
    assert head.weight is linear.weight
    assert head.bias is (linear.bias if similarity == "dot" else None)
    assert not head.training
    assert ClassHead.from_linear(linear, similarity=similarity, bias=True).bias is linear.bias
    assert ClassHead.from_linear(linear, similarity=similarity, bias=False).bias is None
    x = torch.randn(3, 6)
    assert_close(head(x), expected_logits(head, x))
    if similarity == "dot":
        assert_close(head(x), 2 * linear(x))


def test_from_linear_without_bias_and_its_errors():
    plain = nn.Linear(6, 5, bias=False)
    assert ClassHead.from_linear(plain).bias is None
    with pytest.raises(LargeMarginError, match=r"this nn\.Linear has none\. Pass bias=None"):
        ClassHead.from_linear(plain, bias=True)
    with pytest.raises(LargeMarginError, match=r"must be an nn\.Linear .* but Conv1d was given"):
        ClassHead.from_linear(nn.Conv1d(1, 1, 1))
    with pytest.raises(LargeMarginError, match="Remove parametrizations"):
        ClassHead.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)))


def test_param_groups_hold_every_parameter_once():
    head = ClassHead(6, 5)
    groups = head.param_groups(lr=0.1, weight_decay=5e-4)
    assert groups == [
        {"params": [head.weight], "lr": 0.1, "weight_decay": 5e-4},
        {"params": [head.bias], "lr": 0.1, "weight_decay": 0.0},
    ]
    assert head.param_groups(bias_weight_decay=None) == [
        {"params": [head.weight]},
        {"params": [head.bias]},
    ]
    assert len(ClassHead(6, 5, similarity="cosine").param_groups()) == 1


def test_repr_rebuilds():
    for head in (
        ClassHead(6, 5),
        ClassHead(6, 5, similarity="cosine", scale=16, dtype=torch.float64),
        ClassHead(6, 5, similarity="euclidean", scale=0.5, bias=True),
    ):
        twin = eval(repr(head), {"ClassHead": ClassHead, "torch": torch})
        assert repr(twin) == repr(head)
        assert twin.weight.dtype == head.weight.dtype


@similarities
def test_state_dict_pickle_and_copy_round_trips(similarity):
    head = make(similarity)
    x = torch.randn(3, 6, dtype=torch.float64)
    fresh = make(similarity)
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer))
    for twin in (fresh, pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        assert torch.equal(twin(x), head(x))
        assert twin.weight is not head.weight


@similarities
def test_compiled_equals_eager(similarity):
    torch.compiler.reset()
    head = make(similarity, dtype=torch.float32)
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True)
    for size in (4, 7):
        x = torch.randn(size, 6)
        results = []
        for run in (head, compiled):
            head.zero_grad()
            loss = run(x).logsumexp(1).sum()
            loss.backward()
            results.append((loss.detach(), head.weight.grad.clone(), head.bias.grad.clone()))
        assert_close(results[1], results[0])


@similarities
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_features_change_no_parameter(similarity, dtype):
    head = make(similarity, dtype=torch.float32)
    x = torch.randn(4, 6)
    exact = head(x)
    with torch.autocast("cpu", dtype=dtype):
        inside = head(x)
        inside.sum().backward()
        classes = head.predict(x).classes
    assert inside.dtype == torch.float32
    assert classes.shape == (4, 1)
    assert_close(inside, exact, rtol=0.05, atol=0.2)
    assert head(x.to(dtype)).dtype == torch.float32
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert head.weight.grad.dtype == torch.float32


def test_nothing_is_mutated():
    head = make()
    x = torch.randn(4, 6, dtype=torch.float64)
    before = [x.clone(), head.weight.clone(), head.bias.clone()]
    head(x), head.predict(x, k=2, chunk_size=2), head.to_linear(), head.param_groups(lr=1.0)
    assert all(map(torch.equal, before, [x, head.weight, head.bias]))


def test_meta_device_then_materialise():
    head = ClassHead(6, 5, similarity="cosine", device="meta")
    head = head.to_empty(device="cpu")
    head.reset_parameters()
    assert head(torch.randn(2, 6)).isfinite().all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClassHead(0, 5), "in_features must be a finite number >= 1, but 0 was given"),
        (lambda: ClassHead(6.5, 5), "in_features must be a whole number, but 6.5 was given"),
        (lambda: ClassHead(6, 5.0), "num_classes must be a whole number, but 5.0 was given"),
        (lambda: ClassHead(6, "5"), "num_classes must be a whole number, but '5' was given"),
        (lambda: ClassHead(6, 1), "at least 2 classes are needed, but 1 was given"),
        (lambda: ClassHead(6, 5, similarity="l2"), "similarity must be one of 'dot', .* but 'l2'"),
        (lambda: ClassHead(6, 5, scale=0.0), "scale must be a finite number > 0, but 0.0"),
        (lambda: ClassHead(6, 5, bias="yes"), "bias must be one of None, True, False"),
        (lambda: ClassHead(6, 5)(torch.ones(2, 7)), r"D = in_features = 6, .*\(2, 7\)"),
        (lambda: ClassHead(6, 5)(torch.ones(())), r"D = in_features = 6, .*\(\)"),
        (lambda: ClassHead(6, 5)([1.0]), "but list was given"),
        (lambda: ClassHead(6, 5)(torch.ones(2, 6, dtype=torch.long)), "must be floating point"),
        (lambda: ClassHead(6, 5).predict(torch.ones(2, 6), 6), "There are 5 classes to rank"),
        (lambda: ClassHead(6, 5).predict(torch.ones(2, 6), 0), "k must be a finite number >= 1"),
        (lambda: ClassHead(6, 5).predict(torch.ones(2, 6), 1.5), "k must be a whole number"),
        (
            lambda: ClassHead(6, 5).predict(torch.ones(2, 6), chunk_size=2.5),
            "chunk_size must be a whole number, but 2.5 was given",
        ),
        (lambda: ClassHead(6, 5).predict(torch.ones(2, 6), chunk_size=0), "It counts classes"),
    ],
)
def test_errors_name_the_argument_and_the_fix(build, message):
    with pytest.raises(LargeMarginError, match=message):
        build()


def test_whole_numbers_of_numpy_count():
    head = ClassHead(np.int64(6), np.int32(5))
    assert head.predict(torch.ones(2, 6), np.int64(3), chunk_size=np.int64(2)).classes.shape == (
        2,
        3,
    )
