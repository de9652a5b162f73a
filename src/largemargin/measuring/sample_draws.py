"""Random numbers that depend on what they are for, never on what was drawn before."""

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor


def seed_for(*what: int | str) -> int:
    """A seed made from numbers and words, as ``(seed, epoch, "order")``; equal ones give equal."""
    return _hashed("/".join(str(part) for part in what))


def generator_for(*what: int | str) -> torch.Generator:
    """A generator on the CPU, so that every device draws the same."""
    return torch.Generator().manual_seed(seed_for(*what))


def _hashed(text: str) -> int:
    # Seeds are signed in torch: 63 bits fit on every device.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class SampleDraws:
    """Numbers of one purpose that belong to a sample, whatever batch or process it comes in.

    They are drawn in float32 where the inputs are: the same on every call, others on another kind
    of device.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        self.seed, self.purpose = seed, purpose

    def normal(self, index: Tensor, count: int, like: Tensor) -> Tensor:
        """(n, count, ...) from N(0, 1) for the samples ``like`` (n, ...) with these indices."""
        return self._drawn(torch.randn, index, count, like).to(like.dtype)

    def uniform(self, index: Tensor, count: int, like: Tensor) -> Tensor:
        """(n, count, ...) from U(-1, 1)."""
        return self._drawn(torch.rand, index, count, like).mul_(2).sub_(1).to(like.dtype)

    def generator(self, index: int) -> torch.Generator:
        """One for the draws of a sample on the CPU."""
        return self._at(torch.Generator(), index)

    def keys(self, index: Tensor) -> list[int]:
        """One number per sample, for an order of chance that each sample has by itself."""
        return [self._seed(which) for which in index.tolist()]

    def _drawn(
        self, draw: Callable[..., Tensor], index: Tensor, count: int, like: Tensor
    ) -> Tensor:
        drawn = like.new_empty((len(index), count, *like.shape[1:]), dtype=torch.float32)
        generator = torch.Generator(like.device)
        for row, which in zip(drawn, index.tolist(), strict=True):
            draw(row.shape, generator=self._at(generator, which), out=row)
        return drawn

    def _at(self, generator: torch.Generator, index: int) -> torch.Generator:
        return generator.manual_seed(self._seed(index))

    def _seed(self, index: int) -> int:
        return _hashed(f"{self.seed} {self.purpose} {index}")
