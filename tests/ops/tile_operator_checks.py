"""The tiled statistics as an operator, under every loss, and the best classes by tiles."""

import sys
from typing import Any

import pytest
import torch
from contract.problems import Sizes, assert_close, random_problem, value_and_gradients
from contract.zoo import ZOO, build, supporting
from ops.tile_problems import Problem, made
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import largemargin.functional as LF
from largemargin import ArcFace, CosFace, CrossEntropy, Kobayashi, class_stats
from largemargin.errors import LargeMarginError
from largemargin.heads import ShardedClassHead
from largemargin.ops import SIMILARITIES
from largemargin.ops.similarity import AffineForm, affine_form, dense_logits
from largemargin.ops.triton import chunks, op
from largemargin.ops.triton.tile_topk import tile_top

pytestmark = pytest.mark.skipif(not op.interpreted(), reason="needs TRITON_INTERPRET=1")

# The package exports a function of the module's name.
OPERATOR = sys.modules["largemargin.ops.class_stats"]
ALL = 15
SLOW = pytest.mark.slow
LOSSES_ON_STATISTICS = [name for name in supporting("chunked") if ZOO[name].kind == "samples"]


def operands(normalize: bool, bias: bool, transposed: bool = False) -> tuple[Any, ...]:
    problem = made(5, 9, 3, bias=bias)
    rows = problem.features.t().contiguous().t() if transposed else problem.features
    given = problem.bias.requires_grad_() if problem.bias is not None else None
    columns = problem.prototypes.requires_grad_()
    return rows.requires_grad_(), columns, given, problem.labels, normalize, "highest", ALL


def test_a_backward_pass_inside_autocast_keeps_its_precision() -> None:
    problem = made(5, 40, 16)
    leaves = problem.features.requires_grad_(), problem.prototypes.requires_grad_()
    found = []
    for inside in (False, True):
        value = CosFace(impl="triton", precision="highest")(*leaves, problem.labels)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(value, leaves))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_second_derivatives_under_activation_checkpointing() -> None:
    """What a forward pass saved is handed out once only there."""
    problem = made(4, 9, 3)
    features = problem.features.requires_grad_()
    given = features, problem.prototypes, problem.labels
    loss = CosFace(impl="triton", precision="highest")
    found = []
    for value in (loss(*given), checkpoint(loss, *given, use_reentrant=False)):
        with pytest.warns(UserWarning, match="second derivative"):
            (slope,) = torch.autograd.grad(value, features, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), features)[0])
    torch.testing.assert_close(*found)


# The checker looks at .grad of what it was given and of what it makes of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("normalize", "bias", "transposed"),
    [(True, True, False), pytest.param(False, False, True, marks=SLOW)],
)
def test_operators_are_what_torch_expects(normalize: bool, bias: bool, transposed: bool) -> None:
    given = operands(normalize, bias, transposed)
    torch.library.opcheck(op._tile_stats, given)
    found = op._tile_stats(*given)
    plain = [value.detach() if isinstance(value, Tensor) else value for value in given]
    for needs in (7, 1):
        torch.library.opcheck(
            op._tile_stats_backward,
            (
                *plain[:4],
                *(tensor.detach() for tensor in found),
                torch.randn(5, 5),
                *plain[4:],
                needs,
            ),
            test_utils=("test_schema", "test_faketensor"),  # it is no one's to differentiate
        )


@SLOW
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_operators_on_an_empty_batch() -> None:
    given = operands(True, True)
    empty = given[0].detach()[:0].requires_grad_()
    torch.library.opcheck(op._tile_stats, (empty, *given[1:3], given[3][:0], *given[4:]))


@pytest.mark.parametrize("name", LOSSES_ON_STATISTICS)
def test_every_loss_is_that_of_the_dense_definition(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = OPERATOR.tile_stats
    monkeypatch.setattr(OPERATOR, "tile_stats", lambda *args: calls.append(1) or original(*args))
    problem = random_problem(Sizes(6, 5, 4), dtype=torch.float32, seed=7)
    problem.labels[1] = -100
    found = {
        impl: value_and_gradients(build(name, problem, dtype=torch.float32, impl=impl), problem)
        for impl in ("dense", "triton")
    }
    assert calls, f"{name} did not use the kernels"
    assert_close(found["triton"][0], found["dense"][0], 1e-5, "value")
    for key, gradient in found["dense"][1].items():
        assert_close(found["triton"][1][key], gradient, 2e-5, key)


@pytest.mark.parametrize("rate", [1.0, pytest.param(0.5, marks=SLOW)])
def test_a_sharded_head_of_one_process(rate: float) -> None:
    problem = made(6, 40, 4)
    found = []
    for impl in ("dense", "triton"):
        head = ShardedClassHead(4, 40, similarity="cosine", sample_rate=rate)
        with torch.no_grad():
            head.weight.copy_(problem.prototypes)
        value = ArcFace(scale=4.0, impl=impl)(problem.features, head, problem.labels)
        found.append((value.detach(), *torch.autograd.grad(value, head.parameters())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dense_hinge", "center", "zero_centroid"])
def test_a_loss_without_statistics_refuses(name: str) -> None:
    problem = random_problem(Sizes(6, 5, 4), dtype=torch.float32)
    with pytest.raises(LargeMarginError, match="does not support"):
        build(name, problem, impl="triton")


def test_functions_without_statistics_refuse() -> None:
    problem = made(4, 6, 3)
    given = problem.features, problem.prototypes, problem.labels
    with pytest.raises(LargeMarginError, match=r'dense_hinge.*impl="triton".*impl="auto"'):
        LF.dense_hinge(*given, impl="triton")
    with pytest.raises(LargeMarginError, match=r'impl="triton".*logits were given'):
        LF.cross_entropy(problem.features, problem.labels.clamp(max=2), impl="triton")


@pytest.mark.parametrize(
    ("autocast", "sizes"),
    [
        (False, (5,)),
        pytest.param(True, (5, 3), marks=SLOW),
        pytest.param(False, (5, 3), marks=SLOW),
    ],
)
def test_compiled_without_a_break(autocast: bool, sizes: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    loss = CosFace(scale=8.0, impl="triton")
    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for samples in sizes:  # other shapes compile again, dynamically
        values, gradients = [], []
        for function in (loss, traced):
            problem = made(samples, 9, 3)
            leaves = problem.features.requires_grad_(), problem.prototypes.requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = function(*leaves, problem.labels)
            values.append(value.detach())
            gradients.append(torch.autograd.grad(value, leaves))
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*gradients)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "loss",
    [
        ArcFace(scale=4.0),
        CrossEntropy(similarity="euclidean", scale=0.5),
        pytest.param(Kobayashi(), marks=SLOW),
    ],
    ids=["ArcFace", "euclidean", "Kobayashi"],
)
def test_second_derivatives_are_those_of_the_dense_definition(loss: Any) -> None:
    def twice(impl: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        problem = made(4, 6, 3)
        leaves = [
            tensor.to(dtype).requires_grad_() for tensor in (problem.features, problem.prototypes)
        ]
        loss.impl = impl
        first = torch.autograd.grad(loss(*leaves, problem.labels), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    with pytest.warns(UserWarning, match=r"second derivative.*4 x 6 logits.*impl=\"dense\""):
        got = twice("triton", torch.float32)
    for one, other in zip(got, twice("dense", torch.float64), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_the_backward_pass_can_run_twice() -> None:
    problem = made(4, 6, 3)
    features = problem.features.requires_grad_()
    value = ArcFace(impl="triton")(features, problem.prototypes, problem.labels)
    first, second = (torch.autograd.grad(value, features, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_precision_left_open_is_that_of_torch() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting, meant in (("tf32", "tf32"), ("ieee", "highest"), ("none", "highest")):
            torch.backends.cuda.matmul.fp32_precision = setting
            assert op.precision_of(None) == meant
            assert op.precision_of("bf16") == "bf16"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_refusals_say_what_to_do() -> None:
    problem = made(4, 6, 3)
    soft = torch.full((4, 6), 1 / 6)
    with pytest.raises(LargeMarginError, match=r'impl="triton".*soft targets.*"auto" or "dense"'):
        class_stats(problem.features, problem.prototypes, soft, impl="triton")
    for one, other in ((torch.float64, torch.float64), (torch.float32, torch.float64)):
        given = problem.features.to(one), problem.prototypes.to(other), problem.labels
        with pytest.raises(LargeMarginError, match=r'float64.*impl="auto".*"chunked"'):
            class_stats(*given, impl="triton")


def form_of(problem: Problem, similarity: str) -> AffineForm:
    return affine_form(
        problem.features,
        problem.prototypes,
        bias=problem.bias,
        similarity=similarity,
        scale=problem.scale,
        precision=None,
        keep_columns=True,
    )


def assert_top(form: AffineForm, exact: AffineForm, k: int, precision: str = "bf16") -> None:
    scores, classes = tile_top(form, k, precision=precision)
    logits = dense_logits(exact)
    expected, where = logits.sort(dim=1, descending=True, stable=True)
    assert scores.shape == classes.shape == (len(logits), k)
    assert torch.equal(classes, where[:, :k])
    torch.testing.assert_close(scores.double(), expected[:, :k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_best_classes(similarity: str, bias: bool) -> None:
    problem = made(3, 70, 5, bias=bias)
    assert_top(form_of(problem, similarity), form_of(problem.double(), similarity), 3, "highest")


SIZES = [(7, 7), (100, 40), (200, 1)]


@pytest.mark.parametrize(
    ("classes", "k"),
    [(70, 10), (32, 10), (2, 1), (33, 33), *(pytest.param(*x, marks=SLOW) for x in SIZES)],
)
def test_best_of_any_number(classes: int, k: int) -> None:
    """Fewer tiles than k, one tile alone, and k beyond what a tile holds."""
    problem = made(2, classes, 6)
    assert_top(form_of(problem, "cosine"), form_of(problem.double(), "cosine"), k, "highest")


def test_best_at_low_precision_are_scored_in_float32() -> None:
    """Scores two hundredths apart, above all others: bfloat16 finds them and orders them not."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 16, generator=generator)
    weight = weight / weight.norm(dim=1, keepdim=True)
    features = weight[:4].clone()
    for place, class_ in enumerate((7, 77, 177, 277)):
        weight[class_] = features[0] * (1.5 - 0.002 * place)
    problem = Problem(features, weight, torch.zeros(4), None, torch.tensor(1.0))
    scores, classes = tile_top(form_of(problem, "dot"), 4)
    assert classes[0].tolist() == [7, 77, 177, 277]
    expected = torch.tensor([1.5, 1.498, 1.496, 1.494])
    torch.testing.assert_close(scores[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
def test_best_of_half_precision_prototypes(dtype: torch.dtype) -> None:
    problem = made(4, 70, 16, bias=False).to(features=dtype, prototypes=dtype)
    form, exact = form_of(problem, "cosine"), form_of(problem.double(), "cosine")
    assert_top(form, exact, 3, "highest")


TIED = [[5, 6], [40, 70, 99, 130]]


@pytest.mark.parametrize(
    ("tied", "k"),
    [([5, 6], 1), ([40, 99], 1), *(pytest.param(x, 3, marks=SLOW) for x in TIED)],
)
def test_first_classes_among_equals(tied: list[int], k: int) -> None:
    weight = torch.zeros(200, 4)
    weight[tied] = 1.0
    form = form_of(
        Problem(torch.ones(3, 4), weight, torch.zeros(3), None, torch.tensor(1.0)), "dot"
    )
    classes = tile_top(form, k)[1]
    others = [class_ for class_ in range(200) if class_ not in tied]
    assert classes.tolist() == [(tied + others)[:k]] * 3


@SLOW
def test_best_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = chunks.Tile(16, 512, 16, 1, 1)
    monkeypatch.setattr(chunks, "INTERPRETED", chunks.Tiles(tile, tile, tile))
    monkeypatch.setattr(chunks, "COPY_BYTES", 1)
    problem = made(3, 2053, 3)
    problem.prototypes[2052] = 4 * problem.features[1]
    assert_top(form_of(problem, "dot"), form_of(problem.double(), "dot"), 4, "highest")


@pytest.mark.parametrize("size", [0.0, 1e30, pytest.param(1e-20, marks=SLOW)])
def test_best_with_prototypes_of_any_length(size: float) -> None:
    problem = made(3, 40, 4, bias=False)
    problem.prototypes[7] = size * problem.features[1]
    form, exact = form_of(problem, "cosine"), form_of(problem.double(), "cosine")
    assert_top(form, exact, 2, "highest")


def test_best_of_an_empty_batch() -> None:
    scores, classes = tile_top(form_of(made(0, 40, 4), "cosine"), 3)
    assert scores.shape == classes.shape == (0, 3)
    assert classes.dtype == torch.long
