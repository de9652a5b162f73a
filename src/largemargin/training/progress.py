"""The progress bar of a run: loss terms, images per second, time left."""

import time
from typing import Any

from largemargin.training.sums import Seen


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

    def show(self, seen: Seen) -> None:
        if self.bar is None or not seen.steps:
            return
        now = time.perf_counter()
        rate, self.images = self.images / max(1e-9, now - self.since), 0
        self.since = now
        terms = " ".join(f"{name} {value / seen.steps:.3g}" for name, value in seen.terms.items())
        if len(seen.terms) > 1:
            terms = f"loss {seen.loss / seen.steps:.3g} ({terms})"
        self.bar.set_postfix_str(f"{terms}, {rate:,.0f} images/s{self.validation}", refresh=False)

    def end_epoch(self, row: dict[str, Any]) -> None:
        if row["validation"] is not None:
            self.validation = f", validation {100 * row['validation']['accuracy']:.2f} %"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
