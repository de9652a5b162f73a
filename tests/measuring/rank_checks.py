"""What every process of a distributed measurement runs; ``test_distributed`` starts them.

Each check yields what differs as text instead of raising, so that the ranks stay in step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring.alike import same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from two_ranks import meeting_folder

from largemargin.errors import LargeMarginError
from largemargin.measuring import Geometry, measure

N, C, D = 23, 4, 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Linear(D, C)).double()


def data(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(C, (n,), generator=generator)


def alone(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Geometry:
    return measure(model, [(x, y)], sync=False, **options)


def differing(name: str, got: Geometry, want: Geometry) -> Iterator[str]:
    try:
        same(got, want)
    except AssertionError as error:
        yield f"{name}: {error}"


def check_padded_sampler() -> Iterator[str]:
    """23 samples on two ranks: the sampler repeats one. Shuffled, indices still are positions."""
    x, y = data()
    strange = torch.randn(7, 5, generator=torch.Generator().manual_seed(2)).double()
    want = alone(net(), x, y, pairwise=True, ood=[strange], worst=N)
    for shuffle in (False, True):
        for batch_size in (1, 5):
            sampler = DistributedSampler(TensorDataset(x, y), shuffle=shuffle)
            others = DistributedSampler(TensorDataset(strange), shuffle=shuffle)
            got = measure(
                net(),
                DataLoader(TensorDataset(x, y), batch_size=batch_size, sampler=sampler),
                pairwise=True,
                worst=N,
                ood=DataLoader(TensorDataset(strange), batch_size=3, sampler=others),
            )
            yield from differing(f"shuffle={shuffle}, {batch_size} at a time", unpaired(got), want)


def unpaired(g: Geometry) -> Geometry:
    """The pair of closest samples in increasing order: ranks take turns."""
    made = g.to_dict()
    for part in (made, *(made["layers"] or ())):
        if part["compactness"] is not None:
            part["compactness"]["closest_samples"].sort()
    return Geometry.from_dict(made)


def check_uneven_parts() -> Iterator[str]:
    """Parts cut by hand: three batches and one, eleven and none; wrapped in DDP or not."""
    x, y = data()
    want = alone(net(), x, y)
    wrapped = DistributedDataParallel(net())
    for cut in (20, 23, 0):
        mine = (x[:cut], y[:cut]) if dist.get_rank() == 0 else (x[cut:], y[cut:])
        loader = [
            pair for pair in zip(*(each.split(7) for each in mine), strict=True) if len(pair[0])
        ]
        for model in (net(), wrapped):
            got = measure(model, loader)
            if len(got.notes) != 1 or "DistributedSampler" not in got.notes[0]:
                yield f"notes: {got.notes}"
            yield from differing(f"cut at {cut}", without_notes(got), want)


def without_notes(g: Geometry) -> Geometry:
    return Geometry.from_dict(g.to_dict() | {"notes": []})


def check_layers() -> Iterator[str]:
    """Layers and the sphere: every part of them is that of one process, features in files too."""
    x, y = data()
    # The same on both: net() sets the seed.
    deep = nn.Sequential(net()[:3], nn.Linear(D, 3).double(), nn.Linear(3, C).double())
    options: dict[str, Any] = {"layers": ["0", "1"], "pairwise": True, "sphere": True}
    want = unpaired(alone(deep, x, y, **options))
    folder = Path(meeting_folder()) / f"kept.{dist.get_rank()}"
    sampler = DistributedSampler(TensorDataset(x, y), shuffle=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=5, sampler=sampler)
    mine = [(x, y)] if dist.get_rank() == 1 else []  # the first does not know how wide layers are
    for store in (None, folder):
        got = measure(deep, loader, store=store, **options)
        yield from differing(f"layers, store {store}", unpaired(got), want)
        got = without_notes(measure(deep, mine, store=store, **options))
        yield from differing(f"one rank has all, store {store}", unpaired(got), want)
    got = measure(deep, loader, layers="blocks")
    if [each.name for each in got.layers or ()] != ["0.2", "1"]:
        yield f"blocks: {got.layers}"
    broken = x.clone()
    broken[3] = torch.nan
    try:
        measure(deep, [(x if dist.get_rank() == 0 else broken, y)], **options)
    except LargeMarginError as error:
        if "layer '0'" not in str(error):
            yield f"said: {error}"
    else:
        yield "measured NaN"


def check_repeated_samples() -> Iterator[str]:
    """Two loaders of the whole data: nobody knows which samples came twice, but it is said."""
    x, y = data()
    got = measure(net(), DataLoader(TensorDataset(x, y), batch_size=4))
    if got.samples != 2 * N or not any("23 samples more" in note for note in got.notes):
        yield f"{got.samples} samples, {got.notes}"


def check_files() -> Iterator[str]:
    """Features in files are joined in files."""
    x, y = data()
    sampler = DistributedSampler(TensorDataset(x, y), shuffle=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler)
    folder = Path(meeting_folder()) / f"features.{dist.get_rank()}"
    got = measure(net(), loader, pairwise=True, store=folder)
    yield from differing("file", unpaired(got), alone(net(), x, y, pairwise=True))
    if list(folder.iterdir()):
        yield f"left behind: {list(folder.iterdir())}"


def check_failure_of_one_rank() -> Iterator[str]:
    """A bad label on one rank stops both, with its reason."""
    x, y = data()
    if dist.get_rank() == 1:
        y = y + C
    model = net()
    try:
        measure(model, [(x, y)])
    except LargeMarginError as error:
        wanted = "lie in [0, 4)" if dist.get_rank() == 1 else "process 1 could not measure"
        if wanted not in str(error):
            yield f"said: {error}"
    else:
        yield "did not raise"
    if not model.training:
        yield "left in evaluation mode"
    try:
        measure(model, [])
    except LargeMarginError as error:
        if "empty" not in str(error):
            yield f"said: {error}"
    else:
        yield "measured nothing"


def check_one_rank_alone() -> Iterator[str]:
    x, y = data()
    if dist.get_rank() == 0:
        got = measure(net(), [(x[:9], y[:9])], sync=False)
        if got.samples != 9:
            yield f"{got.samples} samples"
    dist.barrier()


def check_skipped_labels() -> Iterator[str]:
    """Labels of -100 count over all ranks."""
    x, y = data(20)
    y[[3, 4, 11]] = -100
    half = slice(0, 10) if dist.get_rank() == 0 else slice(10, 20)
    got = measure(net(), [(x[half], y[half])])
    if got.samples != 17 or not any(note.startswith("3 samples labelled") for note in got.notes):
        yield f"{got.samples} samples, {got.notes}"
