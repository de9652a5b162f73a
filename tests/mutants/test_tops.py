"""The best classes: ties, chunks, limits, and where kernels look for them."""

import contextlib
import importlib
import types

import pytest
import torch

from largemargin.errors import LargeMarginError
from largemargin.heads.topk import best_of, flat_features, top_classes
from largemargin.ops import similarity_logits
from largemargin.ops.similarity import dense_logits

module = importlib.import_module("largemargin.heads.topk")


def whole_numbers(*shape, seed=0, below=4):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).float()


def ranked(scores, k):
    """By falling score, then by class."""
    rows = [
        sorted(range(scores.shape[1]), key=lambda c, r=row: (-float(r[c]), c)) for row in scores
    ]
    classes = torch.tensor([row[:k] for row in rows])
    return scores.gather(1, classes), classes


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_of_equal_scores_the_first_are_taken(k):
    scores = whole_numbers(20, 7)
    for got, want in zip(best_of(scores, k), ranked(scores, k), strict=True):
        assert torch.equal(got, want)


def test_few_ties_need_no_whole_sort(monkeypatch):
    """Only those for the last place do. Sorts by score are stable, as not all are on a GPU."""
    lengths = []
    sort = torch.Tensor.sort

    def watched(x, **how):
        lengths.append(x.shape[1])
        assert how.get("descending", False) == how.get("stable", False)
        return sort(x, **how)

    monkeypatch.setattr(torch.Tensor, "sort", watched)
    for row, wide in (([5.0, 1, 5, 0], False), ([5.0, 1, 1, 0], True), ([3.0, 3, 3, 0], True)):
        lengths.clear()
        best_of(torch.tensor([row]), 2)
        assert (max(lengths) == 4) == wide


def test_features_are_flattened():
    assert flat_features(torch.ones(3), 3).shape == (1, 3)
    assert flat_features(torch.ones(2, 3), 3).shape == (2, 3)
    assert flat_features(torch.ones(2, 4, 3), 3).shape == (8, 3)
    for bad in (torch.ones(()), torch.ones(2, 4), [1.0]):
        with pytest.raises(LargeMarginError, match="features must"):
            flat_features(bad, 3)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_chunks_change_nothing(k, chunk_size):
    features, prototypes, bias = whole_numbers(6, 3), whole_numbers(9, 3, seed=1), torch.ones(9)
    bias[4:] = 2
    found = top_classes(features, prototypes, bias=bias, scale=2.0, k=k, chunk_size=chunk_size)
    want = ranked(2 * (features @ prototypes.T + bias), k)
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("samples", "sizes"), [(0, [600]), (1, [600]), (2, [500, 100]), (9, [256, 256, 88])]
)
def test_scores_are_held_up_to_a_number_of_them(monkeypatch, samples, sizes):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1000)
    seen = []

    def logits(features, prototypes, **how):
        seen.append(len(prototypes))
        return similarity_logits(features, prototypes, **how)

    monkeypatch.setattr(module, "similarity_logits", logits)
    top_classes(torch.ones(samples, 2), torch.ones(600, 2))
    assert seen == sizes


def test_limits_and_defaults():
    features, prototypes = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0], [5.0, 0.0]])
    found = top_classes(features, prototypes)
    assert found.scores.tolist() == [[15]]
    assert found.classes.tolist() == [[1]]
    for k in (0, 3):
        with pytest.raises(LargeMarginError, match="k"):
            top_classes(features, prototypes, k=k)
    with pytest.raises(LargeMarginError, match="chunk_size"):
        top_classes(features, prototypes, chunk_size=0)
    assert top_classes(features, prototypes, k=2, chunk_size=1).classes.tolist() == [[1, 0]]


@pytest.mark.parametrize("similarity", ["dot", "cosine", "cosine_prototypes", "euclidean"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_kernels_are_given_what_ranks_the_same(monkeypatch, similarity, with_bias):
    """Cosines without a bias by rows of any length, which are divided out of the scores."""
    forms = []

    def tile_top(form, k):
        forms.append(form)
        wide = form._replace(precision=None, columns=form.columns.float())
        return dense_logits(wide).topk(k, dim=1)

    @contextlib.contextmanager
    def autocast(device, enabled):
        assert (device, enabled) == ("cuda", False)
        yield

    draw = torch.Generator().manual_seed(0)
    features, prototypes = (3 * torch.randn(n, 4, generator=draw) for n in (5, 6))
    bias = torch.randn(6, generator=draw) if with_bias else None
    how = {"bias": bias, "similarity": similarity, "scale": 2.5, "k": 3}
    want = top_classes(features, prototypes, **how, chunk_size=6)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_by_tiles", lambda *_: True)
        patch.setattr(module, "tile_top", tile_top)
        patch.setattr(module.torch, "autocast", autocast)
        found = top_classes(features, prototypes, **how)
        half = prototypes.bfloat16()
        top_classes(features, half, **how)
    assert forms[1].columns is half
    assert torch.allclose(found.scores, want.scores, atol=1e-5)
    assert torch.equal(found.classes, want.classes)
    assert forms[0].precision == "bf16"
    assert forms[0].columns is prototypes
    late = similarity == "cosine" and not with_bias
    assert (forms[0].rows is features) == late


def test_where_kernels_look_for_the_best(monkeypatch):
    reason = None
    monkeypatch.setattr(module, "missing", lambda *_: reason)
    monkeypatch.setattr(module, "DENSE_LIMIT", 12)
    cpu = types.SimpleNamespace(type="cpu")

    def given(samples=3, on_gpu=True, **more):
        return types.SimpleNamespace(
            shape=(samples, 4), is_cuda=on_gpu, device=cpu, dtype=torch.float32, **more
        )

    classes = given(5)
    assert module._by_tiles(given(), classes, "bf16")
    assert not module._by_tiles(given(), classes, None)
    assert not module._by_tiles(given(), given(4), "bf16")
    assert not module._by_tiles(given(on_gpu=False), classes, "bf16")
    assert not module._by_tiles(given(), given(5, class_sample=None), "bf16")
    reason = "it is a test"
    assert not module._by_tiles(given(), classes, "bf16")
