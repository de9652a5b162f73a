"""Heads of several processes, as threads of one: predictions, first weights, samples."""

import importlib
import math
import sys
import types

import pytest
import torch
from mutants.threads import Ranks

from largemargin.errors import LargeMarginError
from largemargin.heads import ShardedClassHead
from largemargin.ops.shards import Shard, class_range

module = importlib.import_module("largemargin.heads.sharded_class_head")

CLASSES, DIM = 7, 2
SIZES = (2, 0, 3, 1, 1)
"""Samples of five ranks, which have 2, 2, 2, 1 and 0 classes."""


def whole_numbers(*shape, seed=0):
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("k", [1, 2, 5, 7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_best_of_the_best_of_all_ranks(monkeypatch, k, with_bias):
    """With many equal scores: the lower class first."""
    head = ShardedClassHead(DIM, CLASSES, scale=2.0, bias=with_bias, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(whole_numbers(CLASSES, DIM))
        if with_bias:
            head.bias.copy_(whole_numbers(CLASSES, seed=1))
    features = whole_numbers(sum(SIZES), DIM, seed=2)
    want = head.to_head().predict(features, k)
    ranks = Ranks(len(SIZES), monkeypatch)

    def shard_of(weight, bias):
        count, first = class_range(CLASSES, len(SIZES), ranks.get_rank())
        part = slice(first, first + count)
        return Shard(
            weight[part], None if bias is None else bias[part], first, CLASSES, "all", None
        )

    monkeypatch.setattr(module, "shard_of", shard_of)
    found = ranks.run(
        lambda rank: head.predict(features[sum(SIZES[:rank]) : sum(SIZES[: rank + 1])], k)
    )
    assert torch.equal(torch.cat([each.scores for each in found]), want.scores)
    assert torch.equal(torch.cat([each.classes for each in found]), want.classes)


def test_shapes_and_limits_of_predictions():
    head = ShardedClassHead(DIM, CLASSES)
    assert head.predict(torch.ones(2, 3, DIM), 4).classes.shape == (2, 3, 4)
    assert head.predict(torch.ones(DIM)).scores.shape == (1,)
    assert head(torch.ones(2, 3, DIM)).shape == (2, 3, CLASSES)
    for k in (0, CLASSES + 1):
        with pytest.raises(LargeMarginError, match="It counts classes to return"):
            head.predict(torch.ones(1, DIM), k)


@pytest.mark.parametrize("with_bias", [True, False])
def test_all_logits(with_bias):
    head = ShardedClassHead(DIM, CLASSES, bias=with_bias, scale=3.0)
    found, want = (made(torch.ones(2, 3, DIM)) for made in (head, head.to_head()))
    assert torch.equal(found, want)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_first_weights_do_not_depend_on_the_number_of_processes(monkeypatch, similarity):
    monkeypatch.setattr(module, "BLOCK", 4)
    torch.manual_seed(3)
    whole = ShardedClassHead(DIM, 11, similarity=similarity, bias=True)
    for mine in (range(11), range(4), range(3, 9), range(8, 11), range(5, 6), range(11, 11)):
        monkeypatch.setattr(ShardedClassHead, "local_classes", mine)
        part = ShardedClassHead(DIM, 11, similarity=similarity, bias=True)
        with torch.no_grad():
            part.weight = torch.nn.Parameter(torch.full((len(mine), DIM), torch.nan))
            part.bias = torch.nn.Parameter(torch.full((len(mine),), torch.nan))
        torch.manual_seed(3)
        part.reset_parameters()
        assert torch.equal(part.weight, whole.weight[mine.start : mine.stop])
        assert torch.equal(part.bias, whole.bias[mine.start : mine.stop])


def test_first_weights_are_drawn_block_by_block():
    """Those of 4096 classes from the seed, the next from the seed and 4096."""
    for similarity in ("dot", "cosine"):
        torch.manual_seed(5)
        head = ShardedClassHead(DIM, 5000, similarity=similarity, bias=True)
        torch.manual_seed(5)
        seed = int(torch.randint(2**40, ()))
        for first in (0, 4096):
            draw = torch.Generator().manual_seed(seed + first)
            bound = 1 / math.sqrt(DIM)
            rows, offsets = torch.empty(4096, DIM), torch.zeros(4096)
            if similarity == "dot":
                rows.uniform_(-bound, bound, generator=draw)
                offsets.uniform_(-bound, bound, generator=draw)
            else:
                rows.normal_(std=bound, generator=draw)
            count = min(4096, 5000 - first)
            assert torch.equal(head.weight[first : first + count], rows[:count])
            assert torch.equal(head.bias[first : first + count], offsets[:count])


def test_the_first_process_draws_the_seed(monkeypatch):
    head = ShardedClassHead(DIM, CLASSES)
    for seed in range(8):
        torch.manual_seed(seed)
        found = head._joint_seed()
        torch.manual_seed(seed)
        assert found == int(torch.randint(2**40, ()))
    asked = []

    def broadcast(seed, group, group_src):
        asked.append((group, group_src))
        seed.fill_(17)

    mesh = types.SimpleNamespace(get_group=lambda: "all", size=lambda: 3, get_local_rank=lambda: 1)
    monkeypatch.setattr(ShardedClassHead, "mesh", mesh)
    monkeypatch.setattr(module.dist, "broadcast", broadcast)
    assert head._joint_seed() == 17
    assert asked == [("all", 0)]
    assert head.local_classes == range(3, 6)


def test_states_of_whole_heads_are_cut(monkeypatch):
    """Those that are cut already are not, nor those that do not fit."""
    head = ShardedClassHead(DIM, CLASSES, bias=True)
    weight, bias = torch.rand(CLASSES, DIM), torch.rand(CLASSES)
    head.weight.device_mesh = head.bias.device_mesh = "mesh"
    sharded, cut = {id(head.weight), id(head.bias)}, []

    def cut_to(rows, shape, mesh):
        cut.append((rows, shape, mesh))
        return torch.full(shape, 9.0)

    monkeypatch.setattr(module, "_sharded", cut_to)
    monkeypatch.setattr(module, "is_sharded", lambda x: id(x) in sharded)
    monkeypatch.setattr(ShardedClassHead, "local_classes", range(2, 5))
    torch.nn.Sequential(head).load_state_dict({"0.weight": weight, "0.bias": bias})
    for (rows, shape, mesh), whole in zip(cut, (weight, bias), strict=True):
        assert torch.equal(rows, whole[2:5])
        assert (shape, mesh) == (whole.shape, "mesh")
    assert head.weight.unique().tolist() == head.bias.unique().tolist() == [9]
    cut.clear()
    sharded |= {id(weight), id(bias)}
    head.load_state_dict({"weight": weight, "bias": bias})
    assert not cut
    assert torch.equal(head.weight, weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        head.load_state_dict({"weight": weight[:3].clone(), "bias": bias})
    with pytest.raises(RuntimeError, match="Missing key"):
        head.load_state_dict({"weight": weight})
    assert not cut


def test_samples_are_counted_and_drawn_in_training_only(monkeypatch):
    head = ShardedClassHead(DIM, CLASSES, sample_rate=0.5, seed=9)
    draws = [head.draw_weight().class_sample for _ in range(3)]
    assert [(draw.rate, draw.seed, draw.draw) for draw in draws] == [(0.5, 9, n) for n in range(3)]
    assert head.draws == 3
    assert head.eval().draw_weight() is head.weight
    whole = ShardedClassHead(DIM, CLASSES)
    assert whole.draw_weight() is whole.weight
    assert (whole.sample_rate, whole.seed, whole.scale, whole.draws) == (1, 0, 1, 0)
    monkeypatch.setattr(module, "recomputing", lambda: True)
    assert head.draw_weight() is head.weight
    with pytest.raises(LargeMarginError, match="activation checkpointing"):
        head.train().draw_weight()


@pytest.mark.parametrize(
    ("name", "just", "beyond"),
    [("sample_rate", 1.0, 1.01), ("sample_rate", 0.01, 0.0), ("seed", 0, -1)],
)
def test_limits_of_samples(name, just, beyond):
    ShardedClassHead(DIM, CLASSES, **{name: just})
    with pytest.raises(LargeMarginError, match=name):
        ShardedClassHead(DIM, CLASSES, **{name: beyond})


def test_heads_on_a_linear_layer_do_not_scale_unless_told_to():
    linear = torch.nn.Linear(DIM, CLASSES)
    assert ShardedClassHead.from_linear(linear).scale == 1
    head = ShardedClassHead.from_linear(linear.eval(), scale=4.0, bias=False)
    assert (head.scale, head.bias, head.training) == (4, None, False)
    assert torch.equal(head.weight, linear.weight)


def test_meshes_have_one_dimension():
    mesh = types.SimpleNamespace(get_local_rank=lambda: 0, ndim=1)
    assert module._mesh(mesh, None) is mesh
    assert module._mesh(None, None) is None
    for bad, match in (
        (types.SimpleNamespace(get_local_rank=lambda: 0, ndim=2), "one dimension"),
        (object(), "must be a torch.distributed DeviceMesh"),
    ):
        with pytest.raises(LargeMarginError, match=match):
            module._mesh(bad, None)


@pytest.mark.parametrize(
    ("backend", "on_gpu", "device", "kind"),
    [
        ("nccl", True, None, "cuda"),
        ("cpu:gloo,cuda:nccl", True, None, "cuda"),
        ("nccl", False, None, "cpu"),
        ("gloo", True, None, "cpu"),
        ("gloo", False, "cuda:1", "cuda"),
        ("nccl", True, "cpu", "cpu"),
    ],
)
def test_meshes_of_all_processes(monkeypatch, backend, on_gpu, device, kind):
    fake = types.SimpleNamespace(init_device_mesh=lambda *given: given)
    monkeypatch.setitem(sys.modules, "torch.distributed.device_mesh", fake)
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(module, "world_size", lambda: 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert module._mesh(None, device) == (kind, (6,))


def test_weights_are_where_the_mesh_is_unless_told_otherwise(monkeypatch):
    seen = []

    def empty_shard(like, mesh, device):
        seen.append((mesh, device))
        return torch.nn.Parameter(like)

    monkeypatch.setattr(module, "_empty_shard", empty_shard)
    monkeypatch.setattr(module, "_mesh", lambda *_: types.SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    ShardedClassHead(DIM, CLASSES, bias=True)
    ShardedClassHead(DIM, CLASSES, bias=False, device="cpu")
    assert [str(device) for _, device in seen] == ["cuda:3", "cuda:3", "cpu"]
    assert module._device_of(types.SimpleNamespace(device_type="cpu")) == torch.device("cpu")


def test_parts_know_the_shape_of_the_whole(monkeypatch):
    """Cut along the classes, rows behind each other; nobody is asked whether that is so."""
    fake = types.SimpleNamespace(
        DTensor=types.SimpleNamespace(from_local=lambda *given, **how: (given, how)),
        Shard=lambda dim: f"Shard({dim})",
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", fake)
    for shape, stride in ((torch.Size((7,)), (1,)), (torch.Size((7, 2)), (2, 1))):
        rows = torch.ones(3, *shape[1:])
        given, how = module._sharded(rows, shape, "mesh")
        assert given[0] is rows
        assert given[1:] == ("mesh", ["Shard(0)"])
        assert how == {"run_check": False, "shape": shape, "stride": stride}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_process_has_its_rows(monkeypatch, rank):
    mesh = types.SimpleNamespace(size=lambda: 3, get_local_rank=lambda: rank)
    monkeypatch.setattr(module, "_sharded", lambda rows, shape, mesh: rows)
    like = torch.empty(CLASSES, DIM, dtype=torch.float64, device="meta")
    for given, count in ((None, CLASSES), (mesh, (3, 3, 1)[rank])):
        made = module._empty_shard(like, given, "cpu")
        assert (made.shape, made.dtype) == ((count, DIM), torch.float64)
        assert made.device.type == "cpu"
