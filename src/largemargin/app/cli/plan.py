"""``largemargin plan``: what a head with many classes takes, and on how many GPUs it fits."""

import json
from typing import Any, Literal

import jsonargparse

from largemargin.app.cli.run_options import add_options, add_switches
from largemargin.exceptions import LargeMarginError

HELP = "memory of a head with many classes, and on how many GPUs it fits"

DESCRIPTION = """\
Print the memory that the classification head takes in a training step: class vectors, gradients,
optimizer state, features and workspace, on 1, 2, 4, ... GPUs that share the classes
(ShardedClassHead). Nothing is allocated. The backbone is not counted: leave room for it."""

EXAMPLES = """\
Examples:
  largemargin plan --classes 1000000 --dim 512
  largemargin plan --classes 100000000 --dim 512 --memory 70 --dtype bfloat16 --optimizer sgd
  largemargin plan --classes 10000000 --dim 512 --gpus 8 --optimizer adamw
  largemargin plan --classes 10000000 --dim 512 --sample_rate 0.1 --json"""

Optimizer = Literal[
    "sgd", "sgd_momentum", "adagrad", "rmsprop", "adam", "adamw", "rowwise_adam", "head_sgd"
]


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin plan --classes C --dim D [options]"
    parser.add_argument("--classes", type=int, required=True, help="number of classes")
    parser.add_argument("--batch_size", "--batch", type=int, default=256, help="samples per GPU")
    add_options(
        parser,
        ("dim", int, 512, "dimensions of the features"),
        ("gpus", int | None, None, "GPUs; default 1, 2, 4, ... until it fits"),
        ("memory", float, 80.0, "GiB of a GPU that the head may take"),
        ("optimizer", Optimizer, "sgd_momentum", "of the head"),
        ("fused", bool, False, "optimizer with fused=True"),
        ("dtype", Literal["float32", "bfloat16", "float16"], "float32", "of the class vectors"),
        ("impl", Literal["auto", "dense", "chunked", "triton"], "auto", "of the class statistics"),
        ("sample_rate", float, 1.0, "part of the classes seen in a step"),
    )
    add_switches(parser, json="print JSON")


def run(options: Any) -> int:
    import torch

    from largemargin.heads.memory_estimate import most_classes

    if options.memory <= 0:
        raise LargeMarginError(f"--memory must be above 0 GiB, but {options.memory:g} was given.")
    settings = {
        "optimizer": options.optimizer,
        "fused": options.fused,
        "dtype": getattr(torch, options.dtype),
        "impl": options.impl,
        "sample_rate": options.sample_rate,
    }
    plans = _plans(options, settings)
    if options.json:
        print(json.dumps([plan.as_dict() for plan in plans], indent=1))
        return 0
    print(f"{options.batch_size} samples per GPU, {options.dim} dimensions, GiB per GPU:\n")
    print(_table(plans, options.memory))
    print()
    print(plans[-1])
    gpus = plans[-1].world_size
    most = most_classes(
        options.memory, options.batch_size, options.dim, world_size=gpus, **settings
    )
    on = "1 GPU" if gpus == 1 else f"{gpus:,} GPUs"
    if not plans[-1].fits(options.memory) and options.gpus is None:
        print(
            "It fits on no number of GPUs: every process gathers the batch of all. Lower --batch, "
            "or take --dtype bfloat16, --optimizer sgd or --sample_rate."
        )
    print(f"Most classes within {options.memory:g} GiB on {on}: {most:,}.")
    return 0


def _plans(options: Any, settings: dict[str, Any]) -> list[Any]:
    """On 1, 2, 4, ... GPUs until it fits or more of them do not help; or on ``--gpus`` of them."""
    from largemargin.heads.memory_estimate import estimate_memory

    plans: list[Any] = []
    gpus = 1 if options.gpus is None else options.gpus
    while True:
        plan = estimate_memory(
            options.batch_size, options.classes, options.dim, world_size=gpus, **settings
        )
        # Features of all processes are gathered: more GPUs do not help for ever.
        if plans and plan.total >= plans[-1].total:
            return plans
        plans.append(plan)
        if options.gpus is not None or plan.fits(options.memory):
            return plans
        gpus *= 2


def _table(plans: list[Any], memory: float) -> str:
    names = ("GPUs", "classes each", "weights", "gradients", "optimizer", "batch and workspace")
    rows: list[tuple[str, ...]] = [(*names, "peak", f"fits {memory:g}")]
    for plan in plans:
        parts = (
            plan.weights,
            plan.gradients,
            plan.optimizer_state,
            plan.features + plan.workspace,
            plan.total,
        )
        numbers = (f"{part / 2**30:.2f}" for part in parts)
        fits = "yes" if plan.fits(memory) else "no"
        rows.append((f"{plan.world_size:,}", f"{plan.local_classes:,}", *numbers, fits))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
