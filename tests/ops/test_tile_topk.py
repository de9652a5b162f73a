"""Which tiles have the largest maxima, looked for in groups of tiles."""

import pytest
import torch
from torch.testing import assert_close

from largemargin.ops.triton import tile_topk


@pytest.mark.parametrize("count", [5, 16, 17, 63, 64])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_groups_hide_no_tile(monkeypatch: pytest.MonkeyPatch, count: int, slots: int) -> None:
    monkeypatch.setattr(tile_topk, "GROUP", 8)
    generator = torch.Generator().manual_seed(count)
    best = torch.randn(count, 50, generator=generator)
    best[:2, :5] += 9  # two in one group
    best[-1, 5:9] += 9  # in what fills no group
    found = tile_topk._largest(best, slots)
    assert found.shape == (50, slots)
    assert_close(best.T.gather(1, found), best.T.topk(slots, 1).values, rtol=0, atol=0)


def test_a_group_with_nan_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_topk, "GROUP", 8)
    best = torch.zeros(40, 3)
    best[21, 1] = torch.nan
    assert tile_topk._largest(best, 1)[1].item() == 21
