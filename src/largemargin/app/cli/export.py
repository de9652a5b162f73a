"""``largemargin export``: a trained run as an ONNX file or a torch.export program."""

from typing import Any, Literal

import jsonargparse

from largemargin.app.cli.open_run import (
    CalibrationCache,
    add_run,
    add_temperature,
    open_run,
    output_file,
    temperature_for,
)
from largemargin.errors import LargeMarginError

HELP = "write a trained model as ONNX or torch.export program, which need no largemargin"

DESCRIPTION = """\
Write the trained model to a file that runs without this library: ONNX for onnxruntime and others,
or a torch.export program for torch. It takes images in [0, 1], of any number, and normalises them
itself. The file is compared with the model before it is written."""

EXAMPLES = """\
Examples:
  largemargin export runs/20260101-120000-run --format onnx -o model.onnx
  largemargin export RUN --format program -o model.pt2 --outputs probabilities"""

SUFFIX = {"onnx": ".onnx", "program": ".pt2"}


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin export RUN [options]"
    add_run(parser)
    parser.add_argument(
        "--format", type=Literal["onnx", "program"], default="onnx", help="onnx or program"
    )
    parser.add_argument("-o", "--out", type=str, help="file; default model.onnx or .pt2 in the run")
    parser.add_argument(
        "--outputs",
        type=Literal["logits", "probabilities", "features"],
        default="logits",
        help="what it returns: logits, probabilities or features",
    )
    add_temperature(
        parser,
        "what logits are divided by for probabilities",
        fitted=", as largemargin predict does",
    )
    parser.add_argument(
        "--overwrite", type=bool, nargs="?", const=True, default=False, help="replace what is there"
    )


def run(options: Any) -> int:
    import torch

    from largemargin.export.onnx_file import to_onnx
    from largemargin.export.program import to_exported_program
    from largemargin.measuring.calibrate import number_of

    opened = open_run(options)
    path = output_file(options.out or opened.run.folder / f"model{SUFFIX[options.format]}")
    for other, suffix in SUFFIX.items():
        if path.suffix.lower() == suffix and other != options.format:
            raise LargeMarginError(
                f"{path.name} has the name of another format than {options.format}. Add --format "
                f"{other}, or call it {path.with_suffix(SUFFIX[options.format]).name}."
            )
    if path.exists() and not options.overwrite:
        raise LargeMarginError(f"{path} exists already. Replace it with --overwrite.")
    temperature = 1.0
    if options.outputs == "probabilities":
        given = temperature_for(options.temperature, CalibrationCache(opened))
        temperature = 1.0 if given is None else number_of(given)
    elif options.temperature not in ("auto", "none"):
        raise LargeMarginError(
            f"--temperature is for --outputs probabilities, but this returns {options.outputs}."
        )
    model = opened.model.cpu()
    example = torch.rand(
        2, opened.channels, *opened.size, generator=torch.Generator().manual_seed(0)
    )
    if options.format == "onnx":
        to_onnx(
            model,
            example,
            path,
            outputs=options.outputs,
            temperature=temperature,
            class_names=opened.classes,
            overwrite=options.overwrite,
        )
    else:
        program = to_exported_program(
            model, example, outputs=options.outputs, temperature=temperature
        )
        partial = path.with_name(f".{path.name}.partial{SUFFIX['program']}")
        torch.export.save(program, partial)
        partial.replace(path)
    size = path.stat().st_size / 2**20
    shape = f"{opened.channels} x {opened.size[0]} x {opened.size[1]}"
    print(f"written to {path} ({size:.1f} MiB): images {shape} in [0, 1] to {options.outputs}")
    return 0
