"""The parts behind the features through ``measure``: options, table, notes, several processes."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from largemargin.errors import LargeMarginError
from largemargin.measuring import Geometry, measure
from largemargin.measuring.generalization import BoundSettings
from largemargin.measuring.input_curvature import CurvatureSettings, measure_curvature
from largemargin.measuring.input_margins import measure_input_margins

SETTINGS = CurvatureSettings(
    num_directions=3, noise={"gaussian": 1.0}, sigma=0.2, stability_draws=5
)
EVERYTHING = {
    "input_margins": True,
    "layer_margins": ["1"],
    "curvature": SETTINGS,
    "bounds": BoundSettings(radius=1.0),
}


def network():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 7, bias=False), nn.ReLU(), nn.Linear(7, 3, bias=False)
    ).double()
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator))
    return model


def dataset(n=23):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, 2, 3, generator=generator).double()
    return TensorDataset(x, torch.arange(n) % 3)


def test_nothing_behind_the_features_unless_asked():
    found = measure(network(), DataLoader(dataset(), batch_size=8))
    assert found.input_margins is found.layer_margins is found.curvature is found.bounds is None


def test_the_same_numbers_as_alone():
    model, loader = network(), DataLoader(dataset(), batch_size=8)
    whole = measure(model, loader, **EVERYTHING)
    alone = measure_input_margins(model, loader, layer_margins=["1"])
    assert whole.input_margins == alone.input
    assert whole.layer_margins == alone.layers
    assert whole.curvature == measure_curvature(model, loader, SETTINGS)
    plain = measure(model, loader)
    assert whole.margins == plain.margins
    assert whole.variance == plain.variance
    assert Geometry.from_json(whole.to_json()) == whole


def test_the_table_has_a_line_for_each():
    text = str(measure(network(), DataLoader(dataset(), batch_size=8), **EVERYTHING))
    for words in (
        "linearised margin at input",
        "linearised margin at 1",
        "input curvature",
        "gaussian noise 1",
        "a heuristic",
        "NGY-5.2",
        "NGY-6.1",
        "ODN-BOUND",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) < 250


def test_the_first_samples_and_ignored_ones():
    model, data = network(), dataset()
    x, y = data.tensors
    y = y.clone()
    y[1] = -100
    loader = [(x[:10], y[:10]), (x[10:], y[10:])]
    few = measure(model, loader, input_margins=True, curvature=SETTINGS, max_samples=5)
    assert few.samples == 22
    assert few.curvature.index == (0, 2, 3, 4)
    assert few.input_margins.samples == 4


def test_bad_settings():
    model, loader = network(), DataLoader(dataset(), batch_size=8)
    for how, message in (
        ({"curvature": "yes"}, "CurvatureSettings"),
        ({"bounds": 3}, "BoundSettings"),
        ({"max_samples": 0}, "max_samples"),
        ({"layer_margins": ["nowhere"]}, "has no layer"),
        ({"curvature": True, "normalization": 0.5}, "mean, std"),
    ):
        with pytest.raises(LargeMarginError, match=message):
            measure(model, loader, **how)
    sequences = [(torch.randn(4, 5, 6), torch.zeros(4, 5, dtype=torch.long))]
    with pytest.raises(LargeMarginError, match="one label per sample"):
        measure(nn.Linear(6, 3), sequences, input_margins=True)


def _rank(rank, port, path):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data = dataset()
    sampler = DistributedSampler(data, 2, rank, shuffle=False)
    found = measure(network(), DataLoader(data, batch_size=4, sampler=sampler), **EVERYTHING)
    found.save(f"{path}/{rank}.json")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=2)
    one = measure(network(), DataLoader(dataset(), batch_size=8), **EVERYTHING)
    first, second = (Geometry.load(tmp_path / f"{rank}.json") for rank in range(2))
    assert first.curvature == second.curvature
    assert first.bounds == second.bounds
    assert first.curvature.index == one.curvature.index
    assert first.curvature.values == pytest.approx(one.curvature.values, rel=1e-9)
    mine, whole = first.curvature.robustness["gaussian"], one.curvature.robustness["gaussian"]
    assert mine.group_size == whole.group_size
    assert mine.strict == pytest.approx(whole.strict)
    assert first.curvature.stability.eta == one.curvature.stability.eta
    assert first.curvature.stability.upper.mean == pytest.approx(
        one.curvature.stability.upper.mean, rel=1e-9
    )
    assert first.input_margins.overall.mean == pytest.approx(
        one.input_margins.overall.mean, rel=1e-9
    )
    assert first.layer_margins["1"].classes.mean == pytest.approx(
        one.layer_margins["1"].classes.mean, rel=1e-9
    )
    for got, want in zip(first.bounds, one.bounds, strict=True):
        assert got.value == pytest.approx(want.value, rel=1e-9, nan_ok=True)
        assert got.verdict == want.verdict
