"""Training images per second of the engine against a hand-written loop, in one run.

ResNet-18 for 32 x 32 images with a 30-d feature layer, random crops and mirror images of 9,984
images that lie on the device. Rows go to ``benchmarks/results/training_speed_<device>.json``.

    python benchmarks/training_speed.py                 # CUDA: plain, compiled, graphs, several
    python benchmarks/training_speed.py --device cpu    # the engine's overhead over a written loop
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from largemargin.app.data import Augment, Batches, Data, DataConfig, Samples
from largemargin.app.models import ModelConfig, build_model
from largemargin.app.training import ObjectiveConfig, RunConfig
from largemargin.app.training.journal import Journal
from largemargin.app.training.processes import Processes, commit, device_name
from largemargin.app.training.trainer import Trainer

BATCH = 128
RESNET = ModelConfig("resnet18", feature_dim=30)
SMALL = ModelConfig("small_cnn")
LMD = ObjectiveConfig("discriminative", {"margin": 6.0, "momentum": 0.99})


def images(count: int, side: int, channels: int, classes: int = 10) -> Data:
    generator = torch.Generator().manual_seed(0)
    shape = (count, channels, side, side)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % classes
    return Data(
        name="random",
        classes=tuple(map(str, range(classes))),
        channels=channels,
        size=(side, side),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        licence="none",
        train=Samples(labels, tuple(map(str, range(count))), pixels),
        validation=None,
        test=None,
        augment=Augment("crop_flip"),
        record={},
    )


def written_loop(
    data: Data, model_config: ModelConfig, device: torch.device, *, compiled: bool, half: bool
) -> Callable[[int], None]:
    """What one writes by hand: crop, flip, autocast, backward, clip, step; no engine."""
    torch.manual_seed(0)
    built = build_model(
        model_config, 10, channels=data.channels, size=data.size, mean=data.mean, std=data.std
    ).to(device)
    model: nn.Module = built.to(memory_format=torch.channels_last)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    batches = Batches(data.train, BATCH, device=device, augment=data.augment)
    endless = (batch for epoch in count() for batch in batches.epoch(epoch))

    def steps(number: int) -> None:
        model.train()
        for batch in islice(endless, number):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = F.cross_entropy(run(batch.images), batch.labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    return steps


class Engines:
    """Trainers of the engine, stepped in turn, each on its own stream."""

    def __init__(self, count: int, data: Data, device: torch.device, **settings: Any) -> None:
        folder = Path(tempfile.mkdtemp())
        self.streams: list[Any] = [None] * count
        if device.type == "cuda":
            self.streams = [torch.cuda.Stream() for _ in range(count)]
        self.trainers: list[Trainer] = []
        self.lanes: list[Iterator[None]] = []
        for seed, stream in enumerate(self.streams):
            config = RunConfig(
                seed=seed,
                epochs=10_000,
                batch_size=BATCH,
                gradients_every=0,
                checkpoint_every=10_000,
                device=str(device),
                data=DataConfig(),
                **settings,
            )
            with torch.cuda.stream(stream):
                trainer = Trainer(config, data, Journal(folder), processes=Processes(config))
                self.trainers.append(trainer)
                self.lanes.append(trainer.steps())

    def gradient_norm(self) -> float:
        """Of the first run, its mean over the epoch so far."""
        return float(self.trainers[0].totals.read().row()["gradient_norm"])

    def __call__(self, count: int) -> None:
        for _ in range(count):
            for lane, stream in zip(self.lanes, self.streams, strict=True):
                with torch.cuda.stream(stream):
                    next(lane)


def rates(
    runs: dict[str, tuple[Callable[[int], None], int]],
    device: torch.device,
    *,
    per_step: float,
    steps: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Images per second of every provider, interleaved, ``rounds`` times ``steps`` steps.

    ``per_step`` is the mean number of images of a step: the last one of an epoch has fewer.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, models) in runs.items():
            wait()
            started = time.perf_counter()
            run(steps)
            wait()
            found[name].append(models * steps * per_step / (time.perf_counter() - started))
    return found


def mean_batch(data: Data) -> float:
    return len(data.train) / math.ceil(len(data.train) / BATCH)


def row(name: str, values: list[float], baseline: list[float], **more: Any) -> dict[str, Any]:
    median = statistics.median(values)
    return {
        "provider": name,
        "images_per_s": round(median, 1),
        "lowest": round(min(values), 1),
        "highest": round(max(values), 1),
        "rounds": len(values),
        "ratio": round(median / statistics.median(baseline), 4),
        **more,
    }


def on_gpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    data = images(78 * BATCH, 32, 3)  # whole batches: a ragged one would be compiled anew by hand
    rows = []
    runs: dict[str, tuple[Callable[[int], None], int]] = {}
    norms: dict[bool, float] = {}

    def add(name: str, make: Callable[[], Callable[[int], None]], models: int = 1) -> None:
        started = time.perf_counter()
        try:
            run = make()
            run(100)  # an epoch and more: compiled, captured
            torch.cuda.synchronize()
            if isinstance(run, Engines):
                # Steps that do not learn would be fast too.
                norm = run.gradient_norm()
                wanted = norms.setdefault("LMD" in name, norm)
                assert math.isclose(norm, wanted, rel_tol=0.5), f"gradient norm {norm}, {wanted}"
        except Exception as error:
            rows.append({"provider": name, "error": repr(error)[:500]})
            print(rows[-1], flush=True)
            return
        runs[name] = run, models
        print(f"{name}: ready in {time.perf_counter() - started:.1f} s", flush=True)

    half = {"precision": "bf16", "model": RESNET}
    add("written loop", lambda: written_loop(data, RESNET, device, compiled=False, half=True))
    add(
        "written loop, compiled",
        lambda: written_loop(data, RESNET, device, compiled=True, half=True),
    )
    add("engine, plain", lambda: Engines(1, data, device, graph="off", **half))
    add("engine, graph", lambda: Engines(1, data, device, graph="on", **half))
    fast = {"graph": "on", "compile": True, **half}
    add("engine, graph, LMD", lambda: Engines(1, data, device, objective=LMD, graph="on", **half))
    add("engine, compiled graph", lambda: Engines(1, data, device, **fast))
    add("engine, compiled graph, LMD", lambda: Engines(1, data, device, objective=LMD, **fast))
    for models in options.side_by_side:
        for objective, mark in ((ObjectiveConfig(), ""), (LMD, ", LMD")):
            name = f"engine, compiled graph{mark}, {models} side by side"
            several = {"objective": objective, **fast}
            add(name, lambda m=models, s=several: Engines(m, data, device, **s), models)
    found = rates(
        runs, device, per_step=mean_batch(data), steps=options.steps, rounds=options.rounds
    )
    baseline = found["written loop"]
    for name, values in found.items():
        rows.append(row(name, values, baseline, against="written loop", models=runs[name][1]))
    for name in [name for name in found if ", LMD" in name]:
        softmax = name.replace(", LMD", "")
        rows.append(row(f"{name} over softmax", found[name], found[softmax], against=softmax))
    return rows


def on_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    rows = []
    for model, side, channels in ((SMALL, 8, 1), (ModelConfig("mnist_cnn"), 28, 1)):
        data = images(6_400, side, channels)
        runs: dict[str, tuple[Callable[[int], None], int]] = {
            "written loop": (
                written_loop(data, model, device, compiled=False, half=False),
                1,
            ),
            "engine": (Engines(1, data, device, model=model), 1),
        }
        for run, _ in runs.values():
            run(5)
        found = rates(
            runs, device, per_step=mean_batch(data), steps=options.steps, rounds=options.rounds
        )
        for name, values in found.items():
            baseline = found["written loop"]
            rows.append(row(name, values, baseline, against="written loop", model=model.name))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=None, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side_by_side", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    options.steps = options.steps or (300 if device.type == "cuda" else 45)
    rows = on_gpu(options) if device.type == "cuda" else on_cpu(options)
    written = {
        "device": device_name(device),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "batch": BATCH,
        "steps_per_round": options.steps,
        "rows": rows,
    }
    path = options.out or Path(__file__).parent / "results" / f"training_speed_{device.type}.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    for each in rows:
        print(each)


if __name__ == "__main__":
    main()
