"""What a training step of the benchmark's methods costs over one of softmax, alone on its device.

The runs of ``papers/benchmark`` were made several at a time on one GPU, a step of each in turn, so
that their seconds tell what ran beside them. Here every method of a situation trains by itself, on
random images of the situation's size, with its network, its batches and the library's defaults of
the loss: what augmentation, noise, forward, loss, backward and optimizer take together. Methods are
interleaved; a ratio is the median of those to softmax in the same repetition. Rows go to
``results/method_cost_<device>.json``; ``papers/benchmark/analyse.py`` reads them.

    python benchmarks/method_cost.py                   # CUDA: captured, precision as in the runs
    python benchmarks/method_cost.py --eager           # CUDA without graphs, as in a loop by hand
    python benchmarks/method_cost.py --device cpu      # float32, the time of the CPU's threads
    python benchmarks/method_cost.py --all             # methods without final runs too
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from largemargin_papers.benchmark import Protocol, read_protocol
from largemargin_papers.benchmark.plan import PASSES
from largemargin_papers.benchmark.protocol import MethodSpec, Situation
from rows import Row, environment, interleaved, spread_ms, write
from training_speed import images

from largemargin.app.training import RunConfig
from largemargin.app.training.journal import Journal
from largemargin.app.training.processes import Processes, device_name
from largemargin.app.training.trainer import Trainer

BENCHMARK = Path(__file__).resolve().parents[1] / "papers" / "benchmark"
SOFTMAX = "softmax"
OMNIGLOT_CLASSES = 770
"""About four fifths of the 964 background characters, as six of 30 alphabets are held out."""

STEPS = {"cpu": 1, "cuda": 100}
"""In one measurement."""

Shape = tuple[str, int, int, int, int]


def shape_of(situation: Situation) -> Shape:
    """What the time of a step depends on: network, batch, side, channels, classes."""
    name = situation.data["name"]
    side, channels, classes = {
        "mnist": (28, 1, 10),
        "omniglot": (32, 1, OMNIGLOT_CLASSES),
    }.get(name, (32, 3, 10))
    return situation.model["name"], situation.batch_size, side, channels, classes


def stepper(
    config: RunConfig, shape: Shape, device: torch.device, eager: bool
) -> Callable[[], None]:
    """Some steps of a run that never ends; warm on a GPU, and captured unless ``eager``."""
    _, batch, side, channels, classes = shape
    cuda = device.type == "cuda"
    endless = 1_000_000
    config = replace(
        config,
        device=str(device),
        epochs=endless,
        checkpoint_every=endless,
        precision=config.precision if cuda else "fp32",
        graph="off" if eager else config.graph,
    )
    data = images(max(8 * batch, 2 * classes) // batch * batch, side, channels, classes)
    stream = torch.cuda.Stream() if cuda else None
    with torch.cuda.stream(stream):
        journal = Journal(Path(tempfile.mkdtemp()))
        trainer = Trainer(config, data, journal, processes=Processes(config))
    lane = trainer.steps()

    def steps() -> None:
        with torch.cuda.stream(stream):
            for _ in range(STEPS[device.type]):
                next(lane)
        if cuda:
            torch.cuda.synchronize()

    steps()
    return steps


def with_final_runs(situation: Situation) -> list[str]:
    file = BENCHMARK / "measured" / f"{situation.name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"methods": {}}
    return [name for name in situation.methods if name in found["methods"]]


def measured(
    protocol: Protocol,
    shape: Shape,
    situations: dict[str, list[str]],
    device: torch.device,
    times: int,
    eager: bool = False,
) -> list[Row]:
    """Rows of all methods of situations that share a shape."""
    first = protocol.situations[next(iter(situations))]
    names = dict.fromkeys([SOFTMAX, *(name for each in situations.values() for name in each)])
    specs = [protocol.methods[name] for name in names]
    runs = {
        spec.name: stepper(protocol.config(first, spec), shape, device, eager) for spec in specs
    }
    # On a CPU its threads' own time: what else the machine does matters less.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = interleaved(runs, repetitions=times, warm_up=1, clock=clock)
    return [_row(spec, seconds, shape, situations) for spec in specs]


def _row(
    spec: MethodSpec,
    seconds: dict[str, list[float]],
    shape: Shape,
    situations: dict[str, list[str]],
) -> Row:
    mine, softmax = seconds[spec.name], seconds[SOFTMAX]
    ratios = [a / b for a, b in zip(mine, softmax, strict=True)]
    fifths = statistics.quantiles(ratios, n=5, method="inclusive")
    model, batch, side, channels, classes = shape
    return {
        "method": spec.name,
        "objective": spec.objective,
        "passes": PASSES[spec.noise.get("use", "none")],
        "situations": [name for name, methods in situations.items() if spec.name in methods],
        "ratio": round(statistics.median(ratios), 4),
        "ratio_p20": round(fifths[0], 4),
        "ratio_p80": round(fifths[-1], 4),
        "against": SOFTMAX,
        **spread_ms(mine),
        "model": model,
        "batch": batch,
        "image": [channels, side, side],
        "classes": classes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--all", action="store_true", help="methods without final runs too")
    options = parser.parse_args()
    device = torch.device(options.device)
    protocol = read_protocol(BENCHMARK / "protocol.yaml")
    shapes: dict[Shape, dict[str, list[str]]] = {}
    for situation in protocol.situations.values():
        methods = list(situation.methods) if options.all else with_final_runs(situation)
        shapes.setdefault(shape_of(situation), {})[situation.name] = methods
    common: dict[str, Any] = {
        "device": device_name(device),
        "steps": STEPS[device.type],
        "mode": "eager" if options.eager or device.type == "cpu" else "captured",
        "precision": "as in the runs" if device.type == "cuda" else "fp32",
        **environment(torch.get_num_threads()),
    }
    rows: list[Row] = []
    for shape, situations in shapes.items():
        new = measured(protocol, shape, situations, device, options.repetitions, options.eager)
        rows += new
        write(f"method_cost_{device.type}{'_eager' * options.eager}", rows, common)
        for row in new:
            print(
                f"{row['model']:10} batch {row['batch']:4} {row['method']:28} "
                f"{row['median_ms']:9.1f} ms  x{row['ratio']:.3f} "
                f"[{row['ratio_p20']:.3f}, {row['ratio_p80']:.3f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
