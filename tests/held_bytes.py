"""How many bytes a function holds at most, counted where they are asked for.

What the system says a process has depends on its allocator, on pages and on what ran before; what
torch and Python ask for does not.
"""

import tracemalloc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def held_by_tensors(function: Callable[[], Any]) -> int:
    """The most bytes that tensors of the CPU held at once, beside those there were before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        function()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def held(function: Callable[[], Any]) -> int:
    """Tensors, and objects and arrays of Python and NumPy."""
    others = 0

    def counted() -> None:
        nonlocal others
        tracemalloc.start()
        try:
            function()
            others = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return held_by_tensors(counted) + others
