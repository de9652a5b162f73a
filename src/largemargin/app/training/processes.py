"""What a run runs on: the device, versions and commit, and this process among the others.

``torchrun`` and ``accelerate launch`` start several processes; accelerate joins them. A run of one
process without trackers needs neither, and takes the short way.
"""

import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from largemargin.app.config import RunConfig
from largemargin.app.training.config_file import flat
from largemargin.errors import LargeMarginError, MissingPackage, optional_module
from largemargin.version import __version__

Loaded = TypeVar("Loaded")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AGREE_EVERY = 10
"""Steps between which processes ask each other whether one was told to stop, at most."""
AGREE_SECONDS = 2.0
"""The same in seconds: launchers kill what has not ended 30 seconds after SIGTERM."""


class Processes:
    """One or several processes that train one model."""

    def __init__(self, config: RunConfig) -> None:
        self.several = several_processes()
        self.accelerator: Any = None
        if self.several or config.trackers:
            self.accelerator = _accelerator(config)
        if self.several:
            self.device = torch.device(self.accelerator.device)
            self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        else:
            self.device = pick_device(config.device)
            self.rank, self.world = 0, 1
        self.scaler = None
        if config.precision == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type)
        self._alone: list[nn.Parameter] = []

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model whose backward pass averages gradients over processes."""
        if not self.several:
            return model, optimizer
        inside = {id(parameter) for parameter in model.parameters()}
        groups = optimizer.param_groups
        # Parameters of losses do not pass through the model, so nobody averages their gradients.
        self._alone = [p for group in groups for p in group["params"] if id(p) not in inside]
        with warnings.catch_warnings():
            # accelerate knows no other name for it yet.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return self.accelerator.prepare_model(model), optimizer

    def backward(self, loss: Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        for parameter in self._alone:
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world

    @torch.no_grad()
    def share_buffers(self, *models: nn.Module) -> None:
        """Give every process the first one's buffers (running statistics of its own images)."""
        if self.several:
            for buffer in nn.ModuleList(models).buffers():  # each once
                torch.distributed.broadcast(buffer, 0)

    def first_alone(self, work: Callable[[], Loaded]) -> Loaded:
        """Let the first process work, then the others: one of them downloads, the others find."""
        with self.accelerator.main_process_first() if self.several else nullcontext():
            return work()

    def wait(self) -> None:
        if self.several:
            self.accelerator.wait_for_everyone()

    def largest(self, *numbers: float) -> list[float]:
        """The largest that any process has of each; all of them have to ask at the same step."""
        if not self.several:
            return list(numbers)
        said = torch.tensor(numbers, device=self.device)
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
        largest: list[float] = said.tolist()
        return largest

    def of_all(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of every process, as ``0.name``, ``1.name`` and so on."""
        found: list[Any] = [tensors]
        if self.several:
            found = [None] * self.world
            torch.distributed.all_gather_object(found, tensors)
        return {f"{rank}.{name}": t for rank, each in enumerate(found) for name, t in each.items()}

    def agree_on(self, folder: Path | None) -> Path:
        """The first process's folder, for all."""
        found = [str(folder)]
        if self.several:
            from accelerate.utils import broadcast_object_list

            broadcast_object_list(found)
        return Path(found[0])

    def start_trackers(self, folder: Path, name: str, settings: dict[str, Any]) -> Any:
        """``track(values, step)``, or None without trackers."""
        if self.accelerator is None or not self.accelerator.log_with:
            return None
        self.accelerator.project_configuration.logging_dir = str(folder)
        plain = {
            path: value if isinstance(value, int | float | str | bool) else str(value)
            for path, value in flat(settings).items()
            if value != {}
        }
        self.accelerator.init_trackers(name, config=plain)
        return lambda values, step: self.accelerator.log(values, step=step)

    def end(self) -> None:
        """Close the trackers. (accelerate's own way would part the processes, too.)"""
        if self.accelerator is not None:
            for tracker in self.accelerator.trackers:
                tracker.finish()


class StopAgreement:
    """Whether any of the processes was told to stop: all learn it after the same step.

    Asking the others takes time, so a question is left out for as many steps as fit into
    :data:`AGREE_SECONDS`, and for :data:`AGREE_EVERY` at most.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.next = 0
        self._step, self._time = 0, time.monotonic()

    def any(self, asked: bool, step: int) -> bool:
        """Whether one was told to, as far as is known after this step."""
        if not self.processes.several:
            return asked
        if step < self.next:
            return False
        now = time.monotonic()
        seconds = (now - self._time) / max(1, step - self._step)
        told, slowest = self.processes.largest(float(asked), seconds)
        fit = int(AGREE_SECONDS / max(slowest, 1e-9))
        self.next = step + max(1, min(fit, AGREE_EVERY))
        self._step, self._time = step, now
        return told > 0


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    dtype = DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def several_processes() -> bool:
    """Whether a launcher started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _accelerator(config: RunConfig) -> Any:
    accelerate = optional_module("accelerate", "several processes and trackers need accelerate")
    # A clean and a noisy pass before one backward pass: buffers may not change in between.
    several = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)
    waiting = accelerate.InitProcessGroupKwargs(timeout=timedelta(seconds=config.timeout))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no supported trackers", UserWarning)  # said below
            accelerator = accelerate.Accelerator(
                cpu=config.device == "cpu" or not torch.cuda.is_available(),
                device_placement=False,
                log_with=list(config.trackers) or None,
                project_dir=config.out,
                kwargs_handlers=[several, waiting],
            )
    except ValueError as error:
        raise LargeMarginError(
            f"accelerate refuses the trackers {list(config.trackers)}: {error}"
        ) from error
    # It leaves out those it cannot find, and says so in a log that nobody sees.
    found = {str(getattr(each, "value", each)) for each in accelerator.log_with}
    if missing := [each for each in config.trackers if each not in (*found, "all")]:
        raise MissingPackage(
            f"no package was found for trackers: {', '.join(missing)}. Install what is missing: "
            f"pip install {' '.join(missing)}. Or leave it out: metrics.jsonl holds the same "
            "numbers."
        )
    return accelerator


PACKAGES = ("torchvision", "numpy", "accelerate", "safetensors", "scikit-learn", "timm")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LargeMarginError(
            f"device must be auto, cpu, cuda, ..., but {name!r} was given."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LargeMarginError(
            f"device is {name}, but torch sees no CUDA device here. Use device: cpu or auto."
        )
    try:
        if device.type != "cuda":
            torch.empty(0, device=device).cpu()
    except (RuntimeError, NotImplementedError, AssertionError):
        raise LargeMarginError(
            f"device is {name}, but this torch cannot compute there. Use device: cpu or auto."
        ) from None
    return device


def environment(device: torch.device, *, processes: int = 1) -> dict[str, Any]:
    """Provenance as plain values. Nothing in it names a user or a path outside the command."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "largemargin": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "packages": versions,
        "device": device_name(device),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "processes": processes,
        "platform": platform.platform(),
        "commit": commit(),
        "command": command(),
    }


def command() -> list[str]:
    """What was typed, without the folder of the program; ``python -m NAME`` as that."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return ["python", "-m", program.parent.name, *sys.argv[1:]]
    return [program.name, *sys.argv[1:]]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {os.cpu_count()} cores)"


def commit() -> str | None:
    """The commit of the working folder, with a + where files differ from it; None without git."""
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None if shown.returncode == 0 else None
