"""Is a model a fully connected ReLU network without biases? Some bounds are about those only."""

from typing import Any

import torch
from torch import Tensor, nn

from largemargin.geometry import NoiseCushions, noise_cushions
from largemargin.measuring.reading import Reader


class FullyConnected:
    """The weights of a model in the order they are used, and whether they are all there is to it.

    Recognised by what the model does, not by how it is written: the chain of its linear layers
    with ReLU between has to give the head's output on every batch.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.reason: str | None = None
        """Why the model is something else."""
        self.weights: list[Tensor] = []
        self.cushions: NoiseCushions | None = None
        self.samples = 0
        """Over which the cushions were taken."""
        self._look()

    def _look(self) -> None:
        model = self.reader.model
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        known = {id(p) for module in linear for p in (module.weight, module.bias) if p is not None}
        others = [name for name, p in model.named_parameters() if id(p) not in known]
        if others:
            kinds = {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in others}
            self.reason = f"it has other layers than linear ones: {', '.join(sorted(kinds))}"
        elif not isinstance(self.reader.head, nn.Linear):
            self.reason = f"its head is a {type(self.reader.head).__name__}"
        elif any(module.bias is not None and bool(module.bias.any()) for module in linear):
            self.reason = "its layers have biases"

    def add(self, inputs: Any) -> None:
        """Check the network on a batch and update its cushions; without gradients."""
        if self.reason is not None:
            return
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            self.reason = "its inputs are not vectors"
            return
        order: list[nn.Linear] = []
        hooks = [
            module.register_forward_hook(lambda each, args, output: order.append(each))
            for module in self.reader.model.modules()
            if isinstance(module, nn.Linear)
        ]
        try:
            logits = self.reader(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        self.weights = [module.weight.detach() for module in order]
        rows = self.reader.normalized(inputs).flatten(1)
        if not self._explains(rows, logits):
            self.reason = "it is not a chain of linear layers with ReLU between them"
            return
        self.samples += len(rows)
        self._take(noise_cushions(self.weights, rows))

    def merge(self, others: list[tuple[str | None, int, NoiseCushions | None]]) -> None:
        """What all processes found, this one among them."""
        self.reason = next((reason for reason, _, _ in others if reason is not None), None)
        self.samples, self.cushions = sum(samples for _, samples, _ in others), None
        for _, _, cushions in others:
            if cushions is not None:
                self._take(cushions)

    def mine(self) -> tuple[str | None, int, NoiseCushions | None]:
        """What this process found."""
        found = self.cushions
        if found is not None:
            found = NoiseCushions(
                found.layer_cushion.cpu(),
                found.minimal_interlayer_cushion.cpu(),
                found.activation_contraction.cpu(),
                found.stable_rank.cpu(),
                found.width,
            )
        return self.reason, self.samples, found

    def _take(self, found: NoiseCushions) -> None:
        old = self.cushions
        self.cushions = found
        if old is None:
            return
        self.cushions = found._replace(
            layer_cushion=torch.minimum(old.layer_cushion, found.layer_cushion),
            minimal_interlayer_cushion=torch.minimum(
                old.minimal_interlayer_cushion, found.minimal_interlayer_cushion
            ),
            activation_contraction=torch.maximum(
                old.activation_contraction, found.activation_contraction
            ),
        )

    def _explains(self, rows: Tensor, logits: Tensor) -> bool:
        below = rows
        for position, weight in enumerate(self.weights):
            if weight.shape[1] != below.shape[1]:
                return False
            below = torch.relu(below) if position else below
            below = below @ weight.T
        if below.shape != logits.shape:
            return False
        scale = float(logits.abs().max())
        return bool(torch.allclose(below, logits, rtol=1e-4, atol=1e-5 * max(scale, 1e-30)))
