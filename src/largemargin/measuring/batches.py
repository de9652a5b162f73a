"""Reading loaders: batches of inputs, labels and sample indices, on the model's device."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from largemargin.errors import LargeMarginError, MissingPackage
from largemargin.measuring.turns import STANCE, turn

IGNORED = -100
"""The label of samples to leave out, as in torch."""

SKIP = f"label them {IGNORED}"
"""What to do about labels that mark samples to leave out."""

NOTHING = f"nothing was measured: the data is empty, or all of it is labelled {IGNORED}."

LABELS = ("labels", "label", "targets", "target")
"""Names under which labels are looked for in a batch that is a dict."""


def device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and without compiled code, which knows no new hooks.

    One thread at a time.
    """
    with turn(model), ExitStack() as stack:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            stack.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(STANCE)
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def batches(
    loader: Iterable[Any], device: torch.device, progress: bool
) -> Iterator[tuple[Any, Tensor | None, Tensor | None]]:
    """Inputs, labels and, under a DistributedSampler, indices (-1 for repeated samples).

    Inputs are a tensor, a tuple (the model's arguments) or a dict (its keyword arguments).
    """
    positions = _positions(loader)
    start = 0
    for batch in _bar(loader, progress):
        inputs, given = _split(batch)
        inputs = moved(inputs, device)
        labels = None if given is None else _labels(given).to(device)
        index = None
        if positions is not None:
            size = len(_first(inputs) if labels is None else labels)
            index = positions[start : start + size]
            start += size
        yield inputs, labels, index


def order_note(loader: Iterable[Any]) -> str | None:
    """What sample indices mean where they are not positions in the dataset."""
    sampler, batched = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if sampler is None or isinstance(sampler, DistributedSampler):
        return None
    if isinstance(sampler, SequentialSampler) and type(batched) in (BatchSampler, type(None)):
        return None
    if type(sampler).__name__ == "_InfiniteConstantSampler":  # an iterable dataset
        return None
    return "the loader draws samples in an order of its own: indices count them as they came"


def dataset_size(loader: Iterable[Any]) -> float:
    """Samples of the dataset behind a loader; infinite where there is no telling."""
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else math.inf


def given_labels(labels: Tensor | None) -> Tensor:
    """The labels of a batch, which :func:`batches` may not have found."""
    if labels is None:
        raise LargeMarginError(
            "the loader yields inputs without labels. Yield (inputs, labels), or dicts with "
            '"labels"; a single batch is [(inputs, labels)]. Data without labels goes to ood=.'
        )
    return labels


def _split(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        name = next((each for each in LABELS if each in batch), None)
        return {key: each for key, each in batch.items() if key != name}, (
            None if name is None else batch[name]
        )
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        inputs = batch[:-1]
        if len(inputs) > 1:
            return tuple(inputs), batch[-1]
        # default_collate makes lists of tuples.
        only = inputs[0]
        return tuple(only) if isinstance(only, list) else only, batch[-1]
    return (batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch), None


def _labels(given: Any) -> Tensor:
    try:
        labels = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise LargeMarginError(
            f"labels must be class indices, but the loader yields {type(given).__name__}"
            f"{f' of {type(given[0]).__name__}' if isinstance(given, tuple | list) else ''}. Yield "
            "(inputs, labels) with labels last."
        ) from None
    if labels.dim() == 0:
        raise LargeMarginError(
            "the loader must yield batches, but it yields single samples (the label is one "
            "number). Wrap the dataset: torch.utils.data.DataLoader(dataset, batch_size=256)."
        )
    if labels.dtype == torch.uint8:
        labels = labels.long()  # torch takes class 156 for -100 there
    one_column = labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point()
    return labels[:, 0] if one_column else labels


def _first(inputs: Any) -> Any:
    """Something as long as the batch is."""
    if isinstance(inputs, dict):
        return _first(next(iter(inputs.values())))
    return _first(inputs[0]) if isinstance(inputs, tuple) else inputs


def moved(inputs: Any, device: torch.device) -> Any:
    """Inputs of a model with all their tensors on a device."""
    if isinstance(inputs, Mapping):
        return {name: moved(each, device) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(moved(each, device) for each in inputs)
    return inputs.to(device, non_blocking=True) if isinstance(inputs, Tensor) else inputs


def _positions(loader: Iterable[Any]) -> Tensor | None:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return None
    index = torch.tensor(list(iter(sampler)), dtype=torch.long)
    size = len(sampler.dataset)  # type: ignore[arg-type]
    place = torch.arange(len(index)) * sampler.num_replicas + sampler.rank
    return torch.where(place < size, index, -1)


def _bar(loader: Iterable[Any], progress: bool) -> Iterable[Any]:
    if not progress:
        return loader
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise MissingPackage(
            "progress=True needs tqdm. Install it: pip install tqdm, or pass progress=False."
        ) from None
    bar: Iterable[Any] = tqdm(loader, unit="batch", desc="measuring")
    return bar
