"""Copies of class vectors that wait for the backward pass where its gradients will stand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.tile_checks import small_chunks  # noqa: F401  a fixture
from ops.tile_problems import made
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from largemargin import ArcFace, CrossEntropy
from largemargin.ops.triton import chunks as _tile_chunks
from largemargin.ops.triton import op

pytestmark = pytest.mark.skipif(not op.interpreted(), reason="needs TRITON_INTERPRET=1")
SLOW = pytest.mark.slow
LOSS = ArcFace(scale=4.0, impl="triton", precision="bf16")


def leaves(classes: int = 9, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    problem = made(5, classes, dim)
    return problem.features.requires_grad_(), problem.prototypes.requires_grad_(), problem.labels


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ways each backward pass went."""
    taken: list[str] = []

    def watch(name: str) -> None:
        original: Callable[..., Any] = getattr(op, name)

        def called(*given: Any) -> Any:
            taken.append(name.removeprefix("_tile_stats_backward"))
            return original(*given)

        monkeypatch.setattr(op, name, called)

    watch("_tile_stats_backward")
    watch("_tile_stats_backward_into")
    return taken


def without_copies(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(op, "leaves_room", lambda *_: False)
        return function()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_operators_are_what_torch_expects() -> None:
    rows, columns, labels = leaves()
    given = rows, columns, None, labels, True, "bf16", 15
    # Not what compares outputs: half of the last one is not written yet.
    torch.library.opcheck(
        op._tile_stats_keeping,
        given,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    found = [tensor.detach() for tensor in op._tile_stats_keeping(*given)]
    plain = rows.detach(), columns.detach(), None, labels
    torch.library.opcheck(
        op._tile_stats_backward_into,
        (found[3], *plain, *found[:3], torch.randn(5, 5), True, "bf16", 15, 3),
        test_utils=("test_schema", "test_faketensor"),  # it is no one's to differentiate
    )


@pytest.mark.parametrize("classes", [2, 1024, 1030, 2053, pytest.param(4099, marks=SLOW)])
@pytest.mark.parametrize(
    "loss",
    [LOSS, pytest.param(CrossEntropy(impl="triton", precision="bf16"), marks=SLOW)],
    ids=["cosine", "dot"],
)
def test_the_same_gradients_bit_by_bit(
    small_chunks: list[int],  # noqa: F811
    counted: list[str],
    classes: int,
    loss: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = leaves(classes)
    given[2][:2] = torch.tensor([0, classes - 1])
    # Kept copies need no chunks in the forward pass, whose sums would have another order.
    monkeypatch.setattr(_tile_chunks, "COPY_BYTES", 2**30)

    def step() -> tuple[Tensor, ...]:
        value = loss(*given)
        return (value.detach(), *torch.autograd.grad(value, given[:2]))

    found = step()
    expected = without_copies(step, monkeypatch)
    assert counted == ["_into", ""]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("size", [1, 3, 4, 7, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_copy_is_written_over_before_it_is_read(size: int, dtype: torch.dtype) -> None:
    """Gradients of each chunk are written right after its copies were handed out."""
    columns = torch.arange(80.0).view(10, 8)
    gradients = torch.empty(10, 8)
    _tile_chunks.copies(gradients).copy_(columns)
    chunks = _tile_chunks.Chunks(columns[:1], columns, False, "bf16", gradients)
    chunks.rows = chunks.rows.to(dtype)
    chunks.product = chunks.product._replace(low=dtype)
    for start, stop, low in chunks.kept_pieces(size):
        gradients[start:stop] = -1 - columns[start:stop]
        assert torch.equal(low.float(), columns[start:stop])
    assert torch.equal(gradients, -1 - columns)


def test_a_second_pass_makes_its_own_copies(counted: list[str]) -> None:
    given = leaves()
    value = LOSS(*given)
    first = torch.autograd.grad(value, given[:2], retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(value, given[:2])
    assert counted == ["_into", ""]
    assert all(map(torch.equal, first, kept)), "the second pass wrote to the first one's gradients"
    assert all(map(torch.equal, second, kept))


def test_gradients_of_features_alone() -> None:
    given = leaves()
    value = LOSS(*given)
    (alone,) = torch.autograd.grad(value, given[:1], retain_graph=True)
    assert torch.equal(alone, torch.autograd.grad(value, given[:2])[0])


def test_accumulated_gradients_are_sums(counted: list[str]) -> None:
    given = leaves()
    (once,) = torch.autograd.grad(LOSS(*given), given[1])
    for _ in range(2):
        LOSS(*given).backward()
    assert counted == ["_into"] * 3
    assert given[1].grad is not None
    torch.testing.assert_close(given[1].grad, 2 * once)


def test_checkpointed(counted: list[str]) -> None:
    given = leaves()
    expected = torch.autograd.grad(LOSS(*given), given[:2])
    value = checkpoint(LOSS, *given, use_reentrant=False)
    assert isinstance(value, Tensor)
    found = torch.autograd.grad(value, given[:2])
    assert counted == ["_into"] * 2
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("why", ["frozen", "narrow", "half", "precise", "no_grad"])
def test_nothing_is_kept_where_there_is_no_use_or_no_room(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, prototypes, labels = leaves(dim=12 if why == "narrow" else 8)
    if why == "frozen":
        prototypes = prototypes.detach()
    if why == "half":
        prototypes = prototypes.bfloat16()

    def refuse(*_: Any) -> None:
        raise AssertionError("copies were kept")

    monkeypatch.setattr(op, "_tile_stats_keeping", refuse)
    loss = ArcFace(impl="triton", precision="highest" if why == "precise" else "bf16")
    with torch.set_grad_enabled(why != "no_grad"):
        loss(features, prototypes, labels)
    with pytest.raises(AssertionError, match="copies were kept"):
        LOSS(*leaves())
