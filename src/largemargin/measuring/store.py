"""Features of all samples, kept where they are asked for."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class FeatureStore:
    """Features of all samples, in memory or in a file that is mapped into it.

    Half precision is kept as float32, float64 as it is.
    """

    path: Path | None = None
    parts: list[Tensor] = field(default_factory=list)
    rows: int = 0
    width: int = 0
    dtype: torch.dtype = torch.float32

    def add(self, features: Tensor) -> None:
        features = features.detach().cpu()
        if self.rows == 0 and features.dtype == torch.float64:
            self.dtype = torch.float64
        # A copy always: a loader may fill the same buffer again.
        features = features.to(self.dtype, copy=True).contiguous()
        self.rows, self.width = self.rows + features.shape[0], features.shape[1]
        if self.path is None:
            self.parts.append(features)
            return
        with self.path.open("ab") as file:
            file.write(features.numpy().tobytes())

    def all(self) -> Tensor:
        """(N, D); from a file, pages are read when they are needed."""
        if self.path is None:
            if len(self.parts) > 1:
                self.parts = [torch.cat(self.parts)]
            return self.parts[0] if self.parts else torch.zeros(0, self.width, dtype=self.dtype)
        if self.rows == 0:
            return torch.zeros(0, self.width, dtype=self.dtype)
        size = self.rows * self.width
        flat = torch.from_file(str(self.path), shared=False, size=size, dtype=self.dtype)
        return flat.view(self.rows, self.width)
