"""What a run adds up and says while it trains.

Totals over the steps of an epoch, added up on the device and read now and then; rows of
metrics.jsonl, trackers, and the progress bar.
"""

import json
import math
import os
import time
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largemargin.app.training.config_file import flat
from largemargin.app.training.files import without_nan, write_text
from largemargin.dropin.criterion import Criterion
from largemargin.errors import LargeMarginError


@dataclass
class Totals:
    """What was added up over the finite steps, and how many were not finite."""

    steps: int = 0
    images: int = 0
    loss: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    gradient_norm: float = 0.0
    bad: int = 0
    bad_in_a_row: int = 0
    bad_terms: dict[str, int] = field(default_factory=dict)
    last_bad: int = -1
    """The step of the epoch, from 0, that was the last one not finite; -1 where all were."""

    def row(self) -> dict[str, Any]:
        """Means over the finite steps, as a row of the metrics."""
        n = self.steps or math.nan
        row: dict[str, Any] = {
            "loss": self.loss / n,
            "terms": {name: value / n for name, value in self.terms.items()},
            "gradient_norm": self.gradient_norm / n,
            "images": self.images,
        }
        if self.bad:
            row["bad_steps"] = self.bad
            row["bad_terms"] = dict(self.bad_terms)
        return row


class EpochTotals:
    """Running sums of loss, terms and gradient norm; non-finite steps are counted, not added.

    On the CPU they are lists of Python numbers. Elsewhere they are float64 tensors, so that a step
    adds to them in a few kernels, which a CUDA graph can hold. Both are only ever changed in place.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self.device = device
        self._add = torch.compile(_add_to, dynamic=False) if compiled else _add_to
        self.on_host = device.type == "cpu"
        self.names: list[str] = []
        self._sums: Any = []
        """Finite steps, bad ones in a row now, loss, norm, terms."""
        self._bad: Any = []
        """Most in a row, bad, the last bad one, bad by term."""
        self._images = 0

    def add(self, total: Tensor, terms: dict[str, Tensor], norm: Tensor, finite: Tensor) -> None:
        """Count a step; ``finite`` says whether it was carried out."""
        if not len(self._sums):
            self._begin(list(terms))
        add = _add_on_host if self.on_host else self._add
        add(self._sums, self._bad, [total, norm, *terms.values()], finite)

    def _begin(self, names: list[str]) -> None:
        self.names = names
        self._sums, self._bad = [0.0] * (4 + len(names)), [0.0] * (3 + len(names))
        if not self.on_host:
            self._sums, self._bad = (
                torch.tensor(each, dtype=torch.float64, device=self.device)
                for each in (self._sums, self._bad)
            )

    def read(self) -> Totals:
        """The sums since :meth:`clear`; waits for the device."""
        if not len(self._sums):
            return Totals(images=self._images)
        sums, bad = map(_numbers, (self._sums, self._bad))
        return Totals(
            steps=int(sums[0]),
            images=self._images,
            loss=sums[2],
            gradient_norm=sums[3],
            terms=dict(zip(self.names, sums[4:], strict=True)),
            bad=int(bad[1]),
            bad_in_a_row=int(bad[0]),
            bad_terms={name: int(n) for name, n in zip(self.names, bad[3:], strict=True) if n},
            last_bad=int(bad[2]) if bad[1] else -1,
        )

    def count(self, images: int) -> None:
        self._images += images

    def clear(self) -> None:
        """Begin an epoch; bad steps in a row go on being counted."""
        self._images = 0
        for at in range(len(self._sums)):
            if at != 1:
                self._sums[at] = 0
        for at in range(len(self._bad)):
            self._bad[at] = 0

    def state(self) -> dict[str, Any]:
        """The sums as plain values, to go on with in the middle of an epoch."""
        return {**asdict(self.read()), "row": int(self._sums[1]) if len(self._sums) else 0}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        totals = Totals(**{key: value for key, value in state.items() if key != "row"})
        self._images = totals.images
        if not totals.terms:
            return
        self._begin(list(totals.terms))
        norm = totals.gradient_norm
        sums = [totals.steps, state["row"], totals.loss, norm, *totals.terms.values()]
        counts = [totals.bad_terms.get(name, 0) for name in self.names]
        bad = [totals.bad_in_a_row, totals.bad, totals.last_bad, *counts]
        for mine, kept in ((self._sums, sums), (self._bad, bad)):
            for at, value in enumerate(kept):
                mine[at] = value


def _numbers(kept: Any) -> list[float]:
    numbers: list[float] = kept.tolist() if isinstance(kept, Tensor) else kept
    return numbers


def _add_on_host(sums: Any, bad: Any, values: list[Tensor], finite: Tensor) -> None:
    """One step in Python numbers; the layout is that of :class:`EpochTotals`."""
    numbers = [each.item() for each in values]
    if finite:
        sums[0] += 1
        sums[1] = 0
        for at, number in enumerate(numbers, 2):
            sums[at] += number
        return
    bad[2] = sums[0] + bad[1]
    sums[1] += 1
    bad[0] = max(bad[0], sums[1])
    bad[1] += 1
    for at, number in enumerate(numbers[2:], 3):
        bad[at] += not math.isfinite(number)


def _add_to(sums: Tensor, bad: Tensor, values: list[Tensor], finite: Tensor) -> None:
    """The same on the device."""
    stacked = torch.stack(values).double()
    wrong = ~finite
    in_a_row = (sums[1] + 1) * wrong
    bad[2].copy_(torch.where(wrong, sums[0] + bad[1], bad[2]))
    sums[2:].add_(torch.where(finite, stacked, 0.0))
    sums[0].add_(finite)
    sums[1].copy_(in_a_row)
    bad[0].copy_(torch.maximum(bad[0], in_a_row))
    bad[1].add_(wrong)
    bad[3:].add_(~stacked[2:].isfinite())


METRICS = "metrics.jsonl"


@dataclass
class Journal:
    """Rows of ``metrics.jsonl`` in the folder of a run. Only the first process writes."""

    folder: Path
    _: KW_ONLY
    writes: bool = True
    track: Any = None
    """``track(values, step)`` sends numbers to trackers."""
    bad_steps: int = field(default=0, init=False)

    @property
    def path(self) -> Path:
        return self.folder / METRICS

    def write(self, row: dict[str, Any]) -> None:
        if row["kind"] == "epoch":
            self.bad_steps = 0
        if not self.writes:
            return
        line = json.dumps(without_nan(row), ensure_ascii=False)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.track is not None:
            numbers = {
                name: float(value)
                for name, value in flat(row, "/").items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            self.track(numbers, row["step"])

    def gradients(self, epoch: int, step: int, criterion: Criterion) -> None:
        """Norms of the terms' gradients on the features, and how far they agree (cosines)."""
        conflicts = criterion.gradient_conflicts
        self.write(
            {
                "kind": "gradients",
                "epoch": epoch,
                "step": step,
                "norms": {name: norm.item() for name, norm in criterion.gradient_norms.items()},
                "cosines": {f"{a} & {b}": cosine.item() for (a, b), cosine in conflicts.items()},
            }
        )

    def report_bad(self, epoch: int, step: int, totals: Totals, samples: list[str]) -> None:
        """Steps that were skipped because something was not finite; samples of the last one."""
        self.bad_steps = totals.bad
        self.write(
            {
                "kind": "bad_steps",
                "epoch": epoch,
                "step": step,
                "skipped": totals.bad,
                "in_a_row": totals.bad_in_a_row,
                "terms": dict(totals.bad_terms),
                "samples": samples,
            }
        )

    def cut(self, step: int) -> None:
        """Forget rows after this step: they will be written again."""
        if not self.writes or not self.path.is_file():
            return
        rows, lines = whole_rows(self.path)
        # Gradients are measured in the step that is under way, everything else after one.
        kept = [
            line + "\n"
            for row, line in zip(rows, lines, strict=True)
            if row["step"] < step or (row["step"] == step > 0 and row["kind"] != "gradients")
        ]
        # A crash cuts the last line short: rows after another would be lost.
        if len(self.path.read_bytes().splitlines()) > len(rows) + 1:
            raise LargeMarginError(
                f"{self.path} is damaged: line {len(rows) + 1} is no row. Repair or remove it."
            )
        write_text(self.path, "".join(kept))


def whole_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a metrics file and their lines, up to one that a crash cut short."""
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines[:-1]:  # a whole line ends with a line break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        kind, step = map(row.get, ("kind", "step")) if isinstance(row, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(step, int):
            break
        rows.append(row)
    return rows, lines[: len(rows)]


class Progress:
    """A bar over all steps, or nothing where ``shown`` is False."""

    def __init__(
        self, total: int = 0, *, done: int = 0, name: str = "", shown: bool = True
    ) -> None:
        self.bar: Any = None
        if shown:
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, desc=name, unit="step", mininterval=0.5)
        self.images = 0
        self.since = time.perf_counter()
        self.validation = ""

    def step(self, images: int) -> None:
        if self.bar is not None:
            self.images += images
            self.bar.update()

    def show(self, totals: Totals) -> None:
        if self.bar is None or not totals.steps:
            return
        now = time.perf_counter()
        rate, self.images = self.images / max(1e-9, now - self.since), 0
        self.since = now
        terms = " ".join(
            f"{name} {value / totals.steps:.3g}" for name, value in totals.terms.items()
        )
        if len(totals.terms) > 1:
            terms = f"loss {totals.loss / totals.steps:.3g} ({terms})"
        self.bar.set_postfix_str(f"{terms}, {rate:,.0f} images/s{self.validation}", refresh=False)

    def end_epoch(self, row: dict[str, Any]) -> None:
        if row["validation"] is not None:
            self.validation = f", validation {100 * row['validation']['accuracy']:.2f} %"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
