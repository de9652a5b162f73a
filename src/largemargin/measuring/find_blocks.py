"""Finding the blocks of a network: what a study "block by block" looks at."""

from collections import Counter, deque

from torch import nn

from largemargin.dropin.find import ancestors
from largemargin.errors import LargeMarginError


def block_names(model: nn.Module, head: nn.Module) -> tuple[str, ...]:
    """Names of the blocks of a model, in the order they are registered in.

    They are the children with layers inside of the outermost module that has two such children of
    one type: ``layer1`` to ``layer4`` of a ResNet, the stages of an EfficientNet, the layers of a
    transformer. (Not two of which one alone has such blocks inside: those are a backbone and
    something beside it.) A network without such modules is cut after each of its layers with a
    weight: in an ``nn.Sequential`` just before the next one or ``nn.Flatten``, so that activation
    and pooling belong to the block.
    What the head is inside of is no block.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
        >>> block_names(net, net[3])
        ('1', '2')
    """
    around = {id(each) for each in ancestors(model, head)}
    queue = deque([("", model)])
    while queue:
        path, module = queue.popleft()
        inside = [(_join(path, name), each) for name, each in module.named_children()]
        blocks = _blocks(inside, around)
        stacks = [_alike(_blocks(list(each.named_children()), around)) for _, each in blocks]
        if _alike(blocks) and not (len(blocks) == 2 and sum(stacks) == 1):
            return tuple(name for name, _ in blocks)
        queue.extend(inside)
    found = _runs(model, head)
    if not found:
        raise LargeMarginError(
            f"{type(model).__name__} has no layers before its head, so layers='blocks' finds none. "
            "Leave layers out."
        )
    return found


def _blocks(inside: list[tuple[str, nn.Module]], around: set[int]) -> list[tuple[str, nn.Module]]:
    """Those with layers inside that are called, and that the head is not inside of."""
    return [
        (name, each)
        for name, each in inside
        if id(each) not in around and _composite(each) and _callable(each)
    ]


def _alike(blocks: list[tuple[str, nn.Module]]) -> bool:
    """Whether two of them are of one type."""
    return max(Counter(type(each) for _, each in blocks).values(), default=0) >= 2


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _composite(module: nn.Module) -> bool:
    """A module with parameters in its children."""
    return any(next(child.parameters(), None) is not None for child in module.children())


def _callable(module: nn.Module) -> bool:
    """Lists and dicts of modules have no forward of their own and are never called."""
    return type(module).forward is not nn.Module.forward


def _runs(model: nn.Module, head: nn.Module) -> tuple[str, ...]:
    """Where blocks of single layers end: each layer with a weight and what follows it."""
    found = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if module is head or weight is None or weight.dim() < 2 or _composite(module):
            continue
        found.append(_end_of_run(model, path))
    return tuple(found)


def _end_of_run(model: nn.Module, path: str) -> str:
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if not isinstance(parent, nn.Sequential):
        return path
    children = list(parent.named_children())
    last = start = [each for each, _ in children].index(name)
    for position in range(start + 1, len(children)):
        child = children[position][1]
        weights = any(parameter.dim() >= 2 for parameter in child.parameters())
        if weights or isinstance(child, nn.Flatten):  # images are pooled, not flattened
            break
        last = position
    return _join(parent_path, children[last][0])
