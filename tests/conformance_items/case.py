"""A golden case as the items see it: decoded inputs and params, and a record of what was read."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
NON_FINITE = ("inf", "-inf", "nan")


class CannotRun(Exception):
    """The case cannot be run as it stands; deliberately no ValueError, which ERR cases expect."""


def is_array(entry: Any) -> bool:
    return isinstance(entry, dict) and {"dtype", "shape", "data"} <= entry.keys()


def decode(entry: Any) -> Any:
    """An encoded array as a tensor, the string of a non-finite number as that number."""
    if is_array(entry):
        if entry["dtype"] not in DTYPES:
            raise CannotRun(f"unknown dtype {entry['dtype']!r}")
        if math.prod(entry["shape"]) != len(entry["data"]):
            raise CannotRun(f"{len(entry['data'])} numbers for shape {entry['shape']}")
        data = [decode(number) for number in entry["data"]]
        return torch.tensor(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if isinstance(entry, str) and entry in NON_FINITE:
        return float(entry)
    return entry


class Case:
    """Inputs and params of one call. Reading a name marks it; ``unread`` lists what is left.

    ``state`` is shared by the steps of a sequence. Items set ``scale`` to the factor s of the
    logits where they have one: tolerances depend on it.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        params: Mapping[str, Any],
        dtype: torch.dtype,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.dtype = dtype
        self.inputs = {name: self._cast(entry) for name, entry in inputs.items()}
        self.params = {name: decode(entry) for name, entry in params.items()}
        self.state = {} if state is None else state
        self.scale: float | None = None
        self._read: set[tuple[str, str]] = set()

    def _cast(self, entry: Any) -> Tensor:
        value = decode(entry)
        tensor = torch.as_tensor(value)
        if not tensor.is_floating_point():
            return tensor
        # Once more: torch reads plain numbers and lists of them in its default dtype.
        exact = torch.as_tensor(value, dtype=torch.float64)
        return exact.to(self.dtype).requires_grad_()

    def get(self, name: str) -> Tensor | None:
        """An input, or None where the case has no such input."""
        self._read.add(("input", name))
        return self.inputs.get(name)

    def need(self, name: str) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise CannotRun(f"input {name!r} is missing")
        return tensor

    def has(self, name: str) -> bool:
        """Whether a param was given."""
        self._read.add(("param", name))
        return name in self.params

    def param(self, name: str, default: Any = None) -> Any:
        return self.params[name] if self.has(name) else default

    def options(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Params under their keyword names (golden name -> keyword); those given, no others."""
        return {ours: self.params[name] for name, ours in names.items() if self.has(name)}

    @property
    def unread(self) -> list[str]:
        given = [("input", name) for name in self.inputs] + [("param", p) for p in self.params]
        return [f"{kind} {name!r}" for kind, name in given if (kind, name) not in self._read]


Outputs = dict[str, Callable[[], Any]]
"""Golden output name to a call that computes it; only the outputs a case names are called."""


def one_way(case: Case) -> tuple[str, ...]:
    return ("",)


class Item(NamedTuple):
    """How the cases of one specification item are run."""

    run: Callable[[Case, str], Outputs]
    ways: Callable[[Case], tuple[str, ...]] = one_way
    """Ways to compute a case, each of which must pass: "dense", "chunked", "logits"."""
    steps: bool = False
    """Whether a case may be a sequence of batches."""


def batch_mean(values: Tensor) -> Tensor:
    """The mean over the batch; of an empty one 0, connected to the graph (rule N8)."""
    return values.mean() if values.numel() else values.sum()
