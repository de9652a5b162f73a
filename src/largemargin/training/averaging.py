"""An exponential moving average of a model, updated without asking the device anything."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from largemargin.errors import check_number


class Average:
    """Parameters follow as ``average += (1 - decay) * (model - average)``; buffers are copied."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        check_number("ema", decay, at_least=0, below=1)
        self.decay = decay
        self.model = deepcopy(model).eval().requires_grad_(False)
        self._mine: list[Tensor] = list(self.model.parameters())
        self._theirs: list[Tensor] = list(model.parameters())
        self._copied = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._mine, self._theirs, 1 - self.decay)
        self.copy_buffers()

    def copy_buffers(self) -> None:
        """Those of the model, as they are now."""
        for mine, theirs in self._copied:
            mine.copy_(theirs)
