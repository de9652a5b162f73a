"""``train_many``: several runs in one process, side by side on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from largemargin.data import Data, load_data
from largemargin.errors import LargeMarginError, check_number
from largemargin.training.config import RunConfig
from largemargin.training.engine import Session, begin, check_config
from largemargin.training.runs import Run, pick_device


def train_many(
    configs: Sequence[RunConfig],
    *,
    folders: Sequence[str | Path] | None = None,
    resume: bool = False,
    data: Data | None = None,
    side_by_side: int = 3,
    progress: bool = True,
) -> list[Run]:
    """Train several models in one process, on a GPU ``side_by_side`` at a time.

    Small networks leave much of a GPU idle; steps of several runs, each on its own CUDA stream,
    fill it. Every run gets the numbers it would get alone. On the CPU they run one after the other.
    Data with the same settings is loaded once.

    Args:
        configs: the runs.
        folders: one for each run; default new ones.
        resume: go on where the runs stopped.
        data: for all runs; default each configuration's own.
        side_by_side: how many at a time.
        progress: show a progress bar for every run.
    """
    check_number("side_by_side", side_by_side, at_least=1)
    if folders is not None and len(folders) != len(configs):
        raise LargeMarginError(
            f"there must be one folder for each of the {len(configs)} runs, but {len(folders)} "
            "were given."
        )
    for config in configs:
        check_config(config)
    on_gpu = all(pick_device(config.device).type == "cuda" for config in configs)
    loaded: dict[str, Data] = {}
    finished: dict[int, Run] = {}
    waiting = list(enumerate(configs))
    lanes: list[_Lane] = []
    try:
        while waiting or lanes:
            while waiting and len(lanes) < (side_by_side if on_gpu else 1):
                index, config = waiting.pop(0)
                key = repr(config.data)
                if data is None and key not in loaded:
                    loaded[key] = load_data(config.data)
                folder = None if folders is None else folders[index]
                lane = _Lane(index, on_gpu)
                lanes.append(lane)
                lane.begin(config, folder, resume, data or loaded[key], progress)
            for lane in list(lanes):
                run = lane.advance()
                if run is not None:
                    finished[lane.index] = run
                    lane.close()
                    lanes.remove(lane)
    finally:
        for lane in lanes:
            lane.close()
    return [finished[index] for index in range(len(configs))]


class _Lane:
    """A run under way, on a CUDA stream of its own."""

    def __init__(self, index: int, on_gpu: bool) -> None:
        self.index = index
        self.stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.stack = ExitStack()
        self.session: Session | Run | None = None
        self.steps: Iterator[None] = iter(())

    def begin(
        self, config: RunConfig, folder: str | Path | None, resume: bool, data: Data, progress: bool
    ) -> None:
        with torch.cuda.stream(self.stream):
            self.session = begin(config, folder, resume, data, progress, None, self.stack)
            if isinstance(self.session, Session):
                self.steps = self.session.trainer.steps()

    def advance(self) -> Run | None:
        """One step; the run when there is no other."""
        with torch.cuda.stream(self.stream):
            if next(self.steps, "end") != "end":
                return None
            assert self.session is not None
            return self.session if isinstance(self.session, Run) else self.session.finish()

    def close(self) -> None:
        self.stack.close()
