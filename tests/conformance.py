"""Runs a folder of golden vectors against the library: ``python tests/conformance.py DIR``.

Prints a line per item and, last, ``items a/b, cases c/d``. A case passes when its values and
gradients agree in float64 and in float32, and by every way of computing it (dense and chunked
class statistics, logits given or made from features). What it cannot run or does not know counts
as failed. Exit status: 0 if all passed, 1 if a case failed, 2 if the folder cannot be read.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from conformance_items import ITEMS, CannotRun, Case, Item, decode, is_array
from torch import Tensor

import largemargin.ops.chunked as chunked

FORMAT = 1
DTYPES = {"float64": torch.float64, "float32": torch.float32}
NOTES = {"name", "tags", "notes", "convention"}
KEYS = NOTES | {"inputs", "params", "expected", "grads", "steps"}
STEEP = 30
"""From this scale on float32 gets more room."""


class Malformed(Exception):
    """A folder or file that is no set of golden vectors."""


class Mismatch(Exception):
    """A result that is not the expected one."""


class Tolerance(NamedTuple):
    """|got - want| <= tolerance * (1 + |want|), or tolerance alone where it is absolute."""

    value: float
    gradient: float
    absolute: bool = False


def tolerance_of(item: str, case: Mapping[str, Any], scale: Any, dtype: torch.dtype) -> Tolerance:
    name, tags = case["name"], case.get("tags", ())
    steep = isinstance(scale, int | float) and scale >= STEEP
    value, gradient = (1e-9, 1e-8) if dtype == torch.float64 else (2e-5, 2e-4)
    if dtype == torch.float32 and (
        steep
        or item == "NGR-21"
        or "opposite" in tags
        or "large_logits" in tags
        or "large_logits" in name
    ):
        value = gradient = 1e-3
    if "aligned_feature" in name:
        value = max(value, 1e-5 if steep else 1e-6)
    tiny = item == "ZHO-MC" and ("tiny_angle" in name or "collinear" in name)
    return Tolerance(value, gradient, absolute=tiny)


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is, a number without rounding it."""
    exact = torch.float64 if isinstance(value, float) else None
    return torch.as_tensor(value, dtype=exact)


def compare(got: Any, want: Any, tolerance: float, absolute: bool = False) -> None:
    """Raise unless ``got`` is ``want``: shapes, non-finite entries, then finite ones."""
    if isinstance(want, str):
        if got != want:
            raise Mismatch(f"got {got!r}, want {want!r}")
        return
    got, want = as_tensor(got).detach(), as_tensor(want)
    if got.shape != want.shape:
        raise Mismatch(f"shape {tuple(got.shape)}, want {tuple(want.shape)}")
    # Whole numbers among the expected ones may be written without a point: 0 for 0.0.
    exact = not want.is_floating_point() and not got.is_floating_point()
    got, want = got.to(torch.float64), want.to(torch.float64)
    room = torch.full_like(want, 0.0 if exact else tolerance)
    if not absolute:
        room = room * (1 + want.abs())
    same = (got == want) | (got.isnan() & want.isnan())
    close = torch.isfinite(want) & ((got - want).abs() <= room)
    bad = ~(same | close).reshape(-1)
    if bool(bad.any()):
        index = int(bad.int().argmax())
        values = (float(x.reshape(-1)[index]) for x in (got, want))
        where = f" at flat index {index}" if want.dim() else ""
        raise Mismatch("got {!r}, want {!r}{}".format(*values, where))


def gradients(output: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Of the output, summed over the batch; zero for an input without a path to it."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(output.sum(), inputs, retain_graph=True, allow_unused=True)
    pairs = zip(found, inputs, strict=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in pairs]


def check_step(
    item_id: str, meta: Mapping[str, Any], step: Mapping[str, Any], case: Case, way: str
) -> None:
    """Run one call and compare its outputs and gradients; raises at the first difference."""
    expected, grads = step["expected"], step["grads"]
    outputs = {name: cache(call) for name, call in ITEMS[item_id].run(case, way).items()}
    if unread := case.unread:
        raise CannotRun(f"unknown {', '.join(unread)}")
    for name in (*expected, *grads):
        if name not in outputs:
            raise CannotRun(f"unknown output {name!r}")
    leaves = {name: x for name, x in case.inputs.items() if x.requires_grad}
    if ITEMS[item_id].steps:
        outputs["value"]()  # the next step needs its state, whatever is expected of this one
    finite_only = "finite_grad" in meta.get("tags", ())
    for name, entry in expected.items():
        got = outputs[name]()
        tolerance = tolerance_of(item_id, meta, case.scale, case.dtype)
        try:
            compare(got, decode(entry), tolerance.value, tolerance.absolute)
        except Mismatch as error:
            raise Mismatch(f"{name}: {error}") from None
        if finite_only:
            for of, grad in zip(leaves, gradients(got, [*leaves.values()]), strict=True):
                if not bool(torch.isfinite(grad).all()):
                    raise Mismatch(f"d {name} / d {of}: not finite")
    for name, by_input in {} if finite_only else grads.items():
        if unknown := [of for of in by_input if of not in leaves]:
            raise CannotRun(f"gradient of {name!r} to unknown input {unknown[0]!r}")
        found = gradients(outputs[name](), [leaves[of] for of in by_input])
        tolerance = tolerance_of(item_id, meta, case.scale, case.dtype)
        for (of, entry), grad in zip(by_input.items(), found, strict=True):
            try:
                compare(grad, decode(entry), tolerance.gradient)
            except Mismatch as error:
                raise Mismatch(f"d {name} / d {of}: {error}") from None


def steps_of(item: Item, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a case: itself, or the batches of a sequence with what the case gives them."""
    if unknown := raw.keys() - KEYS:
        raise CannotRun(f"unknown keys {sorted(unknown)}")
    shared = {key: raw.get(key) or {} for key in ("inputs", "params", "expected", "grads")}
    if "steps" not in raw:
        return [shared]
    if not item.steps or not raw["steps"]:
        raise CannotRun("no sequence of steps is defined here")
    steps = []
    for step in raw["steps"]:
        own = {key: value for key, value in step.items() if key not in KEYS}
        arrays = {name: value for name, value in own.items() if is_array(value)}
        params = {name: value for name, value in own.items() if not is_array(value)}
        steps.append(
            {
                "inputs": {**shared["inputs"], **(step.get("inputs") or {}), **arrays},
                "params": {**shared["params"], **(step.get("params") or {}), **params},
                "expected": step.get("expected") or {},
                "grads": step.get("grads") or {},
            }
        )
    # Expectations beside the steps are about the last of them.
    for key in ("expected", "grads"):
        steps[-1][key] = {**shared[key], **steps[-1][key]}
    return steps


def check_case(item_id: str, raw: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Run a case in one dtype, in every way it can be computed; raises at the first difference."""
    if item_id not in ITEMS:
        raise CannotRun(f"unknown item {item_id!r}")
    item = ITEMS[item_id]
    steps = steps_of(item, raw)
    if not any(step["expected"] or step["grads"] for step in steps):
        raise CannotRun("nothing is expected")
    for way in item.ways(Case(steps[0]["inputs"], steps[0]["params"], dtype)):
        state: dict[str, Any] = {}
        for number, step in enumerate(steps):
            case = Case(step["inputs"], step["params"], dtype, state)
            where = f"step {number} " if len(steps) > 1 else ""
            try:
                check_step(item_id, raw, step, case, way)
            except (CannotRun, Mismatch) as error:
                raise type(error)(f"{f'{way}: ' if way else ''}{where}{error}") from None
            except Exception as error:
                kind = type(error).__name__
                raise CannotRun(f"{f'{way}: ' if way else ''}{where}{kind}: {error}") from error


def failures_of(item_id: str, raw: Any) -> dict[str, str]:
    """Why a case fails, by dtype; empty if it passes."""
    failures = {}
    for name, dtype in DTYPES.items():
        try:
            check_case(item_id, raw, dtype)
        except Exception as error:
            failures[name] = " ".join(str(error).split())[:300]
    return failures


@contextmanager
def several_blocks() -> Iterator[None]:
    """Blocks of two classes, so that chunked statistics of small cases have several of them."""
    before = chunked.MIN_BLOCK, chunked.BLOCK_ELEMENTS
    chunked.MIN_BLOCK, chunked.BLOCK_ELEMENTS = 2, 1
    try:
        yield
    finally:
        chunked.MIN_BLOCK, chunked.BLOCK_ELEMENTS = before


def read(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Item and cases of a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Malformed(f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Malformed(f"{path.name} is not of format {FORMAT}")
    item, cases = content.get("item"), content.get("cases")
    if not isinstance(item, str) or not isinstance(cases, list):
        raise Malformed(f'{path.name} needs an "item" and a list of "cases"')
    if not all(isinstance(case, dict) and isinstance(case.get("name"), str) for case in cases):
        raise Malformed(f"{path.name} has a case without a name")
    return item, cases


class Totals:
    """What passed of what the folder holds."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.malformed = False

    def add_item(self, item: str, cases: list[dict[str, Any]], every: bool) -> None:
        """Run an item's cases and print its line, and with ``every`` a line per failed case."""
        passed, reasons = 0, []
        for raw in cases:
            failures = failures_of(item, raw)
            passed += not failures
            for dtype in DTYPES:
                self.count[dtype] += dtype not in failures
            if failures:
                dtype, reason = next(iter(failures.items()))
                reasons.append(f"{raw['name']} [{dtype}] {reason}")
        self.count["cases"] += len(cases)
        self.count["passed cases"] += passed
        self.count["items"] += 1
        self.count["passed items"] += passed == len(cases) > 0
        reason = reasons[0] if reasons else "" if cases else "no cases"
        print(f"{item:14}{f'{passed}/{len(cases)}':>7}  {reason}".rstrip())
        for more in reasons[1:] if every else ():
            print(f"{'':23}{more}")

    def add_malformed(self, path: Path, error: Malformed) -> None:
        self.malformed = True
        self.count["items"] += 1
        print(f"{path.stem:14}{'0/0':>7}  malformed: {error}")
        print(f"conformance: {error}", file=sys.stderr)

    def summary(self) -> str:
        items = f"items {self.count['passed items']}/{self.count['items']}"
        return f"{items}, cases {self.count['passed cases']}/{self.count['cases']}"

    @property
    def status(self) -> int:
        if self.malformed:
            return 2
        passed = self.count["passed items"] == self.count["items"]
        return 0 if passed else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run golden vectors against the library.")
    parser.add_argument("folder", type=Path, help="folder of <item>.json files")
    parser.add_argument("--every", action="store_true", help="print every failed case")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"conformance: {options.folder} is not a folder", file=sys.stderr)
        return 2
    paths = sorted(options.folder.glob("*.json"))
    if not paths:
        print(f"conformance: {options.folder} holds no .json files", file=sys.stderr)
        return 2
    totals = Totals()
    with several_blocks():
        for path in paths:
            try:
                item, cases = read(path)
            except Malformed as error:
                totals.add_malformed(path, error)
            else:
                totals.add_item(item, cases, options.every)
    cases = totals.count["cases"]
    print(", ".join(f"{dtype} {totals.count[dtype]}/{cases}" for dtype in DTYPES))
    print(totals.summary())
    return totals.status


if __name__ == "__main__":
    sys.exit(main())
