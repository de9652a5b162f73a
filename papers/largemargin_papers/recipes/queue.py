"""A queue: runs of several tables in the order in which they are to be made, and what they cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largemargin.app.config import RunConfig
from largemargin.app.training.config_file import read_yaml, settings_from
from largemargin.errors import LargeMarginError
from largemargin_papers.recipes.cells import chosen_of
from largemargin_papers.recipes.claims import read_claims
from largemargin_papers.recipes.figure_store import sketches_for
from largemargin_papers.recipes.images import train_size
from largemargin_papers.recipes.measured import Wanted, now, read_measured
from largemargin_papers.recipes.reproduce import prepared, runs_of
from largemargin_papers.recipes.schema import read_recipe
from largemargin_papers.recipes.table_rows import measurements_of, protocol_of


@dataclass(frozen=True)
class Entry:
    """Some cells of a table.

    Args:
        recipe: its file, from the folder of the queue on.
        only: cells, as in :func:`reproduce`; default all.
        seeds: of the runs; default as many as the recipe says.
        epochs_fraction: share of the paper's epochs.
        set: settings that differ from the paper's.
        reading: of the table, where its recipe has others than the printed one.
        name: to choose the entry by; default the recipe's file.
    """

    recipe: str
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    epochs_fraction: float = 1.0
    set: dict[str, Any] = field(default_factory=dict)
    reading: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or self.recipe.removesuffix(".yaml")


@dataclass(frozen=True)
class Queue:
    """What a queue file says.

    Args:
        entries: in the order in which their runs are made.
        set: settings of all entries, before their own.
    """

    entries: tuple[Entry, ...]
    set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A place in a table that a run fills."""

    recipe: str
    protocol: str
    cell: str


@dataclass
class Task:
    """A run, and all that is wanted of it by the tables that share it."""

    name: str
    entry: str
    config: RunConfig
    split: str
    needed: str
    wanted: Wanted = field(default_factory=dict)
    sketches: Wanted = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)

    @property
    def images(self) -> int | None:
        """Training images that pass through the network, noisy ones counted with clean ones."""
        size = train_size(self.config.data)
        passes = 2 if self.config.noise.use in ("pair", "clean_and_noisy") else 1
        return None if size is None else size * self.config.epochs * passes


def read_queue(path: str | Path) -> Queue:
    """The queue in a YAML file; unknown names are errors."""
    return settings_from(read_yaml(path), Queue)


def tasks_of(path: str | Path, names: Sequence[str] = ()) -> list[Task]:
    """Every run of a queue once, in its order.

    Args:
        path: of the queue; recipes are looked for beside it.
        names: of the entries; default all. Their runs are measured for every entry that has them.
    """
    queue, folder = read_queue(path), Path(path).parent
    known = [each.title for each in queue.entries]
    for name in names:
        if name not in known:
            raise LargeMarginError(
                f"the queue has no entry {name!r}. It has {', '.join(dict.fromkeys(known))}."
            )
    tasks: dict[str, Task] = {}
    chosen = set()
    for entry in queue.entries:
        added = _add(tasks, entry, queue.set, folder)
        if not names or entry.title in names:
            chosen.update(added)
    return [task for task in tasks.values() if task.name in chosen]


def _add(
    tasks: dict[str, Task], entry: Entry, common: Mapping[str, Any], folder: Path
) -> list[str]:
    """Add the runs of an entry; returns their names."""
    names = []
    path = folder / entry.recipe
    recipe = read_recipe(path, entry.reading)
    changes = {**common, **entry.set}
    cells = prepared(path, recipe, entry.epochs_fraction, entry.seeds, changes)
    needed = measurements_of(read_claims(recipe, path.parent / recipe.claims, cells), recipe)
    drawn = sketches_for(recipe, cells)
    protocol = protocol_of(entry.epochs_fraction, changes, entry.reading)
    for cell in chosen_of(cells, entry.only):
        if not cell.train or cell.name not in needed:
            continue
        for seed, config, _ in runs_of(cell, Path()):
            task = tasks.setdefault(
                config.name,
                Task(config.name, entry.title, config, recipe.split, recipe.data_needed),
            )
            if task.split != recipe.split:
                raise LargeMarginError(
                    f"{path}: {cell.name} is measured on {recipe.split} images, and the same run "
                    f"on {task.split} images by {task.entry}. Put them into two queues."
                )
            task.wanted.update(needed[cell.name].wanted)
            task.sketches.update(drawn.get((cell.name, seed), {}))
            task.places.append(Place(entry.recipe, protocol, cell.name))
            names.append(task.name)
    return names


def measured_already(folder: Path, tasks: Iterable[Task]) -> dict[str, set[str]]:
    """Labels that ``measured/`` has, by the name of the run; everything where a run failed."""
    found: dict[str, set[str]] = {}
    for recipe in {place.recipe for task in tasks for place in task.places}:
        for cells in read_measured(folder / recipe).values():
            for runs in cells.values():
                for run in runs:
                    if run.get("run"):
                        labels = found.setdefault(run["run"], set())
                        labels.update(run["numbers"], run.get("sketches", ()))
                        if run["status"] != "finished":
                            labels.add(FAILED)
    return found


FAILED = "failed"
"""Stands for all labels of a run that broke off: that is its result."""


def left_of(tasks: Sequence[Task], known: Mapping[str, set[str]]) -> list[Task]:
    """Tasks of which something is missing."""
    return [
        task
        for task in tasks
        if FAILED not in known.get(task.name, ())
        and not known.get(task.name, set()) >= now(task.wanted) | task.sketches.keys()
    ]


RATES = {
    "resnet18": 50_000,
    "resnet34": 25_000,
    "cnn13": 35_000,
    "mnist_cnn": 400_000,
    "alexnet": 80_000,
    "small_cnn": 400_000,
}
"""Guesses of images per second of all runs that share a GPU of 2023, as graphs in bf16."""

STEP = 0.0003
"""Seconds of the host for a step: what small networks cost."""


def seconds_of(task: Task) -> float | None:
    """About how much GPU time a run takes with others beside it; None where nobody knows."""
    images = task.images
    if images is None:
        return None
    rate = RATES.get(task.config.model.name, 20_000)
    size = train_size(task.config.data) or 0
    steps = task.config.epochs * -(-size // task.config.batch_size)
    return max(images / rate, steps * STEP)


NOISY = {"noisy_accuracy": 1.5, "perturbed_accuracy": 1.5, "best_on_test": 1.5}
MEASURING = {"curvature": 9.0, "stages": 1.0, **NOISY}
"""Guesses of seconds for 10,000 images of a ResNet-18, in which the runs beside it wait. Curvature
took 5.2 (benchmarks/results/input_curvature_cuda.json), and 20 noisy copies come on top."""

OTHER = 0.3
"""Seconds for every other number that needs the network again."""


def measuring_seconds_of(task: Task) -> float:
    """About how long the numbers and sketches of a run take after it; what is shared, once."""
    kinds = [metric for metric, _ in task.wanted.values()]
    many = [kind for kind in kinds if kind in NOISY]
    once = {_shared(kind) for kind in kinds if kind not in many}
    once |= {_shared(kind) for kind, _ in task.sketches.values()}
    return sum(MEASURING.get(kind, OTHER) for kind in [*many, *once])


def _shared(kind: str) -> str:
    """What several metrics and sketches are read from."""
    if "curvature" in kind:
        return "curvature"
    return "stages" if kind.startswith("stage") else kind


def plan_text(tasks: Sequence[Task], left: Sequence[Task]) -> str:
    """Runs, images and seconds by entry, of what is left."""
    rows = [("entry", "runs", "left", "million images", "training, s", "measuring, s")]
    missing = {task.name for task in left}
    for entry in dict.fromkeys(task.entry for task in tasks):
        mine = [task for task in tasks if task.entry == entry]
        todo = [task for task in mine if task.name in missing]
        rows.append((entry, str(len(mine)), str(len(todo)), *_sums(todo)))
    rows.append(("all", str(len(tasks)), str(len(left)), *_sums(left)))
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0])
        + "".join(f"  {text.rjust(width)}" for text, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join([*lines, "Guesses for one H200, several runs side by side."])


def _sums(tasks: Sequence[Task]) -> tuple[str, str, str]:
    images = sum(task.images or 0 for task in tasks)
    seconds = sum(seconds_of(task) or 0 for task in tasks)
    measuring = sum(measuring_seconds_of(task) for task in tasks)
    return f"{images / 1e6:.1f}", f"{seconds:.0f}", f"{measuring:.0f}"
