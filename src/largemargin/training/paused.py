"""A place in the middle of an epoch: where a run that was asked to stop goes on."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from largemargin.training.journal import Journal
from largemargin.training.processes import Processes
from largemargin.training.seeds import Stream
from largemargin.training.step import Snapshot
from largemargin.training.sums import Sums

Place = dict[str, Any]
KEPT = "kept."


@dataclass(frozen=True)
class Paused:
    """What a step needs of those before it, beside weights: sums of the epoch, random numbers."""

    steps: int
    """Done in the epoch."""
    seconds: float
    sums: dict[str, Any]
    reported: int
    """Bad steps that the journal knows of."""
    kept: dict[str, Tensor]
    """Buffers to go back to after a bad step."""
    random: dict[str, Tensor]
    """States of this process's generators; empty where another number of processes wrote them."""

    def put_back(self, stream: Stream, sums: Sums, snapshot: Snapshot, journal: Journal) -> None:
        """Go on with these sums, and with the random numbers that would have come next."""
        sums.restore(self.sums)
        snapshot.put_back(self.kept)
        journal.bad_steps = self.reported
        if self.random:
            stream.restore(self.random)


def place_of(steps: int, seconds: float, sums: Sums, journal: Journal, world: int) -> Place:
    """What a checkpoint says about the epoch that is under way."""
    place = {"steps": steps, "seconds": seconds, "sums": sums.state()}
    return {**place, "reported": journal.bad_steps, "processes": world}


def tensors_of(snapshot: Snapshot, stream: Stream, processes: Processes) -> dict[str, Tensor]:
    """What it keeps as tensors: buffers to go back to, generators of all processes."""
    kept = {f"{KEPT}{name}": each for name, each in snapshot.states().items()}
    return {**kept, **processes.of_all(stream.states())}


def paused_in(state: dict[str, Any], processes: Processes) -> Paused | None:
    """The place that a checkpoint was written at; None at the end of an epoch."""
    place = state.get("paused")
    if place is None:
        return None
    # Other processes have other parts of the batches, so their numbers would fit nobody.
    same = place["processes"] == processes.world
    random = _named(state["tensors"], f"{processes.rank}.") if same else {}
    kept = _named(state["tensors"], KEPT)
    steps, seconds, sums = place["steps"], place["seconds"], place["sums"]
    return Paused(steps, seconds, sums, place["reported"], kept, random)


def _named(tensors: dict[str, Tensor], mark: str) -> dict[str, Tensor]:
    return {name[len(mark) :]: each for name, each in tensors.items() if name.startswith(mark)}
