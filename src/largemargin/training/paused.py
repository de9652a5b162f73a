"""A place in the middle of an epoch: where a run that was asked to stop goes on."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from largemargin.training.processes import Processes
from largemargin.training.seeds import Stream
from largemargin.training.sums import Sums


@dataclass(frozen=True)
class Paused:
    """What a step needs of those before it, beside weights: sums of the epoch, random numbers."""

    steps: int
    """Done in the epoch."""
    seconds: float
    sums: dict[str, Any]
    random: dict[str, Tensor]
    """States of this process's generators; empty where another number of processes wrote them."""

    def put_back(self, stream: Stream, sums: Sums) -> None:
        """Go on with these sums, and with the random numbers that would have come next."""
        sums.restore(self.sums)
        if self.random:
            stream.restore(self.random)


def place_of(steps: int, seconds: float, sums: Sums, processes: Processes) -> dict[str, Any]:
    """What a checkpoint says about the epoch that is under way."""
    place = {"steps": steps, "seconds": seconds, "sums": sums.state()}
    return {**place, "processes": processes.world}


def paused_in(state: dict[str, Any], processes: Processes) -> Paused | None:
    """The place that a checkpoint was written at; None at the end of an epoch."""
    place = state.get("paused")
    if place is None:
        return None
    mark = f"{processes.rank}."
    # Other processes have other parts of the batches, so their numbers would fit nobody.
    same = place["processes"] == processes.world
    own = {
        name[len(mark) :]: each
        for name, each in state["random"].items()
        if same and name.startswith(mark)
    }
    return Paused(place["steps"], place["seconds"], place["sums"], own)
