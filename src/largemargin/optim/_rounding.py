"""Stochastic rounding to bfloat16: up or down at random, right on average.

A bfloat16 number has 8 significant bits. Rounded to nearest, a change below 1/512 of a number is
lost, every time; rounded at random it arrives with the probability that makes its mean right. The
random bits are a hash of entry, step and array, so a step can be repeated, on any device and over
any number of processes, bit for bit.
"""

import torch
from torch import Tensor

FACTORS = (0x7FEB352D, 0x846CA68B)
"""Of a 32-bit mixing function with three shifts, 16, 15 and 16."""
STRIDE = 0x9E3779B1
"""Sets apart the hashes of consecutive steps."""
PARAMETER, MOMENT = 1, 2
"""Arrays that are rounded in the same step and must not be rounded alike."""


def _signed(number: int) -> int:
    """The int32 with the bits of an unsigned number, modulo 2^32: torch has no arithmetic of
    unsigned numbers everywhere, but multiplies signed ones modulo 2^32 all the same.
    """
    return (number + 2**31) % 2**32 - 2**31


def mixed(x: Tensor) -> Tensor:
    """A hash of int32 numbers, in place; masks make up for the sign that shifts bring in."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(FACTORS[0])
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(FACTORS[1])
    x ^= (x >> 16) & 0xFFFF
    return x


def seed_of(step: Tensor, array: int) -> Tensor:
    """What the hashes of one step and one array start from, 0-dim."""
    return mixed(step.int() * _signed(STRIDE) + array)


def round_at_random(x: Tensor, seed: Tensor, first_entry: int) -> Tensor:
    """Entries of an array to bfloat16; ``first_entry`` counts those that stand before it."""
    x = x.float().contiguous()
    index = torch.arange(x.numel(), device=x.device, dtype=torch.int32)
    index += _signed(first_entry)
    index ^= seed
    bits = mixed(index).view(x.shape)
    bits &= 0xFFFF
    bits += x.view(torch.int32)
    bits &= -0x10000
    return torch.where(x == x, bits.view(torch.float32), x).to(torch.bfloat16)


def store(target: Tensor, value: Tensor, seed: Tensor | None, first_entry: int) -> None:
    """Write ``value`` into ``target``, at random where a seed is given and it is bfloat16."""
    if seed is not None and target.dtype == torch.bfloat16:
        value = round_at_random(value, seed, first_entry)
    target.copy_(value)
