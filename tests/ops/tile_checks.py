"""Values and gradients of the tiled statistics; run through test_tiles_interpreted.py."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.tile_problems import STATISTICS, check_budget, made, outcome

from largemargin.ops import SIMILARITIES
from largemargin.ops.triton import chunks
from largemargin.ops.triton.op import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")

SLOW = pytest.mark.slow
PRECISIONS = ("highest", "tf32", "bf16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK_DTYPES = list(zip(DTYPES, (torch.bfloat16, torch.bfloat16, torch.float32), strict=True))
OF_LOSSES = (
    ("target", "rest"),
    ("target", "rival"),
    ("target", "rival", "rest"),
    ("rival", "rest"),
    ("rival",),
    ("target", "rest", "mean"),
    ("target", "rest", "spread", "mean"),
)
SUBSETS = [
    pytest.param(want, marks=() if want in OF_LOSSES else SLOW, id="+".join(want))
    for length in range(1, 6)
    for want in itertools.combinations(STATISTICS, length)
]


@pytest.mark.parametrize(
    ("bias", "precision"),
    [
        (True, "highest"),
        (True, "bf16"),
        *(pytest.param(*pair, marks=SLOW) for pair in itertools.product((False,), PRECISIONS)),
        pytest.param(True, "tf32", marks=SLOW),
    ],
)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_every_similarity_at_every_precision(similarity, bias, precision):
    check_budget(made(17, 35, 5, bias=bias), precision=precision, similarity=similarity)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("highest", marks=SLOW)])
@pytest.mark.parametrize("want", SUBSETS)
def test_only_what_is_wanted(want, precision):
    problem = made(4, 35, 3, bias=False)
    got = check_budget(problem, want, precision, similarity="cosine")
    named = {name for name in got if not name.startswith("d ")} - {"rival_index"}
    assert named == set(want)
    assert ("rival_index" in got) == ("rival" in want)


@pytest.mark.parametrize(
    ("features", "prototypes"),
    [
        pytest.param(*pair, marks=() if pair in QUICK_DTYPES else SLOW)
        for pair in itertools.product(DTYPES, DTYPES)
    ],
    ids=str,
)
def test_every_dtype(features, prototypes):
    problem = made(5, 9, 4).to(features=features, prototypes=prototypes)
    both = features == prototypes == torch.bfloat16
    got = check_budget(problem, precision="bf16", similarity="cosine_prototypes")
    assert all(got[name].dtype == torch.float32 for name in STATISTICS)
    left_open = outcome(problem, impl="triton", similarity="cosine_prototypes")
    meant = outcome(
        problem,
        impl="triton",
        similarity="cosine_prototypes",
        precision="bf16" if both else "highest",
    )
    for name, value in meant.items():
        assert torch.equal(left_open[name], value), name


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1), (3, 2, 17), (16, 32, 16), (33, 97, 1), pytest.param((2, 65, 33), marks=SLOW)],
)
@pytest.mark.parametrize("similarity", ["cosine", pytest.param("euclidean", marks=SLOW)])
def test_shapes_at_and_off_the_tiles(shape, similarity):
    check_budget(made(*shape), similarity=similarity)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_an_empty_batch_has_gradients_of_zero(similarity):
    got = outcome(made(0, 7, 3), impl="triton", similarity=similarity)
    for name, value in got.items():
        assert value.shape[0] == 0 if not name.startswith("d ") else not value.any(), name


@pytest.fixture
def small_chunks(monkeypatch):
    """A thousand classes at a time, the least there is, in tiles large enough to interpret."""
    tile = chunks.Tile(16, 512, 16, 1, 1)
    tiles = chunks.Tiles(tile, tile, chunks.Tile(16, 512, 16, 1, 1))
    monkeypatch.setattr(chunks, "INTERPRETED", tiles)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "COPY_BYTES", 1)
    sizes = []
    original = chunks.Chunks.pieces

    def counted(self, *args):
        for piece in original(self, *args):
            sizes.append(piece[1] - piece[0])
            yield piece

    monkeypatch.setattr(chunks.Chunks, "pieces", counted)
    return sizes


@pytest.mark.parametrize(
    ("precision", "similarity"),
    [
        ("bf16", "cosine"),
        pytest.param("highest", "dot", marks=SLOW),
        pytest.param("tf32", "euclidean", marks=SLOW),
    ],
)
def test_several_chunks_are_one(small_chunks, precision, similarity):
    problem = made(5, 2053, 3)
    problem.labels[:3] = torch.tensor([0, 1024, 2052])
    check_budget(problem, precision=precision, similarity=similarity)
    assert small_chunks == [1024, 1024, 5] * 2


@pytest.mark.parametrize("similarity", ["cosine_prototypes", pytest.param("dot", marks=SLOW)])
def test_chunks_of_prototypes_that_need_no_copy(small_chunks, similarity):
    """Rows of a multiple of 16 bytes are read where they are."""
    check_budget(made(4, 1030, 8, bias=False), similarity=similarity)
    assert small_chunks[-2:] == [1024, 6]


@settings(max_examples=4)
@given(
    samples=st.integers(1, 20),
    classes=st.integers(2, 40),
    dim=st.integers(1, 20),
    scale=st.sampled_from([0.1, 1.0, 64.0]),
    similarity=st.sampled_from(SIMILARITIES),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(0, 2**16),
)
def test_random_shapes(samples, classes, dim, scale, similarity, precision, seed):
    problem = made(samples, classes, dim, seed=seed, scale=scale)
    check_budget(problem, precision=precision, similarity=similarity)


@SLOW
@settings(max_examples=40)
@given(
    samples=st.integers(1, 70),
    classes=st.integers(2, 150),
    dim=st.integers(1, 70),
    scale=st.sampled_from([0.1, 1.0, 16.0, 64.0, 1000.0]),
    bias=st.booleans(),
    similarity=st.sampled_from(SIMILARITIES),
    precision=st.sampled_from(PRECISIONS),
    features=st.sampled_from(DTYPES),
    prototypes=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_many_random_shapes(
    samples, classes, dim, scale, bias, similarity, precision, features, prototypes, seed
):
    problem = made(samples, classes, dim, seed=seed, scale=scale, bias=bias)
    problem = problem.to(features=features, prototypes=prototypes)
    check_budget(problem, precision=precision, similarity=similarity)


def test_two_runs_are_equal():
    first, second = (outcome(made(4, 35, 3), impl="triton") for _ in range(2))
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.parametrize(
    "needs", ["prototypes", *(pytest.param(x, marks=SLOW) for x in ("features", "bias", "scale"))]
)
def test_one_gradient_alone_is_that_of_all_together(needs):
    problem = made(4, 9, 3)
    alone = outcome(problem, impl="triton", similarity="cosine", needs=(needs,))
    together = outcome(problem, impl="triton", similarity="cosine")
    assert torch.equal(alone[f"d {needs}"], together[f"d {needs}"])
