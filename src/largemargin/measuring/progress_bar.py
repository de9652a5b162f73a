"""Progress bars with the time that is left."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from largemargin.errors import MissingPackage
from largemargin.ops.distributed import world_size

T = TypeVar("T")


class Bar(Protocol):
    def update(self, n: int = 1, /) -> Any: ...


class _Silent:
    def update(self, n: int = 1, /) -> None:
        pass


@contextmanager
def bar(what: str, total: int | None, progress: bool) -> Iterator[Bar]:
    """A bar of ``total`` passes of the model over a batch, on the first process only."""
    if not progress or (world_size() > 1 and dist.get_rank() > 0):
        yield _Silent()
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise MissingPackage(
            "progress=True needs tqdm. Install it: pip install tqdm, or pass progress=False."
        ) from None
    with tqdm(total=total, desc=what, unit="batch", leave=False) as shown:
        yield shown


def with_bar(values: Iterable[T], what: str, total: int | None, progress: bool) -> Iterator[T]:
    with bar(what, total, progress) as shown:
        for each in values:
            yield each
            shown.update()
