"""What a run says while it trains: rows of metrics.jsonl, trackers, and the progress bar."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from largemargin.app.training.epoch_totals import Totals
from largemargin.app.training.files import write_text
from largemargin.app.training.processes import flat
from largemargin.dropin.criterion import Criterion

METRICS = "metrics.jsonl"


class Journal:
    """Rows of ``metrics.jsonl``. Only the first process writes.

    Args:
        folder: of the run.
        writes: whether this process does.
        track: ``track(values, step)`` sends numbers to trackers.
    """

    def __init__(self, folder: Path, *, writes: bool = True, track: Any = None) -> None:
        self.folder = folder
        self.path = folder / METRICS
        self.writes = writes
        self.track = track
        self.bad_steps = 0

    def write(self, row: dict[str, Any]) -> None:
        if row["kind"] == "epoch":
            self.bad_steps = 0
        if not self.writes:
            return
        line = json.dumps(_finite(row), ensure_ascii=False)
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
        # Gradients are measured in the step that is under way, everything else after one.
        kept = [
            line + "\n"
            for row, line in zip(*whole_rows(self.path), strict=True)
            if row["step"] < step or (row["step"] == step > 0 and row["kind"] != "gradients")
        ]
        write_text(self.path, "".join(kept))


def whole_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a metrics file and their lines, up to one that a crash cut short."""
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines[:-1]:  # a whole line ends with a line break
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not {"kind", "step"} <= row.keys():
            break
        rows.append(row)
    return rows, lines[: len(rows)]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
