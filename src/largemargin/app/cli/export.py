"""``largemargin export``: a trained run as an ONNX file or a torch.export program."""

import json
from pathlib import Path
from typing import Any, Literal

import jsonargparse

from largemargin.app.cli.run_options import (
    add_options,
    add_run,
    add_switches,
    add_temperature,
    output_file,
)
from largemargin.exceptions import LargeMarginError

HELP = "write a trained model as ONNX or torch.export program, which need no largemargin"

DESCRIPTION = """\
Write the trained model to a file that runs without this library: ONNX for onnxruntime and others,
or a torch.export program for torch. It takes images in [0, 1], of any number, and normalises them
itself. The file is compared with the model before it is written, and holds the temperature with
which logits give the probabilities of largemargin predict (largemargin.temperature)."""

EXAMPLES = """\
Examples:
  largemargin export runs/20260101-120000-run --format onnx -o model.onnx
  largemargin export RUN --format program -o model.pt2 --outputs probabilities"""

SUFFIX = {"onnx": ".onnx", "program": ".pt2"}


def arguments(parser: jsonargparse.ArgumentParser) -> None:
    parser.usage = "largemargin export RUN [options]"
    add_run(parser)
    outputs = Literal["logits", "probabilities", "features"]
    add_options(parser, ("format", Literal["onnx", "program"], "onnx", "onnx or program"))
    parser.add_argument("-o", "--out", type=str, help="file; default model.onnx or .pt2 in the run")
    text = "what it returns: logits, probabilities or features"
    add_options(parser, ("outputs", outputs, "logits", text))
    add_temperature(
        parser,
        "what logits are divided by for probabilities; a file of logits only says it",
        fitted=", as for largemargin predict",
    )
    add_switches(parser, overwrite="replace what is there")


def run(options: Any) -> int:
    import torch

    from largemargin.app.cli.open_run import CalibrationCache, open_run, temperature_for
    from largemargin.export.onnx_file import to_onnx
    from largemargin.export.program import to_exported_program
    from largemargin.measuring.calibrate import number_of

    opened = open_run(options)
    path = output_file(options.out or opened.run.folder / f"model{SUFFIX[options.format]}")
    _check_free(path, options)
    temperature = 1.0
    if options.outputs != "features":
        given = temperature_for(options.temperature, CalibrationCache(opened))
        temperature = 1.0 if given is None else number_of(given)
    elif options.temperature not in ("auto", "none"):
        raise LargeMarginError(
            "--temperature is for logits and probabilities, but this returns features."
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
        applied = 1.0 if options.outputs == "logits" else temperature
        program = to_exported_program(model, example, outputs=options.outputs, temperature=applied)
        extra = {"largemargin.temperature": json.dumps(temperature)}
        partial = path.with_name(f".{path.name}.partial{SUFFIX['program']}")
        torch.export.save(program, partial, extra_files=extra)
        partial.replace(path)
    size = path.stat().st_size / 2**20
    shape = f"{opened.channels} x {opened.size[0]} x {opened.size[1]}"
    said = {
        "logits": f"; probabilities are softmax(logits / {temperature:.6g})",
        "probabilities": f", softmax(logits / {temperature:.6g})",
        "features": "",
    }[options.outputs]
    print(
        f"written to {path} ({size:.1f} MiB): images {shape} in [0, 1] to {options.outputs}{said}"
    )
    return 0


def _check_free(path: Path, options: Any) -> None:
    """Refuse the name of another format, and a file that is there."""
    for other, suffix in SUFFIX.items():
        if path.suffix.lower() == suffix and other != options.format:
            raise LargeMarginError(
                f"{path.name} has the name of another format than {options.format}. Add --format "
                f"{other}, or call it {path.with_suffix(SUFFIX[options.format]).name}."
            )
    if path.exists() and not options.overwrite:
        raise LargeMarginError(f"{path} exists already. Replace it with --overwrite.")
