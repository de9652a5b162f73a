"""Steps taken inside the backward pass, the moment a gradient is complete."""

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from largemargin.errors import LargeMarginError


class InBackward:
    """Ends :func:`apply_in_backward` when it is removed."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self.handles = handles

    def remove(self) -> None:
        """Go back to calling ``optimizer.step()``."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


def apply_in_backward(optimizer: Optimizer) -> InBackward:
    r"""Step each parameter of an optimizer as soon as its gradient is there, and free the gradient.

    The gradient of a head is as large as the head. It is complete when the loss's own backward
    pass ends, before that of the backbone begins; taken there, it is gone while the backbone's
    activations and gradients are alive, and no second pass over the parameters is needed. Works
    with any optimizer of torch. ``optimizer.step()`` finds no gradients afterwards and does
    nothing, so a training loop may go on calling it. Learning rate schedules work as always.

    One backward pass is one step, so this cannot be combined with adding up gradients over several
    batches, with clipping, with ``GradScaler``, or with ``DistributedDataParallel`` around these
    parameters (a ``ShardedClassHead`` is in none). Give the head an optimizer of its own.

    Returns:
        a handle; ``remove()`` ends it.

    Example:
        >>> from largemargin.heads.optim import HeadSGD
        >>> head = ClassHead(8, 5, bias=False)
        >>> handle = apply_in_backward(HeadSGD(head.parameters(), lr=0.1))
        >>> before = head.weight.detach().clone()
        >>> head(torch.randn(3, 8)).square().sum().backward()
        >>> head.weight.grad is None, torch.equal(head.weight, before)
        (True, False)
    """
    if not isinstance(optimizer, Optimizer):
        raise LargeMarginError(
            f"optimizer must be a torch.optim.Optimizer, but {type(optimizer).__name__} was given."
        )

    def step(param: Tensor) -> None:
        # Every other gradient of this optimizer is gone already, or not there yet.
        optimizer.step()
        param.grad = None

    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if not param.is_leaf or not param.requires_grad:
            raise LargeMarginError(
                "apply_in_backward needs parameters that gradients arrive at, but one of shape "
                f"{tuple(param.shape)} {'is not a leaf' if param.requires_grad else 'is frozen'}."
            )
    return InBackward([param.register_post_accumulate_grad_hook(step) for param in params])
