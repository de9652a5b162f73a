"""ShardedClassHead in one process, with and without a process group, and class samples."""

import copy
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from two_ranks import NEEDS_GLOO

import largemargin as lm
from largemargin.errors import LargeMarginError
from largemargin.heads import ShardedClassHead
from largemargin.heads.optim import HeadSGD, RowwiseAdam
from largemargin.losses.base.classwise import ClassWise
from largemargin.losses.base.terms import drawn_matrix
from largemargin.ops import class_stats
from largemargin.ops.class_stats import STATISTICS, Impl
from largemargin.ops.sharded import sampled_classes
from largemargin.ops.shards import ClassSample, class_range

D, C = 4, 7
LABELS = torch.tensor([0, 6, 2, 3, 3])
REFUSED = {
    "centroid_margin": lambda: lm.CentroidMargin(),
    "curricularface": lambda: lm.CurricularFace(),
    "dense_hinge": lambda: lm.DenseHinge(),
    "discriminative": lambda: lm.Discriminative(C, D),
    "gaussian_mixture": lambda: lm.GaussianMixture(C, D, learn_variances=True),
    "logit_norm": lambda: lm.LogitNorm(),
    "lsoftmax": lambda: lm.LSoftmax(),
    "soft_hinge": lambda: lm.SoftHinge(),
    "stable_discriminative": lambda: lm.StableDiscriminative(C, D),
    "vs_loss": lambda: lm.VSLoss([5, 1, 2, 9, 4, 3, 7]),
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one process: the head's weight is a DTensor then."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["alone", "grouped"])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "grouped":
        request.getfixturevalue("group")
    return request.param


def make(**options) -> ShardedClassHead:
    return ShardedClassHead(D, C, **{"similarity": "cosine", "dtype": torch.float64, **options})


def features(count: int = 5) -> Tensor:
    return torch.randn(count, D, dtype=torch.float64, requires_grad=True)


@NEEDS_GLOO
def test_it_is_a_class_head(place: str) -> None:
    head, x = make(scale=3.0, bias=True), features()
    assert hasattr(head.weight, "full_tensor") == (place == "grouped")
    plain = head.to_head()
    assert_close(head(x), plain(x))
    assert_close(head(x[None, :, :]).shape, torch.Size([1, 5, C]))
    for k in (1, 3, C):
        got, want = head.predict(x, k), plain.predict(x, k)
        assert_close(got.classes, want.classes)
        assert_close(got.scores, want.scores)
    loss = lm.Kobayashi(strength=0.5)
    value, want = loss(x, head, LABELS), loss(x, plain, LABELS)
    assert_close(value, want)
    gradients = torch.autograd.grad(value, [x, head.weight, head.bias])
    wanted = torch.autograd.grad(want, [x, plain.weight, plain.bias])
    for got, expected in zip(gradients, wanted, strict=True):
        assert_close(got.full_tensor() if hasattr(got, "full_tensor") else got, expected)
    assert head.local_classes == range(C)
    assert_close(make(similarity="euclidean").to_linear().weight.shape, torch.Size([C, D]))


@NEEDS_GLOO
def test_gradcheck(place: str) -> None:
    """Against finite differences, with all classes and with a sample of them."""
    for rate in (1.0, 0.5):
        head = make(sample_rate=rate, bias=True)

        def stats(x: Tensor, scale: Tensor, head: ShardedClassHead = head) -> tuple[Tensor, ...]:
            head.draws = 4
            found = class_stats(x, head.draw_weight(), LABELS, bias=head.bias, scale=scale)
            return tuple(value for value in found if value.is_floating_point())

        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(stats, (features(), scale))


def test_gradcheck_of_sampled_prototypes() -> None:
    def stats(weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        marked = weight.view_as(weight)
        marked.class_sample = ClassSample(0.4, 1, 2)
        found = class_stats(x, marked, LABELS, bias=bias, similarity="cosine_prototypes")
        return tuple(value for value in found if value.is_floating_point())

    x = features().detach()
    weight, bias = torch.randn(C, D, dtype=torch.float64), torch.randn(C, dtype=torch.float64)
    assert torch.autograd.gradcheck(stats, (weight.requires_grad_(), bias.requires_grad_()))


@given(
    rate=st.sampled_from([0.1, 0.5, 1.0]),
    draw=st.integers(0, 50),
    num_classes=st.integers(2, 40),
    similarity=st.sampled_from(["dot", "cosine", "euclidean"]),
)
def test_a_sample_against_brute_force(
    rate: float, draw: int, num_classes: int, similarity: str
) -> None:
    """Statistics by name over the kept classes, one sample and one class at a time."""
    generator = torch.Generator().manual_seed(draw)
    weight = torch.randn(num_classes, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (4,), generator=generator)
    marked = weight.view_as(weight)
    marked.class_sample = ClassSample(rate, 9, draw)
    found = class_stats(x, marked, labels, similarity=similarity, scale=2.0)
    kept = sampled_classes(marked.class_sample, 0, num_classes, labels).tolist()
    assert set(labels.tolist()) <= set(kept)
    for row in range(4):
        q, y = x[row], int(labels[row])
        logits = {}
        for j in kept:
            w = weight[j]
            if similarity == "euclidean":
                logits[j] = -float((q - w).square().sum())
            else:
                cosine = similarity == "cosine"
                logits[j] = 2 * float(w @ q) / (float(w.norm() * q.norm()) if cosine else 1)
        own, rivals = logits.pop(y), logits
        mass = math.fsum(math.exp(value) for value in rivals.values())
        expected = {
            "target": own,
            "rival": max(rivals.values()),
            "rival_index": max(rivals, key=rivals.__getitem__),
            "rest": math.log(mass),
            "spread": math.fsum(math.exp(v) * v for v in rivals.values()) / mass,
            "mean": math.fsum(rivals.values()) / len(rivals),
        }
        for name, value in expected.items():
            assert getattr(found, name)[row].item() == pytest.approx(value, abs=1e-9), name


def test_samples_are_uniform_and_independent() -> None:
    nobody = torch.empty(0, dtype=torch.long)
    for rate in (0.05, 0.3):
        drawn = [
            set(sampled_classes(ClassSample(rate, 5, d), 0, 20_000, nobody).tolist())
            for d in range(20)
        ]
        # 20 x 20,000 independent draws: five standard deviations of the mean.
        share = sum(map(len, drawn)) / 400_000
        assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 400_000))
        both = len(drawn[3] & drawn[4]) / 20_000
        assert both == pytest.approx(rate**2, abs=5 * rate / math.sqrt(20_000))
        neighbours = sum(c + 1 in drawn[0] for c in drawn[0]) / 20_000
        assert neighbours == pytest.approx(rate**2, abs=5 * rate / math.sqrt(20_000))
    other = set(sampled_classes(ClassSample(0.3, 6, 3), 0, 20_000, nobody).tolist())
    assert len(other & drawn[3]) / 20_000 == pytest.approx(0.09, abs=0.015)
    parts = [
        sampled_classes(ClassSample(0.3, 5, 3), at, 5000, nobody) + at
        for at in range(0, 20_000, 5000)
    ]
    assert set(torch.cat(parts).tolist()) == drawn[3]


def test_the_bias_of_sampling_is_as_documented() -> None:
    """With many rivals of equal logits the rest is too small by log(1/r), the mean is right."""
    num_classes, rate = 50_000, 0.1
    head = ShardedClassHead(2, num_classes, similarity="dot", bias=False, sample_rate=rate)
    nn.init.constant_(head.weight, 1.0)
    labels, x = torch.arange(3), torch.ones(3, 2)
    sampled = class_stats(x, head.draw_weight(), labels)
    exact = class_stats(x, head.weight, labels)
    assert_close(exact.rest - sampled.rest, torch.full((3,), math.log(10)), atol=0.05, rtol=0)
    assert_close(sampled.mean, exact.mean)
    assert (sampled.rival <= exact.rival).all()


def test_sampling_is_for_training_only_and_leaves_others_without_gradient() -> None:
    head, loss, x = make(sample_rate=0.3), lm.CosFace(scale=8.0), features()
    assert head.eval().draw_weight() is head.weight
    head.train()
    assert drawn_matrix(head).class_sample == ClassSample(0.3, 0, 0)
    loss(x, head, LABELS).backward()
    assert head.draws == 2
    kept = sampled_classes(ClassSample(0.3, 0, 1), 0, C, LABELS).tolist()
    moved = head.weight.grad.abs().sum(1).nonzero().squeeze(1).tolist()
    assert moved == kept != list(range(C))
    assert_close(lm.CosFace(scale=8.0)(x, head.eval(), LABELS), loss(x, head.to_head(), LABELS))


@pytest.mark.parametrize("build", [HeadSGD, RowwiseAdam])
def test_lazy_optimizers_leave_classes_alone_that_were_not_drawn(build: Any) -> None:
    head = make(sample_rate=0.3)
    optimizer = build(head.parameters(), lr=0.1, weight_decay=0.1, lazy=True)
    for draw in range(3):
        before, head.weight.grad = head.weight.detach().clone(), None
        lm.CosFace(scale=8.0)(features(), head, LABELS).backward()
        optimizer.step()
        drawn = sampled_classes(ClassSample(0.3, 0, draw), 0, C, LABELS).tolist()
        moved = (head.weight != before).any(1).nonzero().squeeze(1).tolist()
        assert moved == drawn != list(range(C))


def test_a_sampled_loss_is_not_computed_twice() -> None:
    head, x = make(sample_rate=0.3), features()
    value = checkpoint(lm.CosFace(), x, head, LABELS, use_reentrant=False)
    with pytest.raises(LargeMarginError, match="Checkpoint the backbone only"):
        value.backward()


@NEEDS_GLOO
@pytest.mark.parametrize("impl", ["dense", "chunked"])
def test_a_loss_may_be_computed_twice(place: str, impl: Impl) -> None:
    """Activation checkpointing hands out what was saved once only."""
    head, x, loss = make(), features(), lm.CosFace(impl=impl)
    leaves = x, head.weight
    value = checkpoint(loss, x, head, LABELS, use_reentrant=False)
    want = torch.autograd.grad(loss(x, head, LABELS), leaves)
    assert_close(torch.autograd.grad(value, leaves), want)
    value = checkpoint(loss, x, head, LABELS, use_reentrant=False)
    assert_close(torch.autograd.grad(value, leaves, create_graph=True), want)


@NEEDS_GLOO
@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_need_all_class_vectors_say_so(name: str, group: None) -> None:
    loss = REFUSED[name]().double()
    with pytest.raises(LargeMarginError, match="sharded or sampled class vectors"):
        loss(features(), make(similarity="dot"), LABELS)


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if not issubclass(lm.LOSSES[name], ClassWise)]
)
def test_they_say_so_of_a_sample_in_one_process(name: str) -> None:
    loss, head = REFUSED[name]().double(), make(similarity="dot", sample_rate=0.5)
    with pytest.raises(LargeMarginError, match="sharded or sampled class vectors"):
        loss(features(), head, LABELS)
    assert loss.eval()(features(), head.eval(), LABELS).isfinite()


@NEEDS_GLOO
def test_penalties_and_soft_targets_say_so(group: None) -> None:
    head, x = make(), features()
    with pytest.raises(LargeMarginError, match="all pairs of class vectors"):
        lm.SuperSymmetry()(head)
    with pytest.raises(LargeMarginError, match=r"lm\.LabelSmoothing"):
        lm.CosFace(label_smoothing=0.1)(x, head, LABELS)
    with pytest.raises(LargeMarginError, match=r"must lie in \[0, 7\)"):
        lm.CosFace()(x, head, LABELS + 3)
    with pytest.raises(LargeMarginError, match="bias must be sharded"):
        class_stats(x, head.weight, LABELS, bias=torch.zeros(C, dtype=torch.float64))
    (first,) = torch.autograd.grad(lm.CosFace()(x, head, LABELS), x, create_graph=True)
    with pytest.raises(LargeMarginError, match="differentiated once only"):
        first.sum().backward()
    with pytest.raises(LargeMarginError, match=r"loss\(backbone\(x\), head, labels\)"):
        lm.attach(nn.Sequential(nn.Linear(3, D), head), lm.CosFace())


@NEEDS_GLOO
def test_autocast_is_that_of_a_class_head(group: None) -> None:
    head, x = make(dtype=torch.float32), torch.randn(5, D)
    loss, plain = lm.CosFace(scale=8.0), head.to_head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, want = loss(x, head, LABELS), loss(x, plain, LABELS)
    assert_close(value, want)
    assert not torch.equal(want, loss(x, plain, LABELS))


@NEEDS_GLOO
def test_non_finite_numbers_stay_visible(group: None) -> None:
    head, x = make(), features()
    with torch.no_grad():
        x[1] = torch.nan
    found = class_stats(x, head.weight, LABELS, validate=False)
    for name in STATISTICS:
        assert getattr(found, name).isnan().tolist() == [False, True, False, False, False], name
    with pytest.raises(LargeMarginError, match="features must be finite, but row 1"):
        lm.CosFace(check_finite=True)(x, head, LABELS)


@NEEDS_GLOO
@pytest.mark.parametrize("device", ["meta", None])
def test_meta_device_then_materialise(place: str, device: str | None) -> None:
    with torch.device("cpu" if device else "meta"):
        head = make(device=device)
    assert head.weight.is_meta
    head = head.to_empty(device="cpu")
    torch.manual_seed(0)
    head.reset_parameters()
    torch.manual_seed(0)
    assert_close(make().to_head().weight, head.to_head().weight, rtol=0, atol=0)


@NEEDS_GLOO
def test_state_is_exchanged_with_a_class_head(place: str) -> None:
    plain = lm.ClassHead(D, C, similarity="dot", dtype=torch.float64)
    head = make(similarity="dot")
    head.load_state_dict(plain.state_dict())
    assert_close(head.to_head().state_dict(), plain.state_dict())
    linear = nn.Linear(D, C)
    cut = ShardedClassHead.from_linear(linear, similarity="dot", sample_rate=0.5)
    assert_close(cut.to_head().weight, linear.weight)
    assert_close(cut.to_head().bias, linear.bias)
    again = copy.deepcopy(head)
    assert_close(again.to_head().weight, head.to_head().weight)
    head.load_state_dict(plain.state_dict(), assign=True)
    if place == "grouped":  # no view, which would hold on to the rows of the other processes
        assert head.weight.to_local().data_ptr() != plain.weight.data_ptr()
    with pytest.raises(RuntimeError, match="size mismatch"):
        head.load_state_dict(lm.ClassHead(D, C + 1, dtype=torch.float64).state_dict())
    if place == "alone":
        file = io.BytesIO()
        torch.save(head.state_dict(), file)
        file.seek(0)
        plain.load_state_dict(torch.load(file))


@NEEDS_GLOO
@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_step_on_shards(group: None, fused: bool) -> None:
    head, plain, x = make(), make().to_head(), features()
    plain.load_state_dict(head.to_head().state_dict())
    for each in (head, plain):
        optimizer = torch.optim.AdamW(each.param_groups(lr=0.1), fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            lm.ArcFace(scale=4.0)(x, each, LABELS).backward()
            optimizer.step()
    assert_close(head.to_head().weight, plain.weight)


def test_initialisation_is_that_of_a_class_head_in_distribution() -> None:
    for similarity in ("dot", "cosine"):
        head = ShardedClassHead(64, 6000, similarity=similarity, bias=True)
        assert float(head.weight.detach().std()) == pytest.approx(
            1 / 8 / (math.sqrt(3) if similarity == "dot" else 1), rel=0.02
        )
        assert (head.bias.abs().max() > 0) == (similarity == "dot")
        # Blocks are drawn from seeds of their own: no rows repeat.
        assert len(head.weight.detach()[:, 0].unique()) > 5900
    torch.manual_seed(1)
    first = make()
    torch.manual_seed(1)
    assert_close(make().weight, first.weight, rtol=0, atol=0)
    assert not torch.equal(make().weight, first.weight)


@given(st.integers(2, 50), st.integers(1, 12))
def test_ranges_cover_all_classes_as_chunks_do(num_classes: int, processes: int) -> None:
    cut = [class_range(num_classes, processes, rank) for rank in range(processes)]
    covered = [first + i for count, first in cut for i in range(count)]
    assert covered == list(range(num_classes))
    sizes = [len(chunk) for chunk in torch.arange(num_classes).chunk(processes)]
    assert [count for count, _ in cut if count] == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_rate": 0.0}, "sample_rate must be a finite number > 0 and <= 1"),
        ({"seed": 0.5}, "seed must be a whole number, but 0.5 was given"),
        ({"sample_rate": 1.5}, "sample_rate must be"),
        ({"seed": -1}, "seed must be"),
        ({"mesh": 4}, "mesh must be a torch.distributed DeviceMesh, but int"),
        ({"similarity": "cosin"}, "similarity must be one of"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(LargeMarginError, match=message):
        make(**options)


@NEEDS_GLOO
def test_wrong_meshes_and_placements(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "classes"))
    with pytest.raises(LargeMarginError, match=r'mesh\["classes"\]'):
        make(mesh=mesh)
    assert make(mesh=mesh["classes"]).mesh.size() == 1
    whole = distribute_tensor(torch.randn(C, D).double(), mesh["data"], [Replicate()])
    with pytest.raises(LargeMarginError, match="cut along the classes"):
        class_stats(features(), whole, LABELS)
    with pytest.raises(LargeMarginError, match="k must be"):
        make().predict(features(), C + 1)
    with pytest.raises(LargeMarginError, match="in_features = 4"):
        make().predict(torch.randn(2, 3))


def test_it_says_what_it_holds() -> None:
    assert "sample_rate=0.5" in repr(make(sample_rate=0.5))
