"""A run is a folder: its configuration, what happened, and the trained model.

Below :class:`Run`: the folder itself, and whether the data is still what the run began with.
"""

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from largemargin.app.config import DataConfig, RunConfig
from largemargin.app.data.load import Data, load_data
from largemargin.app.data.sources.source import listed
from largemargin.app.models.build import build_model
from largemargin.app.training.checkpoints import DATA, Checkpoints, model_weights
from largemargin.app.training.config_file import STAMP, from_dict, read_yaml, settings_from
from largemargin.app.training.files import RESULT as RESULT_KIND
from largemargin.app.training.files import check_version, damage_named, read_json
from largemargin.app.training.journal import METRICS, whole_rows
from largemargin.errors import LargeMarginError
from largemargin.measuring.geometry_result import Geometry
from largemargin.measuring.records import Record

Kept = TypeVar("Kept", bound=Record)

CONFIG, RESULT = "config.yaml", "result.json"
ENVIRONMENT, GEOMETRY = "environment.json", "geometry.json"
LOCK = "lock"
EVALUATION = "evaluation.json"
"""What ``largemargin evaluate`` writes."""

NAMED = 5
"""Classes that a message names; of more it says how many."""


class Run:
    """A run's folder, finished or not: ``Run.open("runs/...")``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """The run of a folder that :func:`train` or the command made; another is refused."""
        run = cls(folder)
        if not (run.folder / CONFIG).is_file():
            inside = sorted(path.parent for path in run.folder.glob(f"*/{CONFIG}"))
            example = (
                f"one of those in it, as {inside[-1]}"
                if inside
                else ("a folder that `largemargin train` made, as runs/20250101-120000-name")
            )
            raise LargeMarginError(f"{folder} is no run: it has no {CONFIG}. Pass {example}.")
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> RunConfig:
        """All its settings, also the defaults."""
        return from_dict(read_yaml(self.folder / CONFIG))

    @property
    def finished(self) -> bool:
        """Whether it came to its end; otherwise it can be resumed."""
        return (self.folder / RESULT).is_file()

    @property
    def result(self) -> dict[str, Any]:
        """Accuracies and timings of a finished run."""
        if not self.finished:
            raise LargeMarginError(
                f"{self.folder} is not finished. Continue it: {resume_command(self.folder)}"
            )
        result: dict[str, Any] = read_json(self.folder / RESULT)
        check_version(result, RESULT_KIND, self.folder / RESULT)
        with damage_named(str(self.folder / RESULT)):
            for split in ("validation", "test"):
                float((result.get(split) or {"accuracy": 0})["accuracy"])
            if not isinstance(result.get("failure"), str | None):
                raise TypeError("failure is no text")
        return result

    @property
    def failure(self) -> str | None:
        """Why a finished run is no success, and what to do: it diverged. None where it is."""
        failure: str | None = self.result.get("failure") if self.finished else None
        return failure

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, all or of one kind: "epoch", "gradients", "bad_steps"."""
        path = self.folder / METRICS
        if not path.is_file():
            return []
        rows = whole_rows(path)[0]
        return [row for row in rows if kind is None or row["kind"] == kind]

    def data(self, config: DataConfig | None = None) -> Data:
        """The data of the run, loaded again; the same images, split and noise.

        Args:
            config: how to read it, where not as the run did: ``replace(run.config.data,
                workers=4)``.

        Raises:
            LargeMarginError: where the images are not those the run began with.
        """
        data = load_again(self.folder, config or self.config.data)
        if (self.folder / DATA).is_file():
            instead = "name other images to test: evaluate and measure take them with --data"
            check_same_data(self.folder, self.facts, data, instead=instead)
        return data

    @property
    def facts(self) -> dict[str, Any]:
        """What data.json says: classes, size, licence, and the record of sources and modifiers."""
        path = self.folder / DATA
        facts: dict[str, Any] = read_json(path)
        check_version(facts, RESULT_KIND, path)
        known = {name: each for name, each in facts.items() if name not in STAMP}
        given = settings_from(known, _Facts, str(path))
        parts = ("images", "digests", "contents", "counts")
        groups = [given.record.get(name) or {} for name in parts]
        inner = groups[-1].values() if isinstance(groups[-1], dict) else ()
        if (
            not all(isinstance(each, dict) for each in (*groups, *inner))
            or (len(given.size), len(given.mean), len(given.std)) != (2, *[given.channels] * 2)
            or min(*given.size, given.channels, len(given.classes)) < 1
        ):
            raise LargeMarginError(f"{path} is damaged: its sizes, counts or digests are none.")
        return facts

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return tuple(self.facts["classes"])

    def model(self, which: str = "best") -> nn.Module:
        """The trained network on the CPU, in evaluation mode; it takes images in [0, 1].

        Args:
            which: "best" on the validation images (the last without them) or "last".
        """
        found = Checkpoints(self.folder).find(which)
        if found is None:
            raise LargeMarginError(f"{self.folder} holds no {which} checkpoint yet.")
        config, facts = self.config, self.facts
        with torch.random.fork_rng(devices=[]):
            model = build_model(
                replace(config.model, weights=None),
                len(facts["classes"]),
                channels=facts["channels"],
                size=tuple(facts["size"]),
                mean=tuple(facts["mean"]),
                std=tuple(facts["std"]),
            )
        return model_weights(found, model)

    def geometry(self) -> Geometry | None:
        """What was measured on the test images at the end, if it was."""
        path = self.folder / GEOMETRY
        return load_record(Geometry, path) if path.is_file() else None


@dataclass(frozen=True)
class _Facts:
    """What data.json holds."""

    name: str
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    record: dict[str, Any] = field(default_factory=dict)
    run: str | None = None


def load_record(kind: type[Kept], path: Path) -> Kept:
    """A result that was saved as JSON, refused where it is nested or numbered beyond sense."""
    read_json(path)
    with damage_named(str(path)):
        return kind.load(path)


def resume_command(folder: str | Path) -> str:
    """What continues a run, by as many processes as a launcher started here.

    Example:
        >>> resume_command("runs/my run")
        "largemargin train --resume 'runs/my run'"
    """
    words = f"largemargin train --resume {shlex.quote(str(folder))}"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return words
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    machines = "" if here == world else f"--nnodes {world // here} "
    return f"torchrun {machines}--nproc-per-node {here} -m {words}"


def new_folder(config: RunConfig) -> Path:
    """Make ``out/<time>-<name>``; a second run in the same second gets another name."""
    base = Path(config.out)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = base / (f"{stamp}-{config.name}" + (f"-{attempt}" if attempt else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise LargeMarginError(
                f"cannot make the folder {folder}: {error.strerror}. Choose another with --out."
            ) from error
        return folder
    raise LargeMarginError(f"too many runs named {config.name} in {base}.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time in a run's folder; the lock ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LargeMarginError(
                f"another process is training in {folder}. Wait for it, or choose another folder."
            ) from None
        yield
    finally:
        os.close(handle)


def load_again(folder: Path, config: DataConfig) -> Data:
    """The data of the run in ``folder``; where it was moved, an error says where to write that."""
    path = config.path
    if path is not None and not config.download and not Path(path).expanduser().exists():
        seen = "" if Path(path).expanduser().is_absolute() else f", seen from {Path.cwd()}"
        raise LargeMarginError(
            f"the data of {folder} is not at {path}{seen}. If it was moved, write its new place "
            f"into {folder / 'config.yaml'}, as data.path: there the run finds its images again."
        )
    return load_data(config)


def check_same_data(folder: Path, facts: dict[str, Any], data: Data, *, instead: str) -> None:
    """Refuse other images: in silence they would give another result.

    A folder to which a file was added is split anew, so that images the model was trained on turn
    up among those held out; one without a class numbers the others anew. ``facts`` is what
    data.json of the run says, ``instead`` what else can be done than to put the old images back.
    """
    changed = _classes(facts, data) or _splits(facts.get("record") or {}, data.record)
    if changed:
        raise LargeMarginError(
            f"the data is not what {folder} began with: {changed}. Put the old images back, or "
            f"{instead}."
        )


def _classes(facts: dict[str, Any], data: Data) -> str:
    before = [str(name) for name in (facts.get("record") or {}).get("classes", facts["classes"])]
    now = list(data.classes)
    if before == now:
        return ""
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    said = [
        *([f"it has no {_called(gone)} any more"] if gone else []),
        *([f"it has {_called(new)}, which the run does not know"] if new else []),
    ]
    return " and ".join(said) or "its classes are in another order"


def _called(names: list[str]) -> str:
    return f"class{'es' * (len(names) > 1)} {listed(names, NAMED)}"


def _splits(before: dict[str, Any], now: dict[str, Any]) -> str:
    said = []
    for name, digest in before.get("digests", {}).items():
        count, size = before.get("images", {}).get(name), now.get("images", {}).get(name)
        if digest == now.get("digests", {}).get(name):
            # Runs of older releases know names and labels alone.
            known = before.get("contents", {}).get(name)
            if known is not None and known != now.get("contents", {}).get(name):
                said.append(f"{name} has images of the same names with other contents")
            continue
        if size is None:
            said.append(f"there are no {name} images")
        elif count is None or count == size:
            said.append(f"{name} has other images or labels")
        else:
            said.append(f"{name} has other images ({size:,} instead of {count:,})")
    return f"{', '.join(said)} now" if said else ""
