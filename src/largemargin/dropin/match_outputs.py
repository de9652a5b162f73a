"""Do the outputs a loss is asked for agree with what the head gave?

A loss on features sees what comes into the head. What a model does to the head's output, or a user
to the model's, would be lost without a word: rows in another order, a prior, a mask, an average.
"""

import torch
from torch import Tensor

from largemargin.errors import LargeMarginError, warn_user
from largemargin.tracing import plain_eager

CLOSE, ROUNDED = 0.02, 1e-5
"""Of the largest logit of a row, from the mean and as it is: what a cast may change."""

FIRST, EVERY = 10, 100
"""Outputs on an accelerator are looked at so often: a look waits for the device."""

LARGEST = 2**26
"""Numbers that are compared at most to find rows again."""


class Agreement:
    """Compares outputs with the logits of the pass they were made in; remembers what it found."""

    def __init__(self) -> None:
        self.looked = 0
        self.selects = False
        """Whether rows had to be found again once: then they have to be every time."""
        self.warned = False

    def rows_of(self, tensor: Tensor, logits: Tensor, what: str) -> Tensor | None:
        """Which rows of the logits the outputs are; None where they are all, in order.

        Raises:
            LargeMarginError: where they are something else.
        """
        if not self._looks(tensor):
            return None
        if same(tensor, logits):
            if not self.warned and _probabilities(tensor, logits):
                self._warn(
                    f"what is passed as {what} are probabilities: a softmax comes after the head. "
                    "The loss is computed from the features and has a softmax of its own, so it "
                    "trains all the same; but whoever takes these outputs for logits (cross "
                    "entropy, a temperature, margins) is wrong. Let the model return logits."
                )
            return None
        found = chosen_rows(tensor.detach(), logits)
        if found is not None:
            self.selects = True
            return found
        if tensor.shape == logits.shape and torch.equal(
            tensor.detach().argsort(-1), logits.detach().argsort(-1)
        ):  # every row ranks the classes alike: a temperature, a soft cap
            if not self.warned:
                self._warn(
                    f"what is passed as {what} are the head's logits scaled or bent. The loss is "
                    "computed from the features and does not see that; parameters after the head "
                    "get no gradient from it."
                )
            return None
        if tensor.shape != logits.shape:
            raise LargeMarginError(
                f"{what} of shape {tuple(tensor.shape)} were made from the head's, of shape "
                f"{tuple(logits.shape)}, and are no choice of their rows: a mean over positions, "
                "say. A loss on features needs one vector per label: pool the features before the "
                "head."
            )
        raise LargeMarginError(
            f"{what} are not what the head gave: they come from another layer, or something was "
            "done to them after it (a prior, a mask, an average with another head), which a loss "
            "on features does not see. Pass what the head returned. If another layer is the head, "
            "name it: attach(model, objective, layer=...). A model that returns features needs a "
            "head: nn.Sequential(model, lm.ClassHead(dim, num_classes)). A distilled one of timm "
            "returns its two heads apart after model.set_distilled_training(True)."
        )

    def _warn(self, message: str) -> None:
        self.warned = True
        warn_user(message)

    def _looks(self, tensor: Tensor) -> bool:
        if not plain_eager():
            return False
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        self.looked += 1
        if self.selects or tensor.device.type == "cpu":
            return True
        return self.looked <= FIRST or self.looked % EVERY == 0


def check_unchanged(tensor: Tensor, version: int | None, what: str) -> None:
    """Refuse the head's output where it was changed in place."""
    if version is not None and plain_eager() and tensor._version != version:
        raise LargeMarginError(
            f"{what} were changed in place after the head, which a loss on features does not see. "
            "Change a copy of them, after the loss."
        )


def same(tensor: Tensor, logits: Tensor) -> bool:
    """Whether a tensor is these logits, cast, or turned into (log-)probabilities."""
    if tensor.shape != logits.shape or not tensor.is_floating_point():
        return False
    given, wanted = tensor.detach(), logits.detach()
    if wanted.numel() == 0 or bool(torch.equal(given, wanted.to(given.dtype))):
        return True
    given, wanted = given.float(), wanted.float()
    if not bool(torch.isfinite(wanted).all()):
        return not bool(torch.isfinite(given).all())  # diverged, both of them
    limit = ROUNDED * wanted.abs().amax(-1, keepdim=True)
    wanted = wanted - wanted.mean(-1, keepdim=True)
    limit = limit + CLOSE * wanted.abs().amax(-1, keepdim=True)
    if bool(((given - given.mean(-1, keepdim=True) - wanted).abs() <= limit).all()):
        return True
    return bool(torch.allclose(given, wanted.softmax(-1), rtol=0.05, atol=1e-3))


def _probabilities(tensor: Tensor, logits: Tensor) -> bool:
    """Whether what is ``same`` are probabilities: of logits as they are, rows sum to anything."""
    given = tensor.detach().float()
    if given.numel() == 0 or bool((given < 0).any()):
        return False
    sums = given.sum(-1)
    return bool(((sums - 1).abs() < 0.01).all()) and not torch.equal(given, logits.detach().float())


def chosen_rows(tensor: Tensor, logits: Tensor) -> Tensor | None:
    """Index of every row of ``tensor`` among those of ``logits``; None where one is not there."""
    source, given = logits.to(tensor.dtype), tensor.flatten(0, -2)
    if logits.dim() == 3 and tensor.shape == logits[:, 0].shape:
        # One position of every sequence, as decoders choose it.
        equal = (source == tensor[:, None]).all(-1)
        if bool(equal.any(1).all()):
            steps = equal.shape[1]
            position = steps - 1 - equal.flip(1).int().argmax(1)
            return torch.arange(len(tensor), device=tensor.device) * steps + position
    source = source.flatten(0, -2)
    if len(given) * source.numel() > LARGEST or len(given) == 0:
        return None
    equal = (source[None] == given[:, None]).all(-1)
    return equal.int().argmax(1) if bool(equal.any(1).all()) else None
