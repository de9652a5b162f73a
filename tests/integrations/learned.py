"""What trainers must optimise, save and resume beside the model."""

from typing import Any

import torch
from torch import Tensor, nn

import largemargin as lm


class Learned(lm.CrossEntropy):
    """A loss with a parameter of its own: cross entropy times exp(factor)."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return self.factor.exp() * super().forward(*inputs, **options)
