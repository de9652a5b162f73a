"""Images that the data holds twice, byte for byte: in two parts of it, or under two labels."""

import hashlib
import os
from collections import defaultdict
from typing import Any

from largemargin.data.samples import Samples

SHOWN = 20
"""Pairs that the record names."""
AT_MOST = 200_000
"""Images up to which duplicates are looked for: beyond, reading them takes minutes."""


def shared(train: Samples, other: Samples) -> dict[str, Any]:
    """How many images of ``other`` are in ``train``, and the first pairs (train, other).

    Files are told apart by their length first, so that most of them are never read.
    """
    if len(train) + len(other) > AT_MOST:
        return {"looked_for": False, "reason": f"more than {AT_MOST} images"}
    lengths, other_lengths = all_lengths(train), all_lengths(other)
    common = set(lengths) & set(other_lengths)
    known = {digest(train, i): i for i, each in enumerate(lengths) if each in common}
    wanted = [i for i, each in enumerate(other_lengths) if each in common]
    pairs = [(known[found], i) for i in wanted if (found := digest(other, i)) in known]
    return {
        "looked_for": True,
        "count": len(pairs),
        "pairs": [[train.ids[a], other.ids[b]] for a, b in pairs[:SHOWN]],
    }


def contradicted(train: Samples) -> dict[str, Any]:
    """How many images have more than one label, and the first pairs that say so.

    Read are files alone that have the length of another one of another class.
    """
    if len(train) > AT_MOST:
        return {"looked_for": False, "reason": f"more than {AT_MOST} images"}
    lengths, labels = all_lengths(train), train.labels.tolist()
    seen: defaultdict[int, set[int]] = defaultdict(set)
    for each, label in zip(lengths, labels, strict=True):
        seen[each].add(label)
    first: dict[bytes, int] = {}
    pairs: dict[bytes, tuple[int, int]] = {}
    for i, each in enumerate(lengths):
        if len(seen[each]) > 1:
            same = digest(train, i)
            before = first.setdefault(same, i)
            if labels[before] != labels[i]:
                pairs.setdefault(same, (before, i))
    return {
        "looked_for": True,
        "count": len(pairs),
        "pairs": [[train.ids[a], train.ids[b]] for a, b in list(pairs.values())[:SHOWN]],
    }


def all_lengths(samples: Samples) -> list[int]:
    """Bytes of every stored image."""
    if samples.files is None:
        assert samples.pixels is not None
        return [samples.pixels[0].nbytes] * len(samples)
    return [length(samples.files.source(i)) for i in range(len(samples))]


def length(source: str | bytes | None) -> int:
    return os.stat(source).st_size if isinstance(source, str) else len(source or b"")


def digest(samples: Samples, index: int) -> bytes:
    if samples.files is None:
        assert samples.pixels is not None
        return hashlib.blake2b(samples.pixels[index].numpy().tobytes()).digest()
    source = samples.files.source(index)
    if isinstance(source, str):
        with open(source, "rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    return hashlib.blake2b(source or b"").digest()
