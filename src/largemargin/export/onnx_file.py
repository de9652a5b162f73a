"""``to_onnx``: a trained model as an ONNX file, compared with torch before it is written."""

import inspect
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from largemargin.dropin.find_head import unwrapped
from largemargin.errors import LargeMarginError, MissingPackage, check_number
from largemargin.export.plain_model import Outputs, check_class_names, check_target
from largemargin.export.program import Check, Example, check_equal, trace
from largemargin.version import __version__

PREFIX = "largemargin."
"""Keys of the metadata this library writes begin with it."""


def to_onnx(
    model: nn.Module,
    example: Example,
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool = True,
    outputs: Outputs = "logits",
    temperature: float = 1.0,
    opset: int | None = None,
    class_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    layer: str | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the trained model with its head as an ONNX file that needs neither torch nor us.

    As :func:`to_exported_program`, then through torch's ONNX exporter. The inputs have the names of
    the model's arguments, the output is called like ``outputs``, the free axis "batch". Everything
    runs on a copy on the CPU. The file appears under its name only when it is complete and equal to
    the model. Weights above 2 GB go to ``path + ".data"`` beside it.

    Args:
        model, example, dynamic_batch, outputs, layer: as in :func:`to_exported_program`.
        temperature: what logits are divided by for probabilities. The file of "logits" says it and
            leaves them as they are: ``softmax(logits / temperature)``.
        path: of the file to write, such as "model.onnx".
        opset: version of the ONNX operators; default the exporter's.
        class_names: written into the metadata, one per class.
        metadata: further entries of the file's metadata, text to text. Those of this library are
            ``largemargin.version``, ``.outputs``, ``.temperature``, ``.head`` and ``.class_names``
            (JSON).
        verify: compare with the model in onnxruntime, on two batch sizes where the batch is free.
            Without onnxruntime there is a warning instead.
        tolerance: largest difference accepted, over ``max(1, largest output)``. Default 1e-5.
        overwrite: replace an existing file.

    Returns:
        The path of the file.
    """
    target = Path(path)
    check_target(target, overwrite)
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise MissingPackage(
                f"Writing ONNX needs {package}. Install it: pip install 'largemargin[export]'"
            )
    check_number("temperature", temperature, above=0)
    metadata = dict(metadata or {})
    _check_metadata(metadata)
    program, facts, checks = trace(
        model,
        example,
        dynamic_batch=dynamic_batch,
        outputs=outputs,
        temperature=1.0 if outputs == "logits" else temperature,
        layer=layer,
        strict=False,
        verify=verify,
        device="cpu",
    )
    own = {
        "version": __version__,
        "outputs": outputs,
        "temperature": json.dumps(float(temperature)),
        "head": json.dumps(facts._asdict()),
    }
    if class_names is not None:
        check_class_names(class_names, facts)
        own["class_names"] = json.dumps(list(class_names), ensure_ascii=False)
    names = _input_names(unwrapped(model)[0], example)
    made = _convert(program, names, outputs, opset)
    if dynamic_batch:
        _name_batch(made.model.graph)
    made.model.metadata_props.update({PREFIX + key: text for key, text in own.items()} | metadata)
    made.model.producer_name, made.model.producer_version = "largemargin", __version__
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        draft = Path(folder) / target.name
        made.save(draft)
        if verify:
            _verify(draft, names, checks, model, tolerance)
        weights = draft.with_name(draft.name + ".data")
        if weights.exists():
            shutil.move(weights, target.with_name(weights.name))
        os.replace(draft, target)
    return target


def _convert(
    program: ExportedProgram, names: list[str], output: str, opset: int | None
) -> torch.onnx.ONNXProgram:
    with warnings.catch_warnings():
        # torch 2.11's exporter calls what torch 2.11 has deprecated.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        made = torch.onnx.export(
            program,
            input_names=names,
            output_names=[output],
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    return made


def _input_names(model: nn.Module, example: Example) -> list[str]:
    """What the model calls these inputs; numbered where it takes any number of them."""
    if isinstance(example, Mapping):
        return list(example)
    count = 1 if isinstance(example, Tensor) else len(example)
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [each.name for each in parameters if each.kind in fixed][:count]
    return [*names, *(f"input_{index}" for index in range(len(names), count))]


def _name_batch(graph: Any) -> None:
    """Call the free dimension "batch"; the exporter numbers it."""
    free = next(each.shape[0].value for each in graph.inputs if not each.shape.is_static(0))
    values = [*graph.inputs, *graph.outputs, *(out for node in graph for out in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if getattr(size, "value", None) == free:
                value.shape[axis] = "batch"


def _check_metadata(given: Mapping[str, str]) -> None:
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str) or name.startswith(PREFIX):
            raise LargeMarginError(
                f"metadata must map text to text under keys of your own, but {name!r}: {value!r} "
                f"was given. Write other values with json.dumps; {PREFIX!r} is taken."
            )


def _verify(
    path: Path, names: list[str], checks: list[Check], model: nn.Module, tolerance: float | None
) -> None:
    if find_spec("onnxruntime") is None:
        warnings.warn(
            "onnxruntime is not installed, so the ONNX file was not compared with the model. "
            "Install it: pip install 'largemargin[export]', or pass verify=False.",
            stacklevel=3,
        )
        return
    try:
        runtime = import_module("onnxruntime")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        taken = {each.name for each in session.get_inputs()}  # an unused input is left out
        results = []
        for inputs, _ in checks:
            named = zip(names, inputs, strict=True)
            feed = {name: value.numpy() for name, value in named if name in taken}
            results.append(torch.as_tensor(session.run(None, feed)[0]))
    except Exception as error:
        raise LargeMarginError(
            f"onnxruntime cannot run the exported model: {error} Its CPU kernels lack bfloat16 and "
            "some operators of float16 and float64: export model.float(), or pass verify=False."
        ) from error
    for (_, expected), got in zip(checks, results, strict=True):
        check_equal("the ONNX file", got, expected, model, tolerance)
