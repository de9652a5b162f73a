"""Writes measured tables and the projection for 10^8 classes into how-to/million_classes.md.

The tables are rows of ``benchmarks/results``: ``fused_head_cuda.json``,
``head_optimizer_cuda.json`` and ``omniglot.json``. The answer of ``largemargin plan`` is what the
command prints.
The projection is arithmetic on measured rates of one GPU (``fused_head_cuda.json`` and the
optimizers) and a stated network; nothing of it was run. Rates and memory are of one set-up:
bfloat16 class vectors, the Triton kernels, and an optimizer that was measured on such vectors. Run
``python docs/make_projection.py`` after the benchmarks; a test fails when the committed page is
out of date.
"""

import contextlib
import io
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from largemargin.app.cli.command import main
from largemargin.heads import estimate_memory
from largemargin.heads.memory_estimate import MemoryEstimate

HERE = Path(__file__).parent
PAGE = HERE / "how-to" / "million_classes.md"
RESULTS = HERE.parent / "benchmarks" / "results"
TABLES = ("heads", "plan", "optimizers", "omniglot", "memory", "projection")

CLASSES, DIM, SAMPLES = 10**8, 512, 256
GPUS = (16, 64, 256)
BANDWIDTH = 50e9
"""Bytes a second each GPU sends and receives between machines: 400 Gbit/s InfiniBand."""
LATENCY = 50e-6
"""Seconds before a collective among many machines begins to move data; there are six a step."""
COLLECTIVES = 6
FEATURE_BYTES, GRADIENT_BYTES, STATISTICS = 2, 4, 7
"""Features are gathered in bfloat16, gradients summed in float32; 7 numbers a sample reduced."""

DTYPE = torch.bfloat16
"""Of the class vectors; measured rows with others do not count."""
OPTIMIZERS = {"RowwiseAdam, bfloat16 weights": "rowwise_adam"}
"""Measured on such vectors; the names that ``estimate_memory`` has for them."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rates:
    """What one GPU was measured to take."""

    device: str
    pair_seconds: float
    """Forward and backward, for each pair of a sample and a class."""
    measured_classes: int
    number_seconds: float | None
    """Optimizer step, for each number of the weight."""
    optimizer: str | None
    """Its row in the table of the optimizers."""


def rates(heads: Iterable[Row], optimizers: Iterable[Row]) -> Rates | None:
    """Rates from benchmark rows; None where no fused head of this dimension was measured.

    Of the rows of our fused head with ArcFace and class vectors of ``DTYPE`` the one with most
    classes counts, of several with as many the fastest.
    """
    ours = [
        row
        for row in heads
        if "triton" in str(row["provider"]).lower()
        and "arc" in str(row["loss"]).lower()
        and row["D"] == DIM
        and row["prototypes"] == str(DTYPE)
        and row.get("ms")
    ]
    if not ours:
        return None
    best = max(ours, key=lambda row: (row["C"], -row["ms"]))
    steps = [row for row in optimizers if row["D"] == DIM and row["provider"] in OPTIMIZERS]
    step = min(steps, key=lambda row: row["median_ms"], default=None)
    return Rates(
        device=str(best.get("device", "one GPU")),
        pair_seconds=best["ms"] / 1e3 / (best["N"] * best["C"]),
        measured_classes=best["C"],
        number_seconds=None if step is None else step["median_ms"] / 1e3 / (step["C"] * step["D"]),
        optimizer=None if step is None else str(step["provider"]),
    )


@dataclass(frozen=True)
class Projected:
    """One step of a head on many GPUs, in seconds and bytes."""

    gpus: int
    classes_each: int
    statistics: float
    optimizer: float | None
    network: float
    memory: int

    @property
    def step(self) -> float:
        return self.statistics + (self.optimizer or 0.0) + self.network


def project(measured: Rates, gpus: int) -> Projected:
    """A step of ``gpus`` GPUs with ``SAMPLES`` samples each.

    A process works on all samples and its share of the classes, so on ``SAMPLES * CLASSES`` pairs
    however many there are. The network carries, in and out of each GPU, the features of the others
    once, their gradients once, and a few numbers a sample twice (a ring's all-reduce).
    """
    each, everyone = -(-CLASSES // gpus), SAMPLES * gpus
    others = (gpus - 1) / gpus
    moved = everyone * others * (DIM * (FEATURE_BYTES + GRADIENT_BYTES) + 2 * 4 * STATISTICS)
    return Projected(
        gpus=gpus,
        classes_each=each,
        statistics=measured.pair_seconds * everyone * each,
        optimizer=None if measured.number_seconds is None else measured.number_seconds * each * DIM,
        network=moved / BANDWIDTH + (COLLECTIVES * LATENCY if gpus > 1 else 0.0),
        memory=planned(gpus).total,
    )


def planned(gpus: int) -> MemoryEstimate:
    """Memory of the set-up whose rates are projected."""
    return estimate_memory(
        SAMPLES,
        CLASSES,
        DIM,
        world_size=gpus,
        optimizer=next(iter(OPTIMIZERS.values())),
        impl="triton",
        dtype=DTYPE,
    )


def memory_table() -> str:
    lines = [
        "| GPUs R | classes each | weights + gradients | optimizer state | workspace "
        "| features of all | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        plan = planned(gpus)
        lines.append(
            f"| {gpus} | {plan.local_classes:,} | {_gib(plan.weights + plan.gradients)} "
            f"| {_gib(plan.optimizer_state)} | {_gib(plan.workspace)} | {_gib(plan.features, 2)} "
            f"| {_gib(plan.total)} |"
        )
    return "\n".join(lines)


def _gib(size: int, digits: int = 1) -> str:
    return f"{size / 2**30:.{digits}f} GiB"


def plan_answer(command: str) -> str:
    """The table that ``largemargin plan`` prints; what follows it is left out."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = main(shlex.split(command)[1:])
    if code:
        raise SystemExit(f"{command} ends with {code}")
    head, numbers, *_ = told.getvalue().split("\n\n")
    return f"```text\n{head}\n\n{numbers}\n```"


def table(measured: Rates | None) -> str:
    if measured is None:
        return "Not measured yet: there are no rows of the fused head on a GPU."
    lines = [
        "| GPUs R | classes each | peak | statistics | optimizer | network | step | samples/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        each = project(measured, gpus)
        stepped = "not measured" if each.optimizer is None else f"{1e3 * each.optimizer:.1f} ms"
        lines.append(
            f"| {gpus} | {each.classes_each:,} | {each.memory / 2**30:.1f} GiB "
            f"| {1e3 * each.statistics:.0f} ms | {stepped} | {1e3 * each.network:.1f} ms "
            f"| {1e3 * each.step:.0f} ms | {SAMPLES * gpus / each.step:,.0f} |"
        )
    kind = str(DTYPE).removeprefix("torch.")
    lines += [
        "",
        f"All of it for {kind} class vectors, {SAMPLES} samples a GPU and {DIM} dimensions. The",
        "numbers come from:",
        "",
        f'- statistics: the row "largemargin triton, ArcFace" of {measured.measured_classes:,} '
        f"classes of {kind} above,",
        f"  eager, on one {measured.device}: {1e12 * measured.pair_seconds:.2f} ps a pair of "
        "sample and class;",
    ]
    if measured.optimizer is not None:
        lines += [
            f'- optimizer: the row "{measured.optimizer}" of the [optimizers](#step), as much '
            "for each number;",
        ]
    lines += [
        '- peak: the table before, `impl="triton"`;',
        f"- network: not measured, {BANDWIDTH / 1e9:.0f} GB/s between machines and "
        f"{1e6 * LATENCY:.0f} us for each of {COLLECTIVES} collectives, nothing overlapped.",
        "",
        "The backbone is not in it.",
    ]
    return "\n".join(lines)


def rows_of(name: str) -> list[Row]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def optimizer_table(rows: Sequence[Row]) -> str:
    if not rows:
        return "Not measured yet: there are no rows of the optimizers on a GPU."
    first = rows[0]
    lines = [
        f"Measured on {first['device']}, {first['C']:,} classes of {first['D']}:",
        "",
        "| optimizer | a step | moved | GiB/s | state | allocated in a step | to torch's fastest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['provider']} | {row['median_ms']:.2f} ms | {row['moved_gib']:.1f} GiB "
            f"| {row['gib_per_s']:,.0f} | {row['state_mib']:,.0f} MiB "
            f"| {row['temporary_mib']:,.0f} MiB | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def _milliseconds(row: Row, name: str) -> str:
    return f"{row[name]:.2f}" if row.get(name) is not None else "-"


def head_table(rows: Sequence[Row]) -> str:
    """Forward and backward of ours and of the others, by number of classes."""
    steps = [row for row in rows if row["provider"] != "predict" and "ms" in row]
    if not steps:
        return "Not measured yet: there are no rows of a GPU."
    lines = [f"Forward and backward on {steps[0]['device']}, 512 dimensions, milliseconds:"]
    for classes in dict.fromkeys(row["C"] for row in steps):
        own = [row for row in steps if row["C"] == classes]
        kind = own[0]["prototypes"].removeprefix("torch.")
        lines += [
            "",
            f"{classes:,} classes of {kind}, {own[0]['N']:,} samples:",
            "",
            "| provider | loss | eager | in a CUDA graph | memory beyond gradients |",
            "|---|---|---|---|---|",
        ]
        for row in own:
            extra = row.get("extra_mib")
            memory = "-" if extra is None or extra < 0 else f"{extra:,.0f} MiB"
            lines.append(
                f"| {row['provider']} | {row['loss']} | {_milliseconds(row, 'ms')} "
                f"| {_milliseconds(row, 'graph_ms')} | {memory} |"
            )
    return "\n".join(lines)


def omniglot_table(rows: Sequence[Row]) -> str:
    final = [row for row in rows if row["phase"] == "final"]
    if not final:
        return "Not measured yet: there are no rows of Omniglot."
    lines = [
        "| loss | recall@1 on new alphabets | by seed | chosen |",
        "|---|---|---|---|",
    ]
    for provider in dict.fromkeys(row["provider"] for row in final):
        own = [row for row in final if row["provider"] == provider]
        found = [100 * row["recall_at_1"] for row in own]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        lines.append(
            f"| {provider} | {statistics.mean(found):.2f} +- {spread:.2f} % "
            f"| {', '.join(f'{each:.2f}' for each in found)} "
            f"| lr {own[0]['lr']:g}, margin {own[0]['margin']:g}, {own[0]['epochs']} epochs |"
        )
    floor = next((row for row in rows if row["phase"] == "floor"), None)
    if floor is not None:
        lines += [
            "",
            f"Without training the network finds {100 * floor['untrained_recall_at_1']:.1f} %, the "
            f"pixels themselves {100 * floor['pixels_recall_at_1']:.1f} %. On {own[0]['device']}.",
        ]
    return "\n".join(lines)


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made by docs/make_projection.py -->", f"<!-- end of {name} -->"


def page() -> str:
    steps = rows_of("head_optimizer_cuda")
    text = PAGE.read_text(encoding="utf-8")
    asked = re.search(r"```bash\n(largemargin plan .*?)\n```", text, re.DOTALL)
    if asked is None:
        raise SystemExit(f"{PAGE.name} has lost its command largemargin plan")
    made = {
        "heads": head_table(rows_of("fused_head_cuda")),
        "plan": plan_answer(asked[1]),
        "memory": memory_table(),
        "optimizers": optimizer_table(steps),
        "omniglot": omniglot_table(rows_of("omniglot")),
        "projection": table(rates(rows_of("fused_head_cuda"), steps)),
    }
    for name in TABLES:
        begin, end = marks(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n{made[name]}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
