"""Totals over the steps of an epoch, added up on the device and read now and then."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


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

    On the CPU they are Python numbers. Elsewhere they are one float64 tensor, so that a step adds
    to them in a few kernels, which a CUDA graph can hold.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        self.device = device
        self._add = torch.compile(_add_to, dynamic=False) if compiled else _add_to
        self.on_host = device.type == "cpu"
        self.names: list[str] = []
        self.totals = Totals()
        self._in_a_row = 0
        self._sums = torch.zeros(0, device=device)
        self._bad = torch.zeros(0, device=device)
        self._images = 0

    def add(self, total: Tensor, terms: dict[str, Tensor], norm: Tensor, finite: Tensor) -> None:
        """Count a step; ``finite`` says whether it was carried out."""
        if not self.names:
            self._begin(list(terms))
        if not self.on_host:
            self._add(self._sums, self._bad, [total, norm, *terms.values()], finite)
            return
        totals = self.totals
        if not finite:
            totals.last_bad = totals.steps + totals.bad
            totals.bad += 1
            self._in_a_row += 1
            totals.bad_in_a_row = max(totals.bad_in_a_row, self._in_a_row)
            for name, term in terms.items():
                if not math.isfinite(term):
                    totals.bad_terms[name] = totals.bad_terms.get(name, 0) + 1
            return
        self._in_a_row = 0
        totals.steps += 1
        totals.loss += total.item()
        totals.gradient_norm += norm.item()
        for name, term in terms.items():
            totals.terms[name] += term.item()

    def _begin(self, names: list[str]) -> None:
        self.names = names
        self.totals.terms = dict.fromkeys(names, 0.0)
        # finite steps, bad ones in a row now, loss, norm, terms
        self._sums = torch.zeros(4 + len(names), dtype=torch.float64, device=self.device)
        # most in a row, bad, the last bad one, bad by term
        self._bad = torch.zeros(3 + len(names), dtype=torch.float64, device=self.device)

    def read(self) -> Totals:
        """The sums since :meth:`clear`; waits for the device."""
        self.totals.images = self._images
        if self.on_host or not self.names:
            return self.totals
        sums, bad = self._sums.tolist(), self._bad.tolist()
        self.totals = Totals(
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
        return self.totals

    def count(self, images: int) -> None:
        self._images += images

    def clear(self) -> None:
        """Begin an epoch; bad steps in a row go on being counted."""
        self._images = 0
        if self.on_host:
            self.totals = Totals(terms=dict.fromkeys(self.names, 0.0))
            return
        if self.names:
            row = self._sums[1].clone()
            self._sums.zero_()
            self._bad.zero_()
            self._sums[1].copy_(row)

    def state(self) -> dict[str, Any]:
        """The sums as plain values, to go on with in the middle of an epoch."""
        totals = asdict(self.read())
        row = self._in_a_row if self.on_host else int(self._sums[1]) if self.names else 0
        return {**totals, "row": row}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""
        names = list(state["terms"])
        self._images, self._in_a_row = state["images"], state["row"]
        if names:
            self._begin(names)
        self.totals = Totals(**{key: value for key, value in state.items() if key != "row"})
        if self.on_host or not names:
            return
        totals = self.totals
        norm, counts = totals.gradient_norm, [totals.bad_terms.get(name, 0) for name in names]
        sums = [totals.steps, self._in_a_row, totals.loss, norm, *totals.terms.values()]
        bad = [totals.bad_in_a_row, totals.bad, totals.last_bad, *counts]
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))
        self._bad.copy_(torch.tensor(bad, dtype=torch.float64))


def _add_to(sums: Tensor, bad: Tensor, values: list[Tensor], finite: Tensor) -> None:
    """One step on the device; the layout is that of :meth:`EpochTotals._begin`."""
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
