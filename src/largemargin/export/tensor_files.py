"""Tensors in a safetensors file: names, bytes and shapes, and no code to run on loading."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, optional_module

ALIAS = "alias:"
"""Header entries with this prefix name tensors that are another one of the file."""
SHOWN = 6
"""Names listed in a message before the rest is counted."""


def require_safetensors() -> Any:
    return optional_module(
        "safetensors.torch", "Saving and loading needs safetensors", extra="export"
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; those under several names are written once."""
    kept: dict[str, Tensor] = {}
    header = {"format": "pt"}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise LargeMarginError(
                f"{name!r} is {kind}, which safetensors cannot hold. Convert it before saving."
            )
        # Two tensors of the same place and form are one.
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            header[ALIAS + name] = first[place]
            continue
        first[place] = name
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()  # safetensors refuses views into one storage
        storages.add(plain.untyped_storage().data_ptr())
        kept[name] = plain
    require_safetensors().save_file(kept, str(path), metadata=header)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file by name, on the CPU."""
    require_safetensors()
    open_file = import_module("safetensors").safe_open
    try:
        with open_file(str(path), framework="pt", device="cpu") as file:
            header: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        if is_pickle(path):
            raise LargeMarginError(
                f"{path} is a pickle, as torch.save writes it, under the name of a safetensors "
                "file. Reading one can run any code, so it is refused. If you trust where it comes "
                "from: safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)."
            ) from error
        raise LargeMarginError(
            f"{path} is not a whole safetensors file, or damaged ({error}). It may have been cut "
            "short while it was copied; fetch it again or use another. Files of torch.save and "
            "other pickles are refused, whatever they are called: reading one can run any code."
        ) from error
    for name, target in header.items():
        if name.startswith(ALIAS):
            if target not in tensors:
                raise LargeMarginError(f"{path} is damaged: it refers to a missing {target!r}.")
            tensors[name.removeprefix(ALIAS)] = tensors[target]
    return tensors


def is_pickle(path: Path) -> bool:
    """Whether a file that is no safetensors file begins as torch.save and pickle begin theirs."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError:
        return False
    if start[:4] == b"PK\x03\x04":  # an archive, which torch.save writes
        return True
    # Protocol 2 or later: then comes a frame, or something else. Safetensors begin with the length
    # of their header, far below 4 GiB, which ends in zeros.
    begun = start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5"
    return begun and (start[2:3] == b"\x95" or any(start[4:8]))


def listed(problem: str, names: Sequence[str]) -> list[str]:
    """A problem with the first names of tensors it is about; none where there are none."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{problem} {', '.join(names[:SHOWN])}{more}"] if names else []
