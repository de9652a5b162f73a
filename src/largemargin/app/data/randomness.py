"""Random numbers that depend on what they are for, never on what was drawn before."""

import hashlib

import torch


def seed_for(*what: int | str) -> int:
    """A seed made from numbers and words, as ``(seed, epoch, "order")``; equal ones give equal."""
    text = "/".join(str(part) for part in what)
    # 63 bits: torch takes signed seeds.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator_for(*what: int | str) -> torch.Generator:
    """A generator on the CPU, so that every device draws the same."""
    return torch.Generator().manual_seed(seed_for(*what))
